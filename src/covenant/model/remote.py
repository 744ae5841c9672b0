"""What a remote agent tells of a task, whichever dialect it tells it in: the task itself, or news of it.

The other direction of `model.asking`: what doors encode, the client decodes into these.
"""

from __future__ import annotations

from typing import Any

import msgspec

from covenant.model.content import Content, Text
from covenant.model.folding import Artifact, TaskState
from covenant.model.update import ArtifactUpdate, MessageUpdate


class RemoteTask(msgspec.Struct, frozen=True, kw_only=True):
    """The task as it stands."""

    task_id: str
    context_id: str | None
    state: TaskState
    message: MessageUpdate | None = None
    artifacts: tuple[Artifact, ...] = ()
    history: tuple[MessageUpdate, ...] = ()
    metadata: dict[str, Any] | None = None

    @property
    def text(self) -> str:
        return text_of(self.message.parts) if self.message is not None else ""


class RemoteStatus(msgspec.Struct, frozen=True, kw_only=True):
    """`final`: nothing follows on this stream (only the older dialect says so)."""

    task_id: str
    context_id: str | None
    state: TaskState
    message: MessageUpdate | None = None
    final: bool = False
    metadata: dict[str, Any] | None = None

    @property
    def text(self) -> str:
        return text_of(self.message.parts) if self.message is not None else ""


class RemoteArtifact(msgspec.Struct, frozen=True, kw_only=True):
    task_id: str
    context_id: str | None
    update: ArtifactUpdate

    @property
    def text(self) -> str:
        return text_of(self.update.parts)


class RemoteMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A message that is the whole answer: there is no task."""

    message: MessageUpdate
    context_id: str | None
    task_id: str | None = None

    @property
    def text(self) -> str:
        return text_of(self.message.parts)


Heard = RemoteTask | RemoteStatus | RemoteArtifact | RemoteMessage


def text_of(content: tuple[Content, ...]) -> str:
    """What can be read aloud of it."""
    return "".join(part.text for part in content if isinstance(part, Text))
