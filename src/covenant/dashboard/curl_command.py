"""A curl command that sends a task again, or reads it. The command names `$COVENANT_TOKEN`, never the token."""

from __future__ import annotations

import shlex
import uuid
from typing import Any, Final

import msgspec
from starlette.types import Scope

from covenant.dashboard.form_page import DIRECTION_MARKS
from covenant.dashboard.page_endpoint import query_of
from covenant.dashboard.session_operations import run_for
from covenant.dashboard.sessions import UiSession
from covenant.doors.http.host_names import BaseUrl
from covenant.doors.operator_api.operation import Services
from covenant.exchange.tasks.builder import IDEMPOTENCY
from covenant.model import task as tasks
from covenant.model.content import File, Text
from covenant.model.task import DuplicateSafety, Task
from covenant.wire.a2a.parts_v1 import MessageV1, parts_of, unlinked

BEARER: Final = '-H "Authorization: Bearer $COVENANT_TOKEN"'


class CurlCommand(msgspec.Struct, frozen=True, tag="ui_curl", tag_field="kind"):
    text: str


async def curl_page(services: Services, base_url: BaseUrl, session: UiSession, scope: Scope) -> CurlCommand:
    """The command for a task that the session may see."""
    request = {"task_id": query_of(scope).get("task_id", "")}
    shown: Any = await run_for(session, "show_a2a_task", services, request)
    return CurlCommand(curl_command(shown.task, base_url.of(scope)))


def curl_command(task: Task, url: str) -> str:
    """The command for `task` at `url`, the address by which the browser reached the daemon. Characters that change the
    direction of writing are escaped, so the command shows exactly what it sends."""
    headers: list[str] = []
    body: dict[str, Any] | None = None
    if task.origin == tasks.A2A:
        path, body = f"/v1/a2a/agents/{task.recipient.display.partition('@')[0]}", _a2a_body(task, url)
        headers = ["A2A-Version: 1.0", *_key_header(task)]
    elif task.origin == tasks.MAILBOX:
        path, body = "/a2a/tasks", _mailbox_body(task)
    else:
        path = f"/a2a/tasks/{task.id}/show"
    lines = [f"curl -s {shlex.quote(url + path)} {BEARER}"]
    if body is not None:
        headers = ["Content-Type: application/json", *headers]
        lines.append(" ".join(f"-H {shlex.quote(header)}" for header in headers))
        sent = DIRECTION_MARKS.sub(lambda mark: f"\\u{ord(mark[0]):04x}", msgspec.json.encode(body).decode())
        lines.append(f"-d {shlex.quote(sent)}")
    return " \\\n  ".join(lines)


def _a2a_body(task: Task, url: str) -> dict[str, Any]:
    def link(file: File) -> str:
        return url + unlinked(file)

    parts = parts_of(task.parts or (Text(task.intent_text),), link)
    message = MessageV1(
        message_id=str(uuid.uuid4()),
        role="ROLE_USER",
        parts=parts,
        context_id=task.context_id if task.context_id != task.id else None,
        metadata=task.metadata,
        extensions=task.extensions or None,
        reference_task_ids=task.reference_task_ids or None,
    )
    params: dict[str, Any] = {"message": message}
    if task.output_modes:
        params["configuration"] = {"acceptedOutputModes": task.output_modes}
    about = dict(task.request_metadata or {})
    key = task.idempotency
    if key is not None and (key.duplicate_safety is DuplicateSafety.IDEMPOTENT or not _key_header(task)):
        about[IDEMPOTENCY] = {"key": key.key, "duplicate_safety": key.duplicate_safety}
    if about:
        params["metadata"] = about
    return {"jsonrpc": "2.0", "id": 1, "method": "SendMessage", "params": params}


def _key_header(task: Task) -> list[str]:
    """The header with the task's idempotency key; empty if only the metadata can hold it."""
    key = task.idempotency.key if task.idempotency is not None else ""
    return [f"Idempotency-Key: {key}"] if key.isascii() and key.isprintable() and key == key.strip() != "" else []


def _mailbox_body(task: Task) -> dict[str, Any]:
    body = {
        "id": str(uuid.uuid4()),
        "recipient": {"display": task.recipient.display},
        "intent_text": task.intent_text,
        "parts": task.parts,
        "idempotency": task.idempotency,
    }
    return {name: value for name, value in body.items() if value}
