"""The mailbox's operations: tasks, results, leases and the queue.

A caller that waits for a change of the queue gets `next`, a digest of the answer. Its next request has the digest as
`after`, and is answered when the digest has changed, or when the time is over. So no change between two requests is
missed, a restart of the daemon between them makes no difference, and changes that a caller may not see do not wake it.
"""

from __future__ import annotations

import asyncio
import hashlib
from typing import Final

import msgspec

from covenant.doors.metrics import LIVE
from covenant.doors.operator_api.operation import (
    PAGE_BYTES_MAX,
    AnyApiOperation,
    ApiAnswer,
    ApiOperation,
    Services,
    encode,
    fill,
    fit,
    page_limit,
    size_of,
)
from covenant.doors.waits import CallerGoneError, Pause
from covenant.exchange.access.principals import Principal
from covenant.ledger.contract.tasks import QueueEntry, QueueQuery
from covenant.ledger.machine.commands import Drained, Leased
from covenant.model.ids import LeaseId, TaskId, parse_lease_id, parse_task_id
from covenant.model.task import Ending, Lease, Result, Task
from covenant.model.task_event import MessageUpdate
from covenant.wire.mailbox import (
    CancelTaskRequest,
    DrainRequest,
    LeaseRequest,
    PostResult,
    QueueRequest,
    ReceiveRequest,
    ReleaseLease,
    SendTask,
    UpdateTask,
    WithdrawRequest,
    WrappedResult,
    WrappedTask,
    parse_optional,
)

LIMIT: Final = 10
QUEUE_READ_PAUSE_S: Final = 0.1
"""The shortest time between two reads of the queue for one waiting caller, however often the queue changes."""
DIGEST_BYTES: Final = 16


class TaskQueued(ApiAnswer, frozen=True, kw_only=True, tag="a2a_task_queued"):
    """`replayed`: a cached result answers the task. `following`: the task with the same work and result."""

    task_id: TaskId
    duplicate: bool = False
    replayed: bool = False
    following: TaskId | None = None


class LeaseShown(msgspec.Struct, frozen=True, gc=False):
    lease_id: LeaseId
    attempt: int
    leased_at_ms: int

    @classmethod
    def of(cls, lease: Lease) -> LeaseShown:
        return cls(lease.lease_id, lease.attempt, lease.leased_at_ms)


class LeasedShown(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """`messages`: those that a later turn of the task answers; the first turn answers the task itself."""

    task: Task
    lease: LeaseShown
    turn: int = 1
    messages: tuple[MessageUpdate, ...] = ()


class TaskOpt(ApiAnswer, frozen=True, kw_only=True, tag="a2a_task_opt"):
    """The first of `tasks` stands at the top as well."""

    task: Task | None
    lease: LeaseShown | None
    tasks: tuple[LeasedShown, ...]


class ResultPosted(ApiAnswer, frozen=True, kw_only=True, tag="a2a_result_posted"):
    """`goes_on`: messages came meanwhile, so the result ended the turn and not the task."""

    task_id: TaskId
    duplicate: bool = False
    goes_on: bool = False


class ResultOpt(ApiAnswer, frozen=True, kw_only=True, tag="a2a_result_opt"):
    """The first of `results` stands at the top as well."""

    result: Result | None
    results: tuple[Result, ...]


class LeaseRenewedAnswer(ApiAnswer, frozen=True, kw_only=True, tag="a2a_lease_renewed"):
    task_id: TaskId
    lease: LeaseShown


class LeaseReleasedAnswer(ApiAnswer, frozen=True, kw_only=True, tag="a2a_lease_released"):
    task_id: TaskId


class RequestWithdrawnAnswer(ApiAnswer, frozen=True, kw_only=True, tag="a2a_request_withdrawn"):
    """How many leases and results went back."""

    request_id: str
    leases: int
    results: int


class TaskUpdatedAnswer(ApiAnswer, frozen=True, kw_only=True, tag="a2a_task_updated"):
    task_id: TaskId
    generation: int
    duplicate: bool = False


class TaskCanceled(ApiAnswer, frozen=True, kw_only=True, tag="a2a_task_canceled"):
    """`canceled` is false when the task had ended otherwise; `ending` and `result` say how."""

    task_id: TaskId
    canceled: bool
    ending: Ending
    result: Result


async def send_a2a_task(services: Services, caller: Principal, request: SendTask) -> TaskQueued:
    accepted = await services.exchange.accept(caller, request.task(caller.agent, services.catalogue.named))
    return TaskQueued(
        task_id=accepted.task_id,
        duplicate=accepted.duplicate,
        replayed=accepted.replayed,
        following=accepted.following,
    )


async def try_recv_a2a_task(services: Services, caller: Principal, request: ReceiveRequest) -> TaskOpt:
    return _task_opt(await _take(services, caller, request))


async def take_waiting(services: Services, caller: Principal, request: ReceiveRequest, pause: Pause) -> TaskOpt:
    recipient = None if request.everyone else caller.agent.pubkey
    clock, give_up_ms = services.ledger.clock, services.give_up_ms(request.wait_ms)
    with services.ledger.task_waiter(recipient) as waiter:
        while True:
            leased = await _take(services, caller, request)
            if leased.tasks:
                waiter.served()
                await _check_caller(services, request, leased, pause)
                return _task_opt(leased)
            if leased.again or not await pause.until(waiter.wait(give_up_ms - clock.monotonic_ms())):
                return _task_opt(leased)


async def _take(services: Services, caller: Principal, request: ReceiveRequest) -> Leased:
    return await services.exchange.take(
        caller,
        everyone=request.everyone,
        count=1 if request.count is None else request.count,
        request_id=request.request_id,
    )


async def _check_caller(services: Services, request: ReceiveRequest, answer: Leased | Drained, pause: Pause) -> None:
    """Gives back the leases or results of a caller that has left. With a request id, it may ask for them again."""
    if pause.caller_gone:
        if request.request_id is None:
            await services.exchange.give_back(answer)
        raise CallerGoneError


def _task_opt(leased: Leased) -> TaskOpt:
    if not leased.tasks:
        return TaskOpt(task=None, lease=None, tasks=())
    shown = tuple(LeasedShown(each.task, LeaseShown.of(each.lease), each.turn, each.messages) for each in leased.tasks)
    return TaskOpt(task=shown[0].task, lease=shown[0].lease, tasks=shown)


async def post_a2a_result(services: Services, caller: Principal, request: PostResult) -> ResultPosted:
    lease_id = parse_optional(parse_lease_id, request.lease_id)
    settled = await services.exchange.settle(caller, request.result(), lease_id, rejected=bool(request.rejected))
    return ResultPosted(task_id=settled.task_id, duplicate=settled.duplicate, goes_on=settled.goes_on)


async def try_recv_a2a_result(services: Services, caller: Principal, request: DrainRequest) -> ResultOpt:
    return _result_opt(await _drain(services, caller, request))


async def drain_waiting(services: Services, caller: Principal, request: DrainRequest, pause: Pause) -> ResultOpt:
    sender = None if request.everyone else caller.agent.pubkey
    ledger, give_up_ms = services.ledger, services.give_up_ms(request.wait_ms)
    task_id = parse_optional(parse_task_id, request.task_id)
    with ledger.result_waiter(sender) as waiter:
        while True:
            drained = await _drain(services, caller, request)
            if drained.results:
                waiter.served()
                await _check_caller(services, request, drained, pause)
                return _result_opt(drained)
            remaining_ms = max(0, give_up_ms - ledger.clock.monotonic_ms())
            arrival = waiter.wait(remaining_ms) if task_id is None else ledger.finished(task_id, remaining_ms)
            if not await pause.until(arrival) or not remaining_ms:
                return _result_opt(drained)


async def _drain(services: Services, caller: Principal, request: DrainRequest) -> Drained:
    return await services.exchange.drain(
        caller,
        everyone=request.everyone,
        count=1 if request.count is None else request.count,
        request_id=request.request_id,
        task_id=parse_optional(parse_task_id, request.task_id),
    )


def _result_opt(drained: Drained) -> ResultOpt:
    results = drained.results
    return ResultOpt(result=results[0] if results else None, results=results)


async def renew_a2a_lease(services: Services, caller: Principal, request: LeaseRequest) -> LeaseRenewedAnswer:
    task_id = request.parsed_task_id()
    lease = await services.exchange.renew(caller, task_id, request.parsed_lease_id())
    return LeaseRenewedAnswer(task_id=task_id, lease=LeaseShown.of(lease))


async def release_a2a_lease(services: Services, caller: Principal, request: ReleaseLease) -> LeaseReleasedAnswer:
    task_id = request.parsed_task_id()
    await services.exchange.release(caller, task_id, request.parsed_lease_id(), request.reason)
    return LeaseReleasedAnswer(task_id=task_id)


async def withdraw_a2a_request(
    services: Services, caller: Principal, request: WithdrawRequest
) -> RequestWithdrawnAnswer:
    returned = await services.exchange.withdraw(caller, request.request_id)
    return fill(RequestWithdrawnAnswer, returned, request_id=request.request_id)


async def update_a2a_task(services: Services, caller: Principal, request: UpdateTask) -> TaskUpdatedAnswer:
    task_id, lease_id = request.parsed_task_id(), request.parsed_lease_id()
    reported = await services.exchange.report(
        caller, task_id, lease_id, request.parsed_update(), request.update_no or 0
    )
    return fill(TaskUpdatedAnswer, reported, task_id=task_id)


async def cancel_a2a_task(services: Services, caller: Principal, request: CancelTaskRequest) -> TaskCanceled:
    return fill(TaskCanceled, await services.exchange.cancel(caller, request.parsed_task_id(), request.reason))


class CountsShown(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Counts of all tasks, whatever the filters and limits."""

    queued: int
    in_flight: int
    parked: int
    following: int
    result_pending: int
    cached: int
    holders_lost: int
    delegations_lost: int = 0
    """Delegations to peers that are lost: `covenant peers delegations` shows them."""


class QueueShown(ApiAnswer, frozen=True, kw_only=True, tag="a2a_queue"):
    """`counts` and `warnings` are for the operator. `next` is for a caller that waits."""

    tasks: tuple[QueueEntry, ...]
    results: tuple[Result, ...]
    truncated: bool = False
    counts: CountsShown | None = None
    warnings: tuple[str, ...] = ()
    """Warnings for the operator that concern no task."""
    next: str | None = None


async def a2a_queue(services: Services, caller: Principal, request: QueueRequest) -> QueueShown:
    query = QueueQuery(
        limit=page_limit(request.limit, LIMIT),
        min_lease_age_ms=request.min_lease_age_ms,
        deadline_within_ms=request.deadline_within_ms,
        state_filter=request.state_filter.replace("-", "_") if request.state_filter else None,
    )
    found = await services.exchange.queue(caller, query)
    tasks = fit(found.tasks)
    results = fit(found.results, PAGE_BYTES_MAX - size_of(tasks))
    truncated = len(tasks) < len(found.tasks) or len(results) < len(found.results)
    answer = QueueShown(tasks=tasks, results=results, truncated=truncated)
    if not caller.operator:
        return answer
    counts = await services.ledger.counts()
    shown = fill(CountsShown, counts, **{state.wire_name: getattr(counts, state.value) for state in LIVE})
    warning = services.backups.warning if services.backups is not None else None
    return msgspec.structs.replace(answer, counts=shown, warnings=(warning,) if warning else ())


async def queue_waiting(services: Services, caller: Principal, request: QueueRequest, pause: Pause) -> QueueShown:
    """Waits until the queue's digest differs from `after`."""
    clock, give_up_ms = services.ledger.clock, services.give_up_ms(request.wait_ms)
    while True:
        moved = services.ledger.changes.next_change()  # before the queue is read: no change in between is missed
        answer = await a2a_queue(services, caller, request)
        digest = hashlib.blake2b(encode(answer), digest_size=DIGEST_BYTES).hexdigest()
        remaining_ms = give_up_ms - clock.monotonic_ms()
        if digest != request.after or remaining_ms <= 0:
            return msgspec.structs.replace(answer, next=digest)
        await pause.until(_wait_for_change(moved, remaining_ms / 1000))


async def _wait_for_change(moved: asyncio.Future[None], remaining_s: float) -> None:
    await asyncio.wait((moved,), timeout=remaining_s)
    await asyncio.sleep(min(QUEUE_READ_PAUSE_S, remaining_s))


OPERATIONS: Final[tuple[AnyApiOperation, ...]] = (
    ApiOperation("POST", "/a2a/tasks", send_a2a_task, "Send a task to another agent", frame=WrappedTask),
    ApiOperation("GET", "/a2a/tasks/next", try_recv_a2a_task, "Lease the next queued tasks", wait=take_waiting),
    ApiOperation("POST", "/a2a/results", post_a2a_result, "Post the result of a leased task", frame=WrappedResult),
    ApiOperation(
        "GET",
        "/a2a/results/next",
        try_recv_a2a_result,
        "Drain the next results of tasks you sent, or the result of one",
        wait=drain_waiting,
    ),
    ApiOperation(
        "POST", "/a2a/tasks/{task_id}/renew", renew_a2a_lease, "Say that a leased task is still being worked on"
    ),
    ApiOperation(
        "POST", "/a2a/tasks/{task_id}/release", release_a2a_lease, "Give back a leased task that was not started"
    ),
    ApiOperation(
        "POST",
        "/a2a/withdraw",
        withdraw_a2a_request,
        "Withdraw a receive or drain by its request id, and give back its leases or results",
    ),
    ApiOperation(
        "POST",
        "/a2a/tasks/{task_id}/updates",
        update_a2a_task,
        "Report a status, an artifact chunk or a message of a leased task",
    ),
    ApiOperation("POST", "/a2a/tasks/{task_id}/cancel", cancel_a2a_task, "Cancel a task you sent"),
    ApiOperation(
        "GET",
        "/a2a/queue",
        a2a_queue,
        "Leases, queued tasks and undrained results; the most worrying first",
        wait=queue_waiting,
    ),
)
