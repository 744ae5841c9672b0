"""The newest steps of tasks that have push configurations, so that a delivery need not wait for the archive.

Bounded in bytes and in steps for each task. The task that moved longest ago is forgotten first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import Final

import msgspec

from covenant.model.ids import TaskId
from covenant.model.task import Task
from covenant.model.task_event import Began, Step

BYTES_MAX: Final = 8 * 1024 * 1024
STEPS_MAX: Final = 64
"""The most steps of one task."""

_encode = msgspec.json.Encoder().encode


class _RecentTask:
    __slots__ = ("size", "steps", "task", "task_size")

    def __init__(self) -> None:
        self.steps: deque[tuple[Step, int]] = deque()
        """Each with its size, without a gap."""
        self.task: Task | None = None
        self.task_size = 0
        self.size = 0
        """Of the steps and of the task."""

    def drop_first(self) -> None:
        self.size -= self.steps.popleft()[1]


class RecentSteps:
    def __init__(self, bytes_max: int = BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._tasks: dict[TaskId, _RecentTask] = {}
        """The task that moved last comes last."""
        self._bytes = 0

    def add(self, task_id: TaskId, step: Step) -> None:
        """A durable step; those of one task come in order."""
        recent = self._last(task_id)
        if recent.steps and recent.steps[-1][0].generation + 1 != step.generation:
            while recent.steps:
                recent.drop_first()
        if isinstance(step.what, Began):
            self._keep(recent, step.what.task)
        size = len(_encode(step.what))
        recent.steps.append((step, size))
        recent.size += size
        if len(recent.steps) > STEPS_MAX:
            recent.drop_first()
        self._replaced(recent)

    def keep_task(self, task: Task) -> None:
        recent = self._last(task.id)
        self._keep(recent, task)
        self._replaced(recent)

    def forget(self, task_id: TaskId) -> None:
        known = self._tasks.pop(task_id, None)
        if known is not None:
            self._bytes -= known.size

    def after(self, task_id: TaskId, generation: int, limit: int) -> Sequence[Step] | None:
        """The steps after a generation, oldest first; None if that is not known here."""
        recent = self._tasks.get(task_id)
        if recent is None or not recent.steps:
            return None
        begin = generation + 1 - recent.steps[0][0].generation
        if begin < 0:
            return None
        return tuple(step for step, _ in islice(recent.steps, begin, begin + limit))

    def task(self, task_id: TaskId) -> Task | None:
        recent = self._tasks.get(task_id)
        return recent.task if recent is not None else None

    @staticmethod
    def _keep(recent: _RecentTask, task: Task) -> None:
        recent.size -= recent.task_size
        recent.task, recent.task_size = task, len(_encode(task))
        recent.size += recent.task_size

    def _last(self, task_id: TaskId) -> _RecentTask:
        """A task's steps, to be changed and then counted again."""
        recent = self._tasks.pop(task_id, None) or _RecentTask()
        self._bytes -= recent.size
        self._tasks[task_id] = recent
        return recent

    def _replaced(self, recent: _RecentTask) -> None:
        self._bytes += recent.size
        while self._bytes > self._bytes_max:
            forgotten = next(iter(self._tasks))
            self._bytes -= self._tasks.pop(forgotten).size
