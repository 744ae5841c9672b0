"""The HTTP door as one ASGI application.

In front stands a look-up of the four routes that carry the traffic; everything else goes through the router. No request
reaches a route before its `Host` is allowed, and whatever a route fails to catch becomes a plain 500.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from covenant.doors.answers import encode, encode_legacy
from covenant.doors.http.call import Call
from covenant.doors.http.health import Health
from covenant.doors.http.hosts import LOOPBACK, Hosts
from covenant.doors.http.openapi import Described, Page, document
from covenant.doors.http.origins import Origins, reply_preflight
from covenant.doors.http.reference import page as reference_page
from covenant.doors.http.reply import reply_internal, reply_not_found, reply_refused, speaks_plainly
from covenant.doors.http.routes import ByMethod
from covenant.doors.metrics import Meter
from covenant.doors.operation import AnyOperation, Office
from covenant.doors.peers import PeerDesk
from covenant.doors.table import OPERATIONS
from covenant.doors.waiting import Waits
from covenant.exchange.catalogue import Catalogue
from covenant.exchange.doorkeeper import Doorkeeper
from covenant.exchange.mailbox import MailboxExchange
from covenant.exchange.registry import Registry
from covenant.exchange.tenancy import Tenancy
from covenant.ledger.contract import Ledger
from covenant.model.errors import Forbidden
from covenant.wire.frames import FRAME_BYTES_MAX

BODY_BYTES_MAX: Final = FRAME_BYTES_MAX
HOT: Final = frozenset({"send_a2a_task", "try_recv_a2a_task", "post_a2a_result", "try_recv_a2a_result"})

PAGES: Final = (
    Page(path="/healthz", summary="Whether the process is alive", content_type="application/json"),
    Page(path="/health", summary="The same, under its older name", content_type="application/json"),
    Page(path="/readyz", summary="Whether it can take work; 503 says why not", content_type="application/json"),
    Page(path="/metrics", summary="Numbers for Prometheus", content_type="text/plain"),
    Page(path="/version", summary="Which protocol is spoken here", content_type="application/json"),
    Page(path="/openapi.json", summary="This document", content_type="application/json"),
    Page(path="/docs", summary="This document, for people", content_type="text/html"),
)

log = logging.getLogger(__name__)


class HttpDoor:
    """`router` has every route, the hot ones too."""

    def __init__(
        self,
        router: Router,
        hot: Mapping[tuple[str, str], ASGIApp],
        hosts: Hosts,
        origins: Origins,
        under: Sequence[tuple[str, ASGIApp]] = (),
    ) -> None:
        self.router = router
        self._hot = hot
        self._under = tuple(under)
        self._hosts = hosts
        self._origins = origins
        self._any_origins = bool(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.router(scope, receive, send)
            return
        if not self._hosts.allows(scope):
            refusal = Forbidden("host_not_allowed", "this daemon is not called by that name; see http.allowed_hosts")
            await reply_refused(send, refusal)
            return
        if self._any_origins and (origin := self._origins.of(scope)) is not None:
            send = self._origins.marked(send, origin)
            if scope["method"] == "OPTIONS":
                await reply_preflight(send)
                return
        path: str = scope["path"]
        hot = self._hot.get((scope["method"], path))
        if hot is not None:
            await hot(scope, receive, send)
            return
        for prefix, door in self._under:
            if path.startswith(prefix):
                await door(scope, receive, send)
                return
        await self._route(scope, receive, send)

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def noting(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self.router(scope, receive, noting)
        except Exception:  # the last stand before the client: it hears nothing of what went wrong
            log.exception("http.failed", extra={"path": scope["path"]})
            if started:
                raise
            await reply_internal(send, plain=speaks_plainly(scope["path"]))


def build_http(
    *,
    exchange: MailboxExchange,
    registry: Registry,
    tenancy: Tenancy,
    catalogue: Catalogue,
    doorkeeper: Doorkeeper,
    ledger: Ledger,
    waits: Waits,
    meter: Meter,
    version: str,
    allowed_hosts: Sequence[str] = LOOPBACK,
    origins: Sequence[str] = (),
    body_bytes_max: int = BODY_BYTES_MAX,
    legacy_kinds: bool = False,
    metrics_token: str = "",
    peers: PeerDesk | None = None,
    more_routes: Sequence[BaseRoute] = (),
    under: Sequence[tuple[str, ASGIApp]] = (),
    described: Sequence[Described] = (),
) -> HttpDoor:
    """`waits` and `meter` are shared with the local socket. `more_routes` are other doors on the same port, and `under`
    those that answer for everything below a prefix; `described` is what the OpenAPI document says of them."""
    office = Office(exchange, registry, ledger, tenancy, catalogue, peers)
    calls = {
        operation.kind: Call(
            operation,
            office,
            doorkeeper,
            waits,
            meter,
            encode=encode_legacy if legacy_kinds else encode,
            body_bytes_max=body_bytes_max,
        )
        for operation in OPERATIONS
    }
    health = Health(ledger, waits, meter, server=f"covenant/{version}", metrics_token=metrics_token)
    routes = [*_operation_routes(calls), *_page_routes(health, version, described), *more_routes]
    router = Router(routes, redirect_slashes=False, default=_not_found)
    hot: dict[tuple[str, str], ASGIApp] = {
        (operation.method, operation.path): calls[operation.kind] for operation in OPERATIONS if operation.kind in HOT
    }
    return HttpDoor(router, hot, Hosts(allowed_hosts), Origins(origins), under)


def _operation_routes(calls: Mapping[str, ASGIApp]) -> list[BaseRoute]:
    paths: dict[str, dict[str, ASGIApp]] = {}
    for operation in sorted(OPERATIONS, key=_hot_first):
        paths.setdefault(operation.path, {})[operation.method] = calls[operation.kind]
    return [Route(path, ByMethod(by_method), name=path) for path, by_method in paths.items()]


def _hot_first(operation: AnyOperation) -> bool:
    return operation.kind not in HOT


def _page_routes(health: Health, version: str, others: Sequence[Described]) -> list[BaseRoute]:
    described = document(OPERATIONS, PAGES, version, others)
    as_json, as_html = msgspec.json.encode(described), reference_page(described)

    async def openapi(_: Request) -> Response:
        return Response(as_json, media_type="application/json")

    async def docs(_: Request) -> Response:
        policy = {"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'"}
        return Response(as_html, headers=policy, media_type="text/html")

    endpoints = {
        "/healthz": health.alive,
        "/health": health.alive,
        "/readyz": health.ready,
        "/metrics": health.metrics,
        "/version": health.version,
        "/openapi.json": openapi,
        "/docs": docs,
    }
    routes: list[BaseRoute] = []
    for page in PAGES:
        call = Route(page.path, endpoints[page.path]).app
        routes.append(Route(page.path, ByMethod({"GET": call, "HEAD": call}), name=page.path))
    return routes


async def _not_found(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.close"})
        return
    await reply_not_found(send, plain=speaks_plainly(scope["path"]))
