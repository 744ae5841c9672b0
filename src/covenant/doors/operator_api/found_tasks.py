"""Finding tasks."""

from __future__ import annotations

from typing import Final

from covenant.doors.operator_api.operation import AnyApiOperation, ApiAnswer, ApiOperation, Services, fill
from covenant.exchange import task_search
from covenant.exchange.access.principals import Principal
from covenant.ledger.contract.task_query import FoundTask
from covenant.wire.mailbox import FindRequest


class Found(ApiAnswer, frozen=True, kw_only=True, tag="a2a_found"):
    """`next` is null on the last page. `total` is null if it was not asked for; `at_least`: there may be more."""

    tasks: tuple[FoundTask, ...]
    next: str | None
    total: int | None
    at_least: bool = False


async def find_a2a_tasks(services: Services, caller: Principal, request: FindRequest) -> Found:
    return fill(Found, await task_search.find(services.ledger, caller, request))


OPERATIONS: Final[tuple[AnyApiOperation, ...]] = (
    ApiOperation("GET", "/a2a/tasks", find_a2a_tasks, "Find tasks, live and finished, by what is known of them"),
)
