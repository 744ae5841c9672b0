"""The simple door: `POST /a2a/tasks/send` and `GET /a2a/tasks/{task_id}`, for a tenant's callers.

The order of checks is authentication, the tenant's limits, size, JSON, depth, agent, chain, this door's own rate. A
refusal is `{"error", "code"}` under its true status; one code goes with each status.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from time import perf_counter
from typing import Any, Final

import msgspec
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from covenant.doors.http.bearer_auth import TRANSPORT, TenantGate
from covenant.doors.http.endpoint import MethodRouter, TenantRequest, read_call_headers
from covenant.doors.http.openapi import Described
from covenant.doors.http.request_body import BODY_TOO_LARGE, read_body
from covenant.doors.http.responses import CLOSE, Header, refusal_headers, reply
from covenant.doors.metrics import Meter
from covenant.doors.waits import CallerGoneError
from covenant.exchange.simple import SimpleExchange, SimpleSend
from covenant.model.call_context import Hop
from covenant.model.errors import Invalid, NotFound, Refusal
from covenant.wire.simple import CODES, A2ATask, A2ATaskSendRequest, SimpleError, decode_send, task_of

SEND: Final = "/a2a/tasks/send"
TASK: Final = "/a2a/tasks/{task_id}"
BODY_BYTES_MAX: Final = 1024 * 1024

NO_MESSAGE: Final = "message: must be given, and not be blank"
NO_TASK: Final = "Task not found"

log = logging.getLogger(__name__)
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


class SimpleDoor:
    def __init__(self, tasks: SimpleExchange, gate: TenantGate) -> None:
        self._tasks = tasks
        self._gate = gate

    async def send(self, asked: TenantRequest, hop: Hop | None) -> A2ATask:
        request = asked_for(decode_send(asked.body), hop)
        return task_of(await self._tasks.send(asked.caller, request))

    async def get(self, asked: TenantRequest, hop: Hop | None) -> A2ATask:  # noqa: ARG002  (no call is made by looking)
        try:
            return task_of(await self._tasks.get(asked.caller, asked.path["task_id"]))
        except NotFound:
            raise NotFound("unknown_task", NO_TASK) from None


class SimpleCall:
    """One route as an ASGI callable."""

    def __init__(
        self,
        gate: TenantGate,
        meter: Meter,
        name: str,
        run: Callable[[TenantRequest, Hop | None], Awaitable[A2ATask]],
        *,
        body_bytes_max: int,
    ) -> None:
        self._gate = gate
        self._meter = meter
        self._timer = meter.timer(TRANSPORT, name)
        self._name = name
        self._run = run
        self._body_bytes_max = body_bytes_max

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started_s = perf_counter()
        try:
            caller = await self._gate.enter(scope)
            with self._gate.limiter.connected(caller):
                body = await read_body(scope, receive, self._body_bytes_max)
                asked = TenantRequest(caller, scope["path_params"], scope["query_string"], body)
                task = await self._run(asked, read_call_headers(scope))
                await reply(send, 200, _encode(task))
        except Refusal as refusal:
            self._meter.refused(TRANSPORT, refusal.code)
            closing = (CLOSE,) if refusal.code == BODY_TOO_LARGE else ()
            await refuse(send, refusal.status, refusal.message, (*refusal_headers(refusal), *closing))
        except CallerGoneError:
            return
        except Exception:  # the last stand before the client: it hears nothing of what went wrong
            log.exception("http.failed", extra={"operation": self._name})
            self._meter.refused(TRANSPORT, "internal")
            await refuse(send, 500, "internal error")
        finally:
            self._timer.observe(perf_counter() - started_s)


async def refuse(send: Send, status: int, message: str, headers: tuple[Header, ...] = ()) -> None:
    await reply(send, status, _encode(SimpleError(error=message, code=CODES[status])), headers)


class _ByMethod(MethodRouter):
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] in self.calls:
            await super().__call__(scope, receive, send)
            return
        allowed = ", ".join(self.calls)
        await refuse(send, 405, f"this path takes {allowed}", ((b"allow", allowed.encode()),))


DESCRIBED: Final = (
    Described(
        path=SEND,
        method="POST",
        name="send_simple_task",
        summary="Give a text to your first agent that has a project; answers with the task at once",
        request=A2ATaskSendRequest,
        answer=A2ATask,
        refusal=SimpleError,
    ),
    Described(
        path=TASK,
        method="GET",
        name="get_simple_task",
        summary="A task that was sent by this door, as it is now",
        answer=A2ATask,
        refusal=SimpleError,
    ),
)


def simple_routes(
    tasks: SimpleExchange, gate: TenantGate, meter: Meter, *, body_bytes_max: int = BODY_BYTES_MAX
) -> list[BaseRoute]:
    door = SimpleDoor(tasks, gate)
    runs = {"send_simple_task": door.send, "get_simple_task": door.get}
    routes: list[BaseRoute] = []
    for each in DESCRIBED:
        call = SimpleCall(gate, meter, each.name, runs[each.name], body_bytes_max=body_bytes_max)
        routes.append(Route(each.path, _ByMethod({each.method: call}), name=each.path))
    return routes
