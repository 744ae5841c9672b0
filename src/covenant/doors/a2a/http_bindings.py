"""A2A over HTTP, under one prefix: JSON-RPC at `…/{agent}`, 1.0 as plain HTTP below it, and 0.3 below `…/{agent}/v1`.

JSON-RPC has both dialects, told apart by the method's name. The order of checks is authentication, limits, JSON,
envelope, method, version, agent, params. A refusal before the call is decoded has an HTTP status, too; a later one
comes with status 200, as JSON-RPC requires. Plain HTTP names the same operations by method and path, and has statuses
instead of codes.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Iterator, Mapping
from functools import partial
from time import perf_counter
from typing import Any, Final, NamedTuple, TypeVar

import msgspec
from starlette.types import ASGIApp, Scope, Send

from covenant.doors.a2a.admission import TRANSPORT, Admission, AdmittedCaller, CallerScope, Headers, headers_of
from covenant.doors.a2a.operations import (
    BY_NAME,
    METHODS,
    OPERATIONS,
    A2ACall,
    A2AOperation,
    A2AServices,
    RpcMethod,
    skip_params,
)
from covenant.doors.http.endpoint import TOO_SLOW, serve_stream
from covenant.doors.http.openapi import DescribedRoute
from covenant.doors.http.responses import NO_STORE, PROBLEM, refusal_headers, reply, reply_not_allowed
from covenant.doors.http.server.http_exchange import Header, HttpExchange
from covenant.doors.http.server.http_refusals import JSON
from covenant.doors.waits import CallerGoneError
from covenant.exchange.tasks.reader import TaskStream
from covenant.model.errors import Invalid, NotFound, OverLimit, Refusal, Unauthenticated
from covenant.wire import jsonrpc
from covenant.wire.a2a.dialects import PROTO_V03, V03, V1, Dialect
from covenant.wire.a2a.error_codes import Version, rest_error
from covenant.wire.a2a.request_decoder import query_params
from covenant.wire.sse import KEEP_ALIVE, SseFormat

EMPTY_BODIES: Final = frozenset({b"", b"null"})
log = logging.getLogger(__name__)
PREFIX: Final = "/v1/a2a/agents/"
CARDS: Final = frozenset({"agent-card.json", ".well-known/agent-card.json"})
"""The paths of the card below the agent's address. Official clients use the second."""
A2A_JSON: Final[Header] = (b"content-type", b"application/a2a+json")
EVENT_STREAM: Final[Header] = (b"content-type", b"text/event-stream")
E = TypeVar("E", bound=Exception)


async def _write_frames(stream: TaskStream, call: A2ACall, sse: SseFormat, send: Send) -> None:
    first, reply, responses = stream.first, stream.reply, call.dialect.responses
    if reply is not None:
        frame = sse.frame(reply.generation, responses.encode_message(reply, call.link))
        await send({"type": "http.response.body", "body": frame, "more_body": False})
        return
    history_length = getattr(call.request, "history_length", None)
    frame = sse.frame(first.generation, responses.encode_snapshot(first, history_length, call.link))
    await send({"type": "http.response.body", "body": frame, "more_body": True})
    task, encode = first.task, responses.encode_step
    async for steps in stream:
        body = sse.frames([(step.generation, encode(task, step, call.link)) for step in steps]) if steps else KEEP_ALIVE
        await send({"type": "http.response.body", "body": body, "more_body": True})
    await send({"type": "http.response.body", "body": TOO_SLOW if stream.cut else b"", "more_body": False})


Routes = Mapping[str, Mapping[str, A2AOperation]]
"""The operations by path below the agent's address, with `{}` in place of ids, and by method."""


def _routes(**names: str) -> Routes:
    """The routes that both versions have. `names`: further paths, each with the operation that a GET runs."""
    push = "TaskPushNotificationConfig"
    paths: dict[str, dict[str, str]] = {
        "message:send": {"POST": "SendMessage"},
        "message:stream": {"POST": "SendStreamingMessage"},
        "tasks/{}": {"GET": "GetTask"},
        "tasks/{}:cancel": {"POST": "CancelTask"},
        "tasks/{}:subscribe": {"GET": "SubscribeToTask", "POST": "SubscribeToTask"},
        "tasks/{}/pushNotificationConfigs": {"GET": f"List{push}s", "POST": f"Create{push}"},
        "tasks/{}/pushNotificationConfigs/{}": {"GET": f"Get{push}", "DELETE": f"Delete{push}"},
        **{path: {"GET": name} for path, name in names.items()},
    }
    return {path: {method: BY_NAME[name] for method, name in named.items()} for path, named in paths.items()}


class RestDialect(NamedTuple):
    """One version of A2A as plain HTTP: its prefix below the agent's address, and its routes."""

    prefix: str
    dialect: Dialect
    card_dialect: Dialect
    routes: Routes


REST_V1: Final = RestDialect("", V1, V1, _routes(tasks="ListTasks", extendedAgentCard="GetExtendedAgentCard"))
# Official clients of 0.3 read its card, unlike every other object, in the form that it has over JSON-RPC.
REST_V03: Final = RestDialect("v1/", PROTO_V03, V03, _routes(card="GetExtendedAgentCard"))


class A2AObject(msgspec.Struct, frozen=True):
    """An object of A2A as ProtoJSON; the protocol's specification lists its fields."""


def _described() -> Iterator[DescribedRoute]:
    """JSON-RPC, then each route of plain HTTP."""
    agent = f"{PREFIX}{{agent_id}}"
    rpc = "Call an operation of an agent by JSON-RPC, in the dialect of 1.0 or of 0.3; streams are server-sent events"
    yield DescribedRoute("POST", agent, "a2a_json_rpc", rpc, jsonrpc.JsonRpcResponse, request=jsonrpc.JsonRpcRequest)
    for prefix, dialect, _, routes in (REST_V1, REST_V03):
        suffix = "" if dialect is V1 else "_v03"
        for route_key, by_method in routes.items():
            path = prefix + route_key.replace("{}", "{task_id}", 1).replace("{}", "{config_id}")
            for method, operation in by_method.items():
                yield DescribedRoute(
                    method,
                    f"{agent}/{path}",
                    f"a2a_{operation.name}_{method.lower()}{suffix}",
                    f"{operation.name} of A2A {dialect.version.value}",
                    A2AObject,
                    request=A2AObject if method == "POST" else None,
                    body_required=operation.may_block,
                    streams=operation.open_stream is not None,
                )


DESCRIBED: Final = tuple(_described())


def split_path(path: str) -> tuple[str, list[str]]:
    """The key of a path in a table of routes, and the ids in the path: a task's, and a push configuration's."""
    parts = path.strip("/").split("/")
    if parts[0] != "tasks" or len(parts) == 1:
        return path.strip("/"), []
    task_id, colon, verb = parts[1].partition(":")
    key = "/".join(["tasks", f"{{}}{colon}{verb}", *parts[2:3], *["{}"] * len(parts[3:4]), *parts[4:]])
    return key, [task_id, *parts[3:4]]


class _Binding:
    def __init__(self, admission: Admission, services: A2AServices, *, body_bytes_max: int) -> None:
        self._admission = admission
        self._services = services
        self._body_bytes_max = body_bytes_max
        self._timers = {operation.name: admission.meter.timer(TRANSPORT, operation.name) for operation in OPERATIONS}

    async def _run(
        self,
        operation: A2AOperation,
        call: A2ACall,
        exchange: HttpExchange,
        *,
        wrapper: tuple[bytes, bytes] = (b"", b""),
        content_type: Header = JSON,
    ) -> None:
        """Answers or streams. `wrapper`: the bytes before and after each answer or event."""
        if call.ask.extensions and (active := self._admission.activated(call)):
            exchange.add_headers(((b"a2a-extensions", active.encode("latin-1")),))
        if operation.open_stream is None:
            assert operation.run is not None
            if operation.may_block:
                with CallerScope(self._admission.tenants.tenancy, call.ask.caller, exchange):
                    result = await operation.run(self._services, call)
            else:
                result = await operation.run(self._services, call)
            answer = operation.encode(self._services, call, result)
            exchange.answer(200, (content_type, NO_STORE), answer.join(wrapper))
            return
        tenants = self._admission.tenants
        with tenants.limiter.streaming(call.ask.caller):
            stream = await operation.open_stream(self._services, call)
            write = partial(_write_frames, stream, call, SseFormat(*wrapper, named=call.dialect.named_events))
            await serve_stream(stream, call.ask.caller, write, tenants.tenancy, exchange)


class RestBinding(_Binding):
    async def answer(self, agent_id: str, path: str, scope: Scope, exchange: HttpExchange) -> None:
        headers, started_s = headers_of(scope), perf_counter()
        served = REST_V03 if path.startswith(REST_V03.prefix) else REST_V1
        plain_json = served is REST_V03 or (headers.get(b"content-type") or "").startswith("application/json")
        content_type = JSON if plain_json else A2A_JSON
        error_type = A2A_JSON if "application/a2a+json" in (headers.get(b"accept") or "") else JSON
        name = "unknown"
        try:
            admitted = await self._admission.enter(scope, headers, agent_id)
            route_key, ids = split_path(path.removeprefix(served.prefix))
            by_method = served.routes.get(route_key)
            if by_method is None:
                raise NotFound("unknown_method", "there is no operation at this path; /docs lists all operations")
            operation = by_method.get(scope["method"])
            if operation is None:
                _not_allowed(exchange, error_type, tuple(by_method), served.dialect)
                return
            name = operation.name
            with self._admission.tenants.limiter.connected(admitted.caller):
                body = await self._body(admitted, exchange)

                def decode(body: bytes) -> Any:
                    read = operation.decode(served.dialect.requests)
                    return read(query_params(scope["query_string"]) if scope["method"] == "GET" else body, *ids)

                pushes_off = operation.pushes and self._services.pushes is None
                dialect = served.card_dialect if operation.name == "GetExtendedAgentCard" else served.dialect
                call = self._admission.call(admitted, operation, dialect, skip_params if pushes_off else decode, body)
                await self._run(operation, call, exchange, content_type=content_type)
        except CallerGoneError:
            return
        except Exception as error:  # noqa: BLE001  (an internal error tells the client nothing)
            self._refuse(exchange, content_refusal(error, headers), error_type, name, served.dialect)
        finally:
            self._admission.meter.timer(TRANSPORT, name).observe(perf_counter() - started_s)

    async def _body(self, admitted: AdmittedCaller, exchange: HttpExchange) -> bytes:
        """The body. A request that needs none may have none, or `null`, as the official client in Go sends it."""
        if admitted.scope["method"] != "POST":
            return b"{}"
        body = await self._admission.read_body(admitted, exchange, self._body_bytes_max)
        if not body.isascii():
            try:
                # The decoder does not check strings that it skips.
                body.decode()
            except UnicodeDecodeError as wrong:
                raise Invalid("invalid_json", f"the request is not UTF-8: {wrong.reason}") from None
        return body if body.strip() not in EMPTY_BODIES else b"{}"

    def _refuse(
        self, exchange: HttpExchange, error: Exception, content_type: Header, name: str, dialect: Dialect
    ) -> None:
        if not isinstance(error, Refusal):
            log.error("a2a.failed", extra={"operation": name}, exc_info=error)
        self._admission.meter.refused(TRANSPORT, error.code if isinstance(error, Refusal) else "internal")
        status, body = rest_error(error, dialect.version)
        headers = refusal_headers(error) if isinstance(error, Refusal) else ()
        reply(exchange, status, body, headers, content_type=content_type)


def _not_allowed(exchange: HttpExchange, content_type: Header, methods: tuple[str, ...], dialect: Dialect) -> None:
    allowed = ", ".join(methods)
    status, body = rest_error(Invalid("method_not_allowed", f"this path takes {allowed}"), dialect.version)
    reply(exchange, status, body, [(b"allow", allowed.encode())], content_type=content_type)


class JsonRpcBinding(_Binding):
    async def answer(self, agent_id: str, scope: Scope, exchange: HttpExchange) -> None:
        admission, headers, call_id = self._admission, headers_of(scope), jsonrpc.NULL
        meter = admission.meter
        try:
            admitted = await admission.enter(scope, headers, agent_id)
            with admission.tenants.limiter.connected(admitted.caller):
                body = exchange.take_whole_body(self._body_bytes_max)
                if body is None:
                    body = await admission.read_body(admitted, exchange, self._body_bytes_max)
                call = jsonrpc.decode_call(body)
                call_id = call.id
                method = METHODS.get(call.method)
                if method is None:
                    raise jsonrpc.unknown_method(call)
                operation, dialect, decode = method
                if operation.pushes and self._services.pushes is None:
                    decode = skip_params
                started_s = perf_counter()
                try:
                    request = admission.call(admitted, operation, dialect, decode, call.params)
                    await self._run(operation, request, exchange, wrapper=jsonrpc.result_frame(call.id))
                except (OverLimit, Unauthenticated, CallerGoneError):
                    # Answered below, with its HTTP status.
                    raise
                except Refusal as refusal:
                    meter.refused(TRANSPORT, refusal.code)
                    _refuse_call(exchange, call_id, refusal, method)
                except Exception as error:  # the client is told nothing of the cause; the log has it
                    log.exception("a2a.failed", extra={"operation": operation.name})
                    meter.refused(TRANSPORT, "internal")
                    _refuse_call(exchange, call_id, error, method)
                finally:
                    self._timers[operation.name].observe(perf_counter() - started_s)
        except jsonrpc.UnreadableCall as unreadable:
            problem = content_refusal(unreadable, headers)
            meter.refused(TRANSPORT, problem.code)
            reply(exchange, 200, jsonrpc.encode_refusal(unreadable.id, problem, Version.V1))
        except Refusal as refusal:
            meter.refused(TRANSPORT, refusal.code)
            reply_with_status(exchange, refusal, call_id)
        except CallerGoneError:
            return


def _refuse_call(exchange: HttpExchange, call_id: bytes, error: Exception, method: RpcMethod) -> None:
    """Refuses a call. Clients of 0.3 read the answer to a stream as a stream, so there it is one event."""
    body = jsonrpc.encode_refusal(call_id, error, method.dialect.version)
    if method.dialect is V03 and method.operation.open_stream is not None:
        reply(exchange, 200, b"event: message\ndata: %b\n\n" % body, content_type=EVENT_STREAM)
    else:
        reply(exchange, 200, body)


def reply_with_status(exchange: HttpExchange, refusal: Refusal, call_id: bytes = jsonrpc.NULL) -> None:
    """Refuses with an HTTP status; the body is JSON-RPC's error object."""
    body = jsonrpc.encode_refusal(call_id, refusal, Version.V1)
    reply(exchange, refusal.status, body, refusal_headers(refusal))


def content_refusal(error: E, headers: Headers) -> E | Refusal:
    """The refusal of an unreadable body. If the body does not claim to be JSON, its content type is refused."""
    if not isinstance(error, Refusal) or error.code != "invalid_json":
        return error
    content_type = (headers.get(b"content-type") or "").partition(";")[0].strip().lower()
    if not content_type or content_type.endswith(("/json", "+json")):
        return error
    return Invalid("content_type_not_supported", f"{error.message}; its Content-Type is {content_type[:100]!r}")


async def _refuse_method(exchange: HttpExchange) -> None:
    reply_not_allowed(exchange, PROBLEM, ("GET", "HEAD", "POST"))


class A2ADoor:
    """`cards` serves the cards of agents, which are documents and not operations."""

    def __init__(self, admission: Admission, services: A2AServices, cards: ASGIApp, *, body_bytes_max: int) -> None:
        self._rpc = JsonRpcBinding(admission, services, body_bytes_max=body_bytes_max)
        self._rest = RestBinding(admission, services, body_bytes_max=body_bytes_max)
        self._cards = cards

    def serve(self, scope: Scope, exchange: HttpExchange) -> Awaitable[None]:
        agent_id, _, subpath = scope["path"][len(PREFIX) :].partition("/")
        subpath = subpath.rstrip("/")
        if not subpath:
            if scope["method"] == "POST":
                return self._rpc.answer(agent_id, scope, exchange)
            if scope["method"] in ("GET", "HEAD"):
                return self._cards(scope, exchange.receive, exchange)
            return _refuse_method(exchange)
        if subpath in CARDS:
            return self._cards(scope, exchange.receive, exchange)
        return self._rest.answer(agent_id, subpath, scope, exchange)

    def refusal_form(self, path: str, refusal: Refusal) -> tuple[tuple[Header, ...], bytes]:
        """The headers and body of a refusal before there is a call to answer."""
        _, _, subpath = path[len(PREFIX) :].partition("/")
        if not subpath.rstrip("/"):
            return (JSON, *refusal_headers(refusal)), jsonrpc.encode_refusal(jsonrpc.NULL, refusal, Version.V1)
        return (JSON, *refusal_headers(refusal)), rest_error(refusal)[1]
