"""The mailbox's operations: tasks, results, leases, the queue and its repair."""

from __future__ import annotations

from typing import Final

from covenant.doors.answers import (
    AutoRetried,
    Compacted,
    CountsShown,
    LeasedShown,
    LeaseReleased,
    LeaseRenewed,
    LeaseShown,
    QueueShown,
    Repaired,
    RequestWithdrawn,
    ResultOpt,
    ResultPosted,
    Results,
    TaskCanceled,
    TaskOpt,
    TaskQueued,
    Tasks,
    TaskShown,
    TaskUpdated,
    TreeShown,
)
from covenant.doors.operation import AnyOperation, Office, Operation
from covenant.doors.pages import PAGE_BYTES_MAX, fit, size_of
from covenant.doors.waiting import CallerGoneError, Pause
from covenant.exchange.access.principals import Principal
from covenant.ledger.contract.tasks import QueueQuery
from covenant.ledger.machine.commands import Drained, Leased
from covenant.model.errors import Invalid
from covenant.model.ids import parse_lease_id, parse_task_id
from covenant.wire.ipc_frames import WrappedPolicy, WrappedRepair, WrappedResult, WrappedTask
from covenant.wire.mailbox import (
    CancelTaskRequest,
    DrainRequest,
    EmptyRequest,
    LeaseRequest,
    PostResult,
    QueueRequest,
    ReceiveRequest,
    RecentRequest,
    ReleaseLease,
    RepairTask,
    RetryStaleRequest,
    SendTask,
    TaskRequest,
    UpdateTask,
    WithdrawRequest,
    parse_optional,
)

LIMIT: Final = 10


async def send(office: Office, caller: Principal, request: SendTask) -> TaskQueued:
    accepted = await office.exchange.accept(caller, request.task(caller.agent, office.catalogue.named))
    return TaskQueued(
        task_id=accepted.task_id,
        duplicate=accepted.duplicate,
        replayed=accepted.replayed,
        following=accepted.following,
    )


async def take(office: Office, caller: Principal, request: ReceiveRequest) -> TaskOpt:
    return _task_opt(await _take(office, caller, request))


async def take_waiting(office: Office, caller: Principal, request: ReceiveRequest, pause: Pause) -> TaskOpt:
    recipient = None if request.everyone else caller.agent.pubkey
    clock, give_up_ms = office.ledger.clock, _give_up_ms(office, request)
    with office.ledger.task_waiter(recipient) as waiter:
        while True:
            leased = await _take(office, caller, request)
            if leased.tasks:
                waiter.served()
                await _check_caller(office, request, leased, pause)
                return _task_opt(leased)
            if leased.again or not await pause.until(waiter.wait(give_up_ms - clock.monotonic_ms())):
                return _task_opt(leased)


async def _take(office: Office, caller: Principal, request: ReceiveRequest) -> Leased:
    return await office.exchange.take(
        caller,
        everyone=request.everyone,
        count=1 if request.count is None else request.count,
        request_id=request.request_id,
    )


async def _check_caller(office: Office, request: ReceiveRequest, answer: Leased | Drained, pause: Pause) -> None:
    """Nobody else can ask for what a caller without a request id was given: if it has left, that goes back.

    One with a request id may be asking again by now, over another connection, and must be told the same.
    """
    if pause.caller_gone:
        if request.request_id is None:
            await office.exchange.give_back(answer)
        raise CallerGoneError


def _task_opt(leased: Leased) -> TaskOpt:
    if not leased.tasks:
        return TaskOpt(task=None, lease=None, tasks=())
    shown = tuple(LeasedShown(each.task, LeaseShown.of(each.lease), each.turn, each.messages) for each in leased.tasks)
    return TaskOpt(task=shown[0].task, lease=shown[0].lease, tasks=shown)


def _give_up_ms(office: Office, request: ReceiveRequest) -> int:
    """When the wait is over, by a clock that nobody sets."""
    wait_ms, wait_ms_max = request.wait_ms or 0, office.exchange.limits.wait_ms_max
    if wait_ms > wait_ms_max:
        raise Invalid("invalid_wait", f"wait_ms must be between 0 and {wait_ms_max}")
    return office.ledger.clock.monotonic_ms() + wait_ms


async def post(office: Office, caller: Principal, request: PostResult) -> ResultPosted:
    lease_id = parse_optional(parse_lease_id, request.lease_id)
    settled = await office.exchange.settle(caller, request.result(), lease_id)
    return ResultPosted(task_id=settled.task_id, duplicate=settled.duplicate, goes_on=settled.goes_on)


async def drain(office: Office, caller: Principal, request: DrainRequest) -> ResultOpt:
    return _result_opt(await _drain(office, caller, request))


async def drain_waiting(office: Office, caller: Principal, request: DrainRequest, pause: Pause) -> ResultOpt:
    sender = None if request.everyone else caller.agent.pubkey
    ledger, give_up_ms = office.ledger, _give_up_ms(office, request)
    task_id = parse_optional(parse_task_id, request.task_id)
    with ledger.result_waiter(sender) as waiter:
        while True:
            drained = await _drain(office, caller, request)
            if drained.results:
                waiter.served()
                await _check_caller(office, request, drained, pause)
                return _result_opt(drained)
            left_ms = max(0, give_up_ms - ledger.clock.monotonic_ms())
            arrives = waiter.wait(left_ms) if task_id is None else ledger.finished(task_id, left_ms)
            if not await pause.until(arrives) or not left_ms:
                return _result_opt(drained)


async def _drain(office: Office, caller: Principal, request: DrainRequest) -> Drained:
    return await office.exchange.drain(
        caller,
        everyone=request.everyone,
        count=1 if request.count is None else request.count,
        request_id=request.request_id,
        task_id=parse_optional(parse_task_id, request.task_id),
    )


def _result_opt(drained: Drained) -> ResultOpt:
    results = drained.results
    return ResultOpt(result=results[0] if results else None, results=results)


async def recent_tasks(office: Office, caller: Principal, request: RecentRequest) -> Tasks:
    found = await office.exchange.recent_tasks(caller, LIMIT if request.limit is None else request.limit)
    tasks = fit(found)
    return Tasks(tasks=tasks, truncated=len(tasks) < len(found))


async def recent_results(office: Office, caller: Principal, request: RecentRequest) -> Results:
    found = await office.exchange.recent_results(caller, LIMIT if request.limit is None else request.limit)
    results = fit(found)
    return Results(results=results, truncated=len(results) < len(found))


async def queue(office: Office, caller: Principal, request: QueueRequest) -> QueueShown:
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


async def _counts(office: Office) -> CountsShown:
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


async def renew(office: Office, caller: Principal, request: LeaseRequest) -> LeaseRenewed:
    task_id = request.parsed_task_id()
    lease = await office.exchange.renew(caller, task_id, request.parsed_lease_id())
    return LeaseRenewed(task_id=task_id, lease=LeaseShown.of(lease))


async def release(office: Office, caller: Principal, request: ReleaseLease) -> LeaseReleased:
    task_id = request.parsed_task_id()
    await office.exchange.release(caller, task_id, request.parsed_lease_id(), request.reason)
    return LeaseReleased(task_id=task_id)


async def withdraw(office: Office, caller: Principal, request: WithdrawRequest) -> RequestWithdrawn:
    returned = await office.exchange.withdraw(caller, request.request_id)
    return RequestWithdrawn(request_id=request.request_id, leases=returned.leases, results=returned.results)


async def update(office: Office, caller: Principal, request: UpdateTask) -> TaskUpdated:
    task_id, lease_id = request.parsed_task_id(), request.parsed_lease_id()
    reported = await office.exchange.report(caller, task_id, lease_id, request.parsed_update(), request.update_no or 0)
    return TaskUpdated(task_id=task_id, generation=reported.generation, duplicate=reported.duplicate)


async def cancel(office: Office, caller: Principal, request: CancelTaskRequest) -> TaskCanceled:
    canceled = await office.exchange.cancel(caller, request.parsed_task_id(), request.reason)
    return TaskCanceled(
        task_id=canceled.task_id, canceled=canceled.canceled, ending=canceled.ending, result=canceled.result
    )


async def show(office: Office, caller: Principal, request: TaskRequest) -> TaskShown:
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


async def tree(office: Office, caller: Principal, request: TaskRequest) -> TreeShown:
    return TreeShown(tree=await office.exchange.tree(caller, request.parsed_task_id()))


async def repair(office: Office, caller: Principal, request: RepairTask) -> Repaired:
    task_id, command = request.parsed_task_id(), request.parsed_command()
    return Repaired(outcome=await office.exchange.repair(caller, task_id, command, request.reason))


async def retry_stale(office: Office, caller: Principal, request: RetryStaleRequest) -> AutoRetried:
    return AutoRetried(report=await office.exchange.retry_stale(caller, request.policy()))


async def compact(office: Office, caller: Principal, _: EmptyRequest) -> Compacted:
    return Compacted(dropped=await office.exchange.compact(caller))


OPERATIONS: Final[tuple[AnyOperation, ...]] = (
    Operation(
        kind="send_a2a_task",
        method="POST",
        path="/a2a/tasks",
        request=SendTask,
        answer=TaskQueued,
        run=send,
        frame=WrappedTask,
        summary="Send a task to another agent",
    ),
    Operation(
        kind="try_recv_a2a_task",
        method="GET",
        path="/a2a/tasks/next",
        request=ReceiveRequest,
        answer=TaskOpt,
        run=take,
        wait=take_waiting,
        summary="Lease the next queued tasks",
    ),
    Operation(
        kind="post_a2a_result",
        method="POST",
        path="/a2a/results",
        request=PostResult,
        answer=ResultPosted,
        run=post,
        frame=WrappedResult,
        summary="Post the result of a leased task",
    ),
    Operation(
        kind="try_recv_a2a_result",
        method="GET",
        path="/a2a/results/next",
        request=DrainRequest,
        answer=ResultOpt,
        run=drain,
        wait=drain_waiting,
        summary="Drain the next results of tasks you sent, or the result of one",
    ),
    Operation(
        kind="recent_a2a_tasks",
        method="GET",
        path="/a2a/tasks/recent",
        request=RecentRequest,
        answer=Tasks,
        run=recent_tasks,
        summary="Look at queued tasks without taking them",
    ),
    Operation(
        kind="recent_a2a_results",
        method="GET",
        path="/a2a/results/recent",
        request=RecentRequest,
        answer=Results,
        run=recent_results,
        summary="Look at undrained results without taking them",
    ),
    Operation(
        kind="a2a_queue",
        method="GET",
        path="/a2a/queue",
        request=QueueRequest,
        answer=QueueShown,
        run=queue,
        summary="Leases, queued tasks and undrained results; the most worrying first",
    ),
    Operation(
        kind="renew_a2a_lease",
        method="POST",
        path="/a2a/tasks/{task_id}/renew",
        request=LeaseRequest,
        answer=LeaseRenewed,
        run=renew,
        summary="Say that a leased task is still being worked on",
    ),
    Operation(
        kind="release_a2a_lease",
        method="POST",
        path="/a2a/tasks/{task_id}/release",
        request=ReleaseLease,
        answer=LeaseReleased,
        run=release,
        summary="Give back a leased task that was not started",
    ),
    Operation(
        kind="withdraw_a2a_request",
        method="POST",
        path="/a2a/withdraw",
        request=WithdrawRequest,
        answer=RequestWithdrawn,
        run=withdraw,
        summary="Call off a receive or drain by its request id, and give back what it was given",
    ),
    Operation(
        kind="update_a2a_task",
        method="POST",
        path="/a2a/tasks/{task_id}/updates",
        request=UpdateTask,
        answer=TaskUpdated,
        run=update,
        summary="Report a status, an artifact chunk or a message of a leased task",
    ),
    Operation(
        kind="cancel_a2a_task",
        method="POST",
        path="/a2a/tasks/{task_id}/cancel",
        request=CancelTaskRequest,
        answer=TaskCanceled,
        run=cancel,
        summary="Cancel a task you sent",
    ),
    Operation(
        kind="show_a2a_task",
        method="GET",
        path="/a2a/tasks/{task_id}/show",
        request=TaskRequest,
        answer=TaskShown,
        run=show,
        summary="Everything known of one task",
    ),
    Operation(
        kind="a2a_tree",
        method="GET",
        path="/a2a/tasks/{task_id}/tree",
        request=TaskRequest,
        answer=TreeShown,
        run=tree,
        summary="The tasks under a root, by parent",
    ),
    Operation(
        kind="repair_a2a_task",
        method="POST",
        path="/a2a/repair",
        request=RepairTask,
        answer=Repaired,
        run=repair,
        frame=WrappedRepair,
        summary="Requeue a leased task, or settle it with an error",
    ),
    Operation(
        kind="retry_a2a_stale",
        method="POST",
        path="/a2a/retry-stale",
        request=RetryStaleRequest,
        answer=AutoRetried,
        run=retry_stale,
        frame=WrappedPolicy,
        summary="One pass of the retry gate over stale leases",
    ),
    Operation(
        kind="compact_a2a",
        method="POST",
        path="/a2a/compact",
        request=EmptyRequest,
        answer=Compacted,
        run=compact,
        summary="Merge resolved history into a snapshot",
    ),
)
