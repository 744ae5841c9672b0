"""What has changed lately, for whoever shows it live: which tasks, peers and push configurations; and how much audit.

Off, it costs a look at a flag for each record. On, records are kept as they are decided, a bounded number of them, and
`take` tells what the durable ones among them changed: each task once, with the state that it has now.

Used on one loop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from covenant.ledger.machine.events import (
    AnyEvent,
    Audited,
    LeaseInterrupted,
    LeaseReleased,
    MessageKept,
    PeerEvent,
    PushDropped,
    PushPut,
    ResultDrained,
    ResultReturned,
    TaskClosed,
    TaskContinued,
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
    peer_of,
)
from covenant.ledger.machine.states import DRAINED, FOLLOWING, LEASED, PARKED, QUEUED, SETTLED, State
from covenant.model.ids import TaskId

RECORDS_MAX: Final = 50_000
"""Records that wait to be taken. Beyond that, what changed is not known any more."""

_STATES: Final[dict[type[AnyEvent], State | None]] = {
    TaskSent: QUEUED,
    TaskFollowed: FOLLOWING,
    TaskPromoted: QUEUED,
    TaskLeased: LEASED,
    LeaseReleased: QUEUED,
    LeaseInterrupted: LEASED,
    TaskUpdated: LEASED,
    TaskRequeued: QUEUED,
    TaskParked: PARKED,
    TaskSuspended: PARKED,
    TaskResumed: QUEUED,
    TaskContinued: QUEUED,
    MessageKept: None,
    TurnEnded: QUEUED,
    TaskSettled: SETTLED,
    TaskClosed: DRAINED,
    ResultDrained: DRAINED,
    ResultReturned: SETTLED,
}
"""The state that a task has after each event that is told; None: the one that it had before."""


class TaskChange(NamedTuple):
    """`state` is None where it is not known here; `agent` and `tenant` are, where the task was sent just now."""

    state: State | None
    at_ms: int
    agent: str | None = None
    tenant: str | None = None


class Changes(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """What changed up to a position. `complete` is False if there was more than could be kept."""

    position: int
    tasks: dict[TaskId, TaskChange]
    """The one that changed last comes last."""
    peers: frozenset[str] = frozenset()
    pushes: frozenset[TaskId] = frozenset()
    audited: int = 0
    complete: bool = True

    def __bool__(self) -> bool:
        return bool(self.tasks or self.peers or self.pushes or self.audited or not self.complete)


class ChangeLog:
    """`position`: of the last durable record. Where records have no number of their own, they are counted from here."""

    def __init__(self, position: int) -> None:
        self.on = False
        self.position = position
        self._newest = position
        self._records: deque[tuple[int, int, Sequence[AnyEvent]]] = deque()
        self._heard: list[tuple[TaskId, int]] = []
        self._heard_peers: set[str] = set()
        self._complete = True

    def begin(self) -> None:
        self.on = True

    def end(self) -> None:
        """Nobody takes anything any more."""
        self.on = False
        self._records.clear()
        self._heard.clear()
        self._heard_peers.clear()

    def note(self, events: Sequence[AnyEvent], ts_ms: int, seq: int) -> None:
        """A record was decided. `seq` 0: it has no number."""
        self._newest = seq or self._newest + 1
        if len(self._records) >= RECORDS_MAX:
            self._records.clear()
            self._complete = False
        self._records.append((self._newest, ts_ms, events))

    def landed(self, durable_seq: int) -> None:
        """Records through this one are durable; all of them, if they have no numbers."""
        self.position = durable_seq or self._newest

    def hear(self, tasks: Iterable[TaskId], peers: Iterable[str], at_ms: int) -> None:
        """Somebody else has recorded this, and it is durable."""
        if len(self._heard) >= RECORDS_MAX:
            self._heard.clear()
            self._complete = False
        self._heard += [(task_id, at_ms) for task_id in tasks]
        self._heard_peers.update(peers)
        self._newest += 1
        self.position = self._newest

    def forget(self) -> None:
        """What was not durable never happened."""
        while self._records and self._records[-1][0] > self.position:
            self._records.pop()

    def take(self) -> Changes:
        """What changed since the last call."""
        records, position = self._records, self.position
        tasks: dict[TaskId, TaskChange] = {task_id: TaskChange(None, at_ms) for task_id, at_ms in self._heard}
        peers, pushes, audited = self._heard_peers, set[TaskId](), 0
        self._heard, self._heard_peers = [], set()
        while records and records[0][0] <= position:
            _, ts_ms, events = records.popleft()
            event: Any
            for event in events:
                kind = type(event)
                if kind in _STATES:
                    _add(tasks, event, _STATES[kind], ts_ms)
                elif kind is Audited:
                    audited += 1
                elif kind is PushPut or kind is PushDropped:
                    pushes.add(event.task_id)
                elif isinstance(event, PeerEvent) and (peer := peer_of(event)) is not None:
                    peers.add(peer)
        complete, self._complete = self._complete, True
        return Changes(
            position=position,
            tasks=tasks,
            peers=frozenset(peers),
            pushes=frozenset(pushes),
            audited=audited,
            complete=complete,
        )


def _add(tasks: dict[TaskId, TaskChange], event: Any, state: State | None, ts_ms: int) -> None:
    before = tasks.pop(event.task_id, None)
    if type(event) is TaskSent or type(event) is TaskFollowed:
        task = event.task
        tasks[event.task_id] = TaskChange(state, ts_ms, task.recipient.display, task.tenant)
    elif before is None:
        tasks[event.task_id] = TaskChange(state, ts_ms)
    else:
        tasks[event.task_id] = TaskChange(state or before.state, ts_ms, before.agent, before.tenant)
