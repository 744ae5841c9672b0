"""The state's structures beside its entries: queues, the sizes of accounts, cached results and large bodies.

A large body leaves memory once the archive has it, or earlier when too many wait for that. From then on the entry of
its task is an index entry, and the body is read before the task is leased.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, merge, nlargest
from itertools import islice
from typing import Final, NamedTuple

from covenant.ledger.machine.entry import Entry
from covenant.ledger.machine.events import CacheDropped
from covenant.ledger.machine.priorities import rank
from covenant.ledger.machine.view import Account, Cached
from covenant.model.clock_steps import STEADY, Ages
from covenant.model.ids import PublicKey, TaskId
from covenant.model.settings import Limits
from covenant.model.task import CacheKey, Task, account_of, weigh_result

FifoQueue = OrderedDict[TaskId, int]
"""Tasks with their places. Not a plain dict: after many deletions, finding its first key walks over deleted ones."""


NOTHING_AWAITED: Final = -(1 << 62)
_NOTHING: Final = Account()
WAITING_BYTES_MAX: Final = 32 << 20
"""The most bytes of large bodies in memory that wait for the archive."""
UNREADABLE_MAX: Final = 8
"""After this many unreadable bodies, a command reads no more: it goes on with the tasks in memory."""
STALE_TIMES_MAX: Final = 4_096
"""The most times of ended tasks that are kept for later, beyond as many as there are times of live tasks."""


class PriorityQueue:
    """The tasks of one owner, ordered by rank: a queue for each priority, whose first tasks are compared."""

    __slots__ = ("_levels",)

    def __init__(self, plain: FifoQueue) -> None:
        """`plain`: the queue of tasks without a priority."""
        self._levels: dict[int, FifoQueue] = {0: plain} if plain else {}

    def level(self, priority: int) -> FifoQueue:
        queue = self._levels.get(priority)
        if queue is None:
            queue = self._levels[priority] = OrderedDict()
        return queue

    def __len__(self) -> int:
        return sum(map(len, self._levels.values()))

    def __iter__(self) -> Iterator[TaskId]:
        return (task_id for _, task_id in merge(*(_ranked(queue, level) for level, queue in self._levels.items())))

    def __delitem__(self, task_id: TaskId) -> None:
        for priority, queue in self._levels.items():
            if task_id in queue:
                del queue[task_id]
                if not queue:
                    del self._levels[priority]
                return
        raise KeyError(task_id)


def _ranked(queue: FifoQueue, priority: int) -> Iterator[tuple[int, TaskId]]:
    return ((rank(place, priority), task_id) for task_id, place in queue.items())


class FifoQueues:
    """First in, first out, with removal from anywhere at constant cost: a queue for each owner, and one for all.

    If any of an owner's tasks has a priority, its queue orders by rank until it is empty.
    """

    def __init__(self) -> None:
        self._queues: OrderedDict[str, FifoQueue | PriorityQueue] = OrderedDict()
        """The owner that was served last is last."""
        self._all: FifoQueue = OrderedDict()
        self._place = 0

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[TaskId]:
        return iter(self._all)

    def __reversed__(self) -> Iterator[TaskId]:
        return reversed(self._all)

    def enter(self, owner: str, task_id: TaskId, *, first: bool = False, priority: int = 0) -> None:
        queue = self._queues.get(owner)
        if queue is None:
            queue = self._queues[owner] = OrderedDict()
        if type(queue) is not OrderedDict or priority:
            if type(queue) is OrderedDict:
                queue = self._queues[owner] = PriorityQueue(queue)
            assert isinstance(queue, PriorityQueue)
            queue = queue.level(priority)
        self._place = place = self._place + 1
        if first and queue:
            place = min(place, queue[next(iter(queue))])
        queue[task_id] = self._all[task_id] = place
        if first:
            queue.move_to_end(task_id, last=False)
            self._all.move_to_end(task_id, last=False)

    def leave(self, owner: str, task_id: TaskId) -> None:
        del self._all[task_id]
        queue = self._queues[owner]
        del queue[task_id]
        if queue:
            self._queues.move_to_end(owner)
        else:
            del self._queues[owner]

    def first(self, owner: str | None, count: int) -> list[TaskId]:
        """The oldest tasks, up to `count`."""
        queue = self._all if owner is None else self._queues.get(owner)
        return list(islice(queue, count)) if queue else []

    def owners(self) -> Iterator[str]:
        return iter(self._queues)

    def in_turn(self, count: int) -> list[TaskId]:
        """The oldest task of each owner, then the second of each, and so on: many of one hide no few of another."""
        found: list[TaskId] = []
        queues = [iter(queue) for queue in islice(self._queues.values(), count)]
        while queues and len(found) < count:
            of_round = [(task_id, queue) for queue in queues if (task_id := next(queue, None)) is not None]
            found += [task_id for task_id, _ in of_round]
            queues = [queue for _, queue in of_round]
        return found[:count]

    def deepest(self, count: int) -> list[tuple[int, TaskId]]:
        """The owners with the longest queues: the length and the first task. Costs a look at each owner."""
        longest = nlargest(count, self._queues.values(), len)
        return [(len(queue), next(iter(queue))) for queue in longest]

    def count(self, owner: str) -> int:
        return len(self._queues.get(owner, ()))


class Accounts:
    def __init__(self) -> None:
        self._accounts: dict[str, Account] = {}
        self._undrained: dict[PublicKey, int] = {}
        """The bytes of undrained results, by sender."""

    def begin(self, entry: Entry) -> None:
        name = entry.task.tenant or account_of(entry.task)
        account = self._accounts.get(name)
        if account is None:
            account = self._accounts[name] = Account()
        account.tasks += 1
        account.size += entry.body_bytes  # there are no messages yet, unless it comes from a snapshot
        if entry.messages_bytes or entry.kept_bytes or entry.signals_bytes:
            account.size += entry.messages_bytes + entry.kept_bytes + entry.signals_bytes

    def end(self, entry: Entry) -> None:
        """`entry` as it was before it ended."""
        name = entry.task.tenant or account_of(entry.task)
        account = self._accounts[name]
        account.tasks -= 1
        account.size -= entry.body_bytes + entry.messages_bytes + entry.kept_bytes + entry.signals_bytes
        if not account.tasks:
            assert not account.size, f"the account {name} has no task, and {account.size} bytes"
            del self._accounts[name]

    def resize(self, before: Entry, after: Entry) -> None:
        """Counts messages to a live task that came or went."""
        self._accounts[account_of(after.task)].size += after.queued_bytes - before.queued_bytes

    def get(self, name: str) -> Account:
        return self._accounts.get(name, _NOTHING)

    def settled(self, entry: Entry) -> None:
        """Counts a result that waits for its sender."""
        sender = entry.task.sender.pubkey
        self._undrained[sender] = self._undrained.get(sender, 0) + entry.result_bytes

    def drained(self, entry: Entry) -> None:
        sender = entry.task.sender.pubkey
        left = self._undrained.get(sender, 0) - entry.result_bytes
        if left:
            self._undrained[sender] = left
        else:
            self._undrained.pop(sender, None)

    def undrained(self, sender: PublicKey) -> int:
        return self._undrained.get(sender, 0)


class ResultCache:
    def __init__(self) -> None:
        self._cached: OrderedDict[CacheKey, tuple[Cached, int]] = OrderedDict()
        self._size = 0

    def __len__(self) -> int:
        return len(self._cached)

    def get(self, key: CacheKey) -> Cached | None:
        found = self._cached.get(key)
        return None if found is None else found[0]

    def items(self) -> Iterator[tuple[CacheKey, Cached]]:
        return ((key, cached) for key, (cached, _) in self._cached.items())

    def put(self, key: CacheKey, cached: Cached) -> None:
        """Adds a result as the newest."""
        before = self._cached.pop(key, None)
        size = weigh_result(cached.result)
        self._size += size - (before[1] if before is not None else 0)
        self._cached[key] = (cached, size)

    def drop(self, dropped: CacheDropped) -> None:
        # Events of earlier versions count the oldest results instead of naming them.
        for key in dropped.keys or tuple(islice(self._cached, dropped.count)):
            _, size = self._cached.pop(key, (None, 0))
            self._size -= size

    def overflow(self, limits: Limits, now_ms: int, count: int, ages: Ages) -> list[CacheKey]:
        """The oldest results above the limits, up to `count`."""
        over, size = len(self._cached) - limits.cache_entries_max, self._size
        found: list[CacheKey] = []
        for key, (cached, its_size) in islice(self._cached.items(), count):
            young = ages.age_ms(cached.cached_at_ms, now_ms) <= limits.cache_age_ms_max
            if len(found) >= over and young and size <= limits.cache_bytes_max:
                break
            found.append(key)
            size -= its_size
        return found


class BodyNeeded(Exception):
    """A decision needs the body of a task: the engine reads it, and decides anew."""

    def __init__(self, task_id: TaskId) -> None:
        super().__init__(f"the body of task {task_id} is on disk")
        self.task_id = task_id


@dataclass(slots=True)
class ReadBodies:
    """The bodies that were read for one command."""

    found: dict[TaskId, Task] = field(default_factory=dict)
    unreadable: set[TaskId] = field(default_factory=set)

    def get(self, task_id: TaskId) -> Task | None:
        """The task; None if it cannot be read. Raises BodyNeeded for one that was not tried."""
        task = self.found.get(task_id)
        if task is None and task_id not in self.unreadable and len(self.unreadable) < UNREADABLE_MAX:
            raise BodyNeeded(task_id)
        return task


class _Large(NamedTuple):
    seq: int
    task_id: TaskId
    size: int


class LargeBodies:
    """The large bodies in memory, in the order of their records."""

    def __init__(self) -> None:
        self._waiting: deque[_Large] = deque()
        self._size = 0
        self.unloaded_seq = 0
        """The last record with a body that is only on disk: the archive must have reached it before a read."""

    def add(self, entry: Entry, seq: int) -> None:
        self._waiting.append(_Large(seq, entry.task.id, entry.body_bytes))
        self._size += entry.body_bytes

    def leaving(self, archived_seq: int) -> Iterator[TaskId]:
        """Yields each task whose body leaves memory now, once."""
        waiting = self._waiting
        while waiting and (waiting[0].seq <= archived_seq or self._size > WAITING_BYTES_MAX):
            large = waiting.popleft()
            self._size -= large.size
            self.unloaded_seq = max(self.unloaded_seq, large.seq)
            yield large.task_id


class DueTasks:
    """Tasks by the earliest time at which each may be due. Tasks that have changed since are skipped at that time.

    If there are too many times of ended tasks, they are dropped earlier: most tasks end long before their deadline. A
    waiter for the first due task is woken if an earlier one is added.
    """

    def __init__(self, entries: Mapping[TaskId, Entry]) -> None:
        self._entries = entries
        self._heap: list[tuple[int, TaskId]] = []
        self._size_max = STALE_TIMES_MAX
        self.ages: Ages = STEADY
        """The clock steps that the times account for."""
        self._awaited_ms = NOTHING_AWAITED
        self._on_earlier: Callable[[], None] | None = None

    def push(self, at_ms: int, task_id: TaskId) -> None:
        if len(self._heap) >= self._size_max:
            self._drop_stale()
        heappush(self._heap, (at_ms, task_id))
        if at_ms < self._awaited_ms:
            self._awaited_ms = NOTHING_AWAITED
            assert self._on_earlier is not None
            self._on_earlier()

    def _drop_stale(self) -> None:
        """Drops the times of ended tasks. The size doubles between two calls, so each push pays a constant share."""
        entries = self._entries
        live = [item for item in self._heap if (entry := entries.get(item[1])) is not None and not entry.finished]
        if len(live) > 2 * len(entries):  # each lease of a task adds its deadline again
            live = [*set(live)]
        heapify(live)
        self._heap, self._size_max = live, 2 * len(live) + STALE_TIMES_MAX

    def notify(self, before_ms: int, on_earlier: Callable[[], None]) -> None:
        """Calls back once when a task is added that is due before that time."""
        self._awaited_ms, self._on_earlier = before_ms, on_earlier

    def next_ms(self, now_ms: int, ages: Ages) -> int | None:
        """The time of the first task that may be due."""
        if ages.steps != self.ages.steps:
            self._order(now_ms, ages)
        entries, heap = self._entries, self._heap
        while heap:
            at_ms, task_id = heap[0]
            entry = entries.get(task_id)
            live = entry is not None and not entry.finished
            if live and at_ms > now_ms:
                return at_ms
            due_at_ms = entry.due_at_ms(now_ms, ages) if entry is not None and live else None
            if due_at_ms is not None and due_at_ms <= now_ms:
                return at_ms
            heappop(heap)
            if due_at_ms is not None and ages.steps:
                heappush(heap, (due_at_ms, task_id))
        return None

    def find(self, now_ms: int, count: int, ages: Ages) -> list[Entry]:
        """Due tasks, at most one of a cache key at a time: settling one may change the others."""
        if ages.steps != self.ages.steps:
            self._order(now_ms, ages)
        entries, heap = self._entries, self._heap
        found: dict[TaskId, Entry] = {}
        keys: set[CacheKey] = set()
        back: list[tuple[int, TaskId]] = []
        while heap and heap[0][0] <= now_ms and len(found) < count:
            item = heappop(heap)
            entry = entries.get(item[1])
            due_at_ms = entry.due_at_ms(now_ms, ages) if entry is not None else None
            if entry is None or due_at_ms is None:
                continue
            if due_at_ms > now_ms:
                # The turn began before the clock was set: it is looked at again when its time has come.
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
            heappush(heap, item)
        return list(found.values())

    def _order(self, now_ms: int, ages: Ages) -> None:
        """Computes again when each task is due, after the clock was set."""
        self.ages = ages
        moments = ((entry.due_at_ms(now_ms, ages), task_id) for task_id, entry in self._entries.items())
        self._heap = [(due_at_ms, task_id) for due_at_ms, task_id in moments if due_at_ms is not None]
        heapify(self._heap)
