"""The head of one queue, as far as it was loaded, with what this batch has put in and taken out."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Final

from covenant.ledger.machine.priorities import rank
from covenant.model.ids import TaskId

PLACE_BITS: Final = 20
"""Of a place within its batch. The upper bits number the batches."""
_PRIORITY_BITS: Final = 16
"""Two tasks of different priorities never share a place: a batch has fewer than 65,536 of them."""


def queue_place(place: int, priority: int) -> int:
    """Where a task stands in its recipient's queue: `rank`, counted in batches."""
    if not priority:
        return place
    batch, within = place >> PLACE_BITS, place & ((1 << PLACE_BITS) - 1)
    return (rank(batch, priority) << PLACE_BITS) + (priority << _PRIORITY_BITS) + within


class QueueHead:
    def __init__(self) -> None:
        self._loaded: dict[int, TaskId] = {}
        """By place."""
        self._end: int | None = None
        """The place up to which everything is loaded; None: nothing is, or all."""
        self.complete = False
        self._entered: dict[int, TaskId] = {}
        self._left: set[int] = set()
        self._order: deque[tuple[int, TaskId]] | None = None
        """What is there, the first first; None: it is to be put in order."""

    def load(self, rows: Iterable[tuple[int, TaskId]], asked: int) -> None:
        rows = list(rows)
        self._loaded |= dict(rows)
        self.complete = len(rows) < asked
        self._end = max((place for place, _ in rows), default=self._end)
        self._order = None

    def enter(self, place: int, task_id: TaskId) -> None:
        self._left.discard(place)
        if place not in self._loaded:
            self._entered[place] = task_id
        self._order = None

    def leave(self, place: int) -> None:
        if self._entered.pop(place, None) is None:
            self._left.add(place)
        if self._order is not None:
            if self._order and self._order[0][0] == place:
                self._order.popleft()
            else:
                self._order = None

    def first(self, count: int) -> list[TaskId] | None:
        """The first of what is there; None if more must be loaded to know."""
        if self._order is None:
            here = {place: task_id for place, task_id in self._loaded.items() if place not in self._left}
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
        """How many rows to ask for, to have `count` besides those that this batch took out."""
        return count + len(self._left)


LAG_S: Final = 1.0
"""What others began to write before a place was seen to be the first is committed by then, but for a straggler."""
LOOK_S: Final = 1.0
LINES_MAX: Final = 20_000
LOWEST: Final = -(1 << 62)
"""Below every place: those of priorities may be below 0."""


class _Floor:
    __slots__ = ("first", "first_s", "looked_s", "place")

    def __init__(self, now_s: float) -> None:
        self.place = LOWEST
        self.first: int | None = None
        """What was seen to stand first, since when."""
        self.first_s = self.looked_s = now_s


class Floors:
    """From where each queue is read: what was taken below is not walked over again while it cannot be vacuumed.

    Once a second all of a queue is read, so that a straggler below is found. None of it is needed to be right.
    """

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._floors: dict[str, _Floor] = {}

    def at(self, whose: str) -> int:
        floor = self._floors.get(whose)
        if floor is None:
            return LOWEST
        now_s = self._clock_s()
        if floor.first is not None and now_s - floor.first_s >= LAG_S:
            floor.place, floor.first = floor.first, None
        return floor.place

    def look(self, whose: str) -> int:
        """As `at`, but the lowest when it is time to read all of it."""
        floor = self._floors.get(whose)
        if floor is not None and self._clock_s() - floor.looked_s >= LOOK_S:
            floor.looked_s = self._clock_s()
            return LOWEST
        return self.at(whose)

    def saw(self, whose: str, place: int) -> None:
        """This is the first that stands there now."""
        floor = self._floors.get(whose)
        if floor is None:
            if len(self._floors) >= LINES_MAX:
                self._floors.clear()
            floor = self._floors[whose] = _Floor(self._clock_s())
        if place < floor.place:
            floor.place, floor.first = place, None
        elif floor.first is None:
            floor.first, floor.first_s = place, self._clock_s()

    def entered(self, places: Iterable[tuple[str, int]]) -> None:
        """These stand there now. One with a priority may stand before all others."""
        for whose, place in places:
            floor = self._floors.get(whose)
            if floor is not None:
                floor.place = min(floor.place, place)
                if floor.first is not None and place < floor.first:
                    floor.first = None

    def left(self, places: Iterable[tuple[str, int]]) -> None:
        """These stood first, and were taken."""
        for whose, place in dict(sorted(places)).items():
            self.saw(whose, place + 1)
