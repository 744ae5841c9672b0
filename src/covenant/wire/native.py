"""Requests under `/v1`: the form of a task, and its steps as named events, the same live and replayed.

request_received   the task was accepted            stream_start, agent_start  the agent has begun
text               a piece of the answer            stream_end           the answer is complete
tool_call          a tool was used                  file                 a file, by its bytes or its URL
sub_agent_response another agent answered           artifact             any other output
status             a report of progress             message              a message beside the answer
token_usage        the tokens that were used        error                the error
input_required, auth_required                       the task waits for its sender
done               the task has ended, in any way; no event follows

A step is one event, or a few of which the last one has the step's number: a client that is cut off between them gets
all of them again. `stream_id` is 0 for the agent itself, and counts up for agents that answered it, at their `depth`.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Annotated, Any, Final, Literal, assert_never

import msgspec

from covenant.model.agent_definition import INDEX
from covenant.model.content import Content, Embedded, File, Json, Resource, ResourceLink, Text
from covenant.model.errors import Invalid
from covenant.model.sanitizer import file_name_of
from covenant.model.task import NATIVE, Ending, Result, Task
from covenant.model.task_event import (
    STEP_MARK,
    ArtifactUpdate,
    Began,
    Continued,
    Ended,
    MessageUpdate,
    Started,
    StatusUpdate,
    Step,
    StepUpdate,
)
from covenant.model.task_view import TaskState, TaskView, final_message, plain_text
from covenant.model.usage import usage_in
from covenant.wire.a2a.parts_v1 import unlinked
from covenant.wire.a2a.response_encoder import agent_of, usage_of
from covenant.wire.json_input import A2A_NESTING_MAX, decode, deeper_than

CONVERSATION: Final = "conversation:"
"""The prefix of a conversation's context id; the conversation's id follows it."""

RequestState = Literal["running", "completed", "failed", "canceled"]
_ENDED: Final[dict[str, RequestState]] = {
    Ending.COMPLETED: "completed",
    Ending.FAILED: "failed",
    Ending.REJECTED: "failed",
    Ending.CANCELED: "canceled",
}
_encode = msgspec.json.Encoder().encode
PARTS_MAX: Final = 1_000


class RequestShown(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """`state` says whether the request runs; `a2a_state` is A2A's state. `last_seq` is the task's generation."""

    request_id: str
    tenant_id: str
    agent_id: str
    conversation_id: str | None
    origin: str
    state: RequestState
    a2a_state: str
    started_at_ms: int
    updated_at_ms: int
    completed_at_ms: int | None
    error_message: str | None
    last_seq: int


class RequestEvent(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """The fields of an event; its name decides which are set. `data` is base64."""

    request_id: str
    stream_id: int
    depth: int
    ts_ms: int
    agent: str | None = None
    tenant_id: str | None = None
    conversation_id: str | None = None
    role: str | None = None
    text: str | None = None
    append: bool | None = None
    last: bool | None = None
    tool: str | None = None
    ok: bool | None = None
    artifact_id: str | None = None
    name: str | None = None
    mime_type: str | None = None
    data: str | None = None
    url: str | None = None
    value: Any = None
    state: str | None = None
    content: str | None = None
    error: str | None = None
    duration_ms: int | None = None
    tokens: float | None = None
    input_tokens: float | None = None
    output_tokens: float | None = None
    metadata: dict[str, Any] | None = None


def conversation_of(origin: str, context_id: str | None) -> str | None:
    """The conversation that a request belongs to. An A2A context is never one, whatever its id is."""
    if origin != NATIVE or context_id is None or not context_id.startswith(CONVERSATION):
        return None
    return context_id.removeprefix(CONVERSATION)


def show_request(view: TaskView) -> RequestShown:
    task, over = view.task, view.state.terminal
    error = view.result.error_message if view.result is not None else None
    return RequestShown(
        request_id=task.id,
        tenant_id=task.tenant or "",
        agent_id=agent_of(task),
        conversation_id=conversation_of(task.origin, task.context_id),
        origin=task.origin,
        state=request_state(view.state),
        a2a_state=view.state.value,
        started_at_ms=view.created_at_ms,
        updated_at_ms=view.updated_at_ms,
        completed_at_ms=view.updated_at_ms if over else None,
        error_message=error if isinstance(error, str) else None,
        last_seq=view.generation,
    )


def request_state(state: str) -> RequestState:
    return _ENDED.get(state, "running")


class RequestEvents:
    def __init__(self, task: Task, began_at_ms: int) -> None:
        self._task = task
        self._began_at_ms = began_at_ms

    def received(self) -> bytes:
        """The frame of the first step, which every view includes."""
        return self.frame(Step(1, self._began_at_ms, Began(self._task)))

    def frames(self, steps: Iterable[Step]) -> bytes:
        return b"".join([self.frame(step) for step in steps])

    def frame(self, step: Step) -> bytes:
        *before, last = self._events(step)
        frames = [self._encoded_event(step, b"", name, fields) for name, fields in before]
        frames.append(self._encoded_event(step, b"id: %d\n" % step.generation, *last))
        return b"".join(frames)

    def _encoded_event(self, step: Step, number: bytes, name: str, fields: dict[str, Any]) -> bytes:
        position = {"stream_id": 0, "depth": 0, **fields}
        event = RequestEvent(request_id=self._task.id, ts_ms=step.ts_ms, **position)
        return b"%bevent: %b\ndata: %b\n\n" % (number, name.encode(), _encode(event))

    def _events(self, step: Step) -> list[tuple[str, dict[str, Any]]]:
        what, event = step.what, self._event(step)
        match what:
            case Started():
                return [event, ("agent_start", event[1])]
            case ArtifactUpdate(last_chunk=True) if event[0] == "text":
                named = {name: value for name, value in event[1].items() if name != "text"}
                return [event, ("stream_end", named)]
            case Ended():
                used = tokens_used(what.result)
                usage = [("token_usage", {**used, "agent": agent_of(self._task)})] if used else []
                failed = event[1]["error"]
                wrong = [("error", {"error": failed, "state": event[1]["state"]})] if failed else []
                return [*usage, *wrong, event]
            case _:
                return [event]

    def _event(self, step: Step) -> tuple[str, dict[str, Any]]:
        what, task = step.what, self._task
        match what:
            case ArtifactUpdate():
                return _artifact_event(task, what)
            case Began():
                named = {"tenant_id": task.tenant, "conversation_id": conversation_of(task.origin, task.context_id)}
                return "request_received", {"agent": agent_of(task), "text": task.intent_text, **named}
            case Started():
                return "stream_start", {"agent": agent_of(task)}
            case StatusUpdate(state=state):
                name = "status" if state == TaskState.WORKING else state.replace("-", "_")
                text = what.text or plain_text(what.parts)
                return name, {"state": state, "text": text, "metadata": what.metadata}
            case MessageUpdate():
                return "message", {"role": what.role, "text": plain_text(what.parts)}
            case StepUpdate(name=name):
                return "status", {"state": TaskState.WORKING, "text": "", "metadata": {STEP_MARK: name}}
            case Continued(message):
                return "message", {"role": message.role, "text": plain_text(message.parts)}
            case Ended():
                return "done", self._done(what, step.ts_ms)
            case _:
                assert_never(what)

    def _done(self, ended: Ended, ts_ms: int) -> dict[str, Any]:
        task, result, ok = self._task, ended.result, ended.ending is Ending.COMPLETED
        message = final_message(result, ended.ending)
        return {
            "ok": ok,
            "state": ended.ending.value,
            "content": plain_text(message.parts) if message is not None and ok else "",
            "error": None if ok or message is None else plain_text(message.parts),
            "agent": agent_of(task),
            "tenant_id": task.tenant,
            "conversation_id": conversation_of(task.origin, task.context_id),
            "duration_ms": max(0, ts_ms - self._began_at_ms),
            "metadata": usage_of(result),
            **tokens_used(result),
        }


def _artifact_event(task: Task, update: ArtifactUpdate) -> tuple[str, dict[str, Any]]:
    """The event of an artifact. The artifact's id has the kind after the task's id."""
    kind = update.artifact_id.removeprefix(f"{task.id}-").partition("-")[0]
    named: dict[str, Any] = {"artifact_id": update.artifact_id, "append": update.append, "last": update.last_chunk}
    part = update.parts[0] if update.parts else None
    if kind == "text":
        text = plain_text(update.parts)
        return ("text", {**named, "text": text}) if text or not update.last_chunk else ("stream_end", named)
    if kind == "tool" and isinstance(part, Json) and isinstance(part.value, dict):
        return "tool_call", {**named, "tool": _string(part.value.get("tool")), "ok": part.value.get("ok") is True}
    if kind == "sub" and isinstance(part, Json) and isinstance(part.value, dict):
        fields, depth = part.value, part.value.get("depth")
        depth = depth if isinstance(depth, int) and not isinstance(depth, bool) else 1
        who = {"agent": _string(fields.get("agent")), "content": _string(fields.get("content"))}
        where = {"stream_id": _count(update.artifact_id) + 1, "depth": depth}
        return "sub_agent_response", {**named, **who, **where, "value": fields}
    about = {**named, "name": update.name, "metadata": update.metadata, **_part_fields(part)}
    return "file" if kind == "file" else "artifact", about


def _part_fields(part: Content | None) -> dict[str, Any]:
    match part:
        case None:
            return {}
        case Text():
            return {"text": part.text, "mime_type": part.mimeType}
        case Json():
            return {"value": part.value, "mime_type": part.mimeType}
        case ResourceLink():
            return {"url": part.uri, "mime_type": part.mimeType}
        case File():
            return {"url": unlinked(part), "mime_type": part.mimeType}
        case Resource():
            inner = part.resource
            return {"text": inner.text, "data": inner.blob, "mime_type": inner.mimeType}
        case _:
            return {"data": part.data, "mime_type": part.mimeType}


def tokens_used(result: Result) -> dict[str, float]:
    """The tokens that the work and its delegations took; empty if no usage was reported."""
    usage = usage_in(result.metadata)
    return {name: usage[name] for name in ("tokens", "input_tokens", "output_tokens") if name in usage}


def _count(artifact_id: str) -> int:
    """The number of an artifact within its kind: the last part of its id."""
    number = artifact_id.rpartition("-")[2].rpartition(".")[2]
    return int(number) if number.isascii() and number.isdigit() and len(number) < 10 else 0


def _string(value: object) -> str | None:
    return value if isinstance(value, str) else None


Name = Annotated[str, msgspec.Meta(min_length=1, max_length=512)]


class TextPart(msgspec.Struct, frozen=True, tag_field="type", tag="text", kw_only=True, forbid_unknown_fields=True):
    text: str


class ImagePart(msgspec.Struct, frozen=True, tag_field="type", tag="image", kw_only=True, forbid_unknown_fields=True):
    """An image by its bytes in base64, or by its URL."""

    data: str | None = None
    url: str | None = None
    mime_type: Name = "image/png"


class FilePart(msgspec.Struct, frozen=True, tag_field="type", tag="file", kw_only=True, forbid_unknown_fields=True):
    """A file by its bytes in base64, or by its URL."""

    name: Name
    data: str | None = None
    url: str | None = None
    mime_type: Name | None = None


class DataPart(msgspec.Struct, frozen=True, tag_field="type", tag="data", kw_only=True, forbid_unknown_fields=True):
    value: Any


NativePart = TextPart | ImagePart | FilePart | DataPart
MessageInput = str | Annotated[tuple[NativePart, ...], msgspec.Meta(min_length=1, max_length=PARTS_MAX)]
"""A text, or a list of parts."""


class RunRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`agent_def` is an agent for this request alone, instead of one of the catalogue."""

    message: MessageInput
    agent: Annotated[str, msgspec.Meta(min_length=1, max_length=64)] = INDEX
    agent_def: dict[str, Any] | None = None
    original_query: str | None = None
    channel: Literal["text", "voice"] | None = None
    not_before_ms: Annotated[int, msgspec.Meta(ge=0)] | None = None


class NewConversation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    agent: Annotated[str, msgspec.Meta(min_length=1, max_length=64)] = INDEX
    title: Annotated[str, msgspec.Meta(max_length=200)] = ""


class NewMessage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    message: MessageInput


decode_run: Final = partial(decode, msgspec.json.Decoder(RunRequest))
decode_message: Final = partial(decode, msgspec.json.Decoder(NewMessage))
_conversation: Final = msgspec.json.Decoder(NewConversation)


def decode_conversation(body: bytes) -> NewConversation:
    """Decodes a new conversation. An empty body is a conversation with the index agent."""
    return decode(_conversation, body or b"{}")


def message_content(message: MessageInput) -> tuple[Content, ...]:
    if isinstance(message, str):
        if not message.strip():
            raise Invalid("invalid_request", "message: must not be empty")
        return (Text(message),)
    return tuple(_contents(message))


def _contents(parts: tuple[NativePart, ...]) -> Iterator[Content]:
    for place, part in enumerate(parts):
        match part:
            case TextPart(text=text):
                yield Text(text)
            case DataPart(value=value):
                if deeper_than((value,), A2A_NESTING_MAX):
                    raise Invalid("invalid_request", f"message[{place}].value: nested too deeply")
                yield Json(value)
            case ImagePart():
                yield _file(place, part, "")
            case FilePart():
                yield _file(place, part, part.name)


def _file(place: int, part: ImagePart | FilePart, name: str) -> Content:
    if (part.data is None) == (part.url is None):
        raise Invalid("invalid_request", f"message[{place}]: give either data or url")
    if part.url is not None:
        return ResourceLink(uri=part.url, name=file_name_of(name) if name else "", mimeType=part.mime_type)
    try:
        base64.b64decode(part.data or "", validate=True)
    except ValueError:
        raise Invalid("invalid_request", f"message[{place}].data: must be base64") from None
    kind = part.mime_type or "application/octet-stream"
    return Resource(Embedded(uri="", mimeType=kind, blob=part.data), filename=file_name_of(name) if name else None)
