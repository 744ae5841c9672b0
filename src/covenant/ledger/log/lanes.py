"""Lanes: first in, first out, with removal from anywhere at constant cost."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Final

from covenant.model.ids import TaskId

SLACK: Final = 64

Place = tuple[int, TaskId]
"""A ticket and its task. One tuple stands in every lane the task is in."""


class Lane:
    """Places in order. A place counts only while `tickets` (shared by lanes of one kind) still has it.

    Removal leaves the place behind as a husk; husks are dropped when they reach the front, or all at once when they
    outnumber the rest, so that a lane never holds more than twice what is alive and no operation scans another's tasks.
    """

    __slots__ = ("_places", "_tickets", "count")

    def __init__(self, tickets: dict[TaskId, int]) -> None:
        self._tickets = tickets
        self._places: deque[Place] = deque()
        self.count = 0

    def push(self, place: Place) -> None:
        self._places.append(place)
        self.count += 1

    def left(self) -> None:
        """One of the tasks here was taken out of `tickets`."""
        self.count -= 1
        if len(self._places) > 2 * self.count + SLACK:
            tickets = self._tickets
            self._places = deque(place for place in self._places if tickets.get(place[1]) == place[0])

    def first(self, count: int) -> list[TaskId]:
        """The oldest tasks, up to `count`."""
        places, tickets = self._places, self._tickets
        while places:
            ticket, task_id = places[0]
            if tickets.get(task_id) == ticket:
                return [task_id] if count == 1 else list(islice(self, count))
            places.popleft()
        return []

    def __iter__(self) -> Iterator[TaskId]:
        tickets = self._tickets
        return (task_id for ticket, task_id in self._places if tickets.get(task_id) == ticket)


class Lanes:
    """One lane for each owner, and one for all of them together."""

    def __init__(self) -> None:
        self._tickets: dict[TaskId, int] = {}
        self._next = 1
        self._lanes: dict[str, Lane] = {}
        self._all = Lane(self._tickets)

    def __len__(self) -> int:
        return len(self._tickets)

    def __iter__(self) -> Iterator[TaskId]:
        return iter(self._all)

    def enter(self, owner: str, task_id: TaskId) -> None:
        ticket = self._next
        self._next = ticket + 1
        self._tickets[task_id] = ticket
        place = (ticket, task_id)
        lane = self._lanes.get(owner)
        if lane is None:
            lane = self._lanes[owner] = Lane(self._tickets)
        lane.push(place)
        self._all.push(place)

    def leave(self, owner: str, task_id: TaskId) -> None:
        del self._tickets[task_id]
        lane = self._lanes[owner]
        lane.left()
        if not lane.count:
            del self._lanes[owner]
        self._all.left()

    def first(self, owner: str | None, count: int) -> list[TaskId]:
        lane = self._all if owner is None else self._lanes.get(owner)
        return lane.first(count) if lane is not None else []

    def count(self, owner: str) -> int:
        lane = self._lanes.get(owner)
        return lane.count if lane is not None else 0
