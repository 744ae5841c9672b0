"""Finding tasks, counting them, and repairing those that a filter leaves."""

from __future__ import annotations

from typing import Final

from covenant.doors.operator_api.operation import AnyApiOperation, ApiAnswer, ApiOperation, Services, fill
from covenant.exchange import task_search
from covenant.exchange.access.principals import Principal
from covenant.exchange.bulk_repair import BulkReport, repair_tasks
from covenant.ledger.contract.task_query import FoundTask, TaskCounts
from covenant.wire.mailbox import EmptyRequest, FindRequest, RepairTasks


class Found(ApiAnswer, frozen=True, kw_only=True, tag="a2a_found"):
    """`next` is null on the last page. `total` is null if it was not asked for; `at_least`: there may be more."""

    tasks: tuple[FoundTask, ...]
    next: str | None
    total: int | None
    at_least: bool = False


class Counted(ApiAnswer, TaskCounts, frozen=True, kw_only=True, tag="a2a_counts", omit_defaults=False):
    """Every field is there, also where it is 0."""


class RepairedTasks(ApiAnswer, BulkReport, frozen=True, kw_only=True, tag="a2a_bulk"):
    """`more`: the filter leaves more tasks than the limit."""


async def find_a2a_tasks(services: Services, caller: Principal, request: FindRequest) -> Found:
    return fill(Found, await task_search.find(services.ledger, caller, request))


async def count_a2a_tasks(services: Services, caller: Principal, _: EmptyRequest) -> Counted:
    return fill(Counted, await task_search.count(services.ledger, caller))


async def repair_a2a_tasks(services: Services, caller: Principal, request: RepairTasks) -> RepairedTasks:
    return fill(RepairedTasks, await repair_tasks(services.ledger, services.exchange, caller, request))


OPERATIONS: Final[tuple[AnyApiOperation, ...]] = (
    ApiOperation(
        "GET",
        "/a2a/tasks",
        find_a2a_tasks,
        "Find tasks, live and finished, by what is known of them",
        for_tenants=True,
    ),
    ApiOperation(
        "GET",
        "/a2a/tasks/counts",
        count_a2a_tasks,
        "How many tasks there are, by lane and by agent",
        for_tenants=True,
    ),
    ApiOperation(
        "POST",
        "/a2a/repair/bulk",
        repair_a2a_tasks,
        "Requeue, end or cancel the tasks that a filter leaves; dry at first",
    ),
)
