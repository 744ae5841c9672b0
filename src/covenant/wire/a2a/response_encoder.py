"""Answers of the A2A methods in JSON, in either dialect: tasks, messages, pages, push configurations, stream frames.

A2A 1.0 is written as ProtoJSON: camelCase, defaults left out, times with three decimals. In 0.3 every object has its
`kind`, states are in lower case, and `final` marks the end of a stream. Task metadata has our own keys under
`covenant.`; 0.3 also has keys under `x-arbiter.` that its clients may know.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

import msgspec

from covenant.model.a2a_requests import ListTasks, PushConfig, TaskPage
from covenant.model.content import Content
from covenant.model.task import ERROR_CODE, Result, ResultStatus, Task
from covenant.model.task_event import (
    AWAITING_REPAIR,
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
from covenant.model.task_view import Artifact, TaskState, TaskView, final_message, fold, status_message
from covenant.model.usage import usage_in
from covenant.wire.a2a import parts_proto_v03, parts_v03, parts_v1
from covenant.wire.a2a.parts_proto_v03 import MessageProtoV03, PartProtoV03
from covenant.wire.a2a.parts_v03 import MessageV03, PartV03
from covenant.wire.a2a.parts_v1 import Link, MessageV1, PartV1, unlinked
from covenant.wire.a2a.request_decoder import (
    CANCELLED_V03,
    STATE_NAMES_V1,
    AuthenticationV03,
    AuthenticationV1,
    PushObjectV03,
    PushObjectV1,
    TaskPushObjectV03,
)
from covenant.wire.timestamps import format_ms

USAGE: Final = "covenant.usage"
"""Key in metadata: the usage of the work."""
_FOREIGN_NOTES: Final = ("agent_id", "input_tokens", "output_tokens", "stop_reason", "error")

_encode = msgspec.json.Encoder().encode
WireMessage = MessageV1 | MessageV03 | MessageProtoV03
WirePart = PartV1 | PartV03 | PartProtoV03
M = TypeVar("M")
"""The messages of a dialect, and its parts."""
P = TypeVar("P")
_OK: Final = ResultStatus.OK
_PARTIAL: Final = ResultStatus.PARTIAL
"""Read through their class, these would take fifty times as long: the class of an enum has a hook for that."""


def agent_of(task: Task) -> str:
    return task.recipient.display.partition("@")[0]


def usage_of(result: Result | None) -> dict[str, Any] | None:
    if result is None or result.metadata is msgspec.UNSET:
        return None
    return result.metadata or None


class WireObject(msgspec.Struct, frozen=True, gc=False, rename="camel", omit_defaults=True):
    """The base of objects that servers write, and clients read. They are written in the order of their declaration."""


class StatusObject(WireObject, Generic[M], frozen=True):
    state: str | int | None = None
    message: M | None = None
    timestamp: Any = None


class ArtifactObject(WireObject, Generic[P], frozen=True):
    artifact_id: str | None = None
    parts: list[P] | None = None
    name: str | None = None
    description: str | None = None
    metadata: dict[str, Any] | None = None
    extensions: tuple[str, ...] | None = None


class TaskObject(WireObject, Generic[M, P], frozen=True):
    kind: Any = None
    id: str | None = None
    context_id: str | None = None
    status: StatusObject[M] | None = None
    artifacts: list[ArtifactObject[P]] | None = None
    history: list[M] | None = None
    metadata: dict[str, Any] | None = None


class StatusUpdateObject(WireObject, Generic[M], frozen=True):
    kind: Any = None
    task_id: str | None = None
    context_id: str | None = None
    status: StatusObject[M] | None = None
    final: bool | None = None
    metadata: dict[str, Any] | None = None


class ArtifactUpdateObject(WireObject, Generic[P], frozen=True):
    kind: Any = None
    task_id: str | None = None
    context_id: str | None = None
    artifact: ArtifactObject[P] | None = None
    append: bool | None = None
    last_chunk: bool | None = None


class ReplyObject(WireObject, Generic[M, P], frozen=True):
    """SendMessageResponse and StreamResponse of 1.0: exactly one field is set."""

    task: TaskObject[M, P] | None = None
    message: M | None = None
    status_update: StatusUpdateObject[M] | None = None
    artifact_update: ArtifactUpdateObject[P] | None = None


class _NotesV1(msgspec.Struct, frozen=True, gc=False, rename="covenant.{}".format, omit_defaults=True, kw_only=True):
    """Metadata keys that are not part of the protocol."""

    generation: int | None = None
    agent: str | None = None
    created_at: str | None = None
    partial: bool = False
    holder_lost: str | None = None
    stop_reason: Any = None
    usage: dict[str, Any] | None = None
    model: Any = None
    route: Any = None
    error_code: Any = None


def _note_name(name: str) -> str:
    return f"x-arbiter.{name}" if name in _FOREIGN_NOTES else f"covenant.{name}"


class _NotesV03(msgspec.Struct, frozen=True, gc=False, rename=_note_name, omit_defaults=True, kw_only=True):
    generation: int | None = None
    created_at: str | None = None
    partial: bool = False
    holder_lost: str | None = None
    agent_id: str
    input_tokens: Any = None
    output_tokens: Any = None
    stop_reason: Any = None
    error: str | None = None
    usage: dict[str, Any] | None = None
    model: Any = None
    route: Any = None
    error_code: Any = None


class _Page(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """All four fields are always written."""

    tasks: list[TaskObject[Any, Any]]
    next_page_token: str
    page_size: int
    total_size: int


class _Pushes(WireObject, frozen=True):
    configs: list[Any]
    next_page_token: str = ""


class _StatusChange(msgspec.Struct, frozen=True, gc=False):
    """The state that a step brought, and the message, metadata or result that came with it."""

    state: TaskState
    message: MessageUpdate | None = None
    metadata: dict[str, Any] | None = None
    result: Result | None = None


_WORKING: Final = _StatusChange(TaskState.WORKING)
_StatusStep = Started | StatusUpdate | MessageUpdate | StepUpdate | Continued | Ended


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ResponseEncoder:
    """Encodes one dialect. The fields are the differences between dialects."""

    states: Mapping[TaskState, str]
    parts_of: Callable[[Iterable[Content], Link], Any]
    message_of: Callable[[MessageUpdate, str | None, str, str, Link], WireMessage]
    task_notes: Callable[[TaskView], Any]
    """Returns the metadata of a task."""
    change_notes: Callable[[Task, _StatusChange], Any]
    """Returns the metadata of a status update."""
    push: Callable[[str, PushConfig], Any]
    pushes: Callable[[list[Any], str], Any]
    """Returns a page of push configurations with the token of the next page."""
    deleted: bytes
    """The answer to a deleted push configuration."""
    kinds: bool
    """Whether objects have a `kind` and all their flags (0.3), or are nested in a field of that name (1.0)."""
    finals: bool
    """Whether a status update says if the stream ends with it."""

    def encode_task(self, view: TaskView, history_length: int | None = None, link: Link = unlinked) -> bytes:
        return _encode(self._task(view, history_length, link))

    def encode_sent(self, view: TaskView, history_length: int | None = None, link: Link = unlinked) -> bytes:
        """Encodes the answer to a send: the task, or the bare message that its agent answered with."""
        if view.result is not None and view.result.reply is True:
            return self.encode_message(view, link)
        return self.encode_snapshot(view, history_length, link)

    def encode_snapshot(self, view: TaskView, history_length: int | None = None, link: Link = unlinked) -> bytes:
        """Encodes the first frame of a stream: the task at the client's cursor."""
        task = self._task(view, history_length, link)
        return _encode(task if self.kinds else ReplyObject(task))

    def encode_message(self, view: TaskView, link: Link = unlinked) -> bytes:
        """Encodes the only frame of a stream whose agent answers with a bare message."""
        assert view.result is not None
        usage = usage_in(usage_of(view.result))
        metadata = {USAGE: usage} if usage else None
        update = MessageUpdate(parts=view.result.content, message_id=f"{view.task.id}-r", metadata=metadata)
        message = self.message_of(update, None, _context_of(view.task), "", link)
        return _encode(message if self.kinds else ReplyObject(message=message))

    def encode_page(self, page: TaskPage, request: ListTasks, link: Link = unlinked) -> bytes:
        length, artifacts = request.history_length, request.include_artifacts
        tasks = [self._task(view, length, link, listed=True, artifacts=artifacts) for view in page.tasks]
        return _encode(_Page(tasks, page.next_page_token, page.page_size, page.total_size))

    def encode_step(self, task: Task, step: Step, link: Link = unlinked) -> bytes:
        """Encodes one step as one frame, live or replayed."""
        what = step.what
        if isinstance(what, ArtifactUpdate):
            update = self._artifact_update(task, what, link)
            return _encode(update if self.kinds else ReplyObject(artifact_update=update))
        if isinstance(what, Began):
            view = fold((step,))
            assert view is not None
            return self.encode_snapshot(view, None, link)
        change = self._status_update(task, step, what, link)
        return _encode(change if self.kinds else ReplyObject(status_update=change))

    def encode_push(self, task_id: str, config: PushConfig) -> bytes:
        return _encode(self.push(task_id, config))

    def encode_pushes(self, task_id: str, configs: Sequence[PushConfig], next_page_token: str = "") -> bytes:
        return _encode(self.pushes([self.push(task_id, config) for config in configs], next_page_token))

    def _task(
        self, view: TaskView, length: int | None, link: Link, *, listed: bool = False, artifacts: bool = True
    ) -> TaskObject[WireMessage, WirePart]:
        task = view.task
        task_id, context_id = task.id, task.context_id or task.id
        shown: list[ArtifactObject[WirePart]] | None = None
        # A listing with artifacts has the field even if it is empty; other answers leave out an empty one.
        if artifacts and (listed or view.artifacts):
            shown = []
            for made in view.artifacts:
                shown.append(self._artifact(made, link))
        messages = view.messages if view.progress else view.history
        first = 0 if length is None else max(0, len(messages) - length)
        kept = messages[first:] if first else messages
        # A loop: a comprehension would make a cell of each name that it uses, and every answer comes by here.
        history: list[WireMessage] = []
        for at, each in enumerate(kept, start=first):
            unnamed = "" if each.message_id else f"{task_id}-h{at}"
            history.append(self.message_of(each, task_id, context_id, unnamed, link))
        message = None
        if view.message is not None:
            # The message that ended a task is also the last of its history: it is converted once and used twice.
            if kept and kept[-1] is view.message and view.message.message_id is not None:
                message = history[-1]
            else:
                message = self.message_of(view.message, task_id, context_id, f"{task_id}-s{view.generation}", link)
        return TaskObject(
            "task" if self.kinds else None,
            task_id,
            context_id,
            StatusObject(self.states[view.state], message, format_ms(view.updated_at_ms)),
            shown,
            history or None,
            self.task_notes(view),
        )

    def _artifact(self, made: Artifact | ArtifactUpdate, link: Link) -> ArtifactObject[WirePart]:
        parts, extensions = self.parts_of(made.parts, link), made.extensions or None
        return ArtifactObject(made.artifact_id, parts, made.name, made.description, made.metadata, extensions)

    def _artifact_update(self, task: Task, update: ArtifactUpdate, link: Link) -> ArtifactUpdateObject[WirePart]:
        kind, unset = ("artifact-update", False) if self.kinds else (None, None)
        append, last_chunk = update.append or unset, update.last_chunk or unset
        return ArtifactUpdateObject(kind, task.id, _context_of(task), self._artifact(update, link), append, last_chunk)

    def _status_update(self, task: Task, step: Step, what: _StatusStep, link: Link) -> StatusUpdateObject[WireMessage]:
        change, context_id = _status_change(task, step.generation, what), _context_of(task)
        message: WireMessage | None = None
        if change.message is not None:
            message = self.message_of(change.message, task.id, context_id, f"{task.id}-s{step.generation}", link)
        status: StatusObject[WireMessage] = StatusObject(self.states[change.state], message, format_ms(step.ts_ms))
        kind, final = "status-update" if self.kinds else None, None
        if self.finals:
            # In 0.3 a stream is one interaction: it also ends where the agent waits for its client.
            final = change.state.terminal or change.state.waits
        return StatusUpdateObject(kind, task.id, context_id, status, final, self.change_notes(task, change))


def _context_of(task: Task) -> str:
    """The task's context id; a task without one is its own context."""
    return task.context_id or task.id


def _status_change(task: Task, generation: int, what: _StatusStep) -> _StatusChange:
    match what:
        case Started() | Continued():
            return _WORKING
        case StatusUpdate(state=state, metadata=metadata) as update:
            return _StatusChange(TaskState(state), status_message(task.id, update, generation), metadata)
        case MessageUpdate() as message:
            return _StatusChange(TaskState.WORKING, message)
        case StepUpdate(name=name):
            return _StatusChange(TaskState.WORKING, metadata={STEP_MARK: name})
        case Ended(ending, result):
            return _StatusChange(TaskState(ending.value), final_message(result, ending), result=result)


def _is_partial(result: Result | None) -> bool:
    return result is not None and result.status is _PARTIAL


def _task_notes_v1(view: TaskView) -> _NotesV1:
    result = view.result
    generation, agent, created_at = view.generation, agent_of(view.task), format_ms(view.created_at_ms)
    if result is not None and result.status is _OK and not result.metadata and not view.holder_lost:
        return _NotesV1(generation=generation, agent=agent, created_at=created_at)
    return _NotesV1(
        generation=generation,
        agent=agent,
        created_at=created_at,
        partial=_is_partial(result),
        holder_lost=AWAITING_REPAIR if view.holder_lost else None,
        **_result_notes(result),
    )


def _change_notes_v1(_: Task, change: _StatusChange) -> Any:
    partial, notes = _is_partial(change.result), _result_notes(change.result)
    return _NotesV1(partial=partial, **notes) if partial or notes else change.metadata


def _result_notes(result: Result | None) -> dict[str, Any]:
    """The usage, stop reason, model, route and error code from a result's metadata."""
    metadata = usage_of(result)
    if metadata is None:
        return {}
    notes = {
        "usage": usage_in(metadata) or None,
        "stop_reason": metadata.get("stop_reason"),
        "model": metadata.get("model"),
        "route": metadata.get("covenant.route"),
        "error_code": metadata.get(ERROR_CODE),
    }
    return {name: value for name, value in notes.items() if value is not None}


def _push_v1(task_id: str, config: PushConfig) -> PushObjectV1:
    given = config.authentication
    authentication = AuthenticationV1(given.scheme, given.credentials) if given is not None else None
    return PushObjectV1(config.id, task_id, config.url, config.token, authentication)


RESPONSES_V1: Final = ResponseEncoder(
    states=STATE_NAMES_V1,
    parts_of=parts_v1.parts_of,
    message_of=parts_v1.message_of,
    task_notes=_task_notes_v1,
    change_notes=_change_notes_v1,
    push=_push_v1,
    pushes=_Pushes,
    deleted=b"{}",
    kinds=False,
    finals=False,
)


def _notes_v03(task: Task, result: Result | None, **more: Any) -> _NotesV03:
    notes = _result_notes(result)
    tokens = notes.get("usage") or {}
    error = result.error_message if result is not None else None
    return _NotesV03(
        partial=_is_partial(result),
        agent_id=agent_of(task),
        input_tokens=tokens.get("input_tokens"),
        output_tokens=tokens.get("output_tokens"),
        error=error if isinstance(error, str) else None,
        **notes,
        **more,
    )


def _task_notes_v03(view: TaskView) -> _NotesV03:
    return _notes_v03(
        view.task,
        view.result,
        generation=view.generation,
        created_at=format_ms(view.created_at_ms),
        holder_lost=AWAITING_REPAIR if view.holder_lost else None,
    )


def _change_notes_v03(task: Task, change: _StatusChange) -> Any:
    return change.metadata if change.result is None else _notes_v03(task, change.result)


def _config_v03(config: PushConfig) -> PushObjectV03:
    given = config.authentication
    authentication = AuthenticationV03([given.scheme], given.credentials) if given is not None else None
    return PushObjectV03(config.id, config.url, config.token, authentication)


def _push_v03(task_id: str, config: PushConfig) -> TaskPushObjectV03:
    return TaskPushObjectV03(task_id, _config_v03(config))


RESPONSES_V03: Final = ResponseEncoder(
    states={state: state.value for state in TaskState},
    parts_of=parts_v03.parts_of,
    message_of=parts_v03.message_of,
    task_notes=_task_notes_v03,
    change_notes=_change_notes_v03,
    push=_push_v03,
    # 0.3 has no pages of push configurations.
    pushes=lambda pushes, _: pushes,
    deleted=b"null",
    kinds=True,
    finals=True,
)


class _PushProtoV03(WireObject, frozen=True):
    name: str
    push_notification_config: PushObjectV03


def _push_proto_v03(task_id: str, config: PushConfig) -> _PushProtoV03:
    return _PushProtoV03(f"tasks/{task_id}/pushNotificationConfigs/{config.id}", _config_v03(config))


RESPONSES_PROTO_V03: Final = ResponseEncoder(
    states=STATE_NAMES_V1 | {TaskState.CANCELED: CANCELLED_V03},
    parts_of=parts_proto_v03.parts_of,
    message_of=parts_proto_v03.message_of,
    task_notes=_task_notes_v03,
    change_notes=_change_notes_v03,
    push=_push_proto_v03,
    pushes=_Pushes,
    deleted=b"{}",
    kinds=False,
    finals=True,
)
