"""The slash methods (A2A 0.3) from the caller's side: what we ask, written; what we are told, read.

The same names as in the other dialect. Older agents leave out `kind`, or spell it `type`: then what is there says what
it is.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from covenant.model import a2a_requests as asking
from covenant.model.task_event import ArtifactUpdate, MessageUpdate
from covenant.model.task_view import (
    Artifact,
    RemoteArtifact,
    RemoteEvent,
    RemoteMessage,
    RemoteStatus,
    RemoteTask,
    TaskState,
)
from covenant.wire.a2a.protojson import ParamsReader
from covenant.wire.a2a.v03.parts import Message, Part, content_of, part_of
from covenant.wire.jsonrpc import BadResponse

VERSION: Final = None
"""Nothing is said of a version: servers of this dialect know no header, or take its absence for this dialect."""
SEND: Final = "message/send"
STREAM: Final = "message/stream"
GET: Final = "tasks/get"
CANCEL: Final = "tasks/cancel"
SUBSCRIBE: Final = "tasks/resubscribe"

_STATES: Final = {state.value: state for state in TaskState}


class _Configuration(msgspec.Struct, frozen=True, gc=False, rename="camel", omit_defaults=True, kw_only=True):
    accepted_output_modes: tuple[str, ...] = ()
    history_length: int | None = None
    blocking: bool | None = None


class _Send(msgspec.Struct, frozen=True, gc=False, rename="camel", omit_defaults=True, kw_only=True):
    message: Message
    configuration: _Configuration
    metadata: dict[str, Any] | None = None


class _Named(msgspec.Struct, frozen=True, gc=False, rename="camel", omit_defaults=True, kw_only=True):
    id: str
    history_length: int | None = None


class _Status(msgspec.Struct, frozen=True, gc=False):
    state: str | None = None
    message: Message | None = None


class _Artifact(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    artifact_id: str | None = None
    parts: list[Part] | None = None
    name: str | None = None
    description: str | None = None
    metadata: dict[str, Any] | None = None
    extensions: tuple[str, ...] | None = None


class _Any(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """A task, a message, or news: told apart by `kind`, else by what is there."""

    kind: str | None = None
    id: str | None = None
    task_id: str | None = None
    context_id: str | None = None
    message_id: str | None = None
    role: str | None = None
    parts: list[Part] | None = None
    status: _Status | None = None
    artifact: _Artifact | None = None
    artifacts: list[_Artifact] | None = None
    history: list[Message] | None = None
    metadata: dict[str, Any] | None = None
    extensions: tuple[str, ...] | None = None
    reference_task_ids: tuple[str, ...] | None = None
    append: bool | None = None
    last_chunk: bool | None = None
    final: bool | None = None


_encode = msgspec.json.Encoder().encode
_any = ParamsReader(_Any, snake=False).read


def encode_send(ask: asking.SendMessage, tenant: str | None = None) -> bytes:  # noqa: ARG001  (the other dialect has one)
    """message/send and message/stream."""
    said = ask.message
    message = Message(
        kind="message",
        message_id=said.message_id,
        context_id=said.context_id,
        task_id=said.task_id,
        role="user",
        parts=[part_of(block) for block in said.parts],
        metadata=said.metadata,
        extensions=said.extensions or None,
        reference_task_ids=said.reference_task_ids or None,
    )
    configuration = _Configuration(
        accepted_output_modes=ask.output_modes, history_length=ask.history_length, blocking=ask.blocking
    )
    return _encode(_Send(message=message, configuration=configuration, metadata=ask.metadata))


def encode_named(task_id: str, tenant: str | None = None, history_length: int | None = None) -> bytes:  # noqa: ARG001
    """tasks/get, tasks/cancel and tasks/resubscribe."""
    return _encode(_Named(id=task_id, history_length=history_length))


def hear(data: bytes) -> RemoteEvent:
    """What a send answers, and what a stream tells. Raises BadResponse, and InvalidParams where a member misfits."""
    said: _Any = _any(data)
    match said.kind or _kind(said):
        case "task":
            return _task(said)
        case "message":
            return RemoteMessage(
                message=_message(_as_message(said), "message"),
                context_id=said.context_id or None,
                task_id=said.task_id or None,
            )
        case "status-update":
            status = said.status or _Status()
            return RemoteStatus(
                task_id=said.task_id or "",
                context_id=said.context_id or None,
                state=_state(status.state),
                message=_message(status.message, "status.message") if status.message is not None else None,
                final=bool(said.final),
                metadata=said.metadata,
            )
        case "artifact-update" if said.artifact is not None:
            return _artifact_update(said, said.artifact)
        case _:
            raise BadResponse("the answer is neither a task nor a message, nor news of one")


def hear_task(data: bytes) -> RemoteTask:
    """What tasks/get and tasks/cancel answer."""
    return _task(_any(data))


def _kind(said: _Any) -> str | None:
    if said.artifact is not None:
        return "artifact-update"
    if said.parts is not None:
        return "message"
    if said.status is not None:
        return "task" if said.id else "status-update"
    return None


def _as_message(said: _Any) -> Message:
    return Message(
        message_id=said.message_id,
        role=said.role,
        parts=said.parts,
        metadata=said.metadata,
        extensions=said.extensions,
        reference_task_ids=said.reference_task_ids,
    )


def _artifact_update(said: _Any, artifact: _Artifact) -> RemoteArtifact:
    kept = _artifact(artifact)
    return RemoteArtifact(
        task_id=said.task_id or "",
        context_id=said.context_id or None,
        update=ArtifactUpdate(
            artifact_id=kept.artifact_id,
            parts=kept.parts,
            name=kept.name,
            description=kept.description,
            append=bool(said.append),
            last_chunk=bool(said.last_chunk),
            metadata=kept.metadata,
            extensions=kept.extensions,
        ),
    )


def _task(said: _Any) -> RemoteTask:
    if not said.id:
        raise BadResponse("the answer is a task without an id")
    status = said.status or _Status()
    return RemoteTask(
        task_id=said.id,
        context_id=said.context_id or None,
        state=_state(status.state),
        message=_message(status.message, "status.message") if status.message is not None else None,
        artifacts=tuple(_artifact(each) for each in said.artifacts or ()),
        history=tuple(_message(each, f"history[{at}]") for at, each in enumerate(said.history or ())),
        metadata=said.metadata,
    )


def _state(said: str | None) -> TaskState:
    return _STATES.get(said or "", TaskState.WORKING)


def _artifact(said: _Artifact) -> Artifact:
    return Artifact(
        artifact_id=said.artifact_id or "",
        parts=tuple(content_of(_kinded(part), f"artifact.parts[{at}]") for at, part in enumerate(said.parts or ())),
        name=said.name or None,
        description=said.description or None,
        metadata=said.metadata,
        extensions=said.extensions or (),
    )


def _message(said: Message, where: str) -> MessageUpdate:
    return MessageUpdate(
        role="user" if said.role == "user" else "agent",
        parts=tuple(content_of(_kinded(part), f"{where}.parts[{at}]") for at, part in enumerate(said.parts or ())),
        message_id=said.message_id or None,
        metadata=said.metadata,
        extensions=said.extensions or (),
        reference_task_ids=said.reference_task_ids or (),
    )


def _kinded(part: Part) -> Part:
    if part.kind is not None:
        return part
    kind = "text" if part.text is not None else "file" if part.file is not None else "data"
    return msgspec.structs.replace(part, kind=kind)
