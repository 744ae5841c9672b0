"""A2A 1.0 from the caller's side: what we ask, written; what we are told, read.

Both dialects have the same names here, so that a caller can be given either. Read as tolerantly as ProtoJSON allows: an
unknown field is ignored, and a state that nobody knows is taken for one in which the agent works.
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
from covenant.wire.a2a.v1.parts import ROLES, Message, Part, contents_of, part_of
from covenant.wire.a2a.v1.requests import STATES
from covenant.wire.jsonrpc import BadResponse

VERSION: Final = "1.0"
SEND: Final = "SendMessage"
STREAM: Final = "SendStreamingMessage"
GET: Final = "GetTask"
CANCEL: Final = "CancelTask"
SUBSCRIBE: Final = "SubscribeToTask"


class _Written(msgspec.Struct, frozen=True, gc=False, rename="camel", omit_defaults=True, kw_only=True):
    tenant: str | None = None


class _Configuration(msgspec.Struct, frozen=True, gc=False, rename="camel", omit_defaults=True, kw_only=True):
    accepted_output_modes: tuple[str, ...] = ()
    history_length: int | None = None
    return_immediately: bool = False


class _Send(_Written, frozen=True):
    message: Message
    configuration: _Configuration
    metadata: dict[str, Any] | None = None


class _Named(_Written, frozen=True):
    id: str
    history_length: int | None = None


class _Status(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    state: str | int | None = None
    message: Message | None = None


class _Artifact(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    artifact_id: str | None = None
    parts: list[Part] | None = None
    name: str | None = None
    description: str | None = None
    metadata: dict[str, Any] | None = None
    extensions: tuple[str, ...] | None = None


class _Task(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    id: str | None = None
    context_id: str | None = None
    status: _Status | None = None
    artifacts: list[_Artifact] | None = None
    history: list[Message] | None = None
    metadata: dict[str, Any] | None = None


class _StatusUpdate(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    task_id: str | None = None
    context_id: str | None = None
    status: _Status | None = None
    metadata: dict[str, Any] | None = None


class _ArtifactUpdate(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    task_id: str | None = None
    context_id: str | None = None
    artifact: _Artifact | None = None
    append: bool | None = None
    last_chunk: bool | None = None


class _Reply(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    task: _Task | None = None
    message: Message | None = None
    status_update: _StatusUpdate | None = None
    artifact_update: _ArtifactUpdate | None = None


_encode = msgspec.json.Encoder().encode
_reply = ParamsReader(_Reply).read
_task_alone = ParamsReader(_Task).read


def encode_send(ask: asking.SendMessage, tenant: str | None = None) -> bytes:
    """SendMessage and SendStreamingMessage."""
    said = ask.message
    message = Message(
        message_id=said.message_id,
        context_id=said.context_id,
        task_id=said.task_id,
        role="ROLE_USER",
        parts=[part_of(block) for block in said.parts],
        metadata=said.metadata,
        extensions=said.extensions or None,
        reference_task_ids=said.reference_task_ids or None,
    )
    configuration = _Configuration(
        accepted_output_modes=ask.output_modes,
        history_length=ask.history_length,
        return_immediately=not ask.blocking,
    )
    return _encode(_Send(tenant=tenant, message=message, configuration=configuration, metadata=ask.metadata))


def encode_named(task_id: str, tenant: str | None = None, history_length: int | None = None) -> bytes:
    """GetTask, CancelTask and SubscribeToTask."""
    return _encode(_Named(tenant=tenant, id=task_id, history_length=history_length))


def hear(data: bytes) -> RemoteEvent:
    """SendMessageResponse and StreamResponse. Raises BadResponse, and InvalidParams where a member does not fit."""
    said: _Reply = _reply(data)
    if said.task is not None:
        return _task(said.task)
    if said.message is not None:
        return RemoteMessage(
            message=_message(said.message, "message"),
            context_id=said.message.context_id or None,
            task_id=said.message.task_id or None,
        )
    if said.status_update is not None:
        news = said.status_update
        status = news.status or _Status()
        return RemoteStatus(
            task_id=news.task_id or "",
            context_id=news.context_id or None,
            state=_state(status.state),
            message=_message(status.message, "status.message") if status.message is not None else None,
            metadata=news.metadata,
        )
    if said.artifact_update is not None and said.artifact_update.artifact is not None:
        return _artifact_update(said.artifact_update, said.artifact_update.artifact)
    raise BadResponse("the answer is neither a task nor a message, nor news of one")


def hear_task(data: bytes) -> RemoteTask:
    """What GetTask and CancelTask answer."""
    return _task(_task_alone(data))


def _artifact_update(news: _ArtifactUpdate, artifact: _Artifact) -> RemoteArtifact:
    kept = _artifact(artifact)
    return RemoteArtifact(
        task_id=news.task_id or "",
        context_id=news.context_id or None,
        update=ArtifactUpdate(
            artifact_id=kept.artifact_id,
            parts=kept.parts,
            name=kept.name,
            description=kept.description,
            append=bool(news.append),
            last_chunk=bool(news.last_chunk),
            metadata=kept.metadata,
            extensions=kept.extensions,
        ),
    )


def _task(said: _Task) -> RemoteTask:
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


def _state(said: str | int | None) -> TaskState:
    return STATES.get(said or 0) or TaskState.WORKING


def _artifact(said: _Artifact) -> Artifact:
    return Artifact(
        artifact_id=said.artifact_id or "",
        parts=contents_of(said.parts or (), "artifact.parts"),
        name=said.name or None,
        description=said.description or None,
        metadata=said.metadata,
        extensions=said.extensions or (),
    )


def _message(said: Message, where: str) -> MessageUpdate:
    return MessageUpdate(
        role=ROLES.get(said.role or 0) or "agent",
        parts=contents_of(said.parts or (), f"{where}.parts"),
        message_id=said.message_id or None,
        metadata=said.metadata,
        extensions=said.extensions or (),
        reference_task_ids=said.reference_task_ids or (),
    )
