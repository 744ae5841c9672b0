"""Applies an event to the entry of its task: one move of the table in `states`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import msgspec

from covenant.ledger.machine.entry import EndedTurn, Entry, Hold
from covenant.ledger.machine.events import (
    LeaseInterrupted,
    LeaseReleased,
    LeaseRenewed,
    MessageKept,
    ResultDrained,
    ResultReturned,
    SignalKept,
    SignalTaken,
    TaskClosed,
    TaskContinued,
    TaskEvent,
    TaskFollowed,
    TaskLeased,
    TaskParked,
    TaskPromoted,
    TaskRequeued,
    TaskResumed,
    TaskSent,
    TaskSettled,
    TaskSuspended,
    TaskUpdated,
    TurnEnded,
)
from covenant.ledger.machine.states import LEASED, SETTLED, TRANSITIONS, State
from covenant.model.content import Text
from covenant.model.task import weigh, weigh_result
from covenant.model.task_event import ArtifactUpdate, Interruption, StepUpdate, weigh_message, weigh_signal

RECENT_IDS_MAX: Final = 16
"""The number of recent messages and signals to a task that are recognised when they are repeated."""
SIGNAL_MARK: Final = "signal "
"""The prefix of a signal's id among the recent ids, which tells it from a message's."""

replace = msgspec.structs.replace


def evolve(entry: Entry | None, event: TaskEvent, ts_ms: int) -> Entry:
    """The entry after `event`. A move that the table does not have is a defect, here or in the journal."""
    move, afters = _MOVES[type(event)]
    after = afters.get(entry.state if entry is not None else None)
    if after is None:
        raise IllegalMoveError(entry, event)
    return move(entry, event, after, ts_ms)


def start(sent: TaskSent, leased: TaskLeased, ts_ms: int) -> Entry:
    """The entry of a task that was leased when it was accepted: what `evolve` returns for both events, at once."""
    lease = leased.lease
    return Entry(
        sent.task,
        sent.digest,
        LEASED,
        ts_ms,
        ts_ms,
        leased.generation or 1,
        attempt=lease.attempt,
        lease=lease,
        turn_started_ms=lease.leased_at_ms,
        events=2,
        body_bytes=weigh(sent.task),
    )


class IllegalMoveError(Exception):
    """An event that is not possible in its task's state."""

    def __init__(self, entry: Entry | None, event: TaskEvent) -> None:
        before = "unknown" if entry is None else entry.state.value
        super().__init__(f"{event.__struct_config__.tag} cannot happen to task {event.task_id}, which is {before}")


def _began(_: None, event: TaskSent | TaskFollowed, after: State, ts_ms: int) -> Entry:
    return Entry(event.task, event.digest, after, ts_ms, ts_ms, body_bytes=weigh(event.task))


def _moved(entry: Entry, _: TaskPromoted | ResultDrained, after: State, ts_ms: int) -> Entry:
    return replace(entry, state=after, events=entry.events + 1, updated_at_ms=ts_ms)


def _leased(entry: Entry, event: TaskLeased, after: State, ts_ms: int) -> Entry:
    return replace(
        entry,
        state=after,
        events=entry.events + 1,
        updated_at_ms=ts_ms,
        generation=event.generation or entry.generation,
        attempt=event.lease.attempt,
        lease=event.lease,
        turn_started_ms=entry.turn_started_ms or event.lease.leased_at_ms,
        interrupted=False,
        update_no=0,
        update_generation=0,
        artifacts=frozenset(),
        open_text=None,
    )


def _renewed(entry: Entry, event: LeaseRenewed, after: State, ts_ms: int) -> Entry:
    lease = replace(entry.lease, renewed_at_ms=event.renewed_at_ms)  # type: ignore[type-var]
    return replace(entry, state=after, events=entry.events + 1, updated_at_ms=ts_ms, lease=lease, interrupted=False)


def _requeued(entry: Entry, _: TaskRequeued, after: State, ts_ms: int) -> Entry:
    return replace(
        entry,
        state=after,
        events=entry.events + 1,
        updated_at_ms=ts_ms,
        interrupted=False,
        continues=False,
        cut=True,
    )


def _released(entry: Entry, event: LeaseReleased, after: State, ts_ms: int) -> Entry:
    if event.undelivered and entry.continues:  # the lease has no number of its own, and the attempt continues
        return replace(entry, state=after, events=entry.events + 1, updated_at_ms=ts_ms, interrupted=False)
    undelivered = entry.undelivered + event.undelivered
    untouched = undelivered == entry.attempt
    return replace(
        entry,
        state=after,
        events=entry.events + 1,
        updated_at_ms=ts_ms,
        interrupted=False,
        undelivered=undelivered,
        lease=None if untouched else entry.lease,
        turn_started_ms=0 if untouched else entry.turn_started_ms,
        continues=False,
        cut=entry.cut or not event.undelivered,
    )


def _returned(entry: Entry | None, event: ResultReturned, after: State, ts_ms: int) -> Entry:
    if entry is not None:
        return replace(entry, state=after, events=entry.events + 1, updated_at_ms=ts_ms)
    return Entry(
        event.task,
        event.digest,
        after,
        event.accepted_at_ms,
        ts_ms,
        generation=event.generation,
        lease=event.lease,
        result=event.result,
        ending=event.ending,
        cause=event.cause,
        body_bytes=weigh(event.task),
        result_bytes=weigh_result(event.result),
    )


def _interrupted(entry: Entry, event: LeaseInterrupted, after: State, ts_ms: int) -> Entry:
    hold = Hold(ts_ms, event.hold_ms, event.reason, event.by_agent) if event.held else None
    return replace(entry, state=after, events=entry.events + 1, updated_at_ms=ts_ms, interrupted=True, hold=hold)


def _updated(entry: Entry, event: TaskUpdated, after: State, ts_ms: int) -> Entry:
    artifacts, open_text = entry.artifacts, entry.open_text
    update = event.update
    if type(update) is ArtifactUpdate:
        if update.artifact_id not in artifacts:
            artifacts |= {update.artifact_id}
        if update.last_chunk:
            open_text = None if update.artifact_id == open_text else open_text
        elif update.parts and type(update.parts[-1]) is Text:
            open_text = update.artifact_id
    return replace(
        entry,
        state=after,
        events=entry.events + 1,
        updated_at_ms=ts_ms,
        generation=event.generation,
        update_no=event.update_no or entry.update_no,
        update_generation=event.generation if event.update_no else entry.update_generation,
        artifacts=artifacts,
        open_text=open_text,
        cut=entry.cut and type(update) is not StepUpdate,
    )


def _suspended(entry: Entry, event: TaskSuspended, after: State, ts_ms: int) -> Entry:
    return replace(
        entry,
        state=after,
        events=entry.events + 1,
        updated_at_ms=ts_ms,
        generation=event.generation or entry.generation,
        wait=event.wait,
        interruption=Interruption.INPUT_REQUIRED if event.wait.asks is not None else None,
        continues=bool(event.wait.step),
        turn_started_ms=0,
        interrupted=False,
        cut=entry.cut and not event.wait.step,
    )


def _resumed(entry: Entry, event: TaskResumed, after: State, ts_ms: int) -> Entry:
    return replace(
        entry,
        state=after,
        events=entry.events + 1,
        updated_at_ms=ts_ms,
        generation=event.generation or entry.generation,
        wait=None,
        interruption=None,
        recent_ids=entry.recent_ids if event.signal_id is None else _with_signal_id(entry, event.signal_id),
    )


def _signal_kept(entry: Entry, event: SignalKept, after: State, ts_ms: int) -> Entry:
    return replace(
        entry,
        state=after,
        events=entry.events + 1,
        updated_at_ms=ts_ms,
        recent_ids=_with_signal_id(entry, event.signal.id),
        signals=(*entry.signals, event.signal),
        signals_bytes=entry.signals_bytes + weigh_signal(event.signal),
    )


def _signal_taken(entry: Entry, event: SignalTaken, after: State, ts_ms: int) -> Entry:
    taken = next((signal for signal in entry.signals if signal.id == event.signal_id), None)
    if taken is None:
        raise IllegalMoveError(entry, event)
    return replace(
        entry,
        state=after,
        events=entry.events + 1,
        updated_at_ms=ts_ms,
        signals=tuple(signal for signal in entry.signals if signal is not taken),
        signals_bytes=entry.signals_bytes - weigh_signal(taken),
    )


def _with_signal_id(entry: Entry, signal_id: str) -> tuple[tuple[str, int], ...]:
    return (*entry.recent_ids[1 - RECENT_IDS_MAX :], (SIGNAL_MARK + signal_id, entry.generation))


def _parked(entry: Entry, event: TaskParked, after: State, ts_ms: int) -> Entry:
    return replace(
        entry,
        state=after,
        events=entry.events + 1,
        updated_at_ms=ts_ms,
        generation=event.generation,
        interruption=event.interruption,
        # The turn is over and its clock stops: the sender's time to answer is not the holder's.
        turn_started_ms=0,
        update_no=event.update_no or entry.update_no,
        update_generation=event.generation if event.update_no else entry.update_generation,
    )


def _continued(entry: Entry, event: TaskContinued, after: State, ts_ms: int) -> Entry:
    return replace(
        entry,
        state=after,
        events=entry.events + 1,
        updated_at_ms=ts_ms,
        generation=event.generation,
        turn=entry.turn + 1,
        attempt=0,
        undelivered=0,
        lease=None,
        turn_started_ms=0,
        interruption=None,
        continues=False,
        cut=False,
        recent_ids=_with_message_id(entry, event),
        messages=(event.message,),
        messages_bytes=weigh_message(event.message),
    )


def _kept(entry: Entry, event: MessageKept, after: State, ts_ms: int) -> Entry:
    return replace(
        entry,
        state=after,
        events=entry.events + 1,
        updated_at_ms=ts_ms,
        generation=event.generation,
        recent_ids=_with_message_id(entry, event),
        kept=entry.kept if event.answers else (*entry.kept, event.message),
        kept_bytes=entry.kept_bytes if event.answers else entry.kept_bytes + weigh_message(event.message),
    )


def _with_message_id(entry: Entry, event: TaskContinued | MessageKept) -> tuple[tuple[str, int], ...]:
    return (*entry.recent_ids[1 - RECENT_IDS_MAX :], (event.message_id, event.generation))


def _turned(entry: Entry, event: TurnEnded, after: State, ts_ms: int) -> Entry:
    return replace(
        entry,
        state=after,
        events=entry.events + 1,
        updated_at_ms=ts_ms,
        generation=event.generation or entry.generation,
        turn=entry.turn + 1,
        attempt=0,
        undelivered=0,
        lease=None,
        turn_started_ms=0,
        interrupted=False,
        interruption=None,
        continues=False,
        cut=False,
        messages=entry.kept,
        kept=(),
        messages_bytes=entry.kept_bytes,
        kept_bytes=0,
        ended_turn=_ended_turn(entry, event),
    )


def _ended_turn(entry: Entry, event: TurnEnded) -> EndedTurn | None:
    lease = entry.lease
    if event.digest is None or lease is None:
        return None
    return EndedTurn(event.lease_id, lease.leased_to.pubkey, event.digest)


def _settled(entry: Entry, event: TaskSettled, after: State, ts_ms: int) -> Entry:
    return replace(
        entry,
        state=after,
        events=entry.events + 1,
        updated_at_ms=ts_ms,
        generation=event.generation,
        interrupted=False,
        interruption=None,
        wait=None,
        result=event.result,
        result_bytes=weigh_result(event.result) if after is SETTLED else 0,
        ending=event.ending,
        cause=event.cause,
    )


_MADE: Final[dict[type[TaskEvent], Callable[[Any, Any, State, int], Entry]]] = {
    TaskSent: _began,
    TaskFollowed: _began,
    TaskPromoted: _moved,
    TaskLeased: _leased,
    LeaseRenewed: _renewed,
    LeaseReleased: _released,
    LeaseInterrupted: _interrupted,
    TaskRequeued: _requeued,
    TaskUpdated: _updated,
    TaskParked: _parked,
    TaskSuspended: _suspended,
    TaskResumed: _resumed,
    SignalKept: _signal_kept,
    SignalTaken: _signal_taken,
    TaskContinued: _continued,
    MessageKept: _kept,
    TurnEnded: _turned,
    TaskSettled: _settled,
    TaskClosed: _settled,
    ResultDrained: _moved,
    ResultReturned: _returned,
}


def _afters(event: type[TaskEvent]) -> dict[State | None, State]:
    """The table's moves by this event: states before and after."""
    tag = event.__struct_config__.tag
    return {before: after for (before, named), after in TRANSITIONS.items() if named == tag}


_MOVES: Final = {event: (made, _afters(event)) for event, made in _MADE.items()}
