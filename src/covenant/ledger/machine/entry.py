"""The entry: what the ledger knows of one task, and what each event does to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import msgspec

from covenant.ledger.machine.events import (
    LeaseInterrupted,
    LeaseReleased,
    LeaseRenewed,
    MessageKept,
    ResultDrained,
    ResultReturned,
    TaskClosed,
    TaskContinued,
    TaskEvent,
    TaskFollowed,
    TaskLeased,
    TaskParked,
    TaskPromoted,
    TaskRequeued,
    TaskSent,
    TaskSettled,
    TaskUpdated,
    TurnEnded,
)
from covenant.ledger.machine.states import FINISHED, LEASED, SETTLED, TRANSITIONS, State
from covenant.model.clock_steps import STEADY, Ages
from covenant.model.content import Text
from covenant.model.ids import LeaseId, PublicKey
from covenant.model.task import (
    CacheKey,
    Cause,
    Ending,
    Lease,
    Result,
    Task,
    cache_key,
    weigh,
    weigh_result,
    without_body,
)
from covenant.model.task_event import ArtifactUpdate, Interruption, MessageUpdate, weigh_message

SAID_MAX: Final = 16
"""Of so many messages to a task is it known that they were said, however often they are said again."""

replace = msgspec.structs.replace


Alive = Callable[[str | None, str], bool]
"""Whether a run (`boot`) of a node may still be there."""


class EndedTurn(msgspec.Struct, frozen=True, gc=False):
    lease_id: LeaseId
    holder: PublicKey
    digest: str


class Hold(msgspec.Struct, frozen=True, gc=False):
    """Interrupted work waits for an operator for `hold_ms`; 0: without a bound."""

    since_ms: int
    hold_ms: int
    reason: str


class Entry(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    task: Task
    digest: str
    state: State
    accepted_at_ms: int
    updated_at_ms: int
    generation: int = 1
    turn: int = 1
    attempt: int = 0
    """Leases given for this turn so far; the last one's number."""
    undelivered: int = 0
    """How many of them nobody was told of. They do not count as attempts."""
    lease: Lease | None = None
    """The live lease while in flight; afterwards the last one of this turn, whose late result may still count."""
    turn_started_ms: int = 0
    """When this turn was first leased: `timeout_ms` counts from here."""
    interrupted: bool = False
    interruption: Interruption | None = None
    update_no: int = 0
    """The last numbered update of this attempt, and which generation it became."""
    update_generation: int = 0
    artifacts: frozenset[str] = frozenset()
    """Artifacts that this attempt has written to: the first chunk of any other replaces what an earlier one left."""
    said: tuple[tuple[str, int], ...] = ()
    """The last messages to it: what each saying was called, and which generation it became."""
    result: Result | None = None
    ending: Ending | None = None
    cause: Cause | None = None
    messages: tuple[MessageUpdate, ...] = ()
    """What this turn is about; none for the first one, which is about the task itself."""
    kept: tuple[MessageUpdate, ...] = ()
    """What the next turn will be about."""
    ended_turn: EndedTurn | None = None
    """The result that ended the last turn, if one did: the same again changes nothing."""
    events: int = 1
    """How many have happened to it: what compaction drops once it is resolved."""
    body_bytes: int = 0
    """Size of the task's body."""
    messages_bytes: int = 0
    kept_bytes: int = 0
    result_bytes: int = 0
    """Size of a result that waits for its sender."""
    body_on_disk: bool = False
    """The task here has no body: it is large, and the engine reads it when somebody needs it."""
    kept_cache_key: CacheKey | None = None
    """The task's cache key while its body, from which the key follows, is on disk."""
    open_text: str | None = None
    """The artifact that this attempt last wrote text to, until it writes the last chunk of it."""
    hold: Hold | None = None
    """Counts while `interrupted`. None: nobody was told that an operator decides."""

    @property
    def finished(self) -> bool:
        return self.state in FINISHED

    @property
    def queued_bytes(self) -> int:
        """What the task and the messages to it count against its account."""
        return self.body_bytes + self.messages_bytes + self.kept_bytes

    @property
    def cache_key(self) -> CacheKey | None:
        return self.kept_cache_key if self.body_on_disk else cache_key(self.task)

    def without_body(self) -> Entry:
        if self.body_on_disk:
            return self
        return replace(self, task=without_body(self.task), body_on_disk=True, kept_cache_key=cache_key(self.task))

    def with_body(self, task: Task) -> Entry:
        return replace(self, task=task, body_on_disk=False, kept_cache_key=None)

    @property
    def deadline_ms(self) -> int | None:
        return self.task.deadline_ms

    def times_out_at_ms(self, now_ms: int, ages: Ages) -> int | None:
        """By the clock as it is now, also if the turn began before that was set."""
        timeout_ms = self.task.timeout_ms
        if not timeout_ms or not self.turn_started_ms:
            return None
        return timeout_ms + (ages.moment_ms(self.turn_started_ms, now_ms) if ages.steps else self.turn_started_ms)

    def hold_ends_at_ms(self, now_ms: int, ages: Ages) -> int | None:
        """When interrupted work has waited for an operator for long enough."""
        hold = self.hold
        if hold is None or not hold.hold_ms or not self.interrupted or self.state is not LEASED:
            return None
        return hold.hold_ms + (ages.moment_ms(hold.since_ms, now_ms) if ages.steps else hold.since_ms)

    def due_at_ms(self, now_ms: int, ages: Ages = STEADY) -> int | None:
        """When its timeout, its hold or, while nobody works on it, its deadline passes."""
        state = self.state
        if state is LEASED:
            timeout_ms, other_ms = self.times_out_at_ms(now_ms, ages), self.hold_ends_at_ms(now_ms, ages)
        elif state in FINISHED:
            return None
        else:
            timeout_ms, other_ms = self.times_out_at_ms(now_ms, ages), self.task.deadline_ms
        if timeout_ms is None or other_ms is None:
            return other_ms if timeout_ms is None else timeout_ms
        return min(timeout_ms, other_ms)

    @property
    def a2a_state(self) -> str:
        """The state as an A2A client is told it."""
        if self.ending is not None:
            return self.ending
        if self.state is State.PARKED:
            return self.interruption or ""
        return "working" if self.attempt > 0 or self.turn > 1 else "submitted"

    def holder_lost(self, alive: Alive) -> bool:
        """The lease belongs to a run of a node that has ended, so nobody holds it any more."""
        lease = self.lease
        if self.state is not LEASED or lease is None:
            return False
        return self.interrupted or (lease.boot is not None and not alive(lease.node, lease.boot))


def evolve(entry: Entry | None, event: TaskEvent, ts_ms: int) -> Entry:
    """The entry after `event`. A move that the table does not have is a defect, here or in the journal."""
    move, afters = _MOVES[type(event)]
    after = afters.get(entry.state if entry is not None else None)
    if after is None:
        raise IllegalMoveError(entry, event)
    return move(entry, event, after, ts_ms)


class IllegalMoveError(Exception):
    """An event that cannot follow the state its task is in."""

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
    return replace(entry, state=after, events=entry.events + 1, updated_at_ms=ts_ms, interrupted=False)


def _released(entry: Entry, event: LeaseReleased, after: State, ts_ms: int) -> Entry:
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
    hold = Hold(ts_ms, event.hold_ms, event.reason) if event.held else None
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
    )


def _parked(entry: Entry, event: TaskParked, after: State, ts_ms: int) -> Entry:
    return replace(
        entry,
        state=after,
        events=entry.events + 1,
        updated_at_ms=ts_ms,
        generation=event.generation,
        interruption=event.interruption,
        # The turn is over and its clock stops: how long the sender thinks is not the holder's time.
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
        said=_said(entry, event),
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
        said=_said(entry, event),
        kept=(*entry.kept, event.message),
        kept_bytes=entry.kept_bytes + weigh_message(event.message),
    )


def _said(entry: Entry, event: TaskContinued | MessageKept) -> tuple[tuple[str, int], ...]:
    return (*entry.said[1 - SAID_MAX :], (event.message_id, event.generation))


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
    TaskContinued: _continued,
    MessageKept: _kept,
    TurnEnded: _turned,
    TaskSettled: _settled,
    TaskClosed: _settled,
    ResultDrained: _moved,
    ResultReturned: _returned,
}


def _afters(event: type[TaskEvent]) -> dict[State | None, State]:
    """The table's moves by this event: from which state to which."""
    tag = event.__struct_config__.tag
    return {before: after for (before, named), after in TRANSITIONS.items() if named == tag}


_MOVES: Final = {event: (made, _afters(event)) for event, made in _MADE.items()}
