"""The head of one queue, as far as it was loaded, with what this batch has put in and taken out."""

from __future__ import annotations

from collections.abc import Iterable

from covenant.model.ids import TaskId


class QueueHead:
    def __init__(self) -> None:
        self._loaded: dict[int, TaskId] = {}
        """By place."""
        self._end: int | None = None
        """The place up to which everything is loaded; None: nothing is, or all."""
        self.complete = False
        self._entered: dict[int, TaskId] = {}
        self._left: set[int] = set()

    def load(self, rows: Iterable[tuple[int, TaskId]], asked: int) -> None:
        rows = list(rows)
        self._loaded |= dict(rows)
        self.complete = len(rows) < asked
        self._end = max((place for place, _ in rows), default=self._end)

    def enter(self, place: int, task_id: TaskId) -> None:
        self._left.discard(place)
        if place not in self._loaded:
            self._entered[place] = task_id

    def leave(self, place: int) -> None:
        if self._entered.pop(place, None) is None:
            self._left.add(place)

    def first(self, count: int) -> list[TaskId] | None:
        """The first of what is there; None if more must be loaded to know."""
        here = {place: task_id for place, task_id in self._loaded.items() if place not in self._left}
        here |= {
            place: task_id
            for place, task_id in self._entered.items()
            if self.complete or (self._end is not None and place <= self._end)
        }
        if len(here) < count and not self.complete:
            return None
        return [here[place] for place in sorted(here)[:count]]

    def wanted(self, count: int) -> int:
        """How many rows to ask for, to have `count` besides those that this batch took out."""
        return count + len(self._left)
