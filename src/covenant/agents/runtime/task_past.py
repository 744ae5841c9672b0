"""What a job can read of its task: what was said in it before, and in the conversation that it is part of."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from covenant.exchange.native import earlier_messages, kept_files
from covenant.exchange.tasks.reader import PAGE, TaskReader
from covenant.ledger.contract.ledger import Ledger
from covenant.ledger.machine.commands import LeasedTask
from covenant.model.settings import A2aSettings
from covenant.model.task import NATIVE, Task
from covenant.model.task_event import MessageUpdate, StatusUpdate, Step, StepUpdate
from covenant.model.task_view import TaskView, first_message


class TaskPast:
    __slots__ = ()

    _ledger: Ledger
    leased: LeasedTask
    task: Task

    @property
    def limits(self) -> A2aSettings:
        raise NotImplementedError

    @property
    def messages(self) -> tuple[MessageUpdate, ...]:
        return self.leased.messages or (first_message(self.task),)

    @property
    def begun_before(self) -> bool:
        """Whether an earlier lease of this turn may have left something behind."""
        return self.leased.continues or self.leased.lease.attempt > 1

    async def _past(self) -> AsyncIterator[Step]:
        after = 0
        while steps := await self._ledger.steps(self.task.id, after, PAGE):
            for step in steps:
                yield step
            after = steps[-1].generation

    async def noted(self, name: str) -> Any:
        """What was last said under this name in the metadata of a status, in this turn or before it."""
        found = None
        async for step in self._past():
            if isinstance(step.what, StatusUpdate) and name in (step.what.metadata or {}):
                assert step.what.metadata is not None
                found = step.what.metadata[name]
        return found

    async def durable_steps(self) -> list[StepUpdate]:
        """The durable steps of this turn, as they were written."""
        turn = self.leased.turn
        return [
            step.what async for step in self._past() if isinstance(step.what, StepUpdate) and step.what.turn == turn
        ]

    async def thread(self, *, context: bool = False) -> tuple[MessageUpdate, ...]:
        """What was said in its conversation before this task, if it is part of one; `context`: or in its context."""
        wanted = self.task.origin == NATIVE or (context and self.limits.context_history)
        return await earlier_messages(self._ledger, self.task) if wanted else ()

    async def kept_files(self) -> dict[str, str]:
        return await kept_files(self._ledger, self.task)

    async def view(self) -> TaskView | None:
        """The task as it stands: what was said in earlier turns."""
        return (await TaskReader(self._ledger).past(self.task.id)).view()
