"""The operator's operations on push configurations: what is owed to whom, and another try."""

from __future__ import annotations

from typing import Final
from urllib.parse import urlsplit

from covenant.doors.answers import PushList, PushRetried, PushShown
from covenant.doors.operation import AnyOperation, Office, Operation
from covenant.doors.pages import fit
from covenant.exchange import push as pushes
from covenant.exchange.access.principals import Principal
from covenant.model.errors import Invalid
from covenant.model.ids import parse_task_id
from covenant.model.push import Push
from covenant.wire.operator_requests import ListPushesRequest, RetryPushRequest

LIMIT: Final = 20
LIMIT_MAX: Final = 1_000


async def list_pushes(office: Office, caller: Principal, request: ListPushesRequest) -> PushList:
    limit = LIMIT if request.limit is None else request.limit
    if not 1 <= limit <= LIMIT_MAX:
        raise Invalid("invalid_limit", f"limit must be between 1 and {LIMIT_MAX}")
    found = await pushes.outbox(office.ledger, caller, dead=bool(request.dead))
    dead = sum(push.dead_at_ms is not None for push in found)
    return PushList(count=len(found), dead=dead, pushes=fit([_shown(push) for push in found[:limit]]))


async def retry_push(office: Office, caller: Principal, request: RetryPushRequest) -> PushRetried:
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


OPERATIONS: Final[tuple[AnyOperation, ...]] = (
    Operation(
        kind="a2a_pushes",
        method="GET",
        path="/a2a/pushes",
        request=ListPushesRequest,
        answer=PushList,
        run=list_pushes,
        summary="Push configurations and how their deliveries stand; those given up first",
    ),
    Operation(
        kind="retry_a2a_push",
        method="POST",
        path="/a2a/pushes/retry",
        request=RetryPushRequest,
        answer=PushRetried,
        run=retry_push,
        summary="Try the deliveries of a push configuration again, at once",
    ),
)
