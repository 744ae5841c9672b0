"""Steps: what happened to a task, as those who watch it see it. One step is one generation, and one frame on a stream.

A reader that has every step from 1 on knows the task: `folding` says how. The ledger's own events say more (who holds
a lease, what was audited); none of that is for a watcher.
"""

from __future__ import annotations

import enum
from typing import Any, Final

import msgspec

from covenant.model.content import Content
from covenant.model.task import Cause, Ending, Result, Task


class StatusUpdate(msgspec.Struct, frozen=True, tag_field="type", tag="status", omit_defaults=True):
    """A word on progress. `state` parks the task when it names an interrupted state."""

    text: str = ""
    state: str = "working"
    metadata: dict[str, Any] | None = None
    parts: tuple[Content, ...] = ()
    """The message in full, where it is more than `text`."""
    message_id: str | None = None


HOLDER_LOST: Final = "covenant.holder_lost"
AWAITING_REPAIR: Final = "worker lost, awaiting repair"
"""In the metadata of a task, and of the update that tells of it: whoever worked on it is gone."""


def text_artifact(task_id: str, turn: int) -> str:
    """The id of the artifact that is all text of a turn."""
    return f"{task_id}-text-{turn - 1}"


class ArtifactUpdate(msgspec.Struct, frozen=True, tag_field="type", tag="artifact", omit_defaults=True):
    """A chunk of an artifact. `append` adds to what this attempt wrote before; otherwise it replaces."""

    artifact_id: str
    parts: tuple[Content, ...] = ()
    name: str | None = None
    description: str | None = None
    append: bool = False
    last_chunk: bool = False
    metadata: dict[str, Any] | None = None
    extensions: tuple[str, ...] = ()


class MessageUpdate(msgspec.Struct, frozen=True, tag_field="type", tag="message", omit_defaults=True):
    role: str = "agent"
    parts: tuple[Content, ...] = ()
    message_id: str | None = None
    metadata: dict[str, Any] | None = None
    extensions: tuple[str, ...] = ()
    reference_task_ids: tuple[str, ...] = ()


_encode = msgspec.json.Encoder().encode


def weigh_message(message: MessageUpdate) -> int:
    """How many bytes a message to a task has."""
    return len(_encode(message))


Update = StatusUpdate | ArtifactUpdate | MessageUpdate


class Interruption(enum.StrEnum):
    """Why a task is parked: it waits, without a lease, for its next message."""

    INPUT_REQUIRED = "input-required"
    AUTH_REQUIRED = "auth-required"


class Began(msgspec.Struct, frozen=True, gc=False, tag_field="type", tag="began"):
    """Generation 1: the task was accepted."""

    task: Task


class Started(msgspec.Struct, frozen=True, gc=False, tag_field="type", tag="started"):
    """Its first lease: from now on it is `working`, whoever holds it."""


class Continued(msgspec.Struct, frozen=True, gc=False, tag_field="type", tag="continued"):
    """Its sender said something: the next turn, or, while somebody works on it, what the next turn will be about."""

    message: MessageUpdate


class Ended(msgspec.Struct, frozen=True, gc=False, tag_field="type", tag="ended"):
    ending: Ending
    result: Result
    cause: Cause = Cause.RESULT


StepContent = Began | Started | StatusUpdate | ArtifactUpdate | MessageUpdate | Continued | Ended
"""A `StatusUpdate` whose state is not `working` has parked the task: it waits for its sender."""


class Step(msgspec.Struct, frozen=True, gc=False):
    generation: int
    ts_ms: int
    what: StepContent
