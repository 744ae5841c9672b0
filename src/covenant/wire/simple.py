"""The simple door's JSON: one text in, a flat task with four states out.

A task that waits for its sender is told as `working`, and one that was canceled or rejected as `failed`: there are no
other words here. Only what can be said in text is told of what an agent made.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Final, Literal

import msgspec

from covenant.model.content import Content, Json, ResourceLink, Text
from covenant.model.task import Cause
from covenant.model.task_event import MessageUpdate
from covenant.model.task_view import TaskState, TaskView
from covenant.wire.json_input import decode
from covenant.wire.timestamps import format_ms

A2ATaskState = Literal["submitted", "working", "completed", "failed"]

TIMED_OUT: Final = "Task timed out"

Words = Annotated[str, msgspec.Meta(min_length=1)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
Timeout = Annotated[int, msgspec.Meta(ge=1_000, le=600_000)]
Depth = Annotated[int, msgspec.Meta(ge=1, le=10)]


class A2ATaskParams(msgspec.Struct, frozen=True, gc=False, kw_only=True, rename="camel", omit_defaults=True):
    message: Words
    skill: Name | None = None
    timeout_ms: Timeout | None = None
    depth: Depth | None = None


class A2ATaskSendRequest(msgspec.Struct, frozen=True, gc=False, kw_only=True, rename="camel", omit_defaults=True):
    """What is asked stands in `params`, which then counts as a whole, or beside it. `method` is not read."""

    params: A2ATaskParams | None = None
    message: Words | None = None
    skill: Name | None = None
    timeout_ms: Timeout | None = None
    depth: Depth | None = None
    source_agent: Name | None = None
    method: str | None = None


class A2APart(msgspec.Struct, frozen=True, gc=False, kw_only=True, tag_field="type", tag="text"):
    text: str


class A2AMessage(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    role: Literal["user", "agent"]
    parts: tuple[A2APart, ...]


class A2ATask(msgspec.Struct, frozen=True, gc=False, kw_only=True, rename="camel", omit_defaults=True):
    """`ignored` names what was asked for and had no effect; it is there only then."""

    id: str
    state: A2ATaskState
    messages: tuple[A2AMessage, ...]
    session_id: str | None
    created_at: str
    updated_at: str
    ignored: tuple[str, ...] = ()


class SimpleError(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    error: str
    code: str


CODES: Final = {
    400: "VALIDATION_ERROR",
    401: "AUTHENTICATION_ERROR",
    403: "AUTHORIZATION_ERROR",
    404: "NOT_FOUND",
    405: "METHOD_NOT_ALLOWED",
    409: "CONFLICT",
    413: "PAYLOAD_TOO_LARGE",
    429: "RATE_LIMITED",
    500: "INTERNAL_ERROR",
    503: "UNAVAILABLE",
}
"""The code that goes with a status, for each status that this door has."""

_STATES: Final[dict[TaskState, A2ATaskState]] = {
    TaskState.SUBMITTED: "submitted",
    TaskState.WORKING: "working",
    TaskState.INPUT_REQUIRED: "working",
    TaskState.AUTH_REQUIRED: "working",
    TaskState.COMPLETED: "completed",
    TaskState.FAILED: "failed",
    TaskState.CANCELED: "failed",
    TaskState.REJECTED: "failed",
}

_request = msgspec.json.Decoder(A2ATaskSendRequest)
_json = msgspec.json.Encoder().encode


def decode_send(body: bytes) -> A2ATaskSendRequest:
    return decode(_request, body)


def task_of(view: TaskView) -> A2ATask:
    ignored = (view.task.request_metadata or {}).get("ignored")
    return A2ATask(
        id=view.task.id,
        state=_STATES[view.state],
        messages=tuple(_messages(view)),
        session_id=view.task.context_id,
        created_at=format_ms(view.created_at_ms),
        updated_at=format_ms(view.updated_at_ms),
        ignored=tuple(ignored) if ignored else (),
    )


def _messages(view: TaskView) -> Iterator[A2AMessage]:
    """What was said, turn by turn. What an agent has said so far in words stands after what it was asked."""
    spoken = {artifact.artifact_id: _parts(artifact.parts) for artifact in view.artifacts}
    finals = {_text(_parts(message.parts)) for message in view.history if message.role == "agent"}
    turn = 0
    for message in view.history:
        parts = _parts(message.parts)
        if view.cause is Cause.DEADLINE and message is view.message:
            parts = (A2APart(text=TIMED_OUT),)
        if parts:
            yield A2AMessage(role=_role(message), parts=parts)
        if message.role == "user":
            said = spoken.get(f"{view.task.id}-text-{turn}", ())
            # The reply as a whole says it again: once is enough.
            if said and _text(said) not in finals:
                yield A2AMessage(role="agent", parts=said)
            turn += 1


def _role(message: MessageUpdate) -> Literal["user", "agent"]:
    return "user" if message.role == "user" else "agent"


def _parts(content: tuple[Content, ...]) -> tuple[A2APart, ...]:
    return tuple(A2APart(text=text) for part in content if (text := _words(part)))


def _text(parts: tuple[A2APart, ...]) -> str:
    return "".join(part.text for part in parts)


def _words(part: Content) -> str:
    match part:
        case Text(text=text):
            return text
        case Json(value=value):
            return _json(value).decode()
        case ResourceLink(uri=uri):
            return uri
        case _:
            return ""
