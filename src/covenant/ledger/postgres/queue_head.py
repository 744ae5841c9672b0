"""The order of queues: places of tasks, the loaded head of a queue, the places that a node has drawn and seen."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Final

from covenant.ledger.machine.priorities import rank
from covenant.model.ids import PublicKey, TaskId

PLACE_BITS: Final = 20
"""The lower bits of a place number the tasks of a batch. The upper bits number the batches."""
_PRIORITY_BITS: Final = 16
"""Two tasks of different priorities never share a place: a batch has fewer than 65,536 of them."""
LAG_S: Final = 1.0
"""After this time, the batches of other nodes that began before a place was seen to be first are committed, except
stragglers."""
LOOK_S: Final = 1.0
QUEUES_MAX: Final = 20_000
LOWEST: Final = -(1 << 62)
"""Below every place. The places of high priorities may be below 0."""


def queue_place(place: int, priority: int) -> int:
    """The place of a task in its recipient's queue: `rank`, counted in batches."""
    if not priority:
        return place
    batch, within = place >> PLACE_BITS, place & ((1 << PLACE_BITS) - 1)
    return (rank(batch, priority) << PLACE_BITS) + (priority << _PRIORITY_BITS) + within


class QueueHead:
    """The first tasks of a queue, as loaded and changed by this batch."""

    def __init__(self) -> None:
        self._loaded: dict[int, TaskId] = {}
        """Loaded tasks by place."""
        self._end: int | None = None
        """The last loaded place: every task up to it is loaded. None: no task was loaded."""
        self.complete = False
        """Whether every task of the queue is loaded."""
        self._entered: dict[int, TaskId] = {}
        self._taken: set[int] = set()
        self._order: deque[tuple[int, TaskId]] | None = None
        """The present tasks in order; None: they must be sorted."""

    def load(self, rows: Iterable[tuple[int, TaskId]], limit: int) -> None:
        rows = list(rows)
        self._loaded |= dict(rows)
        self.complete = len(rows) < limit
        self._end = max((place for place, _ in rows), default=self._end)
        self._order = None

    def enter(self, place: int, task_id: TaskId) -> None:
        self._taken.discard(place)
        if place not in self._loaded:
            self._entered[place] = task_id
        self._order = None

    def leave(self, place: int) -> None:
        if self._entered.pop(place, None) is None:
            self._taken.add(place)
        if self._order is not None:
            if self._order and self._order[0][0] == place:
                self._order.popleft()
            else:
                self._order = None

    def first(self, count: int) -> list[TaskId] | None:
        """The first tasks; None if more must be loaded to know them."""
        if self._order is None and not self._loaded and not self._entered:
            self._order = deque()
        elif self._order is None:
            here = {place: task_id for place, task_id in self._loaded.items() if place not in self._taken}
            here |= {
                place: task_id
                for place, task_id in self._entered.items()
                if self.complete or (self._end is not None and place <= self._end)
            }
            self._order = deque(sorted(here.items()))
        if len(self._order) < count and not self.complete:
            return None
        return [task_id for _, task_id in islice(self._order, count)]

    def wanted(self, count: int) -> int:
        """How many rows to load, to have `count` besides those that this batch took out."""
        return count + len(self._taken)


class BatchQueues:
    """The queues of recipients, or the results of senders, in a batch: the loaded heads, and the changes to write.

    `of_all`: there is a queue of all owners, too, under None.
    """

    def __init__(self, *, of_all: bool = False) -> None:
        self.heads: defaultdict[PublicKey | None, QueueHead] = defaultdict(QueueHead)
        self.added: dict[tuple[str, int], int] = {}
        """The numbers of tasks by owner and place."""
        self.removed: dict[tuple[str, int], None] = {}
        self._of_all = of_all

    def enter(self, owner: PublicKey, place: int, no: int, task_id: TaskId) -> None:
        if (owner, place) in self.removed:
            del self.removed[owner, place]
        else:
            self.added[owner, place] = no
        self.heads[owner].enter(place, task_id)
        if self._of_all:
            self.heads[None].enter(place, task_id)

    def leave(self, owner: PublicKey, place: int) -> None:
        if (owner, place) in self.added:
            del self.added[owner, place]
        else:
            self.removed[owner, place] = None
        self.heads[owner].leave(place)
        if self._of_all:
            self.heads[None].leave(place)


class BatchPlaces:
    """The places that were drawn for this node's next batches."""

    def __init__(self) -> None:
        self._drawn: deque[int] = deque()
        self.wanted = 1
        """How many places there must be before a batch begins."""
        self.last = 0
        """The last place that was drawn."""
        self._ours_since = 0
        """No other node has drawn a place since this one."""

    def draw(self, place: int) -> None:
        if place != self.last + 1:
            self._ours_since = place
        self.last = place
        self._drawn.append(place)

    def take(self) -> int:
        return self._drawn.popleft()

    def drop_passed(self) -> None:
        """Drops places after which another node has drawn one."""
        while self._drawn and not self.is_next(self._drawn[0]):
            self._drawn.popleft()

    def clear(self) -> None:
        self._drawn.clear()

    def is_next(self, place: int) -> bool:
        """Whether no other node has drawn a place between this one and the last."""
        return place >= self._ours_since

    def __len__(self) -> int:
        return len(self._drawn)


class _Floor:
    __slots__ = ("first", "first_s", "looked_s", "place")

    def __init__(self, now_s: float) -> None:
        self.place = LOWEST
        self.first: int | None = None
        """The place that was seen to be first, and since when."""
        self.first_s = self.looked_s = now_s


class Floors:
    """The place from which each queue is read, so that dead rows that cannot be vacuumed yet are not read again.

    Once a second a whole queue is read, so that a straggler below is found. Correctness does not depend on this.
    `alone`: whether no other node writes now, so that there are no stragglers.
    """

    def __init__(
        self, clock_s: Callable[[], float] = time.monotonic, *, alone: Callable[[], bool] = lambda: False
    ) -> None:
        self._clock_s = clock_s
        self._alone = alone
        self._floors: dict[str, _Floor] = {}

    def at(self, owner: str) -> int:
        floor = self._floors.get(owner)
        if floor is None:
            return LOWEST
        if floor.first is not None and (self._alone() or self._clock_s() - floor.first_s >= LAG_S):
            floor.place, floor.first = floor.first, None
        return floor.place

    def look(self, owner: str) -> int:
        """As `at`, but the lowest when it is time to read the whole queue."""
        floor = self._floors.get(owner)
        if floor is not None and self._clock_s() - floor.looked_s >= LOOK_S:
            floor.looked_s = self._clock_s()
            return LOWEST
        return self.at(owner)

    def note_first(self, owner: str, place: int) -> None:
        """Notes the first place of a queue."""
        floor = self._floors.get(owner)
        if floor is None:
            if len(self._floors) >= QUEUES_MAX:
                self._floors.clear()
            floor = self._floors[owner] = _Floor(self._clock_s())
        if place < floor.place:
            floor.place, floor.first = place, None
        elif floor.first is None:
            floor.first, floor.first_s = place, self._clock_s()

    def note_added(self, places: Iterable[tuple[str, int]]) -> None:
        """Notes new places. One with a priority may be before all others."""
        for owner, place in places:
            floor = self._floors.get(owner)
            if floor is not None:
                floor.place = min(floor.place, place)
                if floor.first is not None and place < floor.first:
                    floor.first = None

    def note_taken(self, places: Iterable[tuple[str, int]]) -> None:
        """Notes that the first places of these queues were taken."""
        for owner, place in dict(sorted(places)).items():
            self.note_first(owner, place + 1)
