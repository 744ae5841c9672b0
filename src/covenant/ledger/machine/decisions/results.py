"""Settling: a task ends once, by its holder's result, a cancel, a deadline, a timeout or a repair.

A result of a leader settles its followers too; any other end makes the oldest of them the new leader.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from covenant.ledger.machine.commands import (
    Cancel,
    Canceled,
    CancelOrphans,
    Drain,
    Drained,
    Orphaned,
    Settle,
    Settled,
    Sweep,
    Swept,
)
from covenant.ledger.machine.decisions.acceptance import ENDING_EVENTS, ending_of
from covenant.ledger.machine.decisions.context import (
    DecisionContext,
    audit_repair,
    authorize,
    find_task,
    known_task,
    not_lessee,
    not_sender,
    stale_lease,
    task_has_ended,
    unknown_task,
)
from covenant.ledger.machine.decisions.suspensions import resume
from covenant.ledger.machine.entry import Entry
from covenant.ledger.machine.events import (
    CacheDropped,
    PushDropped,
    ResultDrained,
    TaskClosed,
    TaskPromoted,
    TaskUpdated,
    TurnEnded,
)
from covenant.ledger.machine.states import DRAINED, LEASED, QUEUED, SETTLED
from covenant.ledger.machine.view import Archived
from covenant.model.content import Text
from covenant.model.errors import Conflict, Refusal
from covenant.model.ids import LeaseId, PublicKey, TaskId
from covenant.model.task import (
    DELEGATION,
    TIMED_OUT,
    Cause,
    Ending,
    Lease,
    Result,
    ResultStatus,
    error_result,
    result_digest,
)
from covenant.model.task_event import ArtifactUpdate, MessageUpdate

_encode = msgspec.json.Encoder().encode
# Attribute access through an enum class runs a hook and takes fifty times as long as these names.
_COMPLETED = Ending.COMPLETED
_RESULT = Cause.RESULT
_OK = ResultStatus.OK
DEADLINE_MESSAGE = "deadline_exceeded"


class ByteBudget:
    """The remaining bytes of a batch. The first item always fits: it was accepted once."""

    __slots__ = ("_empty", "_left")

    def __init__(self, bytes_max: int) -> None:
        self._left = bytes_max
        self._empty = True

    def takes(self, item: msgspec.Struct) -> bool:
        self._left -= len(_encode(item))
        fits = self._empty or self._left >= 0
        self._empty = False
        return fits


def settle(decide: DecisionContext, command: Settle) -> Settled:
    task_id = command.task_id
    entry = find_task(decide, command)
    if entry is None:
        if command.holder is not None:
            row = {"type": "a2a_result_rejected", "task_id": task_id, "reason": "unknown_task"}
            decide.audit(command.holder, row)
        raise unknown_task(task_id)
    if _is_repeated(command, entry):
        return Settled(task_id, duplicate=True)
    authorize(decide, command.access)
    if isinstance(entry, Archived):
        raise _too_late(decide, command, entry.leased_to, entry.ending)
    if entry.finished:
        assert entry.ending is not None
        raise _too_late(decide, command, _lessee(entry), entry.ending)
    lease = _answerable(decide, command, entry)
    ending = command.ending or ending_of(command.result)
    generation = close_text(decide, entry, entry.generation)
    goes_on = conclude(decide, entry, command.result, ending=ending, lease_id=lease.lease_id, generation=generation)
    return Settled(task_id, goes_on=goes_on)


def conclude(
    decide: DecisionContext, entry: Entry, result: Result, *, ending: Ending, lease_id: LeaseId, generation: int
) -> bool:
    """Applies the holder's result: it ends the task, or only the turn if messages were kept for the next one."""
    if not entry.kept or ending is not _COMPLETED:
        end(decide, entry, result, ending=ending, cause=_RESULT, lease_id=lease_id, generation=generation)
        return False
    digest = result_digest(result)
    if result.content:
        reply = MessageUpdate(parts=result.content, message_id=f"{entry.task.id}-r{entry.turn}")
        decide.add(TurnEnded(entry.task.id, lease_id, reply, generation + 1, digest))
    else:
        decide.add(TurnEnded(entry.task.id, lease_id, digest=digest))
    return True


def _answerable(decide: DecisionContext, command: Settle, entry: Entry) -> Lease:
    """The lease of this result: the live one, or the last one of a task that nobody has leased since."""
    lease, task_id = entry.lease, command.task_id
    if lease is None or entry.state not in (LEASED, QUEUED):
        raise Conflict("not_leased", f"task {task_id} is not leased, so it has no result yet; it is {entry.state}")
    _check_holder(decide, command, lease.leased_to.pubkey)
    if command.lease_id is None:
        if entry.attempt - entry.undelivered != 1:
            raise Conflict(
                "lease_id_required",
                f"task {task_id} was leased more than once; name the lease_id whose result this is",
            )
    elif command.lease_id != lease.lease_id:
        raise stale_lease(task_id)
    return lease


def _is_repeated(command: Settle, entry: Entry | Archived) -> bool:
    """Whether the same holder repeats its result: as with a repeated task, nothing is checked and no use is spent."""
    if isinstance(entry, Entry) and _ended_a_turn(command, entry):
        return True
    if entry.cause is not _RESULT or entry.result != command.result:
        return False
    lessee = entry.leased_to if isinstance(entry, Archived) else _lessee(entry)
    return command.holder is None or command.holder.pubkey == lessee


def _ended_a_turn(command: Settle, entry: Entry) -> bool:
    """Whether this is the result that ended the last turn."""
    turn = entry.ended_turn
    return (
        turn is not None
        and command.lease_id in (None, turn.lease_id)
        and command.holder is not None
        and command.holder.pubkey == turn.holder
        and result_digest(command.result) == turn.digest
    )


def _lessee(entry: Entry) -> PublicKey | None:
    return entry.lease.leased_to.pubkey if entry.lease is not None else None


def _too_late(decide: DecisionContext, command: Settle, lessee: PublicKey | None, ending: Ending) -> Refusal:
    _check_holder(decide, command, lessee)
    return task_has_ended(command.task_id, ending)


def _check_holder(decide: DecisionContext, command: Settle, lessee: PublicKey | None) -> None:
    if command.holder is not None and command.holder.pubkey != lessee:
        raise not_lessee(decide, command.task_id, command.holder)


def end(
    decide: DecisionContext,
    entry: Entry,
    result: Result,
    *,
    ending: Ending,
    cause: Cause,
    lease_id: LeaseId | None = None,
    reason: str | None = None,
    generation: int | None = None,
) -> Result:
    """Settles an entry and its followers. `generation`: the entry's, if this decision has changed it.

    Returns the stored result: one that is not the holder's own has the holder's usage.
    """
    if cause is not _RESULT:
        if (used := decide.view.usage_so_far(entry.task.id)) is not None:
            result = msgspec.structs.replace(result, metadata=used)
        generation = close_text(decide, entry, entry.generation if generation is None else generation)
    key = entry.cache_key if entry.task.idempotency is not None else None
    shared = key is not None and cause is _RESULT
    decide.add(
        ENDING_EVENTS.get(entry.task.origin, TaskClosed)(
            entry.task.id,
            result,
            ending,
            cause,
            (entry.generation if generation is None else generation) + 1,
            lease_id,
            reason,
            # A delegated task has its own key: no other task will ask for its result.
            shared and result.status == _OK and entry.task.origin != DELEGATION,
        )
    )
    if key is None or decide.view.leader(key) != entry.task.id:
        return result
    followers = decide.view.followers(key)
    if not shared:
        if followers:
            decide.add(TaskPromoted(followers[0]))
        return result
    for follower in followers:
        follower_entry = decide.view.entry(follower)
        assert follower_entry is not None
        decide.add(
            ENDING_EVENTS.get(follower_entry.task.origin, TaskClosed)(
                follower,
                msgspec.structs.replace(result, task_id=follower),
                ending,
                Cause.LEADER,
                follower_entry.generation + 1,
                None,
                entry.task.id,
            )
        )
    return result


def close_text(decide: DecisionContext, entry: Entry, generation: int) -> int:
    """Writes the last chunk of the text that the holder was writing, so that streams of it end."""
    if entry.open_text is None or entry.state is not LEASED or entry.lease is None:
        return generation
    last = ArtifactUpdate(entry.open_text, (Text(""),), append=True, last_chunk=True)
    decide.add(TaskUpdated(entry.task.id, entry.lease.lease_id, generation + 1, last, entry.update_no))
    return generation + 1


def cancel(decide: DecisionContext, command: Cancel) -> Canceled:
    task_id = command.task_id
    entry = known_task(decide, command)
    if isinstance(entry, Archived):
        return Canceled(task_id, entry.ending, entry.result, entry.ending is Ending.CANCELED, before=True)
    if command.viewer is not None and command.viewer != entry.task.sender.pubkey:
        raise not_sender(decide, task_id, command.by)
    if entry.finished:
        assert entry.ending is not None
        assert entry.result is not None
        return Canceled(task_id, entry.ending, entry.result, entry.ending is Ending.CANCELED, before=True)
    result = error_result(task_id, f"canceled: {command.reason}")
    result = end(decide, entry, result, ending=Ending.CANCELED, cause=Cause.CANCEL, reason=command.reason)
    if command.audited:
        lease = entry.lease if entry.state is LEASED else None
        audit_repair(decide, task_id, lease, command.by, action="cancel", reason=command.reason)
    return Canceled(task_id, Ending.CANCELED, result, True)


def cancel_orphans(decide: DecisionContext, command: CancelOrphans) -> Orphaned:
    orphans = decide.view.orphans(command.count)
    for entry in orphans:
        reason = f"task {entry.task.parent}, which asked for this, has ended"
        result = error_result(entry.task.id, f"canceled: {reason}")
        end(decide, entry, result, ending=Ending.CANCELED, cause=Cause.CANCEL, reason=reason)
    return Orphaned(tuple(entry.task.id for entry in orphans), more=bool(orphans))


def expire(decide: DecisionContext, entry: Entry) -> None:
    result = error_result(entry.task.id, DEADLINE_MESSAGE)
    end(decide, entry, result, ending=Ending.FAILED, cause=Cause.DEADLINE)


def fail_interrupted(decide: DecisionContext, entry: Entry) -> None:
    """Fails work about which no operator decided in time. How far it came is unknown, so it is not repeated."""
    assert entry.hold is not None
    reason = f"interrupted: {entry.hold.reason}; no operator decided within {entry.hold.hold_ms // 1000} s"
    result = error_result(entry.task.id, reason)
    end(decide, entry, result, ending=Ending.FAILED, cause=Cause.INTERRUPTED)


def drain(decide: DecisionContext, command: Drain) -> Drained:
    view = decide.view
    if command.request_id is not None:
        again = view.remembered("drain", command.by.pubkey, command.request_id)
        if again is not None:
            return Drained(tuple(_drained_before(decide, task_id) for task_id in again.task_ids))
    by = command.by.pubkey if command.request_id is not None else None
    drained: list[Result] = []
    room = ByteBudget(view.limits.batch_bytes_max)
    for entry in _drainable(decide, command):
        assert entry.result is not None
        if command.count > 1 and not room.takes(entry.result):
            break
        decide.add(ResultDrained(entry.task.id, command.request_id, by))
        drained.append(entry.result)
    return Drained(tuple(drained))


def _drainable(decide: DecisionContext, command: Drain) -> Sequence[Entry]:
    task_id = command.task_id
    if task_id is None:
        return decide.view.settled(command.sender, min(command.count, decide.view.limits.batch_max))
    entry = decide.view.entry(task_id)
    known = entry or decide.view.archived(task_id)
    if known is None or command.sender not in (None, _sender_of(known)):
        raise unknown_task(task_id)
    if entry is None or entry.state is DRAINED:
        raise Conflict(
            "already_drained", f"the result of task {task_id} was drained already; `covenant a2a show` still has it"
        )
    return (entry,) if entry.state is SETTLED else ()


def _sender_of(known: Entry | Archived) -> PublicKey:
    return known.task.sender.pubkey if isinstance(known, Entry) else known.sender.pubkey


def _drained_before(decide: DecisionContext, task_id: TaskId) -> Result:
    entry = decide.view.entry(task_id)
    if entry is not None and entry.result is not None:
        return entry.result
    archived = decide.view.archived(task_id)
    assert archived is not None
    return archived.result


def sweep(decide: DecisionContext, command: Sweep) -> Swept:
    expired: list[TaskId] = []
    timed_out: list[TaskId] = []
    interrupted: list[TaskId] = []
    woken = 0
    view, now_ms, ages = decide.view, decide.now_ms, decide.ages
    if ages.paused:
        return Swept()
    due = view.due(now_ms, command.count, ages)
    # Promoting a follower changes the queue that the next entry is judged in. So one sweep never settles both a leader
    # and its followers: `due` gives at most one task of a cache key.
    for entry in due:
        if entry.wait is not None and not decide.has_passed(entry.task.deadline_ms):
            resume(decide, entry)
            woken += 1
            continue
        times_out_at_ms = entry.times_out_at_ms(now_ms, ages)
        if times_out_at_ms is not None and times_out_at_ms <= now_ms:
            result = error_result(entry.task.id, TIMED_OUT)
            end(decide, entry, result, ending=Ending.FAILED, cause=Cause.TIMEOUT)
            timed_out.append(entry.task.id)
        elif entry.hold_ends_at_ms(now_ms, ages) is not None:
            fail_interrupted(decide, entry)
            interrupted.append(entry.task.id)
        else:
            expire(decide, entry)
            expired.append(entry.task.id)
    forgotten = view.forgettable(now_ms, command.count, ages)
    for entry in forgotten:
        decide.add(ResultDrained(entry.task.id, forgotten=True))
    uncached = view.cache_overflow(now_ms, command.count, ages)
    if uncached:
        decide.add(CacheDropped(keys=tuple(uncached)))
    idle = view.pushes_idle(now_ms, command.count, ages)
    for push in idle:
        decide.add(PushDropped(push.task_id, push.id))
    more = bool(due) or max(len(forgotten), len(idle), len(uncached)) >= command.count
    return Swept(
        expired=tuple(expired),
        timed_out=tuple(timed_out),
        forgotten=len(forgotten),
        uncached=len(uncached),
        more=more,
        pushes=len(idle),
        interrupted=tuple(interrupted),
        woken=woken,
    )
