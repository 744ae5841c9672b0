"""The live tasks in memory, with an index for each query of a decision.

Only `apply` changes the state, record by record, in the same way for a new decision and for a record of the journal.
Finished tasks leave once the archive has them. Each index answers a decision in constant or logarithmic time, whatever
else is in the ledger. Only rare events walk over a whole collection: a step of the wall clock, a purge of identities or
grants, and a peer's change of identity.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from covenant.ledger.embedded.peer_index import PeerIndex
from covenant.ledger.embedded.queues import Accounts, DueTasks, FifoQueues, LargeBodies, ReadBodies, ResultCache
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
from covenant.ledger.machine.evolution import evolve, start
from covenant.ledger.machine.states import DRAINED, FINISHED, FOLLOWING, LEASED, PARKED, QUEUED, SETTLED, State
from covenant.ledger.machine.view import Archived, Cached, Remembered
from covenant.ledger.register_index import PushIndex, RegisterIndex
from covenant.model.clock_steps import Ages
from covenant.model.ids import PublicKey, TaskId
from covenant.model.settings import Limits
from covenant.model.task import DELEGATION, CacheKey, Task, weigh, weigh_result
from covenant.model.task_event import weigh_message


class LedgerState(RegisterIndex, PushIndex, PeerIndex):
    """The input of decisions (it is the machine's `View`), and the source of the engine's reads."""

    def __init__(self, limits: Limits) -> None:
        RegisterIndex.__init__(self)
        PushIndex.__init__(self)
        PeerIndex.__init__(self)
        self.limits = limits
        self.entries: dict[TaskId, Entry] = {}
        self.queue = FifoQueues()
        self.results = FifoQueues()
        self.leased: OrderedDict[TaskId, None] = OrderedDict()
        """Longest untouched first: leasing and renewing move a task to the end."""
        self._alive: Alive | None = None
        """Returns whether a holder may still be alive. None until the engine has set it."""
        self._boot = ""
        self.lost_leases: set[TaskId] = set()
        """Leases whose holder cannot come back: of an earlier run, or stopped in mid-work."""
        self.parked = 0
        self.following = 0
        self.cache = ResultCache()
        self.leaders: dict[CacheKey, TaskId] = {}
        self.groups: dict[CacheKey, dict[TaskId, None]] = {}
        self.requests: OrderedDict[RequestKey, Remembered] = OrderedDict()
        self.children: dict[TaskId, dict[TaskId, None]] = {}
        """Unfinished delegated tasks by their parent."""
        self.orphaned: dict[TaskId, None] = {}
        """Delegated tasks whose parent may have ended."""
        self.recalled: dict[TaskId, Archived | None] = {}
        """Finished tasks that were fetched from the archive for the next decision."""
        self.bodies_read = ReadBodies()
        """Large bodies that were read for the next decision."""
        self.accounts = Accounts()
        self.large = LargeBodies()
        self.usage_source: Callable[[TaskId], dict[str, Any] | None] | None = None
        self.resolved_events = 0
        """The number of events of evicted tasks."""
        self.due_tasks = DueTasks(self.entries)
        self._drained: OrderedDict[TaskId, int] = OrderedDict()
        """Drained tasks that wait for the archive, each with the seq of the record that drained it."""
        # Every decision calls these, so they are bound without a frame between.
        self.entry = self.entries.get
        self.account = self.accounts.get
        self.undrained_bytes = self.accounts.undrained
        self.queued_count = self.queue.count
        self.settled_count = self.results.count

    def usage_so_far(self, task_id: TaskId) -> dict[str, Any] | None:
        return self.usage_source(task_id) if self.usage_source is not None else None

    def apply(self, events: Sequence[AnyEvent], ts_ms: int, seq: int) -> Mapping[TaskId, Entry]:
        """Returns the tasks whose state has changed, except for a task that was leased when it was accepted."""
        entries = self.entries
        if len(events) == 2:
            sent, leased = events
            if type(sent) is TaskSent and type(leased) is TaskLeased and self._start(sent, leased, ts_ms, seq):
                return {}
        moved: dict[TaskId, Entry] = {}
        event: Any
        for event in events:
            if type(event) in TASK_EVENTS:
                task_id = event.task_id
                old = entries.get(task_id)
                entries[task_id] = new = evolve(old, event, ts_ms)
                if old is None or new.state is not old.state:
                    self._move(event, old, new, ts_ms, seq)
                    moved[task_id] = new
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
                    self._forget_requests(event)
        return moved

    def _start(self, sent: TaskSent, leased: TaskLeased, ts_ms: int, seq: int) -> bool:
        """Applies both events of a task that was leased when it was accepted; it enters no queue.

        Returns False, and changes nothing, for any other two events."""
        if sent.task_id != leased.task_id or sent.task_id in self.entries or sent.task.deadline_ms is not None:
            return False
        entry = start(sent, leased, ts_ms)
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
        """Updates the indexes after an event that keeps the state."""
        if isinstance(event, LeaseRenewed):  # nothing else renews a lease
            self.leased.move_to_end(event.task_id)
            self._judge_holder(new)
        elif isinstance(event, LeaseInterrupted):
            self._judge_holder(new)
            if (ends_at_ms := new.hold_ends_at_ms(new.updated_at_ms, self.due_tasks.ages)) is not None:
                self.due_tasks.push(ends_at_ms, new.task.id)
        elif isinstance(event, (MessageKept, TurnEnded, SignalKept, SignalTaken)):
            self.accounts.resize(old, new)

    def _move(self, event: TaskEvent, old: Entry | None, new: Entry, ts_ms: int, seq: int) -> None:
        """Moves a task from the indexes of one state to those of another."""
        kind, task_id, task, finished = type(event), event.task_id, new.task, new.state in FINISHED
        if old is None:
            if not finished:  # a returned result comes from the archive, and counts only as a result
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
        self._keep_request(key, effects.merge_remembered(self.requests.get(key), remembered))

    def _begin(self, entry: Entry, seq: int) -> None:
        self.accounts.begin(entry)
        if entry.body_bytes >= self.limits.body_bytes_on_disk:
            self.large.add(entry, seq)
            self.unload(0)

    def unload(self, archived_seq: int) -> None:
        """Drops large bodies that the archive has from memory, and the oldest of too many that wait for it."""
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
            if self.lost_leases:
                self.lost_leases.discard(task.id)
        elif state is SETTLED:
            self.results.leave(task.sender.pubkey, task.id)
            self.accounts.drained(entry)
        elif state is PARKED:
            self.parked -= 1
        elif state is FOLLOWING:
            self.following -= 1
        elif state is DRAINED:
            del self._drained[task.id]

    def _enter(self, state: State, entry: Entry, seq: int, *, first: bool = False) -> None:
        task = entry.task
        if state is QUEUED:
            self.queue.enter(task.recipient.pubkey, task.id, first=first, priority=task.priority)
        elif state is LEASED:
            self.leased[task.id] = None
            self._judge_holder(entry)
            if (
                task.timeout_ms
                and (due_ms := entry.times_out_at_ms(entry.updated_at_ms, self.due_tasks.ages)) is not None
            ):
                self.due_tasks.push(due_ms, task.id)
        elif state is SETTLED:
            self.results.enter(task.sender.pubkey, task.id, first=first)
            self.accounts.settled(entry)
            return
        elif state is DRAINED:
            self._drained[task.id] = seq
            return
        elif state is PARKED:
            self.parked += 1
            if (
                entry.wait is not None
                and (end_ms := entry.wait.ends_at_ms(entry.updated_at_ms, self.due_tasks.ages)) is not None
            ):
                self.due_tasks.push(end_ms, task.id)
        elif state is FOLLOWING:
            self.following += 1
        if task.deadline_ms is not None and state is not LEASED:
            self.due_tasks.push(task.deadline_ms, task.id)

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
        """Updates the leader and followers of a cache key, and the cached result."""
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

    def _forget_requests(self, event: TenantErased) -> None:
        for key in [key for key in self.requests if key[1] in event.keys]:
            del self.requests[key]

    def _keep_request(self, key: RequestKey, remembered: Remembered) -> None:
        self.requests[key] = remembered
        if len(self.requests) > self.limits.requests_remembered_max:
            self.requests.popitem(last=False)

    def restore(self, entry: Entry) -> None:
        """Restores an entry of a snapshot; entries come in the order of their lanes.

        A large body is dropped: nobody reads it before the archive has reached the snapshot.
        """
        entry = _weighed(entry)
        if not entry.finished:
            self.accounts.begin(entry)
        if entry.body_bytes >= self.limits.body_bytes_on_disk:
            entry = entry.without_body()
        task = entry.task
        self.entries[task.id] = entry
        self._enter(entry.state, entry, 0)
        due_at_ms = entry.due_at_ms(entry.updated_at_ms, self.due_tasks.ages)
        if due_at_ms is not None and entry.state in (QUEUED, LEASED):
            # `_enter` does not add the timeout of a turn whose lease is over, or the end of a hold.
            self.due_tasks.push(due_at_ms, task.id)
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
        """All live entries, in an order from which `restore` builds the same lanes again."""
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
        """Drops drained tasks that the archive has from memory, and returns their ids."""
        drained, evicted = self._drained, []
        while drained and drained[next(iter(drained))] <= archived_seq:
            task_id, _ = drained.popitem(last=False)
            self.resolved_events += self.entries.pop(task_id).events
            evicted.append(task_id)
        return evicted

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
        return self.due_tasks.find(now_ms, count, ages)

    def orphans(self, count: int) -> Sequence[Entry]:
        found: list[Entry] = []
        with_live_parent: list[TaskId] = []
        for task_id in self.orphaned:
            entry = self.entries[task_id]
            assert entry.task.parent is not None
            parent = self.entries.get(entry.task.parent)
            if parent is not None and not parent.finished:
                with_live_parent.append(task_id)
            elif len(found) < count:
                found.append(entry)
            else:
                break
        for task_id in with_live_parent:
            del self.orphaned[task_id]
        return found

    def forgettable(self, now_ms: int, count: int, ages: Ages) -> Sequence[Entry]:
        return effects.forgettable(self.settled(None, count), self.limits.retention_ms, now_ms, ages)

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

    def watch_holders(self, alive: Alive, boot: str) -> None:
        """From now on counts the leases whose holder cannot come back. `boot`: this run, whose holders are alive."""
        self._alive, self._boot = alive, boot
        for entry in self.leases():
            self._judge_holder(entry)

    def _judge_holder(self, entry: Entry) -> None:
        here = entry.lease is not None and entry.lease.boot == self._boot and not entry.interrupted
        if not here and self._alive is not None and entry.holder_lost(self._alive):
            self.lost_leases.add(entry.task.id)
        elif self.lost_leases:
            self.lost_leases.discard(entry.task.id)


def _weighed(entry: Entry) -> Entry:
    """The entry with sizes, which entries of old versions lack."""
    if entry.body_bytes:
        return entry
    return msgspec.structs.replace(
        entry,
        body_bytes=weigh(entry.task),
        result_bytes=weigh_result(entry.result) if entry.state is SETTLED and entry.result is not None else 0,
        messages_bytes=sum(map(weigh_message, entry.messages)),
        kept_bytes=sum(map(weigh_message, entry.kept)),
    )
