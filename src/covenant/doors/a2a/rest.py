"""A2A 1.0 over plain HTTP: the same operations, named by method and path, with statuses instead of codes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any, Final
from urllib.parse import parse_qsl

import msgspec
from starlette.types import Receive, Scope, Send

from covenant.doors.a2a.calling import TRANSPORT, Gate, Headers
from covenant.doors.a2a.departure import Departure
from covenant.doors.a2a.operations import BY_NAME, Asked, Office, Operation
from covenant.doors.a2a.pouring import pour
from covenant.doors.a2a.replies import A2A_JSON, JSON, reply_json
from covenant.doors.http.body import read_body
from covenant.doors.http.reply import Header, refusal_headers
from covenant.doors.waiting import CallerGoneError
from covenant.model.errors import Invalid, NotFound, Refusal
from covenant.wire import a2a_v1
from covenant.wire.a2a_errors import Dialect, rest_error
from covenant.wire.sse import Framing

log = logging.getLogger(__name__)

QUERY_FIELDS_MAX: Final = 100


@dataclass(frozen=True, slots=True)
class Found:
    """What an address says: which operation, and the ids in the path."""

    operation: Operation
    decode: Callable[[bytes, str, str, int | None], Any]
    """From the params, the task's id, the configuration's id and the cursor to the request."""
    in_body: bool


def _row(name: str, decode: Callable[[bytes, str, str, int | None], Any], *, in_body: bool = False) -> Found:
    return Found(BY_NAME[name], decode, in_body)


def _push_of(params: bytes, task_id: str, config_id: str) -> bytes:
    return msgspec.json.encode({**msgspec.json.decode(params or b"{}"), "taskId": task_id, "id": config_id})


_SUBSCRIBE: Final = _row(
    "SubscribeToTask", lambda params, task, _, cursor: a2a_v1.decode_subscribe(params, cursor, task)
)
_PUSHES: Final = "tasks/{}/pushNotificationConfigs"

# The place after the agent's address, with ids left out. `None` among the methods is what the path alone allows.
ROUTES: Final[dict[str, dict[str, Found]]] = {
    "message:send": {
        "POST": _row("SendMessage", lambda params, _, __, ___: a2a_v1.decode_send(params), in_body=True),
    },
    "message:stream": {
        "POST": _row("SendStreamingMessage", lambda params, _, __, ___: a2a_v1.decode_send(params), in_body=True),
    },
    "tasks": {"GET": _row("ListTasks", lambda params, _, __, ___: a2a_v1.decode_list_tasks(params))},
    "tasks/{}": {"GET": _row("GetTask", lambda params, task, _, __: a2a_v1.decode_get_task(params, task))},
    "tasks/{}:cancel": {
        "POST": _row("CancelTask", lambda params, task, _, __: a2a_v1.decode_cancel(params, task), in_body=True),
    },
    "tasks/{}:subscribe": {"GET": _SUBSCRIBE, "POST": _SUBSCRIBE},
    _PUSHES: {
        "GET": _row(
            "ListTaskPushNotificationConfigs", lambda params, task, _, __: a2a_v1.decode_list_push(params, task)
        ),
        "POST": _row(
            "CreateTaskPushNotificationConfig",
            lambda params, task, _, __: a2a_v1.decode_create_push(params, task),
            in_body=True,
        ),
    },
    f"{_PUSHES}/{{}}": {
        "GET": _row(
            "GetTaskPushNotificationConfig",
            lambda params, task, config, _: a2a_v1.decode_get_push(_push_of(params, task, config)),
        ),
        "DELETE": _row(
            "DeleteTaskPushNotificationConfig",
            lambda params, task, config, _: a2a_v1.decode_delete_push(_push_of(params, task, config)),
        ),
    },
    "extendedAgentCard": {
        "GET": _row("GetExtendedAgentCard", lambda params, _, __, ___: a2a_v1.decode_nothing(params)),
    },
}


def place_of(path: str) -> tuple[str, str, str]:
    """The key of `ROUTES` for what follows the agent's address, and the ids in it."""
    parts = path.strip("/").split("/")
    if parts[0] != "tasks" or len(parts) == 1:
        return path.strip("/"), "", ""
    task_id, colon, verb = parts[1].partition(":")
    config_id = parts[3] if len(parts) == 4 else ""
    key = "/".join(["tasks", f"{{}}{colon}{verb}", *parts[2:3], *["{}"] * len(parts[3:4]), *parts[4:]])
    return key, task_id, config_id


class Rest:
    def __init__(self, gate: Gate, office: Office, *, body_bytes_max: int) -> None:
        self._gate = gate
        self._office = office
        self._body_bytes_max = body_bytes_max

    async def answer(self, agent_id: str, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        headers, started_s = Headers(scope), perf_counter()
        kind = JSON if (headers.get(b"content-type") or "").startswith("application/json") else A2A_JSON
        name = "unknown"
        try:
            visit = await self._gate.enter(scope, headers, agent_id)
            place, task_id, config_id = place_of(path)
            by_method = ROUTES.get(place)
            if by_method is None:
                raise NotFound("unknown_method", "there is no operation at this path")
            found = by_method.get(scope["method"])
            if found is None:
                await _not_allowed(send, kind, tuple(by_method))
                return
            name = found.operation.name
            params = await self._params(found, scope, receive)
            decode = partial(found.decode, params, task_id, config_id)
            asked = self._gate.asked(visit, found.operation, Dialect.V1, decode)
            await self._run(found.operation, asked, kind, receive, send)
        except CallerGoneError:
            return
        except Exception as error:  # noqa: BLE001  the last stand before the client: a fault of ours tells it nothing
            await self._refuse(send, error, kind, name)
        finally:
            self._gate.meter.timer(TRANSPORT, name).observe(perf_counter() - started_s)

    async def _params(self, found: Found, scope: Scope, receive: Receive) -> bytes:
        body = await read_body(scope, receive, self._body_bytes_max) if scope["method"] == "POST" else b""
        if found.in_body or body.strip():
            return body if body.strip() else b"{}"
        return query_as_json(scope["query_string"])

    async def _run(self, operation: Operation, asked: Asked, kind: Header, receive: Receive, send: Send) -> None:
        with self._gate.working(asked.ask.caller, works=operation.works):
            if operation.streams:
                stream = await operation.run(self._office, asked)
                await pour(stream, asked, Framing(), tenancy=self._gate.tenants.tenancy, receive=receive, send=send)
                return
            with Departure(receive) as departure:
                answer = await operation.run(self._office, asked)
            if not departure.gone:
                await reply_json(send, operation.encode(a2a_v1, answer, asked.request), kind=kind)

    async def _refuse(self, send: Send, error: Exception, kind: Header, name: str) -> None:
        if not isinstance(error, Refusal):
            log.error("a2a.failed", extra={"operation": name}, exc_info=error)
        self._gate.meter.refused(TRANSPORT, error.code if isinstance(error, Refusal) else "internal")
        status, body = rest_error(error)
        headers = refusal_headers(error) if isinstance(error, Refusal) else ()
        await reply_json(send, body, status=status, kind=kind, headers=headers)


async def _not_allowed(send: Send, kind: Header, methods: tuple[str, ...]) -> None:
    allowed = ", ".join(methods)
    _, body = rest_error(Invalid("method_not_allowed", f"this path takes {allowed}"))
    await reply_json(send, body, status=405, kind=kind, headers=[(b"allow", allowed.encode())])


_BOOLEANS: Final = {"true": True, "false": False}


def query_as_json(query: bytes) -> bytes:
    """A query's fields as an object: what the JSON rules then read, numbers written as strings among them."""
    if not query:
        return b"{}"
    try:
        fields = dict(parse_qsl(query.decode("ascii"), keep_blank_values=True, max_num_fields=QUERY_FIELDS_MAX))
    except ValueError:
        raise Invalid("invalid_params", "the query cannot be read") from None
    return msgspec.json.encode({name: _BOOLEANS.get(value, value) for name, value in fields.items()})
