"""A2A 1.0 over plain HTTP: the same operations, named by method and path, with statuses instead of codes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Final, NamedTuple

import msgspec
from starlette.types import Receive, Scope, Send

from covenant.doors.a2a.admission import TRANSPORT, Admission, AdmittedCaller, Headers
from covenant.doors.a2a.operations import BY_NAME, A2ACall, A2AOperation, A2AServices
from covenant.doors.a2a.sse_stream import write_stream
from covenant.doors.http.responses import JSON, Header, refusal_headers, reply
from covenant.doors.waits import CallerGoneError
from covenant.model.errors import Invalid, NotFound, Refusal
from covenant.wire.a2a.dialects import REQUESTS_V1, V1
from covenant.wire.a2a.error_codes import rest_error
from covenant.wire.sse import SseFormat

log = logging.getLogger(__name__)

A2A_JSON: Final[Header] = (b"content-type", b"application/a2a+json")
_READ: Final = REQUESTS_V1


@dataclass(frozen=True, slots=True)
class RestCall:
    """What an address says besides the agent: the ids in the path, the query, and the body."""

    task_id: str
    config_id: str
    query: bytes = b""
    body: bytes = b"{}"

    @property
    def named(self) -> bytes:
        """The ids as a JSON object."""
        return msgspec.json.encode({"taskId": self.task_id, "id": self.config_id})


class RestRoute(NamedTuple):
    operation: A2AOperation
    decode: Callable[[RestCall], Any]
    """From the address and the body to the request."""


def _row(name: str, decode: Callable[[RestCall], Any]) -> RestRoute:
    return RestRoute(BY_NAME[name], decode)


_SUBSCRIBE: Final = _row("SubscribeToTask", lambda at: _READ.decode_subscribe(at.body, at.task_id))
_PUSHES: Final = "tasks/{}/pushNotificationConfigs"

# What follows the agent's address, with the ids left out.
ROUTES: Final[dict[str, dict[str, RestRoute]]] = {
    "message:send": {"POST": _row("SendMessage", lambda at: _READ.decode_send(at.body))},
    "message:stream": {"POST": _row("SendStreamingMessage", lambda at: _READ.decode_send(at.body))},
    "tasks": {"GET": _row("ListTasks", lambda at: _READ.query_list_tasks(at.query))},
    "tasks/{}": {"GET": _row("GetTask", lambda at: _READ.query_get_task(at.task_id, at.query))},
    "tasks/{}:cancel": {"POST": _row("CancelTask", lambda at: _READ.decode_cancel(at.body, at.task_id))},
    "tasks/{}:subscribe": {"GET": _SUBSCRIBE, "POST": _SUBSCRIBE},
    _PUSHES: {
        "GET": _row("ListTaskPushNotificationConfigs", lambda at: _READ.query_list_push(at.task_id, at.query)),
        "POST": _row("CreateTaskPushNotificationConfig", lambda at: _READ.decode_create_push(at.body, at.task_id)),
    },
    f"{_PUSHES}/{{}}": {
        "GET": _row("GetTaskPushNotificationConfig", lambda at: _READ.decode_get_push(at.named)),
        "DELETE": _row("DeleteTaskPushNotificationConfig", lambda at: _READ.decode_delete_push(at.named)),
    },
    "extendedAgentCard": {"GET": _row("GetExtendedAgentCard", lambda at: _READ.decode_nothing(at.body))},
}


def split_path(path: str) -> tuple[str, str, str]:
    """The key of `ROUTES` for what follows the agent's address, and the ids in it."""
    parts = path.strip("/").split("/")
    if parts[0] != "tasks" or len(parts) == 1:
        return path.strip("/"), "", ""
    task_id, colon, verb = parts[1].partition(":")
    config_id = parts[3] if len(parts) == 4 else ""
    key = "/".join(["tasks", f"{{}}{colon}{verb}", *parts[2:3], *["{}"] * len(parts[3:4]), *parts[4:]])
    return key, task_id, config_id


class RestBinding:
    def __init__(self, gate: Admission, office: A2AServices, *, body_bytes_max: int) -> None:
        self._gate = gate
        self._office = office
        self._body_bytes_max = body_bytes_max

    async def answer(self, agent_id: str, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        headers, started_s = Headers(scope), perf_counter()
        kind = JSON if (headers.get(b"content-type") or "").startswith("application/json") else A2A_JSON
        name = "unknown"
        try:
            visit = await self._gate.enter(scope, headers, agent_id)
            place, task_id, config_id = split_path(path)
            by_method = ROUTES.get(place)
            if by_method is None:
                raise NotFound("unknown_method", "there is no operation at this path")
            found = by_method.get(scope["method"])
            if found is None:
                await _not_allowed(send, kind, tuple(by_method))
                return
            name = found.operation.name
            with self._gate.tenants.limiter.connected(visit.caller):
                body = await self._body(visit, receive, send)
                at = RestCall(task_id, config_id, scope["query_string"], body)
                call = self._gate.call(visit, found.operation, V1, found.decode, at)
                await self._run(found.operation, call, kind, receive, send)
        except CallerGoneError:
            return
        except Exception as error:  # noqa: BLE001  the last stand before the client: a fault of ours tells it nothing
            await self._refuse(send, error, kind, name)
        finally:
            self._gate.meter.timer(TRANSPORT, name).observe(perf_counter() - started_s)

    async def _body(self, visit: AdmittedCaller, receive: Receive, send: Send) -> bytes:
        """What needs nothing may come without one."""
        if visit.scope["method"] != "POST":
            return b"{}"
        body = await self._gate.read_body(visit, receive, send, self._body_bytes_max)
        if not body.isascii():
            try:
                # The decoder does not look into what it skips.
                body.decode()
            except UnicodeDecodeError as wrong:
                raise Invalid("invalid_json", f"the request is not UTF-8: {wrong.reason}") from None
        return body if body.strip() else b"{}"

    async def _run(self, operation: A2AOperation, call: A2ACall, kind: Header, receive: Receive, send: Send) -> None:
        tenants = self._gate.tenants
        if operation.open_stream is None:
            answer = await self._gate.run(operation, self._office, call, send, receive)
            await reply(send, 200, answer, kind=kind)
            return
        with tenants.limiter.streaming(call.ask.caller):
            stream = await operation.open_stream(self._office, call)
            await write_stream(stream, call, SseFormat(), tenancy=tenants.tenancy, receive=receive, send=send)

    async def _refuse(self, send: Send, error: Exception, kind: Header, name: str) -> None:
        if not isinstance(error, Refusal):
            log.error("a2a.failed", extra={"operation": name}, exc_info=error)
        self._gate.meter.refused(TRANSPORT, error.code if isinstance(error, Refusal) else "internal")
        status, body = rest_error(error)
        headers = refusal_headers(error) if isinstance(error, Refusal) else ()
        await reply(send, status, body, headers, kind=kind)


async def _not_allowed(send: Send, kind: Header, methods: tuple[str, ...]) -> None:
    allowed = ", ".join(methods)
    status, body = rest_error(Invalid("method_not_allowed", f"this path takes {allowed}"))
    await reply(send, status, body, [(b"allow", allowed.encode())], kind=kind)
