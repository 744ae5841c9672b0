"""Waiters for a task, a result or the end of a task, and watches of each step of one.

Waiters: one arrival wakes at most one waiter, the longest waiting, whether it waits for one identity or for any. No
wake is lost: a woken waiter that leaves without having taken anything wakes the next one if something is still there;
one that was woken in vain keeps its place. Waiting, waking and leaving cost O(log n) for n waiters.

Watches: each durable step is given to every watch of its task, in order, once. A watch begins at once and misses
nothing from then on. Earlier steps are in the history: begin to watch, read the past, then go on with newer steps;
generations tell them apart. Steps wait here until their record is durable. Everything here is used on one loop.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from itertools import chain, product
from operator import attrgetter
from types import TracebackType
from typing import Any, Final, Protocol, Self

from covenant.ledger.change_log import ChangeLog
from covenant.ledger.clock import LONG_WAIT_S, LongWaits
from covenant.ledger.contract.identities import Register, RegisterChange
from covenant.ledger.machine.events import (
    AgentPut,
    AgentRemoved,
    AnyEvent,
    Audited,
    IdentityEnrolled,
    IdentityRevoked,
    MessageKept,
    PeerEvent,
    PushDropped,
    PushPut,
    TaskClosed,
    TaskContinued,
    TaskEvent,
    TaskFollowed,
    TaskLeased,
    TaskParked,
    TaskRequeued,
    TaskResumed,
    TaskSent,
    TaskSettled,
    TaskSuspended,
    TaskUpdated,
    TenantPut,
    TenantRemoved,
    TurnEnded,
    peer_of,
)
from covenant.model.ids import PublicKey, TaskId
from covenant.model.peers.instance import InstanceId
from covenant.model.task import Cause
from covenant.model.task_event import Began, Continued, Ended, Started, StatusUpdate, Step, StepContent

DEPARTED_MAX: Final = 64
"""The numbers of departed waiters that a line may hold beyond twice its waiters."""
UNREAD_MAX: Final = 2_048
"""The most steps that wait for a slow reader before it is cut off; it can come back with its cursor."""
LEASE_ENDS: Final = frozenset({TaskSettled, TaskClosed, TaskRequeued})
_REGISTERS: Final[dict[type[AnyEvent], Callable[[Any], RegisterChange]]] = {
    IdentityEnrolled: lambda event: RegisterChange(Register.IDENTITIES, event.identity.token_sha256),
    IdentityRevoked: lambda event: RegisterChange(Register.IDENTITIES, event.token_sha256),
    TenantPut: lambda event: RegisterChange(Register.TENANTS, event.tenant.name),
    TenantRemoved: lambda event: RegisterChange(Register.TENANTS, event.tenant),
    AgentPut: lambda event: RegisterChange(Register.AGENTS, event.agent.tenant),
    AgentRemoved: lambda event: RegisterChange(Register.AGENTS, event.tenant),
}


class QueueWaiters:
    """All waiters for tasks, or for results. `pending`: whether there is one for an identity, or for any (None)."""

    def __init__(self, pending: Callable[[PublicKey | None], bool]) -> None:
        self.is_pending = pending
        self.lines: dict[PublicKey | None, _WaitingLine] = {}
        self._last_number = 0

    def waiter(self, identity: PublicKey | None) -> QueueWaiter:
        self._last_number += 1
        return QueueWaiter(self, identity, self._last_number)

    def wake(self, identity: PublicKey) -> None:
        """Wakes the waiter that waits longest for this identity or for any."""
        line = self.lines.get(identity)
        anybody = self.lines.get(None)
        if line is None or (anybody is not None and anybody.first() < line.first()):
            line = anybody
        if line is not None:
            waiter = line.sleeping[line.first()]
            self.remove(waiter)
            waiter.wake(identity)

    def add(self, waiter: QueueWaiter) -> None:
        line = self.lines.get(waiter.identity)
        if line is None:
            line = self.lines[waiter.identity] = _WaitingLine()
        line.add(waiter)

    def remove(self, waiter: QueueWaiter) -> None:
        line = self.lines.get(waiter.identity)
        if line is not None and line.sleeping.pop(waiter.number, None) is not None and not line.sleeping:
            del self.lines[waiter.identity]

    def pass_on(self, identity: PublicKey) -> None:
        """Wakes the next waiter instead of one that was woken for this identity and took nothing."""
        if self.is_pending(identity):
            self.wake(identity)


class QueueWaiter:
    """A place in a line, kept while the context is open. An arrival wakes the longest waiting one.

    A waiter that leaves without having taken anything passes its wake on.

    with waiters.waiter(identity) as waiter:
        while not (found := await take()):
            if not await waiter.wait(timeout_ms):
                return None
        waiter.served()
    """

    def __init__(self, waiters: QueueWaiters, identity: PublicKey | None, number: int) -> None:
        self.identity = identity
        self.number = number
        self._waiters = waiters
        self._woken: asyncio.Future[bool] | None = None
        self._woken_for: PublicKey | None = None

    async def wait(self, timeout_ms: int) -> bool:
        """True when there may be something to take; False after the timeout."""
        if self._waiters.is_pending(self.identity):
            return True
        self._woken_for = None
        if timeout_ms <= 0:
            return False
        loop = asyncio.get_running_loop()
        woken: asyncio.Future[bool] = loop.create_future()
        self._woken = woken
        timer = loop.call_later(timeout_ms / 1000, _end, woken)
        self._waiters.add(self)
        try:
            return await woken
        finally:
            timer.cancel()
            self._waiters.remove(self)

    def wake(self, identity: PublicKey) -> None:
        assert self._woken is not None, "only those who wait are woken"
        self._woken_for = identity
        if not self._woken.done():
            self._woken.set_result(True)

    def served(self) -> None:
        """Marks that the waiter took what it was woken for, so that no other waiter needs to look for it.

        A waiter for any identity may have taken another identity's task or result: when it leaves, a waiter for the
        identity that it was woken for is woken if something is still there.
        """
        if self.identity is not None:
            self._woken_for = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._waiters.remove(self)
        woken_for, self._woken_for = self._woken_for, None
        if woken_for is not None:
            self._waiters.pass_on(woken_for)


class _WaitingLine:
    """The sleeping waiters for one identity by number, and the order of the numbers. Never empty when used."""

    def __init__(self) -> None:
        self.sleeping: dict[int, QueueWaiter] = {}
        self._order: list[int] = []

    def add(self, waiter: QueueWaiter) -> None:
        self.sleeping[waiter.number] = waiter
        heapq.heappush(self._order, waiter.number)
        if len(self._order) > 2 * len(self.sleeping) + DEPARTED_MAX:
            self._order = sorted(self.sleeping)

    def first(self) -> int:
        """The number of the waiter that waits longest."""
        while self._order[0] not in self.sleeping:
            heapq.heappop(self._order)
        return self._order[0]


def _end(woken: asyncio.Future[bool]) -> None:
    if not woken.done():
        woken.set_result(False)


Key = tuple[str, ...]


class KeyedWakeups:
    """Wakes all waiters for a key at its next `wake`."""

    def __init__(self) -> None:
        self.waiting: dict[Key, set[asyncio.Future[None]]] = {}

    def wake(self, key: Key) -> None:
        for future in self.waiting.pop(key, ()):
            _wake(future)

    async def wait(self, key: Key, timeout_ms: int) -> bool:
        """True if the key was woken; False after the timeout."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.waiting.setdefault(key, set()).add(future)
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                await future
        except TimeoutError:
            return False
        finally:
            waiting = self.waiting.get(key)
            if waiting is not None:
                waiting.discard(future)
                if not waiting:
                    del self.waiting[key]
        return True


_STARTED, _update_of = Started(), attrgetter("update")


def _end_of(event: Any) -> Ended:
    return Ended(event.ending, event.result, event.cause)


# What watchers see of each event that has a generation. Other events are invisible to them.
_CONTENTS: Final[dict[type[AnyEvent], Callable[[Any], StepContent]]] = {
    TaskSent: lambda event: Began(event.task),
    TaskFollowed: lambda event: Began(event.task),
    TaskLeased: lambda _: _STARTED,
    TaskUpdated: _update_of,
    TaskParked: _update_of,
    TaskSuspended: _update_of,
    TaskResumed: _update_of,
    TaskContinued: lambda event: Continued(event.message),
    MessageKept: lambda event: Continued(event.message),
    TurnEnded: attrgetter("reply"),
    TaskSettled: _end_of,
    TaskClosed: _end_of,
}


def step_of(event: Any, ts_ms: int) -> Step | None:
    """The step that watchers see for an event; None for an invisible one."""
    content_of = _CONTENTS.get(type(event))
    return Step(event.generation, ts_ms, content_of(event)) if content_of is not None and event.generation else None


class WatchSource(Protocol):
    """The source of a watch's steps. It is called when the watch ends."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop: ...
    @property
    def long_waits(self) -> LongWaits: ...
    def leave(self, watch: TaskWatch) -> None: ...


class TaskWatch:
    """One reader of the steps of one task, until its context ends; `next` is for one caller at a time."""

    __slots__ = ("_source", "_steps", "_until_rest", "_woken", "cut", "task_id")

    def __init__(self, source: WatchSource, task_id: TaskId) -> None:
        self._source = source
        self._steps: list[Step] = []
        self._woken: asyncio.Future[None] | None = None
        self.task_id = task_id
        self.cut = False
        """Whether steps were skipped: the reader was too slow, or the ledger failed. It must restart at its cursor."""
        self._until_rest = False

    async def next(self, timeout_s: float, *, until_rest: bool = False) -> Sequence[Step]:
        """The durable steps since the last call, in order. There may be none after the timeout, or when `cut`.

        `until_rest`: returns only with a step that ends or parks the task, after very many steps, or after the timeout.
        """
        if not self.cut and (not self._steps or (until_rest and not _is_rest(self._steps[-1]))):
            self._until_rest = until_rest
            source = self._source
            self._woken = woken = source.loop.create_future()
            if timeout_s >= LONG_WAIT_S:
                source.long_waits.add(woken, timeout_s)
                try:
                    await woken
                finally:
                    del source.long_waits.ends_s[woken]
                    self._woken = None
            else:
                timer = source.loop.call_later(timeout_s, _wake, woken)
                try:
                    await woken
                finally:
                    timer.cancel()
                    self._woken = None
        steps, self._steps = self._steps, []
        return steps

    def give(self, steps: Sequence[Step]) -> None:
        if self.cut:
            return
        kept, woken = self._steps, self._woken
        kept += steps
        if len(kept) > UNREAD_MAX:
            del kept[UNREAD_MAX:]
            self.cut = True
        # A reader that waits for a rest is woken before its steps pass the bound.
        if woken is not None and (not self._until_rest or _is_rest(steps[-1]) or len(kept) >= UNREAD_MAX // 2):
            _wake(woken)

    def end(self) -> None:
        self.cut = True
        if self._woken is not None:
            _wake(self._woken)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._source.leave(self)


def _is_rest(step: Step) -> bool:
    what = step.what
    return type(what) is Ended or (type(what) is StatusUpdate and what.state != "working")


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


# Attribute access through an enum class runs a hook and takes fifty times as long as this name.
_RESULT: Final = Cause.RESULT


class TaskWatchers:
    """All watches of a ledger, on its loop. `position`: the last durable record."""

    def __init__(self, position: int) -> None:
        self.changes: Final = ChangeLog(position)
        self.loop: Final = asyncio.get_running_loop()
        self.long_waits: Final = LongWaits(self.loop)
        self._watches: dict[str, list[TaskWatch]] = {}
        self._waiting: deque[tuple[int, Callable[[Any], object], Any]] = deque()
        """The calls that pass on a record's changes, by record, each with its argument."""
        self._lost: Callable[[TaskId], None] | None = None
        self._push: Callable[[TaskId, Step | None], None] | None = None
        self._audited: Callable[[AnyEvent], None] | None = None
        self._peer: list[Callable[[InstanceId], None]] = []
        self._registers: list[Callable[[RegisterChange], None]] = []

    def watch(self, task_id: TaskId, *, new: bool = False) -> TaskWatch:  # noqa: ARG002  old or new, it begins now
        watch = TaskWatch(self, task_id)
        self._watches.setdefault(task_id, []).append(watch)
        return watch

    def leave(self, watch: TaskWatch) -> None:
        if watch in (watches := self._watches.get(watch.task_id, [])):
            watches.remove(watch)
            if not watches:
                del self._watches[watch.task_id]

    def on_lost(self, callback: Callable[[TaskId], None]) -> None:
        self._lost = callback

    def on_push(self, callback: Callable[[TaskId, Step | None], None]) -> None:
        self._push = callback

    def on_peer(self, callback: Callable[[InstanceId], None]) -> None:
        self._peer.append(callback)

    def on_registers(self, callback: Callable[[RegisterChange], None]) -> None:
        self._registers.append(callback)

    def on_audit(self, callback: Callable[[AnyEvent], None]) -> None:
        self._audited = callback

    def note(self, events: Sequence[Any], ts_ms: int, seq: int, pushed: Collection[TaskId]) -> None:
        """Notes a decided record. Its steps are given to the watches of the task once it is durable.

        `pushed`: the tasks that have push configurations.
        """
        if self.changes.enabled:
            self.changes.note(events, ts_ms, seq)
        elif not seq:
            self.changes.newest += 1
        watches, waiting, contents = self._watches, self._waiting, _CONTENTS
        lost = self._lost
        watched: TaskId | None = None
        steps: list[Step] = []
        for event in events:
            content_of = contents.get(type(event))
            if content_of is None:
                self._note_invisible(event, seq, pushed)
                continue
            task_id: TaskId = event.task_id
            if content_of is _end_of and event.cause is not _RESULT and lost is not None:
                waiting.append((seq, lost, task_id))  # a holder does not stop because of its own result
            if pushed and task_id in pushed:
                waiting.append((seq, partial(self._notify_push, task_id), step_of(event, ts_ms)))
            if task_id in watches and (generation := event.generation):
                step = Step(generation, ts_ms, content_of(event))
                if task_id == watched:
                    steps.append(step)
                else:
                    watched, steps = task_id, [step]
                    for watch in watches[task_id]:
                        waiting.append((seq, watch.give, steps))

    def _note_invisible(self, event: AnyEvent, seq: int, pushed: Collection[TaskId]) -> None:
        """Notes an event that watches of a task do not see."""
        waiting = self._waiting
        if isinstance(event, TaskEvent):
            if isinstance(event, TaskRequeued) and self._lost is not None:
                waiting.append((seq, self._lost, event.task_id))
            if event.task_id in pushed:
                waiting.append((seq, partial(self._notify_push, event.task_id), None))
        elif isinstance(event, (PushPut, PushDropped)):
            waiting.append((seq, partial(self._notify_push, event.task_id), None))
        elif isinstance(event, PeerEvent) and (peer := peer_of(event)) is not None:
            waiting += [(seq, tell, peer) for tell in self._peer]
        elif type(event) is Audited and self._audited is not None:
            waiting.append((seq, self._audited, event))
        elif (changed := _REGISTERS.get(type(event))) is not None:
            waiting += [(seq, listen, changed(event)) for listen in self._registers]

    def _notify_push(self, task_id: TaskId, step: Step | None) -> None:
        """It may have begun to listen after the record was decided."""
        if self._push is not None:
            self._push(task_id, step)

    def deliver(self, durable_seq: int) -> None:
        """Passes on changes by records up to this one, which are durable now. 0: all, if records have no numbers."""
        changes = self.changes
        changes.position = durable_seq or changes.newest
        if changes.waiter is not None:
            changes.wake(changes.waiter)
        waiting = self._waiting
        while waiting and waiting[0][0] <= durable_seq:
            _, tell, change = waiting.popleft()
            tell(change)

    def notify(
        self,
        *,
        lost: Iterable[TaskId] = (),
        peers: Iterable[InstanceId] = (),
        pushed: Iterable[TaskId] = (),
        registers: Iterable[RegisterChange] = (),
    ) -> None:
        """Passes on durable changes that another node has recorded."""
        if (stop := self._lost) is not None:
            for task_id in lost:
                stop(task_id)
        if (push := self._push) is not None:
            for task_id in pushed:
                push(task_id, None)
        for tell, peer in product(self._peer, peers):
            tell(peer)
        for listen, change in product(self._registers, registers):
            listen(change)

    def cut(self) -> None:
        """Ends all watches after a disk failure: each reader must begin again at its cursor."""
        for watch in chain.from_iterable(self._watches.values()):
            watch.end()

    def forget(self) -> None:
        """Drops changes whose records did not become durable because the disk failed."""
        self.changes.forget()
        self._waiting.clear()
