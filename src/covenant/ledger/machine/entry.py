"""The entry: the ledger's record of one task. `evolution` applies events to it."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from covenant.ledger.machine.states import FINISHED, LEASED, State
from covenant.model.clock_steps import STEADY, Ages
from covenant.model.ids import LeaseId, PublicKey
from covenant.model.task import CacheKey, Cause, Ending, Lease, Result, Task, cache_key, without_body
from covenant.model.task_event import Interruption, MessageUpdate, Signal, Wait

replace = msgspec.structs.replace


Alive = Callable[[str | None, str], bool]
"""Returns whether a run (`boot`) of a node may still be alive."""


class EndedTurn(msgspec.Struct, frozen=True, gc=False):
    lease_id: LeaseId
    holder: PublicKey
    digest: str


class Hold(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """Interrupted work waits `hold_ms` for an operator; 0: without limit."""

    since_ms: int
    hold_ms: int
    reason: str
    by_agent: bool | None = None
    """Whether the work's own turn asked for the hold; None: an earlier version noted it, and did not say."""


class Entry(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    task: Task
    digest: str
    state: State
    accepted_at_ms: int
    updated_at_ms: int
    generation: int = 1
    turn: int = 1
    attempt: int = 0
    """The number of leases of this turn so far, which is also the number of the last one."""
    undelivered: int = 0
    """The number of these leases that their callers never got. They do not count as attempts."""
    lease: Lease | None = None
    """The live lease while in flight; afterwards the last one of this turn, whose late result may still count."""
    turn_started_ms: int = 0
    """When this turn was first leased: `timeout_ms` counts from here."""
    interrupted: bool = False
    interruption: Interruption | None = None
    update_no: int = 0
    """The last numbered update of this attempt, and its generation."""
    update_generation: int = 0
    artifacts: frozenset[str] = frozenset()
    """Artifacts that this attempt has written to: the first chunk of any other replaces an earlier attempt's."""
    recent_ids: tuple[tuple[str, int], ...] = msgspec.field(default=(), name="said")
    """The newest messages and signals to the task, each by its id and generation. (Stored as `said`.)"""
    result: Result | None = None
    ending: Ending | None = None
    cause: Cause | None = None
    messages: tuple[MessageUpdate, ...] = ()
    """The messages of this turn; none for the first one, which has the task's own text."""
    kept: tuple[MessageUpdate, ...] = ()
    """The messages for the next turn."""
    ended_turn: EndedTurn | None = None
    """The result that ended the last turn, if one did: repeating it changes nothing."""
    events: int = 1
    """The number of the task's events, which compaction drops once the task is resolved."""
    body_bytes: int = 0
    """Size of the task's body."""
    messages_bytes: int = 0
    kept_bytes: int = 0
    result_bytes: int = 0
    """The size of a result that waits for its sender."""
    body_on_disk: bool = False
    """The task here has no body: the body is large, and the engine reads it on demand."""
    kept_cache_key: CacheKey | None = None
    """The task's cache key while its body, from which the key follows, is on disk."""
    open_text: str | None = None
    """The artifact that this attempt last wrote text to, until its last chunk."""
    hold: Hold | None = None
    """Counts while `interrupted`. None: no watcher was told that an operator decides."""
    wait: Wait | None = None
    """The condition that ends the parking, if it is not a message of the sender."""
    continues: bool = False
    """The next lease, or the live one, continues the attempt that a wait had ended."""
    cut: bool = False
    """An attempt was cut short, and no step of this turn was recorded since: its last step may have run."""
    signals: tuple[Signal, ...] = ()
    """Signals that no step has waited for yet."""
    signals_bytes: int = 0

    @property
    def finished(self) -> bool:
        return self.state in FINISHED

    @property
    def queued_bytes(self) -> int:
        """The bytes of the task and of the messages to it, which count against its account."""
        return self.body_bytes + self.messages_bytes + self.kept_bytes + self.signals_bytes

    @property
    def cache_key(self) -> CacheKey | None:
        return self.kept_cache_key if self.body_on_disk else cache_key(self.task)

    def without_body(self) -> Entry:
        if self.body_on_disk:
            return self
        return replace(self, task=without_body(self.task), body_on_disk=True, kept_cache_key=cache_key(self.task))

    def with_body(self, task: Task) -> Entry:
        return replace(self, task=task, body_on_disk=False, kept_cache_key=None)

    def times_out_at_ms(self, now_ms: int, ages: Ages) -> int | None:
        """When the turn times out, by the present clock, even if the turn began before the clock was set."""
        timeout_ms = self.task.timeout_ms
        if not timeout_ms or not self.turn_started_ms:
            return None
        return timeout_ms + (ages.moment_ms(self.turn_started_ms, now_ms) if ages.steps else self.turn_started_ms)

    def hold_ends_at_ms(self, now_ms: int, ages: Ages) -> int | None:
        """When interrupted work has waited long enough for an operator."""
        hold = self.hold
        if hold is None or not hold.hold_ms or not self.interrupted or self.state is not LEASED:
            return None
        return hold.hold_ms + (ages.moment_ms(hold.since_ms, now_ms) if ages.steps else hold.since_ms)

    def due_at_ms(self, now_ms: int, ages: Ages = STEADY) -> int | None:
        """When the task's timeout, hold, wait or (while nobody works on it) deadline is over; None: it has none."""
        state = self.state
        if state is LEASED:
            timeout_ms, other_ms = self.times_out_at_ms(now_ms, ages), self.hold_ends_at_ms(now_ms, ages)
        elif state in FINISHED:
            return None
        elif self.wait is not None:  # the turn's time stops while the task waits
            timeout_ms, other_ms = self.wait.ends_at_ms(now_ms, ages), self.task.deadline_ms
        else:
            timeout_ms, other_ms = self.times_out_at_ms(now_ms, ages), self.task.deadline_ms
        if timeout_ms is None or other_ms is None:
            return other_ms if timeout_ms is None else timeout_ms
        return min(timeout_ms, other_ms)

    @property
    def a2a_state(self) -> str:
        """The state for A2A clients."""
        if self.ending is not None:
            return self.ending
        if self.state is State.PARKED and (self.wait is None or self.wait.asks is not None):
            return self.interruption or ""
        return "working" if self.attempt > 0 or self.turn > 1 else "submitted"

    def holder_lost(self, alive: Alive) -> bool:
        """Whether the lease belongs to a run of a node that has ended, so that nobody holds it any more."""
        lease = self.lease
        if self.state is not LEASED or lease is None:
            return False
        return self.interrupted or (lease.boot is not None and not alive(lease.node, lease.boot))
