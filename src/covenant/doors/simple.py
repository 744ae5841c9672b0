"""The simple door: `POST /a2a/tasks/send` and `GET /a2a/tasks/{task_id}`, for a tenant's callers.

One text in, a flat task with four states out. A task that waits for its sender is `working`, and one that was canceled
or rejected is `failed`. An agent's output is shown as text and links only. The order of checks is authentication, the
tenant's limits, size, JSON, depth, agent, chain, this door's own rate. A refusal is `{"error", "code"}`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Annotated, Any, Final, Literal

import msgspec

from covenant.doors.http.endpoint import TenantCall
from covenant.doors.http.openapi import route
from covenant.doors.http.responses import Style
from covenant.exchange.simple import SimpleExchange, SimpleSend
from covenant.model.content import Content, File, Json, ResourceLink, Text
from covenant.model.errors import Invalid, NotFound
from covenant.model.task import TIMED_OUT, Cause, Hop
from covenant.model.task_event import TEXT_ARTIFACT
from covenant.model.task_view import TaskState, TaskView
from covenant.wire.a2a.parts_v1 import Link, unlinked
from covenant.wire.json_input import decode
from covenant.wire.timestamps import format_ms

A2ATaskState = Literal["submitted", "working", "completed", "failed"]


MessageText = Annotated[str, msgspec.Meta(min_length=1)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
Timeout = Annotated[int, msgspec.Meta(ge=1_000, le=600_000)]
Depth = Annotated[int, msgspec.Meta(ge=1, le=10)]
Moment = Annotated[int, msgspec.Meta(ge=0)]
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
"""The code of each status that this door uses."""
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
SEND: Final = "/a2a/tasks/send"
TASK: Final = "/a2a/tasks/{task_id}"
BODY_BYTES_MAX: Final = 1024 * 1024
NO_MESSAGE: Final = "message: must be given, and not be blank"
NO_TASK: Final = "Task not found"
_encode = msgspec.json.Encoder().encode


class _TaskOptions(msgspec.Struct, frozen=True, gc=False, kw_only=True, rename="camel", omit_defaults=True):
    skill: Name | None = None
    timeout_ms: Timeout | None = None
    not_before_ms: Moment | None = None
    depth: Depth | None = None


class A2ATaskParams(_TaskOptions, frozen=True, kw_only=True):
    message: MessageText


class A2ATaskSendRequest(_TaskOptions, frozen=True, kw_only=True):
    """The task's fields are in `params`, which then counts as a whole, or at the top level. `method` is ignored."""

    params: A2ATaskParams | None = None
    message: MessageText | None = None
    source_agent: Name | None = None
    method: str | None = None


class A2APart(msgspec.Struct, frozen=True, gc=False, kw_only=True, tag_field="type", tag="text"):
    text: str


class A2AMessage(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    role: Literal["user", "agent"]
    parts: tuple[A2APart, ...]


class A2ATask(msgspec.Struct, frozen=True, gc=False, kw_only=True, rename="camel", omit_defaults=True):
    """`ignored` names request fields that had no effect; it is left out if there are none."""

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


decode_send: Final = partial(decode, msgspec.json.Decoder(A2ATaskSendRequest))


def task_of(view: TaskView, link: Link = unlinked) -> A2ATask:
    ignored = (view.task.request_metadata or {}).get("ignored")
    return A2ATask(
        id=view.task.id,
        state=_STATES[view.state],
        messages=tuple(_messages(view, link)),
        session_id=view.task.context_id,
        created_at=format_ms(view.created_at_ms),
        updated_at=format_ms(view.updated_at_ms),
        ignored=tuple(ignored) if ignored else (),
    )


def _messages(view: TaskView, link: Link) -> Iterator[A2AMessage]:
    """The messages of all turns. After a turn's message comes the text that the agent has written so far."""
    texts = {artifact.artifact_id: _parts(artifact.parts, link) for artifact in view.artifacts}
    finals = {_text(_parts(message.parts, link)) for message in view.history if message.role == "agent"}
    files = tuple(A2APart(text=link(each)) for each in _made_files(view))
    task_id, turn = view.task.id, 0
    for message in view.history:
        if files and message.role == "agent" and message is view.history[-1]:
            # Before the reply: clients take the last message for the answer.
            yield A2AMessage(role="agent", parts=files)
            files = ()
        parts = _parts(message.parts, link)
        if view.cause is Cause.DEADLINE and message is view.message:
            parts = (A2APart(text=TIMED_OUT),)
        if (
            len(parts) > 1
            and message.role == "agent"
            and _text(parts) == _text(texts.get(TEXT_ARTIFACT % (task_id, turn - 1), ()))
        ):
            # The agent wrote this text as several messages.
            yield from (A2AMessage(role="agent", parts=(part,)) for part in parts)
        elif parts:
            yield A2AMessage(role="user" if message.role == "user" else "agent", parts=parts)
        if message.role == "user":
            turn += 1
            so_far = texts.get(TEXT_ARTIFACT % (task_id, turn - 1), ())
            # The reply repeats this text, which is shown once.
            if so_far and _text(so_far) not in finals:
                yield A2AMessage(role="agent", parts=so_far)
    if files:
        yield A2AMessage(role="agent", parts=files)


def _made_files(view: TaskView) -> Iterator[File]:
    """Files of artifacts that no message has."""
    in_messages = {part.sha256 for message in view.history for part in message.parts if isinstance(part, File)}
    for artifact in view.artifacts:
        yield from (part for part in artifact.parts if isinstance(part, File) and part.sha256 not in in_messages)


def _parts(content: tuple[Content, ...], link: Link) -> tuple[A2APart, ...]:
    return tuple(A2APart(text=text) for part in content if (text := _part_text(part, link)))


def _text(parts: tuple[A2APart, ...]) -> str:
    return "".join(part.text for part in parts)


def _part_text(part: Content, link: Link) -> str:
    match part:
        case Text(text=text):
            return text
        case Json(value=value):
            return _encode(value).decode()
        case ResourceLink(uri=uri):
            return uri
        case File():
            return link(part)
        case _:
            return ""


def read_send(request: A2ATaskSendRequest, hop: Hop | None = None) -> SimpleSend:
    """The request's fields: of `params` if it is given, except that the depth may be at the top level."""
    params: Any = request.params if request.params is not None else request
    if params.message is None or not params.message.strip():
        raise Invalid("invalid_request", NO_MESSAGE)
    return SimpleSend(
        message=params.message,
        skill=params.skill,
        timeout_ms=params.timeout_ms,
        not_before_ms=params.not_before_ms,
        depth=params.depth or request.depth or 1,
        source_agent=request.source_agent,
        hop=hop,
    )


STYLE: Final = Style(lambda refusal: _encode(SimpleError(error=refusal.message, code=CODES[refusal.status])))


class SimpleDoor:
    def __init__(self, tasks: SimpleExchange, link: Link) -> None:
        """`link`: makes the download URL of a task's file."""
        self._tasks = tasks
        self._link = link

    @route(
        "POST",
        SEND,
        "Give a text to your first agent that has a project; answers with the task at once",
        request=A2ATaskSendRequest,
        refusal=SimpleError,
    )
    async def send_simple_task(self, call: TenantCall) -> tuple[int, A2ATask]:
        request = read_send(decode_send(call.body), call.call_context)
        return 200, task_of(await self._tasks.send(call.caller, request), self._link)

    @route("GET", TASK, "A task that was sent by this door, in its current state", refusal=SimpleError)
    async def get_simple_task(self, call: TenantCall) -> tuple[int, A2ATask]:
        try:
            return 200, task_of(await self._tasks.get(call.caller, call.path["task_id"]), self._link)
        except NotFound:
            raise NotFound("unknown_task", NO_TASK) from None
