"""Leasing: taking work, keeping it, reporting on it, giving it back. One live lease for a task, never more."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from typing import Any, Final

import msgspec

from covenant.ledger.machine.commands import (
    Advance,
    Advanced,
    Continue,
    GiveBack,
    HolderCommand,
    Interrupt,
    Leased,
    LeasedTask,
    Release,
    Renew,
    Report,
    Reported,
    Returned,
    Take,
    Withdraw,
)
from covenant.ledger.machine.decisions.acceptance import BUSY_RETRY_MS, check_account, ending_of
from covenant.ledger.machine.decisions.context import (
    DecisionContext,
    audit_repair,
    follows_another,
    key_reused,
    known_task,
    not_lessee,
    open_task,
    stale_lease,
    task_has_ended,
)
from covenant.ledger.machine.decisions.results import ByteBudget, close_text, conclude, expire
from covenant.ledger.machine.decisions.suspensions import answer, suspend
from covenant.ledger.machine.entry import Entry
from covenant.ledger.machine.events import (
    LeaseInterrupted,
    LeaseReleased,
    LeaseRenewed,
    MessageKept,
    RequestWithdrawn,
    ResultReturned,
    TaskContinued,
    TaskLeased,
    TaskParked,
    TaskUpdated,
    TurnEnded,
)
from covenant.ledger.machine.states import DRAINED, FINISHED, FOLLOWING, LEASED, PARKED
from covenant.ledger.machine.view import Archived
from covenant.model.errors import Conflict, Invalid, OverLimit, Unavailable
from covenant.model.ids import LeaseId, TaskId
from covenant.model.question import has_decision
from covenant.model.task import Lease, Task
from covenant.model.task_event import (
    AWAITING_REPAIR,
    HOLDER_LOST,
    WAITS_FOR_SENDER,
    ArtifactUpdate,
    Interruption,
    StatusUpdate,
    TurnUpdate,
    weigh_message,
)
from covenant.wire.timestamps import format_ms

_INTERRUPTIONS = frozenset(Interruption)

EXPIRED_AT_ONCE_MAX: Final = 1_000
"""The most queued tasks that one receive looks at; the sweep settles expired tasks beyond them."""


def take(decide: DecisionContext, command: Take) -> Leased:
    view = decide.view
    if command.request_id is not None and command.asker is not None:
        again = view.remembered("take", command.asker.pubkey, command.request_id)
        if again is not None:
            return _leases_again(decide, again.task_ids, again.lease_ids)
    count = min(command.count, view.limits.batch_max)
    taken: list[LeasedTask] = []
    room = ByteBudget(view.limits.batch_bytes_max)
    looked = unreadable = 0
    # Expired tasks are settled on the way, and must not hide the work behind them: the search goes on, within bounds.
    while len(taken) < count and looked <= EXPIRED_AT_ONCE_MAX:
        entries = view.queued(command.recipient, looked + count - len(taken))[looked:]
        if not entries:
            break
        looked += len(entries)
        for entry in entries:
            if decide.has_passed(entry.task.deadline_ms):
                expire(decide, entry)
                continue
            task = view.task(entry)
            if task is None:
                # The task stays queued, and must not block the work behind it.
                unreadable += 1
            elif count == 1 or room.takes(task):
                taken.append(_lease(decide, entry, task, command))
            else:
                return Leased(tuple(taken))
    if unreadable and not taken and not decide.events:
        raise body_unreadable(f"the body of {unreadable} queued task(s)")
    return Leased(tuple(taken))


def body_unreadable(what: str) -> Unavailable:
    return Unavailable(
        "body_unreadable",
        f"{what} cannot be read from the archive now; nothing is lost, and `covenant doctor` says what is wrong",
        retry_after_ms=BUSY_RETRY_MS,
    )


def _lease(decide: DecisionContext, entry: Entry, task: Task, command: Take) -> LeasedTask:
    lease = Lease(
        lease_id=LeaseId(decide.new_id()),
        leased_to=command.holder or entry.task.recipient,
        leased_at_ms=decide.now_ms,
        attempt=entry.attempt if entry.continues else entry.attempt + 1,
        node=command.node,
        boot=command.boot,
    )
    generation = entry.generation + 1 if entry.attempt == 0 and entry.turn == 1 else 0
    by = command.by.pubkey if command.by is not None else None
    decide.add(TaskLeased(entry.task.id, lease, generation, command.request_id, by))
    return _leased(entry, task, lease, generation or entry.generation)


def _leased(entry: Entry, task: Task, lease: Lease, generation: int) -> LeasedTask:
    return LeasedTask(task, lease, entry.turn, entry.messages, entry.continues, entry.cut, generation)


def _leases_again(decide: DecisionContext, task_ids: tuple[TaskId, ...], lease_ids: tuple[LeaseId, ...]) -> Leased:
    """The same leases again, as far as they are still live: a lost reply costs nothing."""
    taken = []
    for task_id, lease_id in zip(task_ids, lease_ids, strict=True):
        entry = decide.view.entry(task_id)
        if entry is not None and entry.state is LEASED and entry.lease and entry.lease.lease_id == lease_id:
            task = decide.view.task(entry)
            if task is None:
                raise body_unreadable(f"the body of task {task_id}, which this request was given,")
            taken.append(_leased(entry, task, entry.lease, entry.generation))
    return Leased(tuple(taken), again=True)


def renew(decide: DecisionContext, command: Renew) -> Lease:
    lease = held(decide, command).lease
    assert lease is not None
    decide.add(LeaseRenewed(command.task_id, lease.lease_id, decide.now_ms))
    return msgspec.structs.replace(lease, renewed_at_ms=decide.now_ms)


def release(decide: DecisionContext, command: Release) -> Lease:
    lease = held(decide, command).lease
    assert lease is not None
    decide.add(LeaseReleased(command.task_id, lease.lease_id, command.reason))
    if command.audited:
        audit_repair(decide, command.task_id, lease, command.holder, action="release", reason=command.reason)
    return lease


def interrupt(decide: DecisionContext, command: Interrupt) -> Lease:
    entry = held(decide, command)
    lease = entry.lease
    assert lease is not None
    if entry.interrupted and entry.hold is not None:
        return lease
    hold_ms, outlook = command.hold_ms, command.outlook or "an operator decides what becomes of it"
    if hold_ms and not command.outlook:
        outlook = f"an operator decides by {format_ms(decide.now_ms + hold_ms)}, or else the task fails"
    update = StatusUpdate(f"interrupted: {command.reason}; {outlook}", metadata={HOLDER_LOST: AWAITING_REPAIR})
    decide.add(TaskUpdated(command.task_id, lease.lease_id, entry.generation + 1, update))
    held_now = not command.outlook
    if not held_now:
        hold_ms = 0
    decide.add(LeaseInterrupted(command.task_id, lease.lease_id, command.reason, hold_ms, held_now, command.by_agent))
    return lease


def report(decide: DecisionContext, command: Report) -> Reported:
    entry = decide.view.entry(command.task_id)
    if entry is not None and entry.state is PARKED and _is_repeated(entry, command):
        return Reported(entry.update_generation, duplicate=True)
    entry = held(decide, command)
    if command.update_no:
        if command.update_no == entry.update_no:
            return Reported(entry.update_generation, duplicate=True)
        if command.update_no != entry.update_no + 1:
            raise Conflict(
                "update_out_of_order",
                f"update_no {command.update_no} does not follow {entry.update_no}; send the next one, "
                f"{entry.update_no + 1}",
            )
    update, generation = _normalise(decide, entry.artifacts, command.update), entry.generation
    if type(update) is StatusUpdate and update.state in _INTERRUPTIONS:
        generation = close_text(decide, entry, generation)
    generation += 1
    _add_update(decide, entry, command, update, generation, update_no=command.update_no)
    return Reported(generation)


def _add_update(
    decide: DecisionContext,
    entry: Entry,
    command: HolderCommand[Any],
    update: TurnUpdate,
    generation: int,
    *,
    update_no: int = 0,
) -> None:
    task_id, lease_id = command.task_id, command.lease_id
    if type(update) is not StatusUpdate or update.state not in _INTERRUPTIONS:
        decide.add(TaskUpdated(task_id, lease_id, generation, update, update_no))
        return
    decide.add(TaskParked(task_id, lease_id, generation, Interruption(update.state), update, update_no))
    if entry.kept:
        # The kept messages may already contain the answer: the next turn begins at once.
        decide.add(TurnEnded(task_id, lease_id))


def advance(decide: DecisionContext, command: Advance) -> Advanced:
    entry, result = held(decide, command), command.result
    updates = _normalise_all(decide, entry, command)
    generation = entry.generation
    for update in updates:
        generation += 1
        _add_update(decide, entry, command, update, generation)
    if command.wait is not None:
        return suspend(decide, entry, command, command.wait, generation)
    if result is None:
        return Advanced(generation)
    ending = command.ending or ending_of(result)
    goes_on = conclude(decide, entry, result, ending=ending, lease_id=command.lease_id, generation=generation)
    return Advanced(generation + 1, goes_on)


def _is_repeated(entry: Entry, command: Report) -> bool:
    return (
        command.update_no != 0
        and command.update_no == entry.update_no
        and entry.lease is not None
        and entry.lease.lease_id == command.lease_id
        and entry.lease.leased_to.pubkey == command.holder.pubkey
    )


def _normalise_all(decide: DecisionContext, entry: Entry, command: Advance) -> list[TurnUpdate]:
    artifacts, parked = entry.artifacts, False
    updates: list[TurnUpdate] = []
    for given in command.updates:
        if parked:
            raise Invalid("invalid_update", "an update that parks the task must be the last one")
        update = _normalise(decide, artifacts, given)
        if type(update) is ArtifactUpdate:
            if update.artifact_id not in artifacts:
                artifacts |= {update.artifact_id}
        elif type(update) is StatusUpdate:
            parked = update.state in _INTERRUPTIONS
        updates.append(update)
    if (parked or command.result is not None) and command.wait is not None:
        raise Invalid("invalid_update", "an update that makes a task wait must have neither a result nor a question")
    if parked and command.result is not None:
        raise Invalid("invalid_update", "an update that asks the sender must not have a result")
    return updates


def _normalise(decide: DecisionContext, artifacts: AbstractSet[str], update: TurnUpdate) -> TurnUpdate:
    if type(update) is StatusUpdate and update.state != "working" and update.state not in _INTERRUPTIONS:
        raise Invalid("invalid_update", "update.state must be working, input-required or auth-required")
    if type(update) is not ArtifactUpdate or update.artifact_id in artifacts:
        return update
    if len(artifacts) >= decide.view.limits.artifacts_per_attempt_max:
        raise OverLimit("too_many_artifacts", "this attempt has written too many artifacts; append to one of them")
    if not update.append:
        return update
    # An earlier attempt may have left chunks of the artifact: this attempt's first chunk replaces them.
    return msgspec.structs.replace(update, append=False)


def continue_(decide: DecisionContext, command: Continue) -> Reported:
    entry = open_task(decide, command)
    for message_id, generation in entry.recent_ids:
        if message_id == command.message_id or message_id in command.former:
            return Reported(generation, duplicate=True)
        if command.key is not None and message_id.startswith(command.key):
            raise key_reused()
    wait = entry.wait
    if wait is not None and wait.asks is not None:
        return answer(decide, entry, wait, command)
    if has_decision(command.message.parts) and entry.a2a_state not in WAITS_FOR_SENDER:
        raise Conflict("not_asked", f"task {command.task_id} waits for no approval")
    check_account(decide, entry.task, 0, weigh_message(command.message))
    generation = entry.generation + 1
    if entry.state is PARKED and entry.wait is None:
        decide.add(TaskContinued(command.task_id, generation, command.message, command.message_id))
        return Reported(generation)
    if entry.state is FOLLOWING:
        raise follows_another(command.task_id)
    if len(entry.kept) >= decide.view.limits.messages_kept_max:
        raise OverLimit(
            "too_many_messages",
            f"too many messages to task {command.task_id} wait for its next turn; send again when it has begun",
        )
    decide.add(MessageKept(command.task_id, generation, command.message, command.message_id))
    return Reported(generation)


def held(decide: DecisionContext, command: HolderCommand[Any]) -> Entry:
    """The entry, if the command comes from the holder of its live lease."""
    entry: Entry | Archived | None = decide.view.entry(command.task_id)
    if entry is None or command.viewer is not None or command.recipient is not None:
        entry = known_task(decide, command)
    if type(entry) is not Entry:
        assert isinstance(entry, Archived)
        if entry.leased_to not in (None, command.holder.pubkey):
            raise not_lessee(decide, command.task_id, command.holder)
        raise task_has_ended(command.task_id, entry.ending)
    lease = entry.lease
    if lease is not None and lease.leased_to.pubkey != command.holder.pubkey:
        raise not_lessee(decide, command.task_id, command.holder)
    if entry.state in FINISHED:
        assert entry.ending is not None
        raise task_has_ended(command.task_id, entry.ending)
    if lease is not None and lease.lease_id != command.lease_id:
        raise stale_lease(command.task_id)
    if entry.state is not LEASED:
        raise Conflict("not_leased", f"task {command.task_id} is not currently leased; it is {entry.state}")
    return entry


def give_back(decide: DecisionContext, command: GiveBack) -> Returned:
    leases = _release_undelivered(decide, command.leases, command.reason)
    return Returned(leases, _return_undelivered(decide, command.results, command.reason))


def withdraw(decide: DecisionContext, command: Withdraw) -> Returned:
    by, request_id = command.by.pubkey, command.request_id
    taken = decide.view.remembered("take", by, request_id)
    drained = decide.view.remembered("drain", by, request_id)
    leases = _release_undelivered(
        decide, zip(taken.task_ids, taken.lease_ids, strict=True) if taken else (), command.reason
    )
    results = _return_undelivered(decide, drained.task_ids if drained else (), command.reason)
    decide.add(RequestWithdrawn(by, request_id))
    return Returned(leases, results)


def _release_undelivered(decide: DecisionContext, leases: Iterable[tuple[TaskId, LeaseId]], reason: str) -> int:
    count = 0
    # The last one first: each goes to the head of the queue, so that they end up in their former order.
    for task_id, lease_id in reversed(tuple(leases)):
        entry = decide.view.entry(task_id)
        if entry is None or entry.state is not LEASED or entry.lease is None or entry.lease.lease_id != lease_id:
            continue
        # Somebody has worked under the lease, so its caller got it.
        if entry.update_no or entry.artifacts or entry.lease.renewed_at_ms:
            continue
        untouched = not entry.continues and entry.undelivered + 1 == entry.attempt
        decide.add(LeaseReleased(task_id, lease_id, reason, undelivered=True, untouched=untouched))
        count += 1
    return count


def _return_undelivered(decide: DecisionContext, task_ids: Iterable[TaskId], reason: str) -> int:
    found = [event for task_id in task_ids if (event := _returned_event(decide, task_id, reason)) is not None]
    for event in reversed(found):
        decide.add(event)
    return len(found)


def _returned_event(decide: DecisionContext, task_id: TaskId, reason: str) -> ResultReturned | None:
    known = decide.view.entry(task_id) or decide.view.archived(task_id)
    if known is None or (isinstance(known, Entry) and known.state is not DRAINED):
        return None
    if known.task is None or known.result is None or known.ending is None or known.cause is None:
        return None
    return ResultReturned(
        task_id,
        reason,
        known.task,
        known.digest,
        known.result,
        known.ending,
        known.cause,
        known.generation,
        known.accepted_at_ms,
        known.lease,
    )
