"""Looking at tasks and results, and repairing them."""

from __future__ import annotations

from typing import Final

import msgspec

from covenant.doors.operator_api.answers import ApiAnswer
from covenant.doors.operator_api.mailbox import LIMIT
from covenant.doors.operator_api.operation import AnyApiOperation, ApiOperation, Services
from covenant.doors.operator_api.paging import PAGE_BYTES_MAX, fit, size_of
from covenant.exchange.access.principals import Principal
from covenant.ledger.contract.tasks import LeaseRecord, QueueEntry, QueueQuery, TreeNode, UpdateRecord
from covenant.model.result import Result
from covenant.model.retry_policy import RepairOutcome, RetryReport
from covenant.model.task import Task
from covenant.wire.mailbox import (
    EmptyRequest,
    QueueRequest,
    RecentRequest,
    RepairTask,
    RetryStaleRequest,
    TaskRequest,
    WrappedPolicy,
    WrappedRepair,
)


class Tasks(ApiAnswer, frozen=True, kw_only=True, tag="a2a_tasks"):
    """`truncated`: more was asked for than one answer may hold."""

    tasks: tuple[Task, ...]
    truncated: bool = False


class Results(ApiAnswer, frozen=True, kw_only=True, tag="a2a_results"):
    results: tuple[Result, ...]
    truncated: bool = False


class CountsShown(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """How much there is of everything, whatever the filters and limits leave of it."""

    queued: int
    in_flight: int
    parked: int
    following: int
    result_pending: int
    cached: int
    holders_lost: int
    delegations_lost: int = 0
    """Of those that peers do: `covenant peers delegations` shows them."""


class QueueShown(ApiAnswer, frozen=True, kw_only=True, tag="a2a_queue"):
    """`counts` are for the operator."""

    tasks: tuple[QueueEntry, ...]
    results: tuple[Result, ...]
    truncated: bool = False
    counts: CountsShown | None = None


class TaskShown(ApiAnswer, frozen=True, kw_only=True, tag="a2a_task"):
    task: Task
    state: str
    a2a_state: str
    attempt: int
    turn: int
    generation: int
    created_at_ms: int
    updated_at_ms: int
    leases: tuple[LeaseRecord, ...]
    updates: tuple[UpdateRecord, ...]
    result: Result | None
    cause: str | None
    holder_lost: bool
    truncated: bool = False


class TreeShown(ApiAnswer, frozen=True, kw_only=True, tag="a2a_tree"):
    tree: TreeNode


class Repaired(ApiAnswer, frozen=True, kw_only=True, tag="a2a_repaired"):
    outcome: RepairOutcome


class AutoRetried(ApiAnswer, frozen=True, kw_only=True, tag="a2a_auto_retried"):
    report: RetryReport


class CompactedAnswer(ApiAnswer, frozen=True, kw_only=True, tag="a2a_compacted"):
    dropped: int


async def recent_tasks(office: Services, caller: Principal, request: RecentRequest) -> Tasks:
    found = await office.exchange.recent_tasks(caller, LIMIT if request.limit is None else request.limit)
    tasks = fit(found)
    return Tasks(tasks=tasks, truncated=len(tasks) < len(found))


async def recent_results(office: Services, caller: Principal, request: RecentRequest) -> Results:
    found = await office.exchange.recent_results(caller, LIMIT if request.limit is None else request.limit)
    results = fit(found)
    return Results(results=results, truncated=len(results) < len(found))


async def queue(office: Services, caller: Principal, request: QueueRequest) -> QueueShown:
    query = QueueQuery(
        limit=LIMIT if request.limit is None else request.limit,
        min_lease_age_ms=request.min_lease_age_ms,
        deadline_within_ms=request.deadline_within_ms,
        state_filter=request.state_filter.replace("-", "_") if request.state_filter else None,
    )
    found = await office.exchange.queue(caller, query)
    tasks = fit(found.tasks)
    results = fit(found.results, PAGE_BYTES_MAX - size_of(tasks))
    truncated = len(tasks) < len(found.tasks) or len(results) < len(found.results)
    counts = await _counts(office) if caller.operator else None
    return QueueShown(tasks=tasks, results=results, truncated=truncated, counts=counts)


async def _counts(office: Services) -> CountsShown:
    counts = await office.ledger.counts()
    return CountsShown(
        queued=counts.queued,
        in_flight=counts.leased,
        parked=counts.parked,
        following=counts.following,
        result_pending=counts.settled,
        cached=counts.cached,
        holders_lost=counts.holders_lost,
        delegations_lost=counts.delegations_lost,
    )


async def show(office: Services, caller: Principal, request: TaskRequest) -> TaskShown:
    shown = await office.exchange.show(caller, request.parsed_task_id())
    updates = fit(shown.updates, PAGE_BYTES_MAX - size_of((shown.task, shown.leases, shown.result)))
    return TaskShown(
        task=shown.task,
        state=shown.state,
        a2a_state=shown.a2a_state,
        attempt=shown.attempt,
        turn=shown.turn,
        generation=shown.generation,
        created_at_ms=shown.created_at_ms,
        updated_at_ms=shown.updated_at_ms,
        leases=shown.leases,
        updates=updates,
        result=shown.result,
        cause=shown.cause,
        holder_lost=shown.holder_lost,
        truncated=len(updates) < len(shown.updates),
    )


async def tree(office: Services, caller: Principal, request: TaskRequest) -> TreeShown:
    return TreeShown(tree=await office.exchange.tree(caller, request.parsed_task_id()))


async def repair(office: Services, caller: Principal, request: RepairTask) -> Repaired:
    task_id, command = request.parsed_task_id(), request.parsed_command()
    return Repaired(outcome=await office.exchange.repair(caller, task_id, command, request.reason))


async def retry_stale(office: Services, caller: Principal, request: RetryStaleRequest) -> AutoRetried:
    return AutoRetried(report=await office.exchange.retry_stale(caller, request.policy()))


async def compact(office: Services, caller: Principal, _: EmptyRequest) -> CompactedAnswer:
    return CompactedAnswer(dropped=await office.exchange.compact(caller))


OPERATIONS: Final[tuple[AnyApiOperation, ...]] = (
    ApiOperation(
        kind="recent_a2a_tasks",
        method="GET",
        path="/a2a/tasks/recent",
        request=RecentRequest,
        answer=Tasks,
        run=recent_tasks,
        summary="Look at queued tasks without taking them",
    ),
    ApiOperation(
        kind="recent_a2a_results",
        method="GET",
        path="/a2a/results/recent",
        request=RecentRequest,
        answer=Results,
        run=recent_results,
        summary="Look at undrained results without taking them",
    ),
    ApiOperation(
        kind="a2a_queue",
        method="GET",
        path="/a2a/queue",
        request=QueueRequest,
        answer=QueueShown,
        run=queue,
        summary="Leases, queued tasks and undrained results; the most worrying first",
    ),
    ApiOperation(
        kind="show_a2a_task",
        method="GET",
        path="/a2a/tasks/{task_id}/show",
        request=TaskRequest,
        answer=TaskShown,
        run=show,
        summary="Everything known of one task",
    ),
    ApiOperation(
        kind="a2a_tree",
        method="GET",
        path="/a2a/tasks/{task_id}/tree",
        request=TaskRequest,
        answer=TreeShown,
        run=tree,
        summary="The tasks under a root, by parent",
    ),
    ApiOperation(
        kind="repair_a2a_task",
        method="POST",
        path="/a2a/repair",
        request=RepairTask,
        answer=Repaired,
        run=repair,
        frame=WrappedRepair,
        summary="Requeue a leased task, or settle it with an error",
    ),
    ApiOperation(
        kind="retry_a2a_stale",
        method="POST",
        path="/a2a/retry-stale",
        request=RetryStaleRequest,
        answer=AutoRetried,
        run=retry_stale,
        frame=WrappedPolicy,
        summary="One pass of the retry gate over stale leases",
    ),
    ApiOperation(
        kind="compact_a2a",
        method="POST",
        path="/a2a/compact",
        request=EmptyRequest,
        answer=CompactedAnswer,
        run=compact,
        summary="Merge resolved history into a snapshot",
    ),
)
