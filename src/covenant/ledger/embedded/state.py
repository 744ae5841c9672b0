"""The live tasks in memory, with an index for each question that a decision asks.

Changed only by `apply`, record by record, in the same way whether the record was just decided or is read back from the
journal. Finished tasks leave once the archive has them. Each index answers a decision in constant or logarithmic time,
whatever else is in the ledger. Only rare events walk over all of a thing: a step of the wall clock, a purge of
identities or grants, and a peer that goes by another identity.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import msgspec

from covenant.ledger.embedded.peer_index import PeerIndex
from covenant.ledger.embedded.queues import Accounts, FifoQueues, LargeBodies, ReadBodies, ResultCache
from covenant.ledger.machine import effects
from covenant.ledger.machine.effects import RequestKey, Sharing
from covenant.ledger.machine.entry import Alive, Entry
from covenant.ledger.machine.events import (
    TASK_EVENTS,
    AnyEvent,
    CacheDropped,
    LeaseInterrupted,
    LeaseRenewed,
    MessageKept,
    PeerEvent,
    PushEvent,
    RequestWithdrawn,
    ResultDrained,
    SignalKept,
    SignalTaken,
    TaskContinued,
    TaskEvent,
    TaskLeased,
    TaskSent,
    TaskUpdated,
    TenantErased,
    TurnEnded,
)
from covenant.ledger.machine.evolution import evolve
from covenant.ledger.machine.states import DRAINED, FINISHED, FOLLOWING, LEASED, PARKED, QUEUED, SETTLED, State
from covenant.ledger.machine.view import Archived, Cached, Remembered
from covenant.ledger.registries import PushIndex, Registries
from covenant.model.clock_steps import STEADY, Ages
from covenant.model.ids import PublicKey, TaskId
from covenant.model.settings import Limits
from covenant.model.task import DELEGATION, CacheKey, Task, weigh, weigh_result
from covenant.model.task_event import weigh_message


class LedgerState(Registries, PushIndex, PeerIndex):
    """What a decision reads (it is the machine's `View`) and what the engine tells of it."""

    def __init__(self, limits: Limits) -> None:
        Registries.__init__(self)
        PushIndex.__init__(self)
        PeerIndex.__init__(self)
        self.limits = limits
        self.entries: dict[TaskId, Entry] = {}
        self.queue = FifoQueues()
        self.results = FifoQueues()
        self.leased: OrderedDict[TaskId, None] = OrderedDict()
        """The longest untouched first: leasing and renewing move a task to the end."""
        self._alive: Alive | None = None
        """Whether a holder may still be there, once that is known."""
        self._lost_leases: set[TaskId] = set()
        self.parked = 0
        self.following = 0
        self.cache = ResultCache()
        self.leaders: dict[CacheKey, TaskId] = {}
        self.groups: dict[CacheKey, dict[TaskId, None]] = {}
        self.requests: OrderedDict[RequestKey, Remembered] = OrderedDict()
        self.children: dict[TaskId, dict[TaskId, None]] = {}
        """The delegated tasks that have not ended, by their parent."""
        self.orphaned: dict[TaskId, None] = {}
        """Those whose parent may have ended."""
        self.recalled: dict[TaskId, Archived | None] = {}
        """Finished tasks fetched from the archive for the command that is about to be decided."""
        self.bodies_read = ReadBodies()
        """Large bodies that were read for the command that is about to be decided."""
        self.accounts = Accounts()
        self.large = LargeBodies()
        self.used_here: Callable[[TaskId], dict[str, Any] | None] | None = None
        self.resolved_events = 0
        """Events of the tasks that were evicted."""
        self._due: list[tuple[int, TaskId]] = []
        """A moment before which each task that may become due need not be looked at; in the clock of `_due_ages`."""
        self._due_ages: Ages = STEADY
        self._finished: OrderedDict[TaskId, int] = OrderedDict()
        """With the seq of the record that finished it."""
        # What every decision asks, answered without a frame between.
        self.entry = self.entries.get
        self.account = self.accounts.get
        self.undrained_bytes = self.accounts.undrained
        self.queued_count = self.queue.count
        self.settled_count = self.results.count

    def used(self, task_id: TaskId) -> dict[str, Any] | None:
        return self.used_here(task_id) if self.used_here is not None else None

    def apply(self, events: Sequence[AnyEvent], ts_ms: int, seq: int) -> None:
        entries = self.entries
        if len(events) == 2:
            sent, leased = events
            if type(sent) is TaskSent and type(leased) is TaskLeased and self._start(sent, leased, ts_ms, seq):
                return
        event: Any
        for event in events:
            if type(event) in TASK_EVENTS:
                task_id = event.task_id
                old = entries.get(task_id)
                entries[task_id] = new = evolve(old, event, ts_ms)
                if old is None or new.state is not old.state:
                    self._move(event, old, new, ts_ms, seq)
                elif type(event) is not TaskUpdated:
                    self._stay(event, old, new)
            elif isinstance(event, PushEvent):
                self.apply_push(event, ts_ms)
            elif isinstance(event, PeerEvent):
                self.apply_peer(event, ts_ms)
            elif isinstance(event, RequestWithdrawn):
                for verb in ("take", "drain"):
                    self._keep_request((verb, event.by, event.request_id), Remembered(()))
            elif isinstance(event, CacheDropped):
                self.cache.drop(event)
            else:
                self.register(event)
                if type(event) is TenantErased:
                    for key in [key for key in self.requests if key[1] in event.keys]:
                        del self.requests[key]

    def _start(self, sent: TaskSent, leased: TaskLeased, ts_ms: int, seq: int) -> bool:
        """Apply both to a task that was leased as it was accepted: it is in no queue on the way. False: not one."""
        if sent.task_id != leased.task_id or sent.task_id in self.entries or sent.task.deadline_ms is not None:
            return False
        entry = evolve(evolve(None, sent, ts_ms), leased, ts_ms)
        task = entry.task
        self.entries[task.id] = entry
        self._begin(entry, seq)
        self._enter(LEASED, entry, seq)
        if task.idempotency is not None:
            self._share(sent, entry, ts_ms)
        if task.origin == DELEGATION:
            self._attach(entry)
        if leased.request_id is not None:
            self._remember(leased, entry)
        return True

    def _stay(self, event: TaskEvent, old: Entry, new: Entry) -> None:
        """In the same state."""
        if isinstance(event, LeaseRenewed):  # nothing else makes a lease young
            self.leased.move_to_end(event.task_id)
            self._judge_holder(new)
        elif isinstance(event, LeaseInterrupted):
            self._judge_holder(new)
            if (ends_at_ms := new.hold_ends_at_ms(new.updated_at_ms, self._due_ages)) is not None:
                heapq.heappush(self._due, (ends_at_ms, new.task.id))
        elif isinstance(event, (MessageKept, TurnEnded, SignalKept, SignalTaken)):
            self.accounts.resize(old, new)

    def _move(self, event: TaskEvent, old: Entry | None, new: Entry, ts_ms: int, seq: int) -> None:
        """From one state to another: out of the indexes of the one, and into those of the other."""
        kind, task_id, task, finished = type(event), event.task_id, new.task, new.state in FINISHED
        if old is None:
            if not finished:  # a result that was given back comes from the archive, and counts as a result alone
                self._begin(new, seq)
        else:
            self._leave(old.state, new)
            if finished and old.state not in FINISHED:
                self.accounts.end(old)
            elif kind is TaskContinued or kind is TurnEnded:
                self.accounts.resize(old, new)
        if kind in effects.MAY_GO_FIRST:
            self._enter(new.state, new, seq, first=effects.goes_first(event))
        else:
            self._enter(new.state, new, seq)
        if task_id in self.pushes_by_task and effects.ends_pushes(event):
            self.end_pushes(task_id, new.generation)
        if task.idempotency is not None:
            self._share(event, new, ts_ms)
        if task.origin == DELEGATION:
            if old is None and not finished:
                self._attach(new)
            elif finished:
                self._detach(new)
        if finished and task_id in self.children:
            self.orphaned.update(self.children.pop(task_id))
        if (kind is TaskLeased or kind is ResultDrained) and event.request_id is not None:  # type: ignore[attr-defined]  # both have one
            self._remember(event, new)

    def _remember(self, event: Any, entry: Entry) -> None:
        key, remembered = effects.request_given(event, entry)
        self._keep_request(key, effects.given_besides(self.requests.get(key), remembered))

    def _begin(self, entry: Entry, seq: int) -> None:
        self.accounts.begin(entry)
        if entry.body_bytes >= self.limits.body_bytes_on_disk:
            self.large.add(entry, seq)
            self.unload(0)

    def unload(self, archived_seq: int) -> None:
        """Large bodies that the archive holds leave memory, and so do the oldest of too many that wait for it."""
        for task_id in self.large.leaving(archived_seq):
            entry = self.entries.get(task_id)
            if entry is not None:
                self.entries[task_id] = entry.without_body()

    def _leave(self, state: State, entry: Entry) -> None:
        task = entry.task
        if state is QUEUED:
            self.queue.leave(task.recipient.pubkey, task.id)
        elif state is LEASED:
            del self.leased[task.id]
            if self._lost_leases:
                self._lost_leases.discard(task.id)
        elif state is SETTLED:
            self.results.leave(task.sender.pubkey, task.id)
            self.accounts.drained(entry)
        elif state is PARKED:
            self.parked -= 1
        elif state is FOLLOWING:
            self.following -= 1
        elif state is DRAINED:
            del self._finished[task.id]

    def _enter(self, state: State, entry: Entry, seq: int, *, first: bool = False) -> None:
        task = entry.task
        if state is QUEUED:
            self.queue.enter(task.recipient.pubkey, task.id, first=first, priority=task.priority)
        elif state is LEASED:
            self.leased[task.id] = None
            self._judge_holder(entry)
            if task.timeout_ms and (due_ms := entry.times_out_at_ms(entry.updated_at_ms, self._due_ages)) is not None:
                heapq.heappush(self._due, (due_ms, task.id))
        elif state is SETTLED:
            self.results.enter(task.sender.pubkey, task.id, first=first)
            self.accounts.settled(entry)
            return
        elif state is DRAINED:
            self._finished[task.id] = seq
            return
        elif state is PARKED:
            self.parked += 1
            if (
                entry.wait is not None
                and (end_ms := entry.wait.ends_at_ms(entry.updated_at_ms, self._due_ages)) is not None
            ):
                heapq.heappush(self._due, (end_ms, task.id))
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
        key = entry.cache_key
        if key is None:
            return
        task_id, sharing = entry.task.id, effects.sharing(event)
        if sharing is Sharing.LEADS:
            self.leaders.setdefault(key, task_id)
        elif sharing is Sharing.TAKES_OVER:
            self._unfollow(key, task_id)
            self.leaders[key] = task_id
        elif sharing is Sharing.FOLLOWS:
            self.groups.setdefault(key, {})[task_id] = None
        elif sharing is Sharing.ENDS:
            if self.leaders.get(key) == task_id:
                del self.leaders[key]
            else:
                self._unfollow(key, task_id)
            found = effects.cacheable(event, ts_ms)
            if found is not None:
                self.cache.put(key, found)

    def _unfollow(self, key: CacheKey, task_id: TaskId) -> None:
        group = self.groups.get(key)
        if group is not None:
            group.pop(task_id, None)
            if not group:
                del self.groups[key]

    def _keep_request(self, key: RequestKey, remembered: Remembered) -> None:
        self.requests[key] = remembered
        if len(self.requests) > self.limits.requests_remembered_max:
            self.requests.popitem(last=False)

    def restore(self, entry: Entry) -> None:
        """Put back an entry of a snapshot; they come in the order of their lanes.

        A large body stays behind: nobody asks before the archive has come to the snapshot.
        """
        entry = _weighed(entry)
        if not entry.finished:
            self.accounts.begin(entry)
        if entry.body_bytes >= self.limits.body_bytes_on_disk:
            entry = entry.without_body()
        task = entry.task
        self.entries[task.id] = entry
        self._enter(entry.state, entry, 0)
        due_at_ms = entry.due_at_ms(entry.updated_at_ms, self._due_ages)
        if due_at_ms is not None and entry.state in (QUEUED, LEASED):
            # Of a turn that began with a lease that is over, or of a hold, entering a lane does not say so.
            heapq.heappush(self._due, (due_at_ms, task.id))
        if task.origin == DELEGATION and not entry.finished:
            self._attach(entry)
            self.orphaned[task.id] = None
        key = entry.cache_key
        if key is None or entry.finished:
            return
        if entry.state is FOLLOWING:
            self.groups.setdefault(key, {})[task.id] = None
        else:
            self.leaders[key] = task.id

    def ordered(self) -> Iterator[Entry]:
        """All live entries, in an order from which `restore` makes the same lanes again."""
        for task_ids in (self.queue, self.leased, self.results):
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
        while finished and finished[next(iter(finished))] <= archived_seq:
            task_id, _ = finished.popitem(last=False)
            self.resolved_events += self.entries.pop(task_id).events
            gone.append(task_id)
        return gone

    def archived(self, task_id: TaskId) -> Archived | None:
        return self.recalled.get(task_id)

    def is_erased(self, task_id: TaskId) -> bool:
        return task_id in self.recalled and self.recalled[task_id] is None

    def task(self, entry: Entry) -> Task | None:
        return self.bodies_read.get(entry.task.id) if entry.body_on_disk else entry.task

    def queued(self, recipient: PublicKey | None, count: int) -> Sequence[Entry]:
        found = self.queue.in_turn(count) if recipient is None else self.queue.first(recipient, count)
        return [self.entries[task_id] for task_id in found]

    def settled(self, sender: PublicKey | None, count: int) -> Sequence[Entry]:
        return [self.entries[task_id] for task_id in self.results.first(sender, count)]

    def leases(self) -> Iterator[Entry]:
        return (self.entries[task_id] for task_id in self.leased)

    def due(self, now_ms: int, count: int, ages: Ages) -> Sequence[Entry]:
        """At most one task of a cache key at a time: settling one may change what the others are."""
        if ages.steps != self._due_ages.steps:
            self._order_due(now_ms, ages)
        found: dict[TaskId, Entry] = {}
        keys: set[CacheKey] = set()
        back: list[tuple[int, TaskId]] = []
        while self._due and self._due[0][0] <= now_ms and len(found) < count:
            item = heapq.heappop(self._due)
            entry = self.entries.get(item[1])
            due_at_ms = entry.due_at_ms(now_ms, ages) if entry is not None else None
            if entry is None or due_at_ms is None:
                continue
            if due_at_ms > now_ms:
                # A turn that began before the clock was set: it is looked at again when its time has come.
                if ages.steps:
                    back.append((due_at_ms, item[1]))
                continue
            back.append(item)
            key = entry.cache_key
            if key is None or key not in keys:
                found[item[1]] = entry
            if key is not None:
                keys.add(key)
        for item in back:
            heapq.heappush(self._due, item)
        return list(found.values())

    def _order_due(self, now_ms: int, ages: Ages) -> None:
        """The clock was set: find again when each task is due."""
        self._due_ages = ages
        moments = ((entry.due_at_ms(now_ms, ages), task_id) for task_id, entry in self.entries.items())
        self._due = [(due_at_ms, task_id) for due_at_ms, task_id in moments if due_at_ms is not None]
        heapq.heapify(self._due)

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

    def forgettable(self, now_ms: int, count: int, ages: Ages) -> Sequence[Entry]:
        found: list[Entry] = []
        for entry in self.settled(None, count):
            if ages.age_ms(entry.updated_at_ms, now_ms) <= self.limits.retention_ms:
                break
            found.append(entry)
        return found

    def cached(self, key: CacheKey) -> Cached | None:
        return self.cache.get(key)

    def cache_overflow(self, now_ms: int, count: int, ages: Ages) -> Sequence[CacheKey]:
        return self.cache.overflow(self.limits, now_ms, count, ages)

    def leader(self, key: CacheKey) -> TaskId | None:
        return self.leaders.get(key)

    def followers(self, key: CacheKey) -> Sequence[TaskId]:
        return tuple(self.groups.get(key, ()))

    def remembered(self, verb: str, holder: PublicKey, request_id: str) -> Remembered | None:
        return self.requests.get((verb, holder, request_id))

    def oldest_lease_age_ms(self, now_ms: int, ages: Ages) -> int:
        entry = next(self.leases(), None)
        return entry.lease.age_ms(now_ms, ages) if entry is not None and entry.lease is not None else 0

    def watch_holders(self, alive: Alive) -> None:
        """From now on count the leases whose holder cannot come back."""
        self._alive = alive
        for entry in self.leases():
            self._judge_holder(entry)

    def _judge_holder(self, entry: Entry) -> None:
        if self._alive is not None and entry.holder_lost(self._alive):
            self._lost_leases.add(entry.task.id)
        elif self._lost_leases:
            self._lost_leases.discard(entry.task.id)

    def lost_leases(self) -> Iterable[TaskId]:
        return self._lost_leases

    def holders_lost(self) -> int:
        """Leases whose holder cannot come back: an earlier run of this node, or one that was stopped in mid-work."""
        return len(self._lost_leases)


def _weighed(entry: Entry) -> Entry:
    """An entry that was written before entries had sizes gets them here."""
    if entry.body_bytes:
        return entry
    return msgspec.structs.replace(
        entry,
        body_bytes=weigh(entry.task),
        result_bytes=weigh_result(entry.result) if entry.state is SETTLED and entry.result is not None else 0,
        messages_bytes=sum(map(weigh_message, entry.messages)),
        kept_bytes=sum(map(weigh_message, entry.kept)),
    )
