"""Checks of mailbox requests, before anything is looked up."""

from __future__ import annotations

from typing import Final

from covenant.exchange.tasks.builder import check_blocks
from covenant.model.content import Text
from covenant.model.errors import Invalid, TooLarge
from covenant.model.ids import REQUEST_ID_LENGTH_MAX
from covenant.model.question import PersonDecision
from covenant.model.retry_policy import ForceError, RepairCommand
from covenant.model.task import Task, fingerprint
from covenant.model.task_event import MessageUpdate

REASON_LENGTH_MAX: Final = 2_000
NAME_LENGTH_MAX: Final = 1_000


def check_task(task: Task, bytes_max: int) -> str:
    """Refuses an invalid task. Returns the task's digest."""
    if not task.intent_text.strip():
        raise Invalid("invalid_task", "invalid task: intent_text must not be empty")
    if task.task_kind is not None and not 0 < len(task.task_kind.strip()) <= NAME_LENGTH_MAX:
        raise Invalid("invalid_task", "invalid task: task_kind must not be empty when present, nor over 1000")
    if task.idempotency is not None and not 0 < len(task.idempotency.key.strip()) <= NAME_LENGTH_MAX:
        raise Invalid("invalid_task", "invalid task: idempotency key must not be empty, nor over 1000")
    for name, value in (("deadline_ms", task.deadline_ms), ("timeout_ms", task.timeout_ms)):
        if value is not None and value <= 0:
            raise Invalid("invalid_task", f"invalid task: {name} must be positive")
    if task.parent == task.id:
        raise Invalid("invalid_task", "invalid task: a task cannot be its own parent")
    digest, size = fingerprint(task)
    if size > bytes_max:
        raise TooLarge("task_too_large", f"the task has {size} bytes; the limit is {bytes_max}")
    check_blocks(task.parts, "parts")
    return digest


def check_reason(reason: str, what: str) -> str:
    if not reason.strip():
        raise Invalid("invalid_reason", f"invalid {what} request: reason must not be empty")
    if len(reason) > REASON_LENGTH_MAX:
        raise Invalid("invalid_reason", f"reason must have at most {REASON_LENGTH_MAX} characters")
    return reason


def check_repair(command: RepairCommand, reason: str) -> None:
    check_reason(reason, "repair")
    if isinstance(command, ForceError) and not command.message.strip():
        raise Invalid("invalid_repair", "invalid repair request: force_error message must not be empty")


def check_limit(limit: int, most: int, name: str = "limit") -> int:
    if not 1 <= limit <= most:
        raise Invalid("invalid_limit", f"{name} must be between 1 and {most}")
    return limit


def check_request_id(request_id: str | None) -> None:
    if request_id is not None and not 0 < len(request_id.strip()) <= REQUEST_ID_LENGTH_MAX:
        raise Invalid("invalid_request_id", f"request_id must have 1 to {REQUEST_ID_LENGTH_MAX} characters")


def read_answer(given: str | PersonDecision) -> MessageUpdate:
    """The sender's answer to an agent's question, as a message to the task."""
    if isinstance(given, PersonDecision):
        if len(given.reason) > REASON_LENGTH_MAX:
            raise Invalid("invalid_reason", f"reason must have at most {REASON_LENGTH_MAX} characters")
        return MessageUpdate(role="user", parts=given.as_parts())
    if not given.strip():
        raise Invalid("invalid_answer", "the answer must not be empty")
    return MessageUpdate(role="user", parts=(Text(given),))


def check_size(encoded: bytes, bytes_max: int, what: str) -> None:
    if len(encoded) > bytes_max:
        raise TooLarge(f"{what}_too_large", f"the {what} has {len(encoded)} bytes; the limit is {bytes_max}")
