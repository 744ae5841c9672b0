"""Accepting a task: once per id, replayed from the cache or following a leader where the work is the same."""

from __future__ import annotations

from typing import Final

from covenant.ledger.machine.commands import Accept, Accepted, LeasedTask, RecipientFault, Starter
from covenant.ledger.machine.decisions.context import DecisionContext, authorize
from covenant.ledger.machine.decisions.identities import being_removed
from covenant.ledger.machine.decisions.push import check_room, make_push
from covenant.ledger.machine.entry import Entry
from covenant.ledger.machine.events import TaskClosed, TaskFollowed, TaskLeased, TaskSent, TaskSettled, TaskSuspended
from covenant.ledger.machine.priorities import PRIORITY_MAX
from covenant.ledger.machine.states import State
from covenant.ledger.machine.view import Archived, Cached
from covenant.model.errors import Conflict, Invalid, OverLimit
from covenant.model.ids import AgentId, LeaseId, TaskId
from covenant.model.task import (
    DELEGATION,
    MAILBOX,
    CacheKey,
    Cause,
    Ending,
    Lease,
    Result,
    ResultStatus,
    Task,
    account_of,
    cache_key,
    weigh,
)
from covenant.model.task_event import Wait

LIVE_TASKS: Final = "live_task_limit"
QUEUED_BYTES: Final = "queued_bytes_limit"
# Attribute access through an enum class runs a hook and takes fifty times as long as these names.
_COMPLETED, _FAILED, _ERROR = Ending.COMPLETED, Ending.FAILED, ResultStatus.ERROR
DEADLINE_MS_MAX: Final = 2**64 - 1
"""The largest number that JSON is decoded to. A database column that holds less stores its own maximum instead."""
NOT_BEFORE_MS_MAX: Final = 10 * 366 * 86_400_000
BUSY_RETRY_MS: Final = 1_000
ENDING_EVENTS: Final = {MAILBOX: TaskSettled}
"""Only a mailbox sender drains its result; the results of other doors are read from the archive."""


def check_account(decide: DecisionContext, task: Task, tasks: int, size: int) -> None:
    """Refuses this many more tasks and bytes if they would exceed a limit of the task's account."""
    view = decide.view
    limits, account = view.limits, view.account(task.tenant or account_of(task))
    tenant = view.tenant(task.tenant) if task.tenant is not None else None
    tasks_max, bytes_max = limits.live_tasks_max, limits.queued_bytes_max
    if tenant is not None:
        if tasks and tenant.removal is not None:
            raise being_removed(tenant.name)
        tasks_max = tenant.limits.live_tasks or tasks_max
        bytes_max = tenant.limits.queued_bytes or bytes_max
    if tasks and tasks_max and account.tasks + tasks > tasks_max:
        raise OverLimit(
            LIVE_TASKS,
            f"{tasks_max} tasks that have not ended are the limit; send again when some have",
            retry_after_ms=BUSY_RETRY_MS,
        )
    if bytes_max and account.size + size > bytes_max:
        raise OverLimit(
            QUEUED_BYTES,
            f"the tasks that have not ended may have {bytes_max} bytes together; send again when some have ended",
            retry_after_ms=BUSY_RETRY_MS,
        )


def accept(decide: DecisionContext, command: Accept) -> Accepted:
    task, view = command.task, decide.view
    known = view.entry(task.id) or (None if command.minted else view.archived(task.id))
    if known is not None and (known.digest == command.digest or known.digest in command.former):
        # The digest covers the sender, so this is who sent it first. The answer is the same as then: it asks for no
        # capability and spends no use, or a lost reply to the last use of a grant could never be made good.
        return _accepted_before(decide, task.id, known)
    if task.deadline_ms is not None and decide.has_passed(task.deadline_ms):
        raise Invalid("deadline_past", "deadline_ms is already past; send it with a later one")
    if task.deadline_ms is not None and task.deadline_ms > DEADLINE_MS_MAX:
        raise Invalid("invalid_task", f"deadline_ms must be at most {DEADLINE_MS_MAX}")
    if task.not_before_ms is not None:
        _check_start(decide, task, task.not_before_ms)
    if not 0 <= task.priority <= PRIORITY_MAX:
        raise Invalid("invalid_task", f"priority must be from 0 to {PRIORITY_MAX}")
    if command.access is not None:
        authorize(decide, command.access)
    if command.recipient_fault is not None:
        # Without the audit row of the check that passed: nothing was done with the permission.
        decide.events.clear()
        raise _wrong_recipient(task.recipient, command.recipient_fault)
    if command.admission is not None:
        authorize(decide, command.admission)
    if known is not None:
        raise Conflict(
            "duplicate_task_id",
            f"task {task.id} is known with other content; send new work under a new id",
        )
    if not command.minted and view.is_erased(task.id):
        raise Conflict(
            "duplicate_task_id",
            f"task {task.id} has ended, and is no longer kept; send new work under a new id",
        )
    if task.origin == DELEGATION:
        _check_parent(decide, task)
    key = cache_key(task) if task.idempotency is not None else None
    if key is not None:
        cached = view.cached(key)
        if cached is not None and _is_fresh(decide, cached):
            return _replay(decide, command, cached)
        leader = view.leader(key)
        if leader is not None:
            return _follow(decide, command, key, leader)
    check_account(decide, task, 1, weigh(task) if command.body_bytes is None else command.body_bytes)
    waiting = view.queued_count(task.recipient.pubkey)
    if waiting >= view.limits.queued_per_recipient_max:
        raise OverLimit(
            "queue_full",
            f"the queue of {task.recipient.display} is full; send again when it has drained",
            retry_after_ms=BUSY_RETRY_MS,
        )
    if task.origin == MAILBOX:
        _check_undrained(decide, task)
    sent = TaskSent(task.id, task, command.digest)
    if command.push is None:
        decide.add(sent)
    else:
        _begin(decide, command, sent)
    if task.not_before_ms is not None and task.not_before_ms > decide.now_ms:
        decide.add(TaskSuspended(task.id, Wait(since_ms=decide.now_ms, until_ms=task.not_before_ms)))
        return Accepted(task_id=task.id)
    starter = command.starter
    if starter is None or waiting:
        return Accepted(task_id=task.id)
    return Accepted(task_id=task.id, leased=_start(decide, task, starter))


def _check_start(decide: DecisionContext, task: Task, not_before_ms: int) -> None:
    if not 0 <= not_before_ms <= decide.now_ms + NOT_BEFORE_MS_MAX:
        raise Invalid("invalid_task", "not_before_ms must be within ten years from now")
    if task.deadline_ms is not None and task.deadline_ms <= not_before_ms:
        raise Invalid("invalid_task", "deadline_ms must be later than not_before_ms")


def _is_fresh(decide: DecisionContext, cached: Cached) -> bool:
    return decide.ages.age_ms(cached.cached_at_ms, decide.now_ms) <= decide.view.limits.cache_age_ms_max


def _wrong_recipient(recipient: AgentId, fault: RecipientFault) -> Invalid:
    """The task would be stranded: nobody could receive it. A mismatch does not reveal the right display or key."""
    if fault == "unknown":
        return unknown_recipient(recipient)
    message = "the recipient's display and pubkey do not belong together here; give both as its operator told you"
    return Invalid("recipient_mismatch", message)


def unknown_recipient(recipient: AgentId) -> Invalid:
    message = f"{recipient.display} is not enrolled here; name its pubkey, or ask the operator to enroll it"
    return Invalid("unknown_recipient", message)


def _check_parent(decide: DecisionContext, task: Task) -> None:
    """Refuses a delegated task whose parent has ended: delegated tasks end with their parent."""
    parent = decide.view.entry(task.parent) if task.parent is not None else None
    if parent is None or parent.finished:
        raise Conflict(
            "parent_ended", f"task {task.parent}, the parent of this one, has ended; send it without a parent"
        )


def _begin(decide: DecisionContext, command: Accept, event: TaskSent | TaskFollowed) -> None:
    if command.push is not None:
        check_room(decide, event.task_id, event.task.recipient)
    decide.add(event)
    if command.push is not None:
        make_push(decide, event.task_id, event.task.recipient, command.push, delivered=0)


def _start(decide: DecisionContext, task: Task, starter: Starter) -> LeasedTask:
    lease = Lease(
        lease_id=LeaseId(decide.new_id()),
        leased_to=starter.holder,
        leased_at_ms=decide.now_ms,
        attempt=1,
        node=starter.node,
        boot=starter.boot,
    )
    decide.add(TaskLeased(task.id, lease, generation=2))
    return LeasedTask(task, lease)


def _accepted_before(decide: DecisionContext, task_id: TaskId, known: Entry | Archived) -> Accepted:
    leader = None
    if isinstance(known, Entry) and known.state is State.FOLLOWING and (key := known.cache_key):
        leader = decide.view.leader(key)
    return Accepted(task_id=task_id, duplicate=True, replayed=known.cause is Cause.REPLAY, following=leader)


def _check_undrained(decide: DecisionContext, task: Task) -> None:
    view, limits, sender = decide.view, decide.view.limits, task.sender.pubkey
    if (
        view.settled_count(sender) >= limits.undrained_per_sender_max
        or view.undrained_bytes(sender) >= limits.undrained_bytes_per_sender_max
    ):
        raise OverLimit(
            "results_undrained",
            "too many of your results, or too large ones, wait to be drained; take them with GET /a2a/results/next",
            retry_after_ms=BUSY_RETRY_MS,
        )


def _replay(decide: DecisionContext, command: Accept, cached: Cached) -> Accepted:
    task = command.task
    _check_undrained(decide, task)
    result = Result(
        task_id=task.id,
        status=cached.result.status,
        content=cached.result.content,
        error_message=cached.result.error_message,
    )
    _begin(decide, command, TaskSent(task.id, task, command.digest))
    decide.add(
        ENDING_EVENTS.get(task.origin, TaskClosed)(
            task.id,
            result,
            ending=ending_of(result),
            cause=Cause.REPLAY,
            generation=2,
            reason=cached.source_task_id,
        )
    )
    return Accepted(task_id=task.id, replayed=True)


def _follow(decide: DecisionContext, command: Accept, key: CacheKey, leader: TaskId) -> Accepted:
    task = command.task
    if len(decide.view.followers(key)) >= decide.view.limits.followers_max:
        raise OverLimit(
            "followers_full",
            f"too many tasks already wait for the result of task {leader}; send again when it has ended",
            retry_after_ms=BUSY_RETRY_MS,
        )
    check_account(decide, task, 1, weigh(task))
    _begin(decide, command, TaskFollowed(task.id, task, command.digest, leader))
    return Accepted(task_id=task.id, following=leader)


def ending_of(result: Result) -> Ending:
    """The ending of a result. `partial` counts as completed, and shows in the result."""
    return _FAILED if result.status == _ERROR else _COMPLETED
