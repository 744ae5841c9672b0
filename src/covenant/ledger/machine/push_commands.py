"""Commands about push configurations: where a task's steps are told besides, and how far that has come."""

from __future__ import annotations

from covenant.ledger.machine.commands import AUDIT, Command, Key, TaskCommand
from covenant.model.a2a_requests import PushConfig
from covenant.model.ids import AgentId
from covenant.model.push import Push, PushMove


class PutPush(TaskCommand[Push], frozen=True, gc=False, kw_only=True):
    """Make a configuration; or put it in the place of the one with its id, which keeps its cursor.

    `once`: without an id, one that is equal is the same one. So a client that says it with every message has one.
    """

    config: PushConfig
    once: bool = False

    def keys(self) -> tuple[Key, ...]:
        return ("task", self.task_id), ("pushes",)


class DropPush(TaskCommand[bool], frozen=True, gc=False, kw_only=True):
    """Whether there was one. Doing it twice is as good as once."""

    id: str

    def keys(self) -> tuple[Key, ...]:
        return ("task", self.task_id), ("pushes",)


class MovePushes(Command[None], frozen=True, gc=False, kw_only=True):
    """What deliveries came to, of several configurations at once. One that was replaced meanwhile is left alone."""

    moves: tuple[PushMove, ...]

    def keys(self) -> tuple[Key, ...]:
        return (*(("task", move.task_id) for move in self.moves), ("pushes",))


class RetryPush(TaskCommand[Push], frozen=True, gc=False, kw_only=True):
    """Try again at once, given up or not."""

    by: AgentId
    id: str

    def keys(self) -> tuple[Key, ...]:
        return ("task", self.task_id), ("pushes",), AUDIT
