"""One route as an ASGI callable: authenticate, limit, read the body, run, encode; or refuse. Each request is measured.

The order of checks is authentication, limits, size, JSON, types. Nothing is buffered for an unknown caller, and the
answer to an internal error reveals nothing of its cause.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from time import perf_counter
from typing import Any, Final, Generic, TypeVar

import msgspec
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from covenant.doors.http.bearer_auth import TenantAuth, audit_refused_caller, credential_of, principal_of, token_in
from covenant.doors.http.openapi import DescribedRoute, routes_of
from covenant.doors.http.request_body import BODY_TOO_LARGE, read_body
from covenant.doors.http.responses import (
    PROBLEM,
    Style,
    reply,
    reply_not_allowed,
    reply_refused,
    style_of,
)
from covenant.doors.http.server.http_exchange import HEADERS_BY_NAME, Header, HttpExchange, exchange_of
from covenant.doors.http.server.http_refusals import CLOSE, internal
from covenant.doors.metrics import Meter
from covenant.doors.operator_api.operation import ApiAnswer, ApiContext, ApiOperation, expand_ids, has_short_id
from covenant.doors.waits import CallerGoneError, on_disconnect, while_connected
from covenant.exchange.access.principals import Principal
from covenant.exchange.access.tenants import Caller, TenantAccess, unauthenticated
from covenant.exchange.tasks.reader import TaskStream
from covenant.model.errors import Refusal, Unauthenticated
from covenant.model.task import Hop
from covenant.wire.call_headers import HEADERS, read_call_context
from covenant.wire.json_input import check_fields, decode, decode_query
from covenant.wire.mailbox import Request
from covenant.wire.sse import comment

_NO_LIMIT: Final = nullcontext()

R = TypeVar("R", bound=Request)

Run = Callable[["TenantCall"], Awaitable[tuple[int, Any]]]
"""Returns a status and the answer, to be encoded as JSON."""
Writer = Callable[[Send], Awaitable[None]]
"""Writes a stream as the body of a response."""
Follow = Callable[["TenantCall"], Awaitable[tuple[TaskStream, Writer]]]

_STREAM_HEADERS: Final = [
    (b"content-type", b"text/event-stream"),
    (b"cache-control", b"no-cache"),
    # Otherwise a proxy would collect frames until its buffer is full.
    (b"x-accel-buffering", b"no"),
]
TOO_SLOW: Final = comment("the reader is too slow; the task goes on: resume with Last-Event-ID")
_REVOKED: Final = comment("the token is no longer valid; the task goes on")
_encode = msgspec.json.Encoder().encode

log = logging.getLogger(__name__)


class Endpoint(ABC):
    """The base of the routes: `_answer` answers, or raises a refusal, which is sent in the route's style."""

    _streams = False
    """Whether the answer is a stream: then `_answer` measures the time until it begins."""

    def __init__(self, name: str, style: Style, meter: Meter) -> None:
        self._name = name
        self._style = style
        self._meter = meter
        self._timer = meter.timer(style.transport, name)

    async def __call__(self, scope: Scope, _: Receive, send: Send) -> None:
        started_s, exchange = perf_counter(), exchange_of(send)
        try:
            await self._answer(scope, exchange)
        except CallerGoneError:
            return
        except Exception as error:  # noqa: BLE001  (the client is told nothing of the cause)
            self._refuse(exchange, error)
        finally:
            if not self._streams:
                self._timer.observe(perf_counter() - started_s)

    @abstractmethod
    async def _answer(self, scope: Scope, exchange: HttpExchange) -> None:
        """`scope` has the parameters in the path; of the dashboard's operations it is not the exchange's own."""

    def _refuse(self, exchange: HttpExchange, error: Exception, headers: Sequence[Header] = ()) -> None:
        if not isinstance(error, Refusal):
            log.error(self._style.failed, extra={"operation": self._name}, exc_info=error)
            error = internal()
        self._meter.refused(self._style.transport, error.code)
        if exchange.begun:
            return  # too late for another answer: the server aborts this one
        closing = (CLOSE,) if error.code == BODY_TOO_LARGE else ()
        reply_refused(exchange, self._style, error, (*headers, *closing))


class OperationEndpoint(Endpoint, Generic[R]):
    """An operation of the mailbox or of operators, by the token of an identity."""

    def __init__(
        self, operation: ApiOperation[R], api: ApiContext, *, body_bytes_max: int, style: Style | None = None
    ) -> None:
        super().__init__(operation.kind, style or style_of(operation.path), api.meter)
        self._operation = operation
        self._run = operation.run
        self._services = api.services
        self._identity_auth = api.identity_auth
        self._waits = api.waits
        self._limiter = api.limiter
        self._encode = api.encode
        self._body_bytes_max = body_bytes_max
        self._decoder = msgspec.json.Decoder(operation.request)
        self._in_body = operation.in_body
        self._has_path_params = "{" in operation.path
        # For every GET without a query. Requests are frozen, so all such calls share one object.
        self._default_request = msgspec.convert({}, operation.request) if not operation.in_body else None

    async def _answer(self, scope: Scope, exchange: HttpExchange) -> None:
        credential = credential_of(scope)
        caller = principal_of(self._identity_auth, credential)
        if caller is None and self._operation.for_tenants:
            caller = self._tenant(credential)
        if caller is None:
            raise await audit_refused_caller(self._identity_auth, scope, credential, self._services.tenancy)
        body = b""
        if self._in_body:
            found = exchange.take_whole_body(self._body_bytes_max)
            body = await read_body(scope, exchange.receive, self._body_bytes_max) if found is None else found
            if found is None and caller.tenant is not None:
                self._services.tenancy.check_valid(caller)
            elif found is None and not self._identity_auth.is_valid(caller):
                raise await audit_refused_caller(self._identity_auth, scope, credential, self._services.tenancy)
        request = self._request(scope, body)
        if request.ids and has_short_id(request):
            request = await expand_ids(self._services, caller, request)
        if self._operation.wait is not None and getattr(request, "wait_ms", None):
            answer = await self._wait(caller, request, scope, exchange)
        else:
            answer = await self._run(self._services, caller, request)
        reply(exchange, self._operation.status, self._encode(answer))

    def _tenant(self, credential: bytes | None) -> Principal | None:
        """The tenant of this credential, with one request of its rate spent."""
        token = token_in(credential) if credential is not None else None
        found = self._services.tenancy.recognise(token) if token is not None else None
        if found is None or self._limiter is None:
            return None
        self._limiter.admit(found)
        client = self._services.catalogue.client(found.tenant.name)
        return Principal(client, operator=False, token_sha256=found.token_sha256, tenant=found.tenant.name)

    def _request(self, scope: Scope, body: bytes) -> R:
        if self._in_body:
            # A request without required fields may come without a body.
            request = decode(self._decoder, body if body.strip() else b"{}")
            if request.strict and body.strip():
                check_fields(body, self._operation.request)
        elif self._default_request is not None and not scope["query_string"]:
            request = self._default_request
        else:
            request = decode_query(self._operation.request, scope["query_string"])
        if self._has_path_params:
            return msgspec.structs.replace(request, **scope["path_params"])
        return request

    async def _wait(self, caller: Principal, request: R, scope: Scope, exchange: HttpExchange) -> ApiAnswer:
        wait = self._operation.wait
        assert wait is not None
        if not exchange.body_complete:
            # While a part of the request is unread, the server does not notice that the caller leaves.
            await read_body(scope, exchange.receive, self._body_bytes_max)
        with self._waits.pause(caller) as pause, on_disconnect(exchange, pause.leave):
            return await wait(self._services, caller, request, pause)


class TenantCall:
    """One request of a tenant, with its body read but not decoded."""

    __slots__ = ("body", "caller", "scope")

    def __init__(self, caller: Caller, scope: Scope, body: bytes) -> None:
        self.caller = caller
        self.scope = scope
        self.body = body

    @property
    def path(self) -> Mapping[str, str]:
        """The parameters in the path, by their names in the route."""
        path_params: Mapping[str, str] = self.scope["path_params"]
        return path_params

    @property
    def query(self) -> bytes:
        query_string: bytes = self.scope["query_string"]
        return query_string

    def header(self, name: bytes) -> str | None:
        value: bytes | None = self.scope[HEADERS_BY_NAME].get(name)
        return value.decode("latin-1") if value is not None else None

    @property
    def call_context(self) -> Hop | None:
        """The chain of calls before this one, from headers; None without such headers."""
        found = {HEADERS[name]: value.decode("latin-1") for name, value in self.scope["headers"] if name in HEADERS}
        return read_call_context(None, found) if found else None


class TenantEndpoint(Endpoint):
    """A route for the token of a tenant, within its limits: an answer in JSON, or a stream of events."""

    def __init__(
        self,
        route: DescribedRoute,
        run: Run | Follow,
        auth: TenantAuth,
        meter: Meter,
        style: Style,
        *,
        body_bytes_max: int,
    ) -> None:
        super().__init__(route.name, style, meter)
        self._streams = route.streams
        self._run: Any = run
        self._auth = auth
        self._body_bytes_max = body_bytes_max

    async def _answer(self, scope: Scope, exchange: HttpExchange) -> None:
        caller = await self._auth.enter(scope)
        limiter = self._auth.limiter
        with limiter.connected(caller), limiter.streaming(caller) if self._streams else _NO_LIMIT:
            found = exchange.take_whole_body(self._body_bytes_max)
            body = await read_body(scope, exchange.receive, self._body_bytes_max) if found is None else found
            if found is None:
                self._auth.tenancy.check_valid(caller)
            request = TenantCall(caller, scope, body)
            if not self._streams:
                status, answer = await self._run(request)
                reply(exchange, status, _encode(answer))
                return
            started_s = perf_counter()
            try:
                stream, write = await self._run(request)
            finally:
                self._timer.observe(perf_counter() - started_s)
            await serve_stream(stream, caller, write, self._auth.tenancy, exchange)


async def serve_stream(
    stream: TaskStream, caller: Caller, write: Writer, tenancy: TenantAccess, exchange: HttpExchange
) -> None:
    """Serves a stream, which `write` formats. If the caller leaves or its token ends, the stream ends, not the task."""
    try:
        with (
            stream,
            while_connected(exchange) as work,
            tenancy.session(caller, lambda: work.end(unauthenticated())),
        ):
            await exchange({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
            await write(exchange)
    except Unauthenticated:
        await exchange({"type": "http.response.body", "body": _REVOKED, "more_body": False})
    except CallerGoneError:
        return


class MethodRouter:
    """The routes of one path, by method. Another method is refused with the list of methods."""

    def __init__(self, calls: Mapping[str, ASGIApp], style: Style | None = None) -> None:
        self.calls = calls
        self._style = style

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = self.calls.get(scope["method"])
        if call is None:
            reply_not_allowed(exchange_of(send), self._style or style_of(scope["path"]), self.calls)
        else:
            await call(scope, receive, send)


def described_routes(
    described: Iterable[DescribedRoute], calls: Mapping[str, ASGIApp], style: Style | None = None
) -> list[BaseRoute]:
    """The routes of these descriptions, each with the callable that answers it, by name."""
    return routes_of_calls(((each.method, each.path, calls[each.name]) for each in described), style)


def routes_of_calls(calls: Iterable[tuple[str, str, ASGIApp]], style: Style | None = None) -> list[BaseRoute]:
    """The routes of these callables, each with its method and path. Paths with parameters come last."""
    paths: dict[str, dict[str, ASGIApp]] = {}
    for method, path, call in calls:
        paths.setdefault(path, {})[method] = call
    ordered = sorted(paths.items(), key=lambda each: "{" in each[0])
    return [Route(path, MethodRouter(by_method, style), name=path) for path, by_method in ordered]


def tenant_routes(
    door: object, auth: TenantAuth, meter: Meter, *, body_bytes_max: int, style: Style = PROBLEM
) -> list[BaseRoute]:
    """The routes that the methods of `door` answer: each a `Run`, or a `Follow`."""
    described = routes_of(type(door))
    calls: dict[str, ASGIApp] = {
        each.name: TenantEndpoint(each, getattr(door, each.name), auth, meter, style, body_bytes_max=body_bytes_max)
        for each in described
    }
    return described_routes(described, calls, style)
