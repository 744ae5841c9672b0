"""The result: what a task's sender drains, once."""

from __future__ import annotations

import enum
import hashlib
from typing import Any

import msgspec

from covenant.model.content import Content, Text
from covenant.model.ids import TaskId
from covenant.model.task import utf8_length


class ResultStatus(enum.StrEnum):
    OK = "ok"
    ERROR = "error"
    PARTIAL = "partial"


class Ending(enum.StrEnum):
    """How a task ended, in A2A's words."""

    COMPLETED = "completed"
    FAILED = "failed"
    CANCELED = "canceled"
    REJECTED = "rejected"


class Cause(enum.StrEnum):
    """What ended a task."""

    RESULT = "result"
    FORCE_ERROR = "force_error"
    CANCEL = "cancel"
    DEADLINE = "deadline_exceeded"
    TIMEOUT = "timeout"
    REPLAY = "replayed"
    LEADER = "leader"


class Result(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    task_id: TaskId
    status: ResultStatus
    content: tuple[Content, ...] = ()
    error_message: str | msgspec.UnsetType = msgspec.UNSET
    """Omitted when absent, unlike `content`, which is always there."""
    metadata: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET
    """What it took: tokens, why it stopped."""
    reply: bool | msgspec.UnsetType = msgspec.UNSET
    """The content is the whole answer, a bare message: who sent the task need not hear of a task at all."""

    @classmethod
    def ok(cls, task_id: TaskId, *content: Content | str) -> Result:
        """Done. A string is a block of text."""
        blocks = tuple(Text(block) if isinstance(block, str) else block for block in content)
        return cls(task_id=task_id, status=ResultStatus.OK, content=blocks)


_encode = msgspec.json.Encoder().encode


def result_digest(result: Result) -> str:
    """SHA-256 of a result: equal digests mean that the same was said again."""
    return hashlib.sha256(_encode(result)).hexdigest()


def weigh_result(result: Result) -> int:
    """How many bytes a result has: what its holder chose freely. Texts alone are not encoded for this."""
    size = utf8_length(result.error_message) if isinstance(result.error_message, str) else 0
    if result.metadata or not all(isinstance(block, Text) for block in result.content):
        return size + len(_encode((result.content, result.metadata or None)))
    return size + sum(utf8_length(block.text) for block in result.content if isinstance(block, Text))


def error_result(task_id: TaskId, message: str) -> Result:
    return Result(task_id=task_id, status=ResultStatus.ERROR, error_message=message)
