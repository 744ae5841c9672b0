"""Recent changes of tasks, peers, push configurations and the audit, for live displays.

While it is not `enabled`, it costs a look at a flag for each record. Otherwise it keeps a bounded number of decided
records, and `take` returns the changes of the durable ones: the `LATEST_MAX` tasks that changed last, and the others.

Must be used on one event loop.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from operator import itemgetter
from typing import Any, Final, NamedTuple

import msgspec

from covenant.ledger.machine.events import (
    TASK_EVENTS,
    AnyEvent,
    Audited,
    LeaseRenewed,
    PeerEvent,
    PushDropped,
    PushPut,
    SignalKept,
    SignalTaken,
    TaskEvent,
    TaskFollowed,
    TaskSent,
    peer_of,
)
from covenant.ledger.machine.states import TRANSITIONS, State
from covenant.model.ids import TaskId

RECORDS_MAX: Final = 50_000
"""The most records that wait to be taken. Beyond that number, all of them are dropped."""
LATEST_MAX: Final = 5
"""The tasks that changed last. Displays name them, and only count the others, which costs much less."""

_record_number = itemgetter(0)
_INVISIBLE: Final = frozenset({LeaseRenewed, SignalKept, SignalTaken})
"""Events of a task that are not reported."""


def _state_after(kind: type[TaskEvent]) -> State | None:
    after = {state for (_, tag), state in TRANSITIONS.items() if tag == kind.__struct_config__.tag}
    return after.pop() if len(after) == 1 else None


_STATES: Final[dict[type[AnyEvent], State | None]] = {kind: _state_after(kind) for kind in TASK_EVENTS - _INVISIBLE}
"""A task's state after each reported event; None: the state stays the same."""


class TaskChange(NamedTuple):
    """`state` is None if it is not known here; `agent` and `tenant` are known only if the task was sent just now."""

    state: State | None
    at_ms: int
    agent: str | None = None
    tenant: str | None = None


class Changes(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """The changes up to a position. `complete` is False if there were more than could be kept."""

    position: int
    latest: dict[TaskId, TaskChange]
    """Ordered by the last change, newest first."""
    others: dict[TaskId, TaskChange] = {}
    """The tasks that changed before these."""
    peers: frozenset[str] = frozenset()
    pushes: frozenset[TaskId] = frozenset()
    audited: int = 0
    nodes: bool = False
    """Whether a daemon joined the ledger, left it or was lost."""
    complete: bool = True

    def __bool__(self) -> bool:
        return bool(self.latest or self.peers or self.pushes or self.audited or self.nodes or not self.complete)


@dataclass(slots=True)
class _RemoteChanges:
    """Changes that other nodes have recorded, since the last look."""

    tasks: list[tuple[TaskId, int]] = field(default_factory=list)
    peers: set[str] = field(default_factory=set)
    pushes: set[TaskId] = field(default_factory=set)
    audited: int = 0
    nodes: bool = False


class ChangeLog:
    """`position`: the last durable record. Records without numbers of their own are counted from this one.

    They are also counted while the log is not `enabled`: a reader at an earlier position must see that it missed some.
    """

    def __init__(self, position: int) -> None:
        self.enabled = False
        self.position = position
        self.newest = position
        """The number of the last decided record."""
        self._records: list[tuple[int, int, Sequence[AnyEvent]]] = []
        self._remote = _RemoteChanges()
        self._complete = True
        self.waiter: asyncio.Future[None] | None = None
        """The future that `next_change` has returned."""

    def next_change(self) -> asyncio.Future[None]:
        """A future that is done at the next durable change, by any node. All callers share it: do not cancel it."""
        if self.waiter is None:
            self.waiter = asyncio.get_running_loop().create_future()
        return self.waiter

    def wake(self, waiter: asyncio.Future[None]) -> None:
        self.waiter = None
        waiter.set_result(None)

    def begin(self) -> None:
        self.enabled = True

    def end(self) -> None:
        """Drops all records: there is no consumer any more."""
        self.enabled = False
        self._records.clear()
        self._remote = _RemoteChanges()

    def note(self, events: Sequence[AnyEvent], ts_ms: int, seq: int) -> None:
        """Notes a decided record. `seq` 0: the record has no number."""
        self.newest = seq or self.newest + 1
        if len(self._records) >= RECORDS_MAX:
            self._records.clear()
            self._complete = False
        self._records.append((self.newest, ts_ms, events))

    def note_remote(
        self, tasks: Iterable[TaskId], peers: Iterable[str], pushes: Iterable[TaskId], at_ms: int, *, audited: bool
    ) -> None:
        """Notes durable changes that another node has recorded."""
        if self.waiter is not None:
            self.wake(self.waiter)
        self.newest += 1
        self.position = self.newest
        if not self.enabled:
            return
        remote = self._remote
        if max(len(remote.tasks), len(remote.pushes)) >= RECORDS_MAX:
            remote.tasks.clear()
            remote.pushes.clear()
            self._complete = False
        remote.tasks += [(task_id, at_ms) for task_id in tasks]
        remote.peers.update(peers)
        remote.pushes.update(pushes)
        remote.audited += audited

    def note_nodes(self) -> None:
        """Notes a change of the living nodes: leases of a lost node have lost their holder."""
        self.newest += 1
        self.position = self.newest
        if self.enabled:
            self._remote.nodes = True

    def forget(self) -> None:
        """Drops records that did not become durable: they never happened."""
        while self._records and self._records[-1][0] > self.position:
            self._records.pop()

    def take(self) -> Changes:
        """The durable changes since the last call."""
        position, records = self.position, self._records
        durable = bisect_right(records, position, key=_record_number)
        taken, self._records = records[:durable], records[durable:]
        remote, self._remote = self._remote, _RemoteChanges()
        peers, pushes, audited = remote.peers, remote.pushes, remote.audited
        complete, self._complete = self._complete, True
        changed: dict[TaskId, TaskChange] = {}
        event: Any
        for _, ts_ms, events in reversed(taken):
            for event in reversed(events):
                kind = type(event)
                if kind in _STATES:
                    task_id = event.task_id
                    if task_id not in changed:
                        changed[task_id] = TaskChange(_STATES[kind], ts_ms)
                    if kind is TaskSent or kind is TaskFollowed:
                        task = event.task
                        changed[task_id] = changed[task_id]._replace(agent=task.recipient.display, tenant=task.tenant)
                elif kind is Audited:
                    audited += 1
                elif kind is PushPut or kind is PushDropped:
                    pushes.add(event.task_id)
                elif isinstance(event, PeerEvent) and (peer := peer_of(event)) is not None:
                    peers.add(peer)
        for task_id, at_ms in reversed(remote.tasks):
            changed.setdefault(task_id, TaskChange(None, at_ms))
        newest_first = iter(changed.items())
        return Changes(
            position=position,
            latest=dict(islice(newest_first, LATEST_MAX)),
            others=dict(newest_first),
            peers=frozenset(peers),
            pushes=frozenset(pushes),
            audited=audited,
            nodes=remote.nodes,
            complete=complete,
        )
