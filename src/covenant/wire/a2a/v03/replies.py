"""What a client hears by a slash method: `kind` on everything, lowercase states, `final` where a stream ends.

Task metadata has our keys (`covenant.`) and those that clients of this dialect may know (`x-arbiter.`).
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
from covenant.model.usage import usage_in
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
from covenant.wire.a2a.v03.parts import Message, Part, message_of, parts_of
from covenant.wire.timestamps import format_ms

DELETED: Final = b"null"

_THEIRS: Final = ("agent_id", "input_tokens", "output_tokens", "stop_reason", "error")


def _key(name: str) -> str:
    return f"x-arbiter.{name}" if name in _THEIRS else f"covenant.{name}"


class Notes(msgspec.Struct, frozen=True, gc=False, rename=_key, omit_defaults=True, kw_only=True):
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


class _Task(_Written, frozen=True, tag_field="kind", tag="task"):
    id: str
    context_id: str
    status: _Status
    artifacts: list[_Artifact] | msgspec.UnsetType = msgspec.UNSET
    history: list[Message] | msgspec.UnsetType = msgspec.UNSET
    metadata: Notes | None = None


class _StatusUpdate(_Written, frozen=True, tag_field="kind", tag="status-update"):
    task_id: str
    context_id: str
    status: _Status
    final: bool
    metadata: dict[str, Any] | Notes | None = None


class _ArtifactUpdate(_Written, frozen=True, tag_field="kind", tag="artifact-update"):
    """Clients of this dialect may look for both flags."""

    task_id: str
    context_id: str
    artifact: _Artifact
    append: bool
    last_chunk: bool


class _Page(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    tasks: list[_Task]
    next_page_token: str
    page_size: int
    total_size: int


class _Authentication(_Written, frozen=True):
    schemes: list[str]
    credentials: str | None = None


class _Config(_Written, frozen=True):
    id: str | None
    url: str
    token: str | None = None
    authentication: _Authentication | None = None


class _Push(_Written, frozen=True):
    task_id: str
    push_notification_config: _Config


_encode = msgspec.json.Encoder().encode


def encode_task(view: TaskView, history_length: int | None = None) -> bytes:
    return _encode(_task(view, history_length))


def encode_sent(view: TaskView, history_length: int | None = None) -> bytes:
    """The task, or the message that is all there is to say."""
    return encode_message(view) if is_bare_message(view) else encode_task(view, history_length)


def encode_snapshot(view: TaskView, history_length: int | None = None) -> bytes:
    """The first frame of a stream: the task, folded where the client's cursor stands."""
    return encode_task(view, history_length)


def encode_message(view: TaskView) -> bytes:
    """The only frame of a stream whose agent answers with a bare message."""
    return _encode(message_of(bare_message(view), None, context_of(view.task), ""))


def encode_page(page: TaskPage, asked: ListTasks) -> bytes:
    tasks = [_task(view, asked.history_length, listed=True, artifacts=asked.include_artifacts) for view in page.tasks]
    return _encode(_Page(tasks, page.next_page_token, page.page_size, page.total_size))


def _task(view: TaskView, length: int | None, *, listed: bool = False, artifacts: bool = True) -> _Task:
    task = view.task
    task_id, context_id = task.id, context_of(task)
    message = None
    if view.message is not None:
        message = message_of(view.message, task_id, context_id, f"{task_id}-s{view.generation}")
    shown: list[_Artifact] | msgspec.UnsetType = msgspec.UNSET
    if artifacts and (listed or view.artifacts):
        shown = [
            _Artifact(
                kept.artifact_id,
                parts_of(kept.parts),
                kept.name,
                kept.description,
                kept.metadata,
                kept.extensions,
            )
            for kept in view.artifacts
        ]
    first, kept_messages = newest_messages(view, length)
    history = [
        message_of(each, task_id, context_id, f"{task_id}-h{at}") for at, each in enumerate(kept_messages, start=first)
    ]
    return _Task(
        task_id,
        context_id,
        _Status(view.state.value, message, format_ms(view.updated_at_ms)),
        shown,
        history or msgspec.UNSET,
        _notes(
            task,
            view.result,
            generation=view.generation,
            created_at=format_ms(view.created_at_ms),
            holder_lost=AWAITING_REPAIR if view.holder_lost else None,
        ),
    )


def _notes(
    task: Task,
    result: Result | None,
    *,
    generation: int | None = None,
    created_at: str | None = None,
    holder_lost: str | None = None,
) -> Notes:
    usage = usage_of(result) or {}
    tokens = usage_in(usage)
    error = result.error_message if result is not None else None
    return Notes(
        generation=generation,
        created_at=created_at,
        partial=is_partial(result),
        holder_lost=holder_lost,
        agent_id=agent_of(task),
        input_tokens=tokens.get("input_tokens"),
        output_tokens=tokens.get("output_tokens"),
        stop_reason=usage.get("stop_reason"),
        error=error if isinstance(error, str) else None,
        usage=usage or None,
    )


def encode_step(task: Task, step: Step) -> bytes:
    """One step is one frame, live or replayed."""
    what = step.what
    if isinstance(what, ArtifactUpdate):
        artifact = _Artifact(
            what.artifact_id, parts_of(what.parts), what.name, what.description, what.metadata, what.extensions
        )
        return _encode(_ArtifactUpdate(task.id, context_of(task), artifact, what.append, what.last_chunk))
    if isinstance(what, Began):
        view = fold((step,))
        assert view is not None
        return encode_snapshot(view)
    return _encode(_status_update(task, step, what))


def _status_update(task: Task, step: Step, what: News) -> _StatusUpdate:
    news = status_change(task, step.generation, what)
    context_id = context_of(task)
    message = None
    if news.message is not None:
        message = message_of(news.message, task.id, context_id, f"{task.id}-s{step.generation}")
    # In this dialect a stream is one interaction: it also ends where the agent waits for its client.
    final = news.state.terminal or news.state.waits
    status = _Status(news.state.value, message, format_ms(step.ts_ms))
    metadata = news.metadata if news.result is None else _notes(task, news.result)
    return _StatusUpdate(task.id, context_id, status, final, metadata)


def encode_push(task_id: str, config: PushConfig) -> bytes:
    return _encode(_push(task_id, config))


def encode_pushes(task_id: str, configs: Sequence[PushConfig], next_page_token: str = "") -> bytes:  # noqa: ARG001
    """All of them: this dialect has no pages here."""
    return _encode([_push(task_id, config) for config in configs])


def _push(task_id: str, config: PushConfig) -> _Push:
    given = config.authentication
    authentication = _Authentication([given.scheme], given.credentials) if given is not None else None
    return _Push(task_id, _Config(config.id, config.url, config.token, authentication))
