"""A2A from the caller's side, in either dialect: encodes requests, decodes answers and stream frames.

An unknown field is ignored, and an unknown state is `working`. Some agents leave out `kind`, or spell it `type`: then
the kind is inferred from the fields that are present.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
from covenant.wire.a2a import parts_proto_v03, parts_v03, parts_v1
from covenant.wire.a2a.parts_proto_v03 import MessageProtoV03, PartProtoV03
from covenant.wire.a2a.parts_v03 import MessageV03, PartV03
from covenant.wire.a2a.parts_v1 import MessageV1, PartV1
from covenant.wire.a2a.protojson import ParamsReader
from covenant.wire.a2a.request_decoder import STATES_PROTO_V03, STATES_V03, STATES_V1
from covenant.wire.a2a.response_encoder import ArtifactObject, ReplyObject, StatusObject, TaskObject, WireObject
from covenant.wire.jsonrpc import BadResponse

_encode = msgspec.json.Encoder().encode


class _ReplyV03(WireObject, frozen=True):
    """A task, a message, or an update of a task: told apart by `kind`, or else by the fields that are present."""

    kind: str | None = None
    id: str | None = None
    task_id: str | None = None
    context_id: str | None = None
    message_id: str | None = None
    role: str | None = None
    parts: list[PartV03] | None = None
    status: StatusObject[MessageV03] | None = None
    artifact: ArtifactObject[PartV03] | None = None
    artifacts: list[ArtifactObject[PartV03]] | None = None
    history: list[MessageV03] | None = None
    metadata: dict[str, Any] | None = None
    extensions: tuple[str, ...] | None = None
    reference_task_ids: tuple[str, ...] | None = None
    append: bool | None = None
    last_chunk: bool | None = None
    final: bool | None = None


def _without_none(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ClientCodec:
    """Encodes and decodes one dialect. The fields are the differences between dialects."""

    version: str | None
    """The header `A2A-Version`. None: servers of 0.3 do not know the header, or take its absence for 0.3."""
    send: str
    """This and the next four fields are names of methods."""
    stream: str
    get: str
    cancel: str
    subscribe: str
    states: Mapping[str | int, TaskState | None]
    roles: Mapping[str | int, str | None]
    message_of: Callable[[a2a_requests.Message, str | None, str | None, str], Any]
    contents_of: Callable[[Any, str], tuple[Content, ...]]
    """Converts a list of parts, or None; the text is the place of the parts, for errors."""
    blocking: Callable[[bool], dict[str, Any]]
    """The configuration field that says whether the answer waits for the end of the task."""
    about: Callable[[str], dict[str, Any]]
    """The params that name the task of a request."""
    reply: ParamsReader
    task: ParamsReader
    kind_of: Callable[[Any], tuple[str | None, Any]]
    """The kind of a reply, as 0.3 names it, and its fields."""

    def encode_send(self, ask: a2a_requests.SendMessage, tenant: str | None = None) -> bytes:
        """Encodes the params of a send, streamed or not."""
        configuration = {
            "acceptedOutputModes": ask.output_modes or None,
            "historyLength": ask.history_length,
            **self.blocking(ask.blocking),
        }
        message = self.message_of(ask.message, ask.message.task_id, ask.message.context_id, "")
        return self._params(tenant, message=message, configuration=_without_none(configuration), metadata=ask.metadata)

    def encode_task_request(self, task_id: str, tenant: str | None = None) -> bytes:
        """Encodes the params to get, cancel or subscribe to a task."""
        return self._params(tenant, **self.about(task_id))

    def _params(self, tenant: str | None, **fields: Any) -> bytes:
        """Encodes params. Only 1.0 has tenants."""
        return _encode(_without_none({"tenant": tenant if self.version is not None else None, **fields}))

    def decode_reply(self, data: bytes) -> RemoteEvent:
        """Decodes the answer to a send, or a stream's frame. Raises BadResponse, or InvalidParams for a bad field."""
        kind, reply = self.kind_of(self.reply.read(data))
        if kind == "task":
            return self._task(reply)
        context_id, task_id = reply.context_id or None, getattr(reply, "task_id", None)
        match kind:
            case "message":
                return RemoteMessage(
                    message=self._message(reply, "message"), context_id=context_id, task_id=task_id or None
                )
            case "status-update":
                # Only 0.3 has `final`.
                final, status = self.version is None and bool(reply.final), self._status(reply.status)
                return RemoteStatus(
                    task_id=task_id or "", context_id=context_id, **status, final=final, metadata=reply.metadata
                )
            case "artifact-update" if reply.artifact is not None:
                made = msgspec.structs.asdict(self._artifact(reply.artifact))
                update = ArtifactUpdate(**made, append=bool(reply.append), last_chunk=bool(reply.last_chunk))
                return RemoteArtifact(task_id=task_id or "", context_id=context_id, update=update)
            case _:
                raise BadResponse("the answer is neither a task nor a message nor an update")

    def decode_task(self, data: bytes) -> RemoteTask:
        """Decodes the answer to a get or a cancel."""
        return self._task(self.task.read(data))

    def _task(self, task: TaskObject[Any, Any] | _ReplyV03) -> RemoteTask:
        if not task.id:
            raise BadResponse("the answer is a task without an id")
        history: Sequence[Any] = task.history or ()
        return RemoteTask(
            task_id=task.id,
            context_id=task.context_id or None,
            **self._status(task.status),
            artifacts=tuple(self._artifact(each) for each in task.artifacts or ()),
            history=tuple(self._message(each, f"history[{at}]") for at, each in enumerate(history)),
            metadata=task.metadata,
        )

    def _status(self, status: StatusObject[Any] | None) -> dict[str, Any]:
        if status is None:
            return {"state": TaskState.WORKING}
        message = self._message(status.message, "status.message") if status.message is not None else None
        return {"state": self.states.get(status.state or 0) or TaskState.WORKING, "message": message}

    def _message(self, message: MessageV1 | MessageV03 | MessageProtoV03 | _ReplyV03, where: str) -> MessageUpdate:
        return MessageUpdate(
            role=self.roles.get(message.role or 0) or "agent",
            parts=self.contents_of(message.parts, f"{where}.parts"),
            message_id=message.message_id or None,
            metadata=message.metadata,
            extensions=message.extensions or (),
            reference_task_ids=message.reference_task_ids or (),
        )

    def _artifact(self, artifact: ArtifactObject[Any]) -> Artifact:
        return Artifact(
            artifact_id=artifact.artifact_id or "",
            parts=self.contents_of(artifact.parts, "artifact.parts"),
            name=artifact.name or None,
            description=artifact.description or None,
            metadata=artifact.metadata,
            extensions=artifact.extensions or (),
        )


def _kind_by_member(reply: ReplyObject[Any, Any]) -> tuple[str | None, Any]:
    kinds: dict[str, Any] = {
        "task": reply.task,
        "message": reply.message,
        "status-update": reply.status_update,
        "artifact-update": reply.artifact_update,
    }
    return next(((kind, value) for kind, value in kinds.items() if value is not None), (None, TaskObject()))


CLIENT_V1: Final = ClientCodec(
    version="1.0",
    send="SendMessage",
    stream="SendStreamingMessage",
    get="GetTask",
    cancel="CancelTask",
    subscribe="SubscribeToTask",
    states=STATES_V1,
    roles=parts_v1.ROLES,
    message_of=parts_v1.message_of,
    contents_of=lambda parts, where: parts_v1.contents_of(parts or (), where),
    blocking=lambda blocking: {"returnImmediately": not blocking or None},
    about=lambda task_id: {"id": task_id},
    reply=ParamsReader(ReplyObject[MessageV1, PartV1]),
    task=ParamsReader(TaskObject[MessageV1, PartV1]),
    kind_of=_kind_by_member,
)


def _kind_v03(reply: _ReplyV03) -> tuple[str | None, Any]:
    kind = reply.kind
    if not kind and reply.artifact is not None:
        kind = "artifact-update"
    elif not kind and reply.parts is not None:
        kind = "message"
    elif not kind and reply.status is not None:
        kind = "task" if reply.id else "status-update"
    return kind, reply


def _contents_v03(parts: list[PartV03] | None, where: str) -> tuple[Content, ...]:
    return tuple(parts_v03.content_of(_with_kind(part), f"{where}[{at}]") for at, part in enumerate(parts or ()))


def _with_kind(part: PartV03) -> PartV03:
    if part.kind is not None:
        return part
    kind = "text" if part.text is not None else "file" if part.file is not None else "data"
    return msgspec.structs.replace(part, kind=kind)


_REPLY_V03: Final = ParamsReader(_ReplyV03, snake=False)
CLIENT_V03: Final = ClientCodec(
    version=None,
    send="message/send",
    stream="message/stream",
    get="tasks/get",
    cancel="tasks/cancel",
    subscribe="tasks/resubscribe",
    states=STATES_V03,
    roles=parts_v03.ROLES,
    message_of=parts_v03.message_of,
    contents_of=_contents_v03,
    blocking=lambda blocking: {"blocking": blocking},
    about=lambda task_id: {"id": task_id},
    reply=_REPLY_V03,
    task=_REPLY_V03,
    kind_of=_kind_v03,
)
CLIENT_PROTO_V03: Final = ClientCodec(
    version=None,
    send="SendMessage",
    stream="SendStreamingMessage",
    get="GetTask",
    cancel="CancelTask",
    subscribe="TaskSubscription",
    states=STATES_PROTO_V03,
    roles=parts_v1.ROLES,
    message_of=parts_proto_v03.message_of,
    contents_of=lambda parts, where: parts_proto_v03.contents_of(parts or (), where),
    blocking=lambda blocking: {"blocking": blocking},
    about=lambda task_id: {"name": f"tasks/{task_id}"},
    reply=ParamsReader(ReplyObject[MessageProtoV03, PartProtoV03]),
    task=ParamsReader(TaskObject[MessageProtoV03, PartProtoV03]),
    kind_of=_kind_by_member,
)
