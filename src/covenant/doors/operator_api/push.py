"""The operator's operations on push configurations: what is owed to whom, and another try."""

from __future__ import annotations

from typing import Final
from urllib.parse import urlsplit

import msgspec

from covenant.doors.operator_api.answers import ApiAnswer
from covenant.doors.operator_api.operation import AnyApiOperation, ApiOperation, Services
from covenant.doors.operator_api.paging import fit
from covenant.exchange import push as pushes
from covenant.exchange.access.principals import Principal
from covenant.model.errors import Invalid
from covenant.model.ids import TaskId, parse_task_id
from covenant.model.push import Push
from covenant.wire.operator_requests import ListPushesRequest, RetryPushRequest


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


async def list_pushes(office: Services, caller: Principal, request: ListPushesRequest) -> PushList:
    limit = LIMIT if request.limit is None else request.limit
    if not 1 <= limit <= LIMIT_MAX:
        raise Invalid("invalid_limit", f"limit must be between 1 and {LIMIT_MAX}")
    found = await pushes.outbox(office.ledger, caller, dead=bool(request.dead))
    dead = sum(push.dead_at_ms is not None for push in found)
    return PushList(count=len(found), dead=dead, pushes=fit([_shown(push) for push in found[:limit]]))


async def retry_push(office: Services, caller: Principal, request: RetryPushRequest) -> PushRetried:
    retried = await pushes.retry(office.ledger, caller, parse_task_id(request.task_id), request.push_id)
    return PushRetried(push=_shown(retried))


def _shown(push: Push) -> PushShown:
    address = urlsplit(push.config.url)
    return PushShown(
        task_id=push.task_id,
        push_id=push.id,
        agent=push.recipient.display,
        host=address.netloc,
        made_at_ms=push.made_at_ms,
        moved_at_ms=push.moved_at_ms,
        delivered=push.delivered,
        attempts=push.attempts,
        state="dead" if push.dead_at_ms is not None else "failing" if push.attempts else "live",
        next_ms=push.next_ms or None,
        failure=push.failure,
        dead_at_ms=push.dead_at_ms,
    )


OPERATIONS: Final[tuple[AnyApiOperation, ...]] = (
    ApiOperation(
        kind="a2a_pushes",
        method="GET",
        path="/a2a/pushes",
        request=ListPushesRequest,
        answer=PushList,
        run=list_pushes,
        summary="Push configurations and how their deliveries stand; those given up first",
    ),
    ApiOperation(
        kind="retry_a2a_push",
        method="POST",
        path="/a2a/pushes/retry",
        request=RetryPushRequest,
        answer=PushRetried,
        run=retry_push,
        summary="Try the deliveries of a push configuration again, at once",
    ),
)
