"""What a 1.0 client is told: tasks, bare messages, pages, push configurations, and one frame for each step.

Written as ProtoJSON: camelCase, defaults left out, moments with three decimals. Task metadata has keys of our own,
all beginning with `covenant.`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from covenant.model.a2a_requests import ListTasks, PushConfig, TaskPage
from covenant.model.result import Result
from covenant.model.task import Task
from covenant.model.task_event import ArtifactUpdate, Began, Step
from covenant.model.task_view import TaskView, fold
from covenant.wire.a2a.task_fields import (
    AWAITING_REPAIR,
    News,
    agent_of,
    bare_message,
    context_of,
    is_bare_message,
    is_partial,
    newest_messages,
    status_change,
    usage_of,
)
from covenant.wire.a2a.v1.parts import Message, Part, message_of, parts_of
from covenant.wire.a2a.v1.requests import STATE_NAMES
from covenant.wire.timestamps import format_ms

DELETED: Final = b"{}"


class _Written(msgspec.Struct, frozen=True, gc=False, rename="camel", omit_defaults=True):
    """Declared in the order in which it is written."""


class _Status(_Written, frozen=True):
    state: str
    message: Message | None = None
    timestamp: str | None = None


class _Artifact(_Written, frozen=True):
    artifact_id: str
    parts: list[Part]
    name: str | None = None
    description: str | None = None
    metadata: dict[str, Any] | None = None
    extensions: tuple[str, ...] = ()


class Notes(msgspec.Struct, frozen=True, gc=False, rename="covenant.{}".format, omit_defaults=True, kw_only=True):
    """What we have to say of a task beyond the protocol."""

    generation: int | None = None
    agent: str | None = None
    created_at: str | None = None
    partial: bool = False
    holder_lost: str | None = None
    usage: dict[str, Any] | None = None


class _Task(_Written, frozen=True):
    id: str
    context_id: str
    status: _Status
    artifacts: list[_Artifact] | msgspec.UnsetType = msgspec.UNSET
    history: list[Message] | msgspec.UnsetType = msgspec.UNSET
    metadata: Notes | None = None


class _StatusUpdate(_Written, frozen=True):
    task_id: str
    context_id: str
    status: _Status
    metadata: dict[str, Any] | Notes | None = None


class _ArtifactUpdate(_Written, frozen=True):
    task_id: str
    context_id: str
    artifact: _Artifact
    append: bool = False
    last_chunk: bool = False


class _Reply(_Written, frozen=True):
    """SendMessageResponse and StreamResponse: one of these."""

    task: _Task | None = None
    message: Message | None = None
    status_update: _StatusUpdate | None = None
    artifact_update: _ArtifactUpdate | None = None


class _Page(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """All four are always there."""

    tasks: list[_Task]
    next_page_token: str
    page_size: int
    total_size: int


class _Push(_Written, frozen=True):
    id: str | None
    task_id: str
    url: str
    token: str | None = None
    authentication: Any = None


class _Pushes(_Written, frozen=True):
    configs: list[_Push]
    next_page_token: str = ""


_encode = msgspec.json.Encoder().encode


def encode_task(view: TaskView, history_length: int | None = None) -> bytes:
    return _encode(_task(view, history_length))


def encode_sent(view: TaskView, history_length: int | None = None) -> bytes:
    """SendMessageResponse: the task, or the message that is all there is to say."""
    if is_bare_message(view):
        return encode_message(view)
    return _encode(_Reply(_task(view, history_length)))


def encode_snapshot(view: TaskView, history_length: int | None = None) -> bytes:
    """The first frame of a stream: the task, folded where the client's cursor stands."""
    return _encode(_Reply(_task(view, history_length)))


def encode_message(view: TaskView) -> bytes:
    """The only frame of a stream whose agent answers with a bare message."""
    said = bare_message(view)
    return _encode(_Reply(message=message_of(said, None, context_of(view.task), said.message_id or "")))


def encode_page(page: TaskPage, asked: ListTasks) -> bytes:
    tasks = [_task(view, asked.history_length, listed=True, artifacts=asked.include_artifacts) for view in page.tasks]
    return _encode(_Page(tasks, page.next_page_token, page.page_size, page.total_size))


def _task(view: TaskView, length: int | None, *, listed: bool = False, artifacts: bool = True) -> _Task:
    task = view.task
    task_id, context_id = task.id, context_of(task)
    shown: list[_Artifact] | msgspec.UnsetType = msgspec.UNSET
    # Where a listing is asked for artifacts it says so even of none; elsewhere none is simply not there.
    if artifacts and (listed or view.artifacts):
        shown = [
            _Artifact(
                kept.artifact_id, parts_of(kept.parts), kept.name, kept.description, kept.metadata, kept.extensions
            )
            for kept in view.artifacts
        ]
    first, kept = newest_messages(view, length)
    history = [
        message_of(each, task_id, context_id, each.message_id or f"{task_id}-h{at}")
        for at, each in enumerate(kept, start=first)
    ]
    message = None
    if view.message is not None:
        # What ended a task is the last that was said: written once, and told in both places.
        last = kept and kept[-1] is view.message and view.message.message_id is not None
        named = view.message.message_id or f"{task_id}-s{view.generation}"
        message = history[-1] if last else message_of(view.message, task_id, context_id, named)
    return _Task(
        task_id,
        context_id,
        _Status(STATE_NAMES[view.state], message, format_ms(view.updated_at_ms)),
        shown,
        history or msgspec.UNSET,
        Notes(
            generation=view.generation,
            agent=agent_of(task),
            created_at=format_ms(view.created_at_ms),
            partial=view.partial,
            holder_lost=AWAITING_REPAIR if view.holder_lost else None,
            usage=usage_of(view.result),
        ),
    )


def encode_step(task: Task, step: Step) -> bytes:
    """StreamResponse: one step is one frame, live or replayed."""
    what = step.what
    if isinstance(what, ArtifactUpdate):
        artifact = _Artifact(
            what.artifact_id, parts_of(what.parts), what.name, what.description, what.metadata, what.extensions
        )
        update = _ArtifactUpdate(task.id, context_of(task), artifact, what.append, what.last_chunk)
        return _encode(_Reply(artifact_update=update))
    if isinstance(what, Began):
        view = fold((step,))
        assert view is not None
        return encode_snapshot(view)
    return _encode(_Reply(status_update=_status_update(task, step, what)))


def _status_update(task: Task, step: Step, what: News) -> _StatusUpdate:
    news = status_change(task, step.generation, what)
    context_id = context_of(task)
    message = None
    if news.message is not None:
        named = news.message.message_id or f"{task.id}-s{step.generation}"
        message = message_of(news.message, task.id, context_id, named)
    status = _Status(STATE_NAMES[news.state], message, format_ms(step.ts_ms))
    return _StatusUpdate(task.id, context_id, status, _notes(news.result) or news.metadata)


def _notes(result: Result | None) -> Notes | None:
    partial, usage = is_partial(result), usage_of(result)
    return Notes(partial=partial, usage=usage) if partial or usage else None


def encode_push(task_id: str, config: PushConfig) -> bytes:
    return _encode(_push(task_id, config))


def encode_pushes(task_id: str, configs: Sequence[PushConfig], next_page_token: str = "") -> bytes:
    return _encode(_Pushes([_push(task_id, config) for config in configs], next_page_token))


def _push(task_id: str, config: PushConfig) -> _Push:
    return _Push(config.id, task_id, config.url, config.token, config.authentication)
