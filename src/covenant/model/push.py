"""Push: one webhook configuration of a task, and its delivery cursor.

The outbox holds no payloads. It is a cursor over the task's steps, which the history keeps: every step after
`delivered` is still to be delivered. A configuration goes when it is deleted, or its ended task's last step was
delivered.
"""

from __future__ import annotations

import msgspec

from covenant.model.a2a_requests import PushConfig
from covenant.model.ids import AgentId, TaskId

FAILURE_LENGTH_MAX = 300


class Push(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    task_id: TaskId
    recipient: AgentId
    """The recipient of the task: `<agent>@<tenant>`."""
    config: PushConfig
    """Its `id` is always set."""
    key: str
    """A permanent name of this configuration. It and the generation name a delivery, also when it is retried."""
    made_at_ms: int
    moved_at_ms: int
    revision: int = 1
    """Counts replacements and retries by the operator. Reports about an older revision are ignored."""
    delivered: int = 0
    """The last generation that was delivered, or the task's generation when the configuration was made."""
    ended: int | None = None
    """The task's last generation, once it has ended."""
    attempts: int = 0
    """The number of failed attempts in a row at the next step."""
    next_ms: int = 0
    """The earliest time of the next attempt."""
    failure: str | None = None
    """Why the last attempt failed; shown to the operator."""
    dead_at_ms: int | None = None
    """When delivery was given up. It resumes when the operator retries it or the owner replaces the configuration."""

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

    @property
    def progress(self) -> tuple[int, bool, int]:
        """Orders the moves of one revision: each element only grows, unless one before it does."""
        return self.delivered, self.dead, self.attempts


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
