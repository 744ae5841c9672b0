"""Watches over many nodes: yields each step of a watched task once, in order, whichever node wrote it.

A task's generations have no gaps. So a step that this node wrote is given at once if it is the next; otherwise another
node wrote in between, and the steps are read. A watch begins at the task's present generation: until that is known,
nothing is given. A reader begins to watch, awaits `wait_for_start`, and then reads the past: so it misses nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from covenant.ledger.clock import LongWaits
from covenant.ledger.watchers import TaskWatch
from covenant.model.ids import TaskId
from covenant.model.task_event import Step

READ_MAX: Final = 1_000
"""How many steps are read at once."""

ReadSteps = Callable[[TaskId, int, int], Awaitable[Sequence[Step]]]
ReadGeneration = Callable[[TaskId], Awaitable[int]]


class _Followed:
    """A watched task."""

    def __init__(self) -> None:
        self.watches: list[TaskWatch] = []
        self.last_given: int | None = None
        """The last generation that was given; None until the task's generation is known."""
        self.nothing_given = True
        """Whether no step was given yet."""
        self.wanted = 0
        """The last generation that is known to exist."""
        self.first: int | None = None
        """The first generation that came while the task's generation was being read."""
        self.reading: asyncio.Task[None] | None = None

    def note(self, first: int, last: int) -> None:
        self.wanted = max(self.wanted, last)
        if self.last_given is None:
            self.first = first if self.first is None else min(self.first, first)

    def begin(self, generation: int) -> None:
        """Sets the starting generation: this one, or the one before the first that came meanwhile."""
        self.last_given = generation if self.first is None else min(generation, self.first - 1)


class StepFollower:
    def __init__(self, read_steps: ReadSteps, read_generation: ReadGeneration) -> None:
        self.loop: Final = asyncio.get_running_loop()
        self.long_waits: Final = LongWaits(self.loop)
        self._read_steps = read_steps
        self._read_generation = read_generation
        self._followed: dict[TaskId, _Followed] = {}

    def watch(self, task_id: TaskId, *, new: bool = False) -> TaskWatch:
        followed = self._followed.get(task_id)
        if followed is None:
            followed = self._followed[task_id] = _Followed()
            if new:
                followed.last_given = 0
            else:
                self._read(task_id, followed)
        watch = TaskWatch(self, task_id)
        followed.watches.append(watch)
        return watch

    def leave(self, watch: TaskWatch) -> None:
        followed = self._followed.get(watch.task_id)
        if followed is not None and watch in followed.watches:
            followed.watches.remove(watch)
            if not followed.watches:
                del self._followed[watch.task_id]
                if followed.reading is not None:
                    followed.reading.cancel()

    async def wait_for_start(self, task_id: TaskId) -> None:
        """Returns when it is known where the watches of this task begin."""
        followed = self._followed.get(task_id)
        while followed is not None and followed.last_given is None and followed.reading is not None:
            await asyncio.wait((followed.reading,))

    def follows(self, task_id: TaskId) -> bool:
        return task_id in self._followed

    def wrote(self, task_id: TaskId, steps: Sequence[Step]) -> None:
        """Notes steps that this node has committed."""
        followed = self._followed.get(task_id)
        if followed is None:
            return
        followed.note(steps[0].generation, steps[-1].generation)
        last_given = followed.last_given
        if last_given is not None and followed.reading is None and steps[0].generation <= last_given + 1:
            self._give(followed, steps)
        else:
            self._read(task_id, followed)

    def heard(self, task_id: TaskId, first: int, last: int) -> None:
        """Notes generations that another node has committed."""
        followed = self._followed.get(task_id)
        if followed is None:
            return
        if followed.nothing_given and followed.last_given is not None:
            # They may have come after the watch began, and before the task's generation was known.
            followed.last_given = min(followed.last_given, first - 1)
        if followed.last_given is None or last > followed.last_given:
            followed.note(first, last)
            self._read(task_id, followed)

    def cut(self) -> None:
        """Ends all watches: each reader must begin again at its cursor."""
        for followed in self._followed.values():
            for watch in followed.watches:
                watch.end()

    def _give(self, followed: _Followed, steps: Sequence[Step]) -> None:
        last_given = followed.last_given or 0
        new = [step for step in steps if step.generation > last_given]
        if new:
            followed.last_given, followed.nothing_given = new[-1].generation, False
            for watch in followed.watches:
                watch.give(new)

    def _read(self, task_id: TaskId, followed: _Followed) -> None:
        if followed.reading is None:
            followed.reading = self.loop.create_task(self._follow(task_id, followed))

    async def _follow(self, task_id: TaskId, followed: _Followed) -> None:
        try:
            if followed.last_given is None:
                followed.begin(await self._read_generation(task_id))
                assert followed.last_given is not None
            while followed.wanted > followed.last_given:
                steps = await self._read_steps(task_id, followed.last_given, READ_MAX)
                if not steps:
                    break
                self._give(followed, steps)
        except Exception:  # noqa: BLE001  each reader begins again at its cursor, and meets the error there
            for watch in followed.watches:
                watch.end()
        finally:
            followed.reading = None
