"""Lanes: first in, first out, with removal from anywhere at constant cost."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from itertools import islice

from covenant.model.ids import TaskId

Lane = OrderedDict[TaskId, None]
"""Not a plain dict: the first key of one that was often deleted from is found only by walking over what is gone."""


class Lanes:
    """One lane for each owner, and one for all of them together."""

    def __init__(self) -> None:
        self._lanes: dict[str, Lane] = {}
        self._all: Lane = OrderedDict()

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[TaskId]:
        return iter(self._all)

    def __reversed__(self) -> Iterator[TaskId]:
        return reversed(self._all)

    def enter(self, owner: str, task_id: TaskId, *, first: bool = False) -> None:
        lane = self._lanes.get(owner)
        if lane is None:
            lane = self._lanes[owner] = OrderedDict()
        lane[task_id] = self._all[task_id] = None
        if first:
            lane.move_to_end(task_id, last=False)
            self._all.move_to_end(task_id, last=False)

    def leave(self, owner: str, task_id: TaskId) -> None:
        del self._all[task_id]
        lane = self._lanes[owner]
        del lane[task_id]
        if not lane:
            del self._lanes[owner]

    def first(self, owner: str | None, count: int) -> list[TaskId]:
        """The oldest tasks, up to `count`."""
        lane = self._all if owner is None else self._lanes.get(owner)
        return list(islice(lane, count)) if lane else []

    def count(self, owner: str) -> int:
        return len(self._lanes.get(owner, ()))
