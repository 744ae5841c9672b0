"""The simple door: `POST /a2a/tasks/send` and `GET /a2a/tasks/{task_id}`, for a tenant's callers.

The order of checks is authentication, the tenant's limits, size, JSON, depth, agent, chain, this door's own rate. A
refusal is `{"error", "code"}` under its true status; one code goes with each status.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from covenant.doors.http.endpoint import TenantCall
from covenant.doors.http.openapi import route
from covenant.doors.http.responses import Style
from covenant.exchange.simple import SimpleExchange, SimpleSend
from covenant.model.errors import Invalid, NotFound
from covenant.model.task import Hop
from covenant.wire.simple import CODES, A2ATask, A2ATaskSendRequest, SimpleError, decode_send, task_of

SEND: Final = "/a2a/tasks/send"
TASK: Final = "/a2a/tasks/{task_id}"
BODY_BYTES_MAX: Final = 1024 * 1024

NO_MESSAGE: Final = "message: must be given, and not be blank"
NO_TASK: Final = "Task not found"

_encode = msgspec.json.Encoder().encode


def asked_for(request: A2ATaskSendRequest, hop: Hop | None = None) -> SimpleSend:
    """`params` counts as a whole where it is given, except that the depth may stand beside it."""
    given: Any = request.params if request.params is not None else request
    if given.message is None or not given.message.strip():
        raise Invalid("invalid_request", NO_MESSAGE)
    return SimpleSend(
        message=given.message,
        skill=given.skill,
        timeout_ms=given.timeout_ms,
        depth=given.depth or request.depth or 1,
        source_agent=request.source_agent,
        hop=hop,
    )


STYLE: Final = Style(lambda refusal: _encode(SimpleError(error=refusal.message, code=CODES[refusal.status])))


class SimpleDoor:
    def __init__(self, tasks: SimpleExchange) -> None:
        self._tasks = tasks

    @route(
        "POST",
        SEND,
        "Give a text to your first agent that has a project; answers with the task at once",
        request=A2ATaskSendRequest,
        refusal=SimpleError,
    )
    async def send_simple_task(self, asked: TenantCall) -> tuple[int, A2ATask]:
        request = asked_for(decode_send(asked.body), asked.call_context)
        return 200, task_of(await self._tasks.send(asked.caller, request))

    @route("GET", TASK, "A task that was sent by this door, as it is now", refusal=SimpleError)
    async def get_simple_task(self, asked: TenantCall) -> tuple[int, A2ATask]:
        try:
            return 200, task_of(await self._tasks.get(asked.caller, asked.path["task_id"]))
        except NotFound:
            raise NotFound("unknown_task", NO_TASK) from None
