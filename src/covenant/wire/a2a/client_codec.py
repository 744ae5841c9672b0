"""A2A from the caller's side, in either dialect: requests written, answers and stream frames read.

Answers are read as tolerantly as ProtoJSON allows: an unknown field is ignored, and a state that nobody knows is taken
for one in which the agent works. Older agents leave out `kind`, or spell it `type`: then the fields that are there say
what it is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Final

import msgspec

from covenant.model import a2a_requests
from covenant.model.content import Content
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
from covenant.wire.a2a import parts_v03, parts_v1
from covenant.wire.a2a.parts_v03 import MessageV03, PartV03
from covenant.wire.a2a.parts_v1 import MessageV1, PartV1
from covenant.wire.a2a.protojson import ParamsReader
from covenant.wire.a2a.request_decoder import STATES_V03, STATES_V1
from covenant.wire.jsonrpc import BadResponse

NO_ANSWER: Final = "the answer is neither a task nor a message, nor news of one"


class _Answer(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """What a server said, or a part of it."""


class _StatusV1(_Answer, frozen=True):
    state: str | int | None = None
    message: MessageV1 | None = None


class _StatusV03(_Answer, frozen=True):
    state: str | None = None
    message: MessageV03 | None = None


class _Artifact(_Answer, frozen=True):
    artifact_id: str | None = None
    name: str | None = None
    description: str | None = None
    metadata: dict[str, Any] | None = None
    extensions: tuple[str, ...] | None = None


class _ArtifactV1(_Artifact, frozen=True):
    parts: list[PartV1] | None = None


class _ArtifactV03(_Artifact, frozen=True):
    parts: list[PartV03] | None = None


class _TaskV1(_Answer, frozen=True):
    id: str | None = None
    context_id: str | None = None
    status: _StatusV1 | None = None
    artifacts: list[_ArtifactV1] | None = None
    history: list[MessageV1] | None = None
    metadata: dict[str, Any] | None = None


class _StatusUpdateV1(_Answer, frozen=True):
    task_id: str | None = None
    context_id: str | None = None
    status: _StatusV1 | None = None
    metadata: dict[str, Any] | None = None


class _ArtifactUpdateV1(_Answer, frozen=True):
    task_id: str | None = None
    context_id: str | None = None
    artifact: _ArtifactV1 | None = None
    append: bool | None = None
    last_chunk: bool | None = None


class _ReplyV1(_Answer, frozen=True):
    task: _TaskV1 | None = None
    message: MessageV1 | None = None
    status_update: _StatusUpdateV1 | None = None
    artifact_update: _ArtifactUpdateV1 | None = None


class _ReplyV03(_Answer, frozen=True):
    """A task, a message, or news of a task: told apart by `kind`, else by the fields that are there."""

    kind: str | None = None
    id: str | None = None
    task_id: str | None = None
    context_id: str | None = None
    message_id: str | None = None
    role: str | None = None
    parts: list[PartV03] | None = None
    status: _StatusV03 | None = None
    artifact: _ArtifactV03 | None = None
    artifacts: list[_ArtifactV03] | None = None
    history: list[MessageV03] | None = None
    metadata: dict[str, Any] | None = None
    extensions: tuple[str, ...] | None = None
    reference_task_ids: tuple[str, ...] | None = None
    append: bool | None = None
    last_chunk: bool | None = None
    final: bool | None = None


_encode = msgspec.json.Encoder().encode


def _given(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


class ClientCodec(ABC):
    """What both dialects say and hear alike. `version` is the header `A2A-Version`; None where none is sent."""

    def __init__(self, version: str | None, *, send: str, stream: str, get: str, cancel: str, subscribe: str) -> None:
        self.version = version
        self.send, self.stream, self.get, self.cancel, self.subscribe = send, stream, get, cancel, subscribe

    def encode_send(self, ask: a2a_requests.SendMessage, tenant: str | None = None) -> bytes:
        """Of a message that is sent, whether its answer is streamed or not."""
        message, configuration = self._request(ask)
        configuration.update(acceptedOutputModes=ask.output_modes or None, historyLength=ask.history_length)
        return self._params(tenant, message=message, configuration=_given(configuration), metadata=ask.metadata)

    def encode_task_request(self, task_id: str, tenant: str | None = None, history_length: int | None = None) -> bytes:
        """To get, cancel or subscribe to a task."""
        return self._params(tenant, id=task_id, historyLength=history_length)

    def _params(self, tenant: str | None, **fields: Any) -> bytes:
        """Only 1.0 has tenants."""
        return _encode(_given({"tenant": tenant if self.version is not None else None, **fields}))

    @abstractmethod
    def _request(self, ask: a2a_requests.SendMessage) -> tuple[Any, dict[str, Any]]:
        """The message, and what only this dialect has in its configuration."""

    @abstractmethod
    def decode_reply(self, data: bytes) -> RemoteEvent:
        """The answer to a send, or a frame of a stream. Raises BadResponse, and InvalidParams where a field misfits."""

    @abstractmethod
    def decode_task(self, data: bytes) -> RemoteTask:
        """The answer where a task was got or canceled."""

    @abstractmethod
    def _state(self, said: Any) -> TaskState: ...

    @abstractmethod
    def _message(self, said: Any, where: str) -> MessageUpdate: ...

    @abstractmethod
    def _artifact(self, said: Any) -> Artifact: ...

    def _task(self, said: _TaskV1 | _ReplyV03) -> RemoteTask:
        if not said.id:
            raise BadResponse("the answer is a task without an id")
        return RemoteTask(
            task_id=said.id,
            context_id=said.context_id or None,
            **self._status(said.status),
            artifacts=tuple(self._artifact(each) for each in said.artifacts or ()),
            history=tuple(self._message(each, f"history[{at}]") for at, each in enumerate(said.history or ())),
            metadata=said.metadata,
        )

    def _status_update(self, said: _StatusUpdateV1 | _ReplyV03, *, final: bool = False) -> RemoteStatus:
        return RemoteStatus(
            task_id=said.task_id or "",
            context_id=said.context_id or None,
            **self._status(said.status),
            final=final,
            metadata=said.metadata,
        )

    def _status(self, status: _StatusV1 | _StatusV03 | None) -> dict[str, Any]:
        if status is None:
            return {"state": self._state(None)}
        message = self._message(status.message, "status.message") if status.message is not None else None
        return {"state": self._state(status.state), "message": message}

    def _artifact_update(self, said: _ArtifactUpdateV1 | _ReplyV03) -> RemoteArtifact:
        made = self._artifact(said.artifact)
        return RemoteArtifact(
            task_id=said.task_id or "",
            context_id=said.context_id or None,
            update=ArtifactUpdate(
                **msgspec.structs.asdict(made), append=bool(said.append), last_chunk=bool(said.last_chunk)
            ),
        )


class ClientCodecV1(ClientCodec):
    def __init__(self) -> None:
        super().__init__(
            "1.0",
            send="SendMessage",
            stream="SendStreamingMessage",
            get="GetTask",
            cancel="CancelTask",
            subscribe="SubscribeToTask",
        )
        self._decode_reply = ParamsReader(_ReplyV1).read
        self._decode_task = ParamsReader(_TaskV1).read

    def _request(self, ask: a2a_requests.SendMessage) -> tuple[MessageV1, dict[str, Any]]:
        message = parts_v1.message_of(ask.message, ask.message.task_id, ask.message.context_id, "")
        return message, {"returnImmediately": not ask.blocking or None}

    def decode_reply(self, data: bytes) -> RemoteEvent:
        said: _ReplyV1 = self._decode_reply(data)
        if said.task is not None:
            return self._task(said.task)
        if said.message is not None:
            return RemoteMessage(
                message=self._message(said.message, "message"),
                context_id=said.message.context_id or None,
                task_id=said.message.task_id or None,
            )
        if said.status_update is not None:
            return self._status_update(said.status_update)
        if said.artifact_update is not None and said.artifact_update.artifact is not None:
            return self._artifact_update(said.artifact_update)
        raise BadResponse(NO_ANSWER)

    def decode_task(self, data: bytes) -> RemoteTask:
        return self._task(self._decode_task(data))

    def _state(self, said: str | int | None) -> TaskState:
        return STATES_V1.get(said or 0) or TaskState.WORKING

    def _message(self, said: MessageV1, where: str) -> MessageUpdate:
        contents = said.contents(f"{where}.parts")
        return _message(said, parts_v1.ROLES.get(said.role or 0) or "agent", contents)

    def _artifact(self, said: _ArtifactV1) -> Artifact:
        return _artifact(said, parts_v1.contents_of(said.parts or (), "artifact.parts"))


class ClientCodecV03(ClientCodec):
    """No version is sent: servers of this dialect know no header, or take its absence for this dialect."""

    def __init__(self) -> None:
        super().__init__(
            None,
            send="message/send",
            stream="message/stream",
            get="tasks/get",
            cancel="tasks/cancel",
            subscribe="tasks/resubscribe",
        )
        self._decode_reply = ParamsReader(_ReplyV03, snake=False).read

    def _request(self, ask: a2a_requests.SendMessage) -> tuple[MessageV03, dict[str, Any]]:
        message = parts_v03.message_of(ask.message, ask.message.task_id, ask.message.context_id, "")
        return message, {"blocking": ask.blocking}

    def decode_reply(self, data: bytes) -> RemoteEvent:
        said: _ReplyV03 = self._decode_reply(data)
        match said.kind or _kind_of(said):
            case "task":
                return self._task(said)
            case "message":
                return RemoteMessage(
                    message=self._message(said, "message"),
                    context_id=said.context_id or None,
                    task_id=said.task_id or None,
                )
            case "status-update":
                return self._status_update(said, final=bool(said.final))
            case "artifact-update" if said.artifact is not None:
                return self._artifact_update(said)
            case _:
                raise BadResponse(NO_ANSWER)

    def decode_task(self, data: bytes) -> RemoteTask:
        return self._task(self._decode_reply(data))

    def _state(self, said: str | None) -> TaskState:
        return STATES_V03.get(said or "") or TaskState.WORKING

    def _message(self, said: MessageV03 | _ReplyV03, where: str) -> MessageUpdate:
        return _message(said, "user" if said.role == "user" else "agent", _contents_v03(said.parts, where))

    def _artifact(self, said: _ArtifactV03) -> Artifact:
        return _artifact(said, _contents_v03(said.parts, "artifact"))


def _message(said: MessageV1 | MessageV03 | _ReplyV03, role: str, parts: tuple[Content, ...]) -> MessageUpdate:
    return MessageUpdate(
        role=role,
        parts=parts,
        message_id=said.message_id or None,
        metadata=said.metadata,
        extensions=said.extensions or (),
        reference_task_ids=said.reference_task_ids or (),
    )


def _artifact(said: _Artifact, parts: tuple[Content, ...]) -> Artifact:
    return Artifact(
        artifact_id=said.artifact_id or "",
        parts=parts,
        name=said.name or None,
        description=said.description or None,
        metadata=said.metadata,
        extensions=said.extensions or (),
    )


def _kind_of(said: _ReplyV03) -> str | None:
    if said.artifact is not None:
        return "artifact-update"
    if said.parts is not None:
        return "message"
    if said.status is not None:
        return "task" if said.id else "status-update"
    return None


def _contents_v03(parts: list[PartV03] | None, where: str) -> tuple[Content, ...]:
    return tuple(parts_v03.content_of(_with_kind(part), f"{where}.parts[{at}]") for at, part in enumerate(parts or ()))


def _with_kind(part: PartV03) -> PartV03:
    if part.kind is not None:
        return part
    kind = "text" if part.text is not None else "file" if part.file is not None else "data"
    return msgspec.structs.replace(part, kind=kind)
