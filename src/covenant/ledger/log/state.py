"""The live tasks in memory, with an index for each question that a decision asks.

Changed only by `apply`, record by record, in the same way whether the record was just decided or is read back from the
journal. Finished tasks leave once the archive has them. Nothing here scans: each index answers in constant or
logarithmic time, whatever else is in the ledger.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from covenant.ledger.log.correspondence import Correspondence
from covenant.ledger.log.lanes import Lanes
from covenant.ledger.log.outbox import Outbox
from covenant.ledger.log.registers import Registers
from covenant.ledger.machine.entry import Entry, evolve
from covenant.ledger.machine.events import (
    AnyEvent,
    CacheDropped,
    LeaseRenewed,
    PushEvent,
    ResultDrained,
    TaskEvent,
    TaskLeased,
    TaskPromoted,
    TaskSent,
    TaskSettled,
)
from covenant.ledger.machine.peer_events import PeerEvent
from covenant.ledger.machine.states import DRAINED, FINISHED, FOLLOWING, LEASED, PARKED, QUEUED, SETTLED, State
from covenant.ledger.machine.view import Archived, Cached, Limits, Remembered
from covenant.model.ids import LeaseId, PublicKey, TaskId
from covenant.model.task import DELEGATION, CacheKey, cache_key

_WAITING = frozenset({QUEUED, PARKED, FOLLOWING})


class LedgerState(Registers, Outbox, Correspondence):
    """What a decision reads (it is the machine's `View`) and what the engine tells of it."""

    def __init__(self, limits: Limits) -> None:
        Registers.__init__(self)
        Outbox.__init__(self)
        Correspondence.__init__(self)
        self.limits = limits
        self.entries: dict[TaskId, Entry] = {}
        self.queue = Lanes()
        self.results = Lanes()
        self.in_flight: OrderedDict[TaskId, None] = OrderedDict()
        """The longest untouched first: leasing and renewing move a task to the end."""
        self.parked = 0
        self.following = 0
        self.cache: OrderedDict[CacheKey, Cached] = OrderedDict()
        self.leaders: dict[CacheKey, TaskId] = {}
        self.groups: dict[CacheKey, dict[TaskId, None]] = {}
        self.requests: OrderedDict[tuple[str, PublicKey, str], Remembered] = OrderedDict()
        """By verb, caller and request id."""
        self.children: dict[TaskId, dict[TaskId, None]] = {}
        """The delegated tasks that have not ended, by their parent."""
        self.orphaned: dict[TaskId, None] = {}
        """Those whose parent may have ended."""
        self.recalled: dict[TaskId, Archived] = {}
        """Finished tasks fetched from the archive for the command that is about to be decided."""
        self.used_here: Callable[[TaskId], dict[str, Any] | None] | None = None
        self.resolved_events = 0
        """Events of the tasks that were evicted."""
        self._due: list[tuple[int, TaskId]] = []
        self._finished: deque[tuple[int, TaskId]] = deque()

    def used(self, task_id: TaskId) -> dict[str, Any] | None:
        return self.used_here(task_id) if self.used_here is not None else None

    def apply(self, events: Sequence[AnyEvent], ts_ms: int, seq: int) -> None:
        entries = self.entries
        for event in events:
            if isinstance(event, TaskEvent):
                old = entries.get(event.task_id)
                entries[event.task_id] = new = evolve(old, event, ts_ms)
                if old is None or new.state is not old.state:
                    self._move(event, old, new, ts_ms, seq)
                elif isinstance(event, LeaseRenewed):  # nothing else makes a lease young
                    self.in_flight.move_to_end(event.task_id)
            elif isinstance(event, PushEvent):
                self.apply_push(event, ts_ms)
            elif isinstance(event, PeerEvent):
                self.apply_peer(event, ts_ms)
            elif isinstance(event, CacheDropped):
                for _ in range(min(event.count, len(self.cache))):
                    self.cache.popitem(last=False)
            else:
                self.register(event)

    def _move(self, event: TaskEvent, old: Entry | None, new: Entry, ts_ms: int, seq: int) -> None:
        """From one state to another: out of the indexes of the one, and into those of the other."""
        task_id, task, finished = event.task_id, new.task, new.state in FINISHED
        if old is not None:
            self._leave(old.state, new)
        self._enter(new.state, new, seq)
        if task_id in self.pushes_by_task and isinstance(event, TaskSettled):
            self.end_pushes(task_id, new.generation)
        if task.idempotency is not None:
            self._share(event, new, ts_ms)
        if task.origin == DELEGATION:
            if old is None:
                self._attach(new)
            elif finished:
                self._detach(new)
        if finished and task_id in self.children:
            self.orphaned.update(self.children.pop(task_id))
        if isinstance(event, (TaskLeased, ResultDrained)) and event.request_id is not None:
            self._remember(event, new)

    def _leave(self, state: State, entry: Entry) -> None:
        task = entry.task
        if state is QUEUED:
            self.queue.leave(task.recipient.pubkey, task.id)
        elif state is LEASED:
            del self.in_flight[task.id]
        elif state is SETTLED:
            self.results.leave(task.sender.pubkey, task.id)
        elif state is PARKED:
            self.parked -= 1
        elif state is FOLLOWING:
            self.following -= 1

    def _enter(self, state: State, entry: Entry, seq: int) -> None:
        task = entry.task
        if state is QUEUED:
            self.queue.enter(task.recipient.pubkey, task.id)
        elif state is LEASED:
            self.in_flight[task.id] = None
            times_out_at_ms = entry.times_out_at_ms
            if times_out_at_ms is not None:
                heapq.heappush(self._due, (times_out_at_ms, task.id))
        elif state is SETTLED:
            self.results.enter(task.sender.pubkey, task.id)
            return
        elif state is DRAINED:
            self._finished.append((seq, task.id))
            return
        elif state is PARKED:
            self.parked += 1
        elif state is FOLLOWING:
            self.following += 1
        if task.deadline_ms is not None and state is not LEASED:
            heapq.heappush(self._due, (task.deadline_ms, task.id))

    def _attach(self, entry: Entry) -> None:
        task = entry.task
        assert task.parent is not None
        self.children.setdefault(task.parent, {})[task.id] = None

    def _detach(self, entry: Entry) -> None:
        task = entry.task
        assert task.parent is not None
        self.orphaned.pop(task.id, None)
        siblings = self.children.get(task.parent)
        if siblings is not None:
            siblings.pop(task.id, None)
            if not siblings:
                del self.children[task.parent]

    def _share(self, event: TaskEvent, entry: Entry, ts_ms: int) -> None:
        """Who leads and who follows in the work that a cache key names, and what was found out."""
        key = cache_key(entry.task)
        if key is None:
            return
        task_id = entry.task.id
        if isinstance(event, TaskSent):
            # A replayed task is sent and settled in one record: it must not take over from a leader that is at work.
            self.leaders.setdefault(key, task_id)
        elif isinstance(event, TaskPromoted):
            self._unfollow(key, task_id)
            self.leaders[key] = task_id
        elif entry.state is FOLLOWING:
            self.groups.setdefault(key, {})[task_id] = None
        elif isinstance(event, TaskSettled):
            if self.leaders.get(key) == task_id:
                del self.leaders[key]
            else:
                self._unfollow(key, task_id)
            if event.cached:
                self.cache.pop(key, None)
                self.cache[key] = Cached(source_task_id=task_id, result=event.result, cached_at_ms=ts_ms)

    def _unfollow(self, key: CacheKey, task_id: TaskId) -> None:
        group = self.groups.get(key)
        if group is not None:
            group.pop(task_id, None)
            if not group:
                del self.groups[key]

    def _remember(self, event: TaskLeased | ResultDrained, entry: Entry) -> None:
        lease_ids: tuple[LeaseId, ...] = ()
        assert event.request_id is not None
        if isinstance(event, TaskLeased):
            key = ("take", event.lease.leased_to.pubkey, event.request_id)
            lease_ids = (event.lease.lease_id,)
        else:
            key = ("drain", event.by or entry.task.sender.pubkey, event.request_id)
        known = self.requests.get(key, Remembered(()))
        self.requests[key] = Remembered((*known.task_ids, event.task_id), (*known.lease_ids, *lease_ids))
        if len(self.requests) > self.limits.requests_remembered_max:
            self.requests.popitem(last=False)

    def restore(self, entry: Entry) -> None:
        """Put back an entry of a snapshot; they come in the order of their lanes."""
        task = entry.task
        self.entries[task.id] = entry
        self._enter(entry.state, entry, 0)
        times_out_at_ms = entry.times_out_at_ms
        if times_out_at_ms is not None and entry.state is QUEUED:
            # Its turn began with a lease that is over; entering the queue does not say so.
            heapq.heappush(self._due, (times_out_at_ms, task.id))
        if task.origin == DELEGATION and not entry.finished:
            self._attach(entry)
            self.orphaned[task.id] = None
        key = cache_key(task)
        if key is None or entry.finished:
            return
        if entry.state is FOLLOWING:
            self.groups.setdefault(key, {})[task.id] = None
        else:
            self.leaders[key] = task.id

    def ordered(self) -> Iterator[Entry]:
        """All live entries, in an order from which `restore` makes the same lanes again."""
        for task_ids in (self.queue, self.in_flight, self.results):
            for task_id in task_ids:
                yield self.entries[task_id]
        for group in self.groups.values():
            for task_id in group:
                yield self.entries[task_id]
        for entry in self.entries.values():
            if entry.state is PARKED:
                yield entry

    def evict(self, archived_seq: int) -> list[TaskId]:
        """Finished tasks that the archive holds leave memory; which ones."""
        finished, gone = self._finished, []
        while finished and finished[0][0] <= archived_seq:
            _, task_id = finished.popleft()
            self.resolved_events += self.entries.pop(task_id).events
            gone.append(task_id)
        return gone

    def entry(self, task_id: TaskId) -> Entry | None:
        return self.entries.get(task_id)

    def archived(self, task_id: TaskId) -> Archived | None:
        return self.recalled.get(task_id)

    def queued(self, recipient: PublicKey | None, count: int) -> Sequence[Entry]:
        return [self.entries[task_id] for task_id in self.queue.first(recipient, count)]

    def queued_count(self, recipient: PublicKey) -> int:
        return self.queue.count(recipient)

    def settled(self, sender: PublicKey | None, count: int) -> Sequence[Entry]:
        return [self.entries[task_id] for task_id in self.results.first(sender, count)]

    def settled_count(self, sender: PublicKey) -> int:
        return self.results.count(sender)

    def leases(self) -> Iterator[Entry]:
        return (self.entries[task_id] for task_id in self.in_flight)

    def due(self, now_ms: int, count: int) -> Sequence[Entry]:
        """At most one task of a cache key at a time: settling one may change what the others are."""
        found: dict[TaskId, Entry] = {}
        keys: set[CacheKey] = set()
        back: list[tuple[int, TaskId]] = []
        while self._due and self._due[0][0] <= now_ms and len(found) < count:
            item = heapq.heappop(self._due)
            entry = self.entries.get(item[1])
            if entry is None or not _is_due(entry, now_ms):
                continue
            back.append(item)
            key = cache_key(entry.task)
            if key is None or key not in keys:
                found[item[1]] = entry
            if key is not None:
                keys.add(key)
        for item in back:
            heapq.heappush(self._due, item)
        return list(found.values())

    def orphans(self, count: int) -> Sequence[Entry]:
        found: list[Entry] = []
        cared_for: list[TaskId] = []
        for task_id in self.orphaned:
            entry = self.entries[task_id]
            assert entry.task.parent is not None
            parent = self.entries.get(entry.task.parent)
            if parent is not None and not parent.finished:
                cared_for.append(task_id)
            elif len(found) < count:
                found.append(entry)
            else:
                break
        for task_id in cared_for:
            del self.orphaned[task_id]
        return found

    def forgettable(self, before_ms: int, count: int) -> Sequence[Entry]:
        found: list[Entry] = []
        for entry in self.settled(None, count):
            if entry.updated_at_ms >= before_ms:
                break
            found.append(entry)
        return found

    def cached(self, key: CacheKey) -> Cached | None:
        return self.cache.get(key)

    def cache_overflow(self, now_ms: int) -> int:
        over = max(0, len(self.cache) - self.limits.cache_entries_max)
        oldest_ms = now_ms - self.limits.cache_age_ms_max
        for index, cached in enumerate(self.cache.values()):
            if index >= over and cached.cached_at_ms >= oldest_ms:
                return index
        return len(self.cache)

    def leader(self, key: CacheKey) -> TaskId | None:
        return self.leaders.get(key)

    def followers(self, key: CacheKey) -> Sequence[TaskId]:
        return tuple(self.groups.get(key, ()))

    def remembered(self, verb: str, holder: PublicKey, request_id: str) -> Remembered | None:
        return self.requests.get((verb, holder, request_id))

    def oldest_lease_age_ms(self, now_ms: int) -> int:
        entry = next(self.leases(), None)
        return entry.lease.age_ms(now_ms) if entry is not None and entry.lease is not None else 0

    def lost(self, node: str, boot: str) -> list[tuple[TaskId, LeaseId]]:
        """Leases whose holder cannot come back: an earlier run of this node, or one that was stopped in mid-work."""
        return [
            (entry.task.id, entry.lease.lease_id)
            for entry in self.leases()
            if entry.lease is not None and entry.holder_lost(node, boot)
        ]


def _is_due(entry: Entry, now_ms: int) -> bool:
    if entry.finished:
        return False
    times_out_at_ms = entry.times_out_at_ms
    if times_out_at_ms is not None and times_out_at_ms <= now_ms:
        return True
    deadline_ms = entry.task.deadline_ms
    return deadline_ms is not None and deadline_ms <= now_ms and entry.state in _WAITING
