"""The operator's operations on push configurations: what is owed to whom, and another try."""

from __future__ import annotations

from typing import Final
from urllib.parse import urlsplit

import msgspec

from covenant.doors.operator_api.answers import ApiAnswer, fill, fit, page_limit
from covenant.doors.operator_api.operation import AnyApiOperation, Services, operation_row
from covenant.exchange import push as pushes
from covenant.exchange.access.principals import Principal
from covenant.model.ids import TaskId, parse_task_id
from covenant.model.push import Push
from covenant.wire.mailbox import Request, Whole


class ListPushesRequest(Request, frozen=True, kw_only=True):
    """`dead`: only those that were given up."""

    limit: Whole | None = None
    dead: bool | None = None


class RetryPushRequest(Request, frozen=True, kw_only=True):
    task_id: str
    push_id: str


class PushShown(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """A push configuration, without its secrets: of its address, only the host.

    `delivered` is the last generation that its receiver has; `attempts` have failed since.
    """

    task_id: TaskId
    push_id: str
    agent: str
    host: str
    made_at_ms: int
    moved_at_ms: int
    delivered: int
    attempts: int
    state: str
    next_ms: int | None = None
    failure: str | None = None
    dead_at_ms: int | None = None


class PushList(ApiAnswer, frozen=True, kw_only=True, tag="a2a_pushes"):
    """Those given up first. `count` and `dead` are of all there are, `pushes` as many as fit."""

    count: int
    dead: int
    pushes: tuple[PushShown, ...]


class PushRetried(ApiAnswer, frozen=True, kw_only=True, tag="a2a_push_retried"):
    push: PushShown


LIMIT: Final = 20
LIMIT_MAX: Final = 1_000


async def a2a_pushes(services: Services, caller: Principal, request: ListPushesRequest) -> PushList:
    limit = page_limit(request.limit, LIMIT, most=LIMIT_MAX)
    found = await pushes.outbox(services.ledger, caller, dead=bool(request.dead))
    dead = sum(push.dead_at_ms is not None for push in found)
    return PushList(count=len(found), dead=dead, pushes=fit([_shown(push) for push in found[:limit]]))


async def retry_a2a_push(services: Services, caller: Principal, request: RetryPushRequest) -> PushRetried:
    retried = await pushes.retry(services.ledger, caller, parse_task_id(request.task_id), request.push_id)
    return PushRetried(push=_shown(retried))


def _shown(push: Push) -> PushShown:
    return fill(
        PushShown,
        push,
        push_id=push.id,
        agent=push.recipient.display,
        host=urlsplit(push.config.url).netloc,
        state="dead" if push.dead_at_ms is not None else "failing" if push.attempts else "live",
        next_ms=push.next_ms or None,
    )


OPERATIONS: Final[tuple[AnyApiOperation, ...]] = (
    operation_row(
        "GET", "/a2a/pushes", a2a_pushes, "Push configurations and how their deliveries stand; those given up first"
    ),
    operation_row(
        "POST", "/a2a/pushes/retry", retry_a2a_push, "Try the deliveries of a push configuration again, at once"
    ),
)
