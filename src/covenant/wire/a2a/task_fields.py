"""What both dialects tell alike of a task, before either has written a word of it."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from covenant.model.result import Result, ResultStatus
from covenant.model.task import Task
from covenant.model.task_event import Continued, Ended, MessageUpdate, Started, StatusUpdate
from covenant.model.task_view import TaskState, TaskView, final_message, status_message

USAGE: Final = "covenant.usage"
"""In metadata: what the work took."""
AWAITING_REPAIR: Final = "worker lost, awaiting repair"

News = Started | StatusUpdate | MessageUpdate | Continued | Ended
"""What is told as a status."""


class StatusChange(msgspec.Struct, frozen=True, gc=False):
    """The state that a step brought, and what was said with it."""

    state: TaskState
    message: MessageUpdate | None = None
    metadata: dict[str, Any] | None = None
    result: Result | None = None


_WORKING: Final = StatusChange(TaskState.WORKING)


def status_change(task: Task, generation: int, what: News) -> StatusChange:
    match what:
        case Started() | Continued():
            return _WORKING
        case StatusUpdate(state=state, metadata=metadata) as update:
            return StatusChange(TaskState(state), status_message(task.id, update, generation), metadata)
        case MessageUpdate() as message:
            return StatusChange(TaskState.WORKING, message)
        case Ended(ending, result):
            return StatusChange(TaskState(ending.value), final_message(result, ending), result=result)


def context_of(task: Task) -> str:
    """A task that no client put into a context is a context of its own."""
    return task.context_id or task.id


def agent_of(task: Task) -> str:
    return task.recipient.display.partition("@")[0]


def usage_of(result: Result | None) -> dict[str, Any] | None:
    if result is None or result.metadata is msgspec.UNSET:
        return None
    return result.metadata or None


def is_partial(result: Result | None) -> bool:
    return result is not None and result.status is ResultStatus.PARTIAL


def newest_messages(view: TaskView, length: int | None) -> tuple[int, tuple[MessageUpdate, ...]]:
    """The last `length` messages, all if nobody said how many, and how many stand before them."""
    if length is None or length >= len(view.history):
        return 0, view.history
    first = len(view.history) - length
    return first, view.history[first:]


def bare_message(view: TaskView) -> MessageUpdate:
    """The reply that stands for itself, without a task."""
    assert view.result is not None
    usage = usage_of(view.result)
    metadata = {USAGE: usage} if usage else None
    return MessageUpdate(parts=view.result.content, message_id=f"{view.task.id}-r", metadata=metadata)


def is_bare_message(view: TaskView) -> bool:
    return view.result is not None and view.result.reply is True
