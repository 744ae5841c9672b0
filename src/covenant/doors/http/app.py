"""All HTTP doors as one.

The prefix of A2A and the four routes of the mailbox that carry its traffic are looked up first; all other requests go
through the router. No request reaches a route before its `Host` is allowed.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final

import msgspec
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute, Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from covenant.doors.a2a.http_bindings import PREFIX, A2ADoor
from covenant.doors.http.endpoint import OperationEndpoint, routes_of_calls
from covenant.doors.http.health import Health
from covenant.doors.http.host_names import LOOPBACK, AllowedHosts, AllowedOrigins, cors_headers, reply_preflight
from covenant.doors.http.openapi import DescribedRoute, Page, Reference, document
from covenant.doors.http.responses import MAILBOX, refusal_form, reply_refused, style_of
from covenant.doors.http.server.bounds import DEFAULTS
from covenant.doors.http.server.http_exchange import HEADERS_BY_NAME, Door, Header, HttpExchange, exchange_of
from covenant.doors.operator_api.operation import ApiContext
from covenant.doors.operator_api.operation_table import OPERATIONS
from covenant.model.errors import Forbidden, NotFound, Refusal
from covenant.model.task import Hop
from covenant.model.tracing import Tracer, trace_of
from covenant.wire.call_headers import TRACEPARENT, TRACESTATE, read_call_context

HOT: Final = frozenset({"send_a2a_task", "try_recv_a2a_task", "post_a2a_result", "try_recv_a2a_result"})

PAGES: Final = (
    Page("/", "Where to begin; a browser is redirected to the dashboard"),
    Page("/healthz", "Whether the process is alive"),
    Page("/health", "The same, under its older name"),
    Page("/readyz", "Whether the daemon accepts work; 503 says why not"),
    Page("/metrics", "Numbers for Prometheus", "text/plain"),
    Page("/version", "The version of the protocol"),
    Page("/openapi.json", "This document"),
    Page("/docs", "This document, for people", "text/html"),
)

LINKS: Final = {
    "agent": "/v1/a2a/agents/{name}",
    "index": "/v1/a2a/agents/index",
    "card": "/.well-known/agent-card.json",
    "docs": "/docs",
    "openapi": "/openapi.json",
    "alive": "/healthz",
    "ready": "/readyz",
    "metrics": "/metrics",
}
"""The addresses in the answer at `/`: an agent (GET: its card, POST: A2A), the agent `index`, which passes each message
on, the card for callers without a token, the reference for people and for programs, and the daemon's health."""
_TRACE_NAMES: Final = {TRACEPARENT.encode(): TRACEPARENT, TRACESTATE.encode(): TRACESTATE}


class HttpDoor:
    """`router` has every route, the hot ones too."""

    def __init__(
        self,
        router: Router,
        hot: Mapping[tuple[str, str], ASGIApp],
        hosts: AllowedHosts,
        origins: AllowedOrigins,
        a2a: A2ADoor | None = None,
    ) -> None:
        self.router = router
        self._hot = hot
        self._a2a = a2a
        self._hosts = hosts
        self._host_decisions = hosts.decisions
        self._origins = origins
        self._any_origins = bool(origins)

    def serve(self, exchange: HttpExchange) -> Awaitable[None]:
        """Returns the awaitable of the answer: a coroutine around it would cost time at each suspension."""
        scope = exchange.scope
        if not self._host_decisions.get(scope[HEADERS_BY_NAME].get(b"host")) and not self._hosts.allows(scope):
            return _refuse_host(exchange)
        if self._any_origins and (origin := self._origins.of(scope)) is not None:
            exchange.add_headers(cors_headers(origin))
            if scope["method"] == "OPTIONS":
                return reply_preflight(exchange)
        path: str = scope["path"]
        if self._a2a is not None and path.startswith(PREFIX):
            return self._a2a.serve(scope, exchange)
        hot = self._hot.get((scope["method"], path))
        return (hot or self.router)(scope, exchange.receive, exchange)

    def refusal_form(self, path: str, refusal: Refusal) -> tuple[tuple[Header, ...], bytes]:
        """The headers and body of a refusal, in the form of the door at this path."""
        if self._a2a is not None and path.startswith(PREFIX):
            return self._a2a.refusal_form(path, refusal)
        return refusal_form(style_of(path), refusal)


async def _refuse_host(exchange: HttpExchange) -> None:
    refusal = Forbidden(
        "host_not_allowed",
        "the Host header names a host that this daemon does not serve; the operator adds it to http.allowed_hosts",
    )
    reply_refused(exchange, MAILBOX, refusal)


def build_http(
    api: ApiContext,
    *,
    allowed_hosts: Sequence[str] = LOOPBACK,
    origins: Sequence[str] = (),
    body_bytes_max: int = DEFAULTS.body_bytes_max,
    metrics_token: str = "",
    notices: Callable[[], Sequence[str]] = tuple,
    more_routes: Sequence[BaseRoute] = (),
    a2a: A2ADoor | None = None,
    described: Sequence[DescribedRoute] = (),
    dashboard: str = "",
) -> HttpDoor:
    """`more_routes` are other doors on the same port; `a2a` answers for everything below its prefix. `described` has
    the routes of both for the OpenAPI document. `dashboard`: where `/` redirects a browser, if anywhere. `notices`:
    problems that `/readyz` reports to the operator."""
    calls = {
        operation.kind: OperationEndpoint(operation, api, body_bytes_max=body_bytes_max) for operation in OPERATIONS
    }
    health = Health(api, metrics_token=metrics_token, notices=notices)
    served = routes_of_calls((operation.method, operation.path, calls[operation.kind]) for operation in OPERATIONS)
    routes = [*served, *_page_routes(health, api.version, described, dashboard), *more_routes]
    router = Router(routes, redirect_slashes=False, default=_not_found)
    hot: dict[tuple[str, str], ASGIApp] = {
        (operation.method, operation.path): calls[operation.kind] for operation in OPERATIONS if operation.kind in HOT
    }
    return HttpDoor(router, hot, AllowedHosts(allowed_hosts), AllowedOrigins(origins), a2a)


def _page_routes(health: Health, version: str, described: Sequence[DescribedRoute], dashboard: str) -> list[BaseRoute]:
    reference = Reference(lambda: document(OPERATIONS, PAGES, version, described))

    async def openapi(_: Request) -> Response:
        return Response((await reference.read()).document, media_type="application/json")

    async def docs(_: Request) -> Response:
        policy = {"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'"}
        return Response((await reference.read()).page, headers=policy, media_type="text/html")

    links = {**LINKS, "dashboard": dashboard} if dashboard else LINKS
    welcomed = msgspec.json.encode({"name": "Covenant", "version": version, "links": links})

    async def welcome(request: Request) -> Response:
        if dashboard and "text/html" in request.headers.get("accept", ""):
            return RedirectResponse(dashboard, status_code=303)
        return Response(welcomed, media_type="application/json")

    endpoints = {
        "/": welcome,
        "/healthz": health.alive,
        "/health": health.alive,
        "/readyz": health.ready,
        "/metrics": health.metrics,
        "/version": health.version,
        "/openapi.json": openapi,
        "/docs": docs,
    }
    apps = {path: Route(path, endpoint).app for path, endpoint in endpoints.items()}
    return routes_of_calls((method, page.path, apps[page.path]) for page in PAGES for method in ("GET", "HEAD"))


async def _not_found(scope: Scope, _: Receive, send: Send) -> None:
    unknown = NotFound("unknown_route", "there is no route at this path; GET / says where to begin")
    reply_refused(exchange_of(send), style_of(scope["path"]), unknown)


class TracedDoor:
    """Serves each request within the trace that its headers name."""

    def __init__(self, door: Door, tracer: Tracer) -> None:
        self._door = door
        self._tracer = tracer

    async def serve(self, exchange: HttpExchange) -> None:
        trace = trace_of(_trace_headers(exchange.scope))
        if trace is None:
            await self._door.serve(exchange)
            return
        with self._tracer.within(trace):
            await self._door.serve(exchange)


def _trace_headers(scope: Scope) -> Hop:
    return read_call_context(
        None, {_TRACE_NAMES[name]: value.decode("latin-1") for name, value in scope["headers"] if name in _TRACE_NAMES}
    )
