"""Push: one configuration of a task, and how far its deliveries have come.

The outbox holds no payloads. It is this cursor over the task's steps, which history keeps: what is owed is every step
after `delivered`. The configuration goes when its task has ended and its last step was delivered, or it is deleted.
"""

from __future__ import annotations

import msgspec

from covenant.model.a2a_requests import PushConfig
from covenant.model.ids import AgentId, TaskId

FAILURE_LENGTH_MAX = 300


class Push(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    task_id: TaskId
    recipient: AgentId
    """Whose task it is: `<agent>@<tenant>`."""
    config: PushConfig
    """Its `id` is always set."""
    key: str
    """Names this configuration for ever: deliveries are named by it and their generation, retried or not."""
    made_at_ms: int
    moved_at_ms: int
    revision: int = 1
    """One more with each replacement and each retry by the operator: what is said of an older one is not heard."""
    delivered: int = 0
    """The last generation that was delivered, or that there was when the configuration was made."""
    ended: int | None = None
    """The last generation that there will be, once the task has ended."""
    attempts: int = 0
    """Failed ones in a row, of the step that is next."""
    next_ms: int = 0
    """Not before this."""
    failure: str | None = None
    """Why the last attempt failed, for the operator."""
    dead_at_ms: int | None = None
    """Given up: nothing is delivered until the operator says so, or the owner replaces it."""

    @property
    def id(self) -> str:
        assert self.config.id is not None
        return self.config.id

    @property
    def done(self) -> bool:
        return self.ended is not None and self.delivered >= self.ended


class PushMove(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    task_id: TaskId
    id: str
    key: str
    revision: int
    delivered: int
    attempts: int = 0
    next_ms: int = 0
    failure: str | None = None
    dead: bool = False


def move_of(push: Push) -> PushMove:
    return PushMove(
        task_id=push.task_id,
        id=push.id,
        key=push.key,
        revision=push.revision,
        delivered=push.delivered,
        attempts=push.attempts,
        next_ms=push.next_ms,
        failure=push.failure,
        dead=push.dead_at_ms is not None,
    )


def tenant_of(recipient: AgentId) -> str:
    """Whose configurations those of this recipient's tasks count as."""
    return recipient.display.rpartition("@")[2]
