"""What has changed lately, for whoever shows it live: which tasks, peers and push configurations; and how much audit.

Off, it costs a look at a flag for each record. On, records are kept as they are decided, a bounded number of them, and
`take` tells what the durable ones among them changed: how many tasks, and the `LATEST_MAX` that changed last.

Used on one loop.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from operator import itemgetter
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
LATEST_MAX: Final = 5
"""Tasks that `take` tells of by their names. Of the others it tells how many there are, which costs much less."""

_number = itemgetter(0)
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
    latest: dict[TaskId, TaskChange]
    """The one that changed last comes first."""
    others: int = 0
    """Tasks that changed before these."""
    peers: frozenset[str] = frozenset()
    pushes: frozenset[TaskId] = frozenset()
    audited: int = 0
    complete: bool = True

    def __bool__(self) -> bool:
        return bool(self.latest or self.peers or self.pushes or self.audited or not self.complete)


class ChangeLog:
    """`position`: of the last durable record. Where records have no number of their own, they are counted from here."""

    def __init__(self, position: int) -> None:
        self.on = False
        self.position = position
        self._newest = position
        self._records: list[tuple[int, int, Sequence[AnyEvent]]] = []
        self._heard: list[tuple[TaskId, int]] = []
        self._heard_peers: set[str] = set()
        self._heard_pushes: set[TaskId] = set()
        self._heard_audited = 0
        self._complete = True
        self._moved: asyncio.Future[None] | None = None

    def moved(self) -> asyncio.Future[None]:
        """Done as soon as something more is durable, whoever recorded it. Of all who wait: not to be canceled."""
        if self._moved is None:
            self._moved = asyncio.get_running_loop().create_future()
        return self._moved

    def _ring(self, moved: asyncio.Future[None]) -> None:
        self._moved = None
        moved.set_result(None)

    def begin(self) -> None:
        self.on = True

    def end(self) -> None:
        """Nobody takes anything any more."""
        self.on = False
        self._records.clear()
        self._heard.clear()
        self._heard_peers.clear()
        self._heard_pushes.clear()
        self._heard_audited = 0

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
        if self._moved is not None:
            self._ring(self._moved)

    def hear(
        self, tasks: Iterable[TaskId], peers: Iterable[str], pushes: Iterable[TaskId], at_ms: int, *, audited: bool
    ) -> None:
        """Somebody else has recorded this, and it is durable."""
        if self._moved is not None:
            self._ring(self._moved)
        if not self.on:
            return
        if len(self._heard) >= RECORDS_MAX:
            self._heard.clear()
            self._complete = False
        self._heard += [(task_id, at_ms) for task_id in tasks]
        self._heard_peers.update(peers)
        self._heard_pushes.update(pushes)
        self._heard_audited += audited
        self._newest += 1
        self.position = self._newest

    def forget(self) -> None:
        """What was not durable never happened."""
        while self._records and self._records[-1][0] > self.position:
            self._records.pop()

    def take(self) -> Changes:
        """What changed since the last call."""
        position, records = self.position, self._records
        durable = bisect_right(records, position, key=_number)
        taken, self._records = records[:durable], records[durable:]
        heard, self._heard = self._heard, []
        peers, self._heard_peers = self._heard_peers, set()
        pushes, self._heard_pushes = self._heard_pushes, set()
        audited, self._heard_audited = self._heard_audited, 0
        complete, self._complete = self._complete, True
        latest: dict[TaskId, TaskChange] = {}
        changed: set[TaskId] = set()
        event: Any
        for _, ts_ms, events in reversed(taken):
            for event in reversed(events):
                kind = type(event)
                if kind in _STATES:
                    task_id = event.task_id
                    if task_id not in changed:
                        changed.add(task_id)
                        if len(latest) < LATEST_MAX:
                            latest[task_id] = TaskChange(_STATES[kind], ts_ms)
                    if (kind is TaskSent or kind is TaskFollowed) and task_id in latest:
                        task = event.task
                        latest[task_id] = latest[task_id]._replace(agent=task.recipient.display, tenant=task.tenant)
                elif kind is Audited:
                    audited += 1
                elif kind is PushPut or kind is PushDropped:
                    pushes.add(event.task_id)
                elif isinstance(event, PeerEvent) and (peer := peer_of(event)) is not None:
                    peers.add(peer)
        for task_id, at_ms in reversed(heard):
            if task_id not in changed and len(latest) < LATEST_MAX:
                latest[task_id] = TaskChange(None, at_ms)
            changed.add(task_id)
        return Changes(
            position=position,
            latest=latest,
            others=len(changed) - len(latest),
            peers=frozenset(peers),
            pushes=frozenset(pushes),
            audited=audited,
            complete=complete,
        )
