"""The doors of a daemon: HTTP with all that it serves, the local socket, gRPC, MCP and push notifications."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from ipaddress import ip_address
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from starlette.routing import BaseRoute

import covenant
from covenant.daemon.home import SOCKET_NAME, read_token_file
from covenant.daemon.listeners import PEER_CONNECTIONS_MAX, make_server
from covenant.daemon.schedulers import Scheduler
from covenant.daemon.settings import HttpSettings, Settings
from covenant.daemon.settings_loader import Loaded, Source, rows
from covenant.daemon.wiring.agents import Agents, check_push
from covenant.daemon.wiring.core import Base
from covenant.dashboard.dashboard import Dashboard
from covenant.dashboard.page_endpoint import HOME
from covenant.dashboard.sessions import Sessions
from covenant.doors import native, simple
from covenant.doors.a2a import cards as a2a_cards
from covenant.doors.a2a.admission import Admission
from covenant.doors.a2a.cards import CardPages, PublishedAgent, extended_cards
from covenant.doors.a2a.http_bindings import DESCRIBED as A2A_DESCRIBED
from covenant.doors.a2a.http_bindings import A2ADoor
from covenant.doors.a2a.operations import A2AServices
from covenant.doors.a2a.own_agents import ActingTenantAuth, OwnAgents
from covenant.doors.file_transfer import DESCRIBED as FILES_DESCRIBED
from covenant.doors.file_transfer import FileAccess, file_routes
from covenant.doors.http import endpoint
from covenant.doors.http.app import HttpDoor, TracedDoor, build_http
from covenant.doors.http.bearer_auth import TenantAuth, certificate_credential
from covenant.doors.http.frame_capture import capture_into
from covenant.doors.http.host_names import AllowedOrigins, BaseUrl, as_host
from covenant.doors.http.openapi import routes_of
from covenant.doors.http.request_body import AnonymousPool
from covenant.doors.http.server.http_exchange import HttpExchange
from covenant.doors.http.server.http_server import HttpServer
from covenant.doors.http.server.tls_handshakes import ServerTls
from covenant.doors.ipc_server import IpcServer
from covenant.doors.mcp.remote_tools import RemoteTools
from covenant.doors.mcp.streamable_http import DESCRIBED as MCP_DESCRIBED
from covenant.doors.mcp.streamable_http import McpDoor, installed
from covenant.doors.mcp.tool_calls import ToolCalls
from covenant.doors.metrics import Meter
from covenant.doors.operator_api.daemon_operations import SettingShown
from covenant.doors.operator_api.inspection import AgentInspector
from covenant.doors.operator_api.operation import ApiContext, Services
from covenant.doors.peer_envelopes import DESCRIBED as PEERS_DESCRIBED
from covenant.doors.peer_envelopes import SealedDoor
from covenant.doors.waits import Waits
from covenant.exchange.a2a_service import A2AExchange
from covenant.exchange.access.principals import LoginCodes
from covenant.exchange.cards import Cards
from covenant.exchange.catalogue import Catalogue
from covenant.exchange.native import Conversations, NativeRuns
from covenant.exchange.push import PushConfigs
from covenant.exchange.simple import SimpleExchange, SimpleLimits
from covenant.exchange.task_lookup import TaskLookup
from covenant.exchange.tenant_use import TenantUsage
from covenant.ledger.clock import uuid_source
from covenant.ledger.contract.ledger import Ledger
from covenant.model.mcp_servers import Tool
from covenant.model.settings import A2aSettings
from covenant.model.tenants import TenantLimits
from covenant.outbound.push_sender import PushSender, WebhookClient
from covenant.outbound.remote.inspector import Inspector
from covenant.seal.cards import CardSigner
from covenant.seal.certificates import certificate_names
from covenant.seal.keys import WebhookSigner
from covenant.wire.a2a.parts_v1 import Link

if TYPE_CHECKING:
    from covenant.daemon.wiring.peers import Peers
    from covenant.doors.a2a.grpc import GrpcCalls
    from covenant.doors.a2a.in_process_grpc import ActingCalls

TENANT_DESCRIBED: Final = tuple(
    described
    for door in (native.AgentDoor, native.RunDoor, native.RequestDoor, simple.SimpleDoor)
    for described in routes_of(door)
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Doors:
    """Made, and not open: none of them listens yet."""

    waits: Waits
    http: HttpServer
    peers: HttpServer | None
    """None: HTTP alone serves the sealed routes."""
    ipc: IpcServer
    grpc: GrpcCalls | None
    """None: switched off."""
    dashboard: Dashboard | None
    """None: switched off."""
    schedulers: tuple[Scheduler, ...]

    async def stop_http(self, grace_s: float) -> None:
        servers = (self.http,) if self.peers is None else (self.http, self.peers)
        await asyncio.gather(*(server.stop(grace_s) for server in servers))


def make_doors(base: Base, agents: Agents, peers: Peers | None, sources: Mapping[str, Source]) -> Doors:
    """`sources`: where each setting came from."""
    settings, storage, access = base.settings, base.storage, base.access
    ledger, telemetry, meter = storage.ledger, base.telemetry, base.telemetry.meter
    if storage.shipper is not None:
        storage.shipper.count(meter)
    waits, tls = Waits(access.identity_auth, settings.limits), _server_tls(base)
    pool = _anonymous_pool(settings.http)
    cards, published = Cards(agents.features.now, CardSigner(storage.key)), _published(settings)
    base_url = BaseUrl(settings.http.public_base_url, settings.http.trusted_proxies)
    pages = CardPages(
        cards,
        access.catalogue,
        access.tenant_auth,
        meter,
        base_url=base_url,
        publishing=published,
        root_form=settings.cards.root_form,
        started_ms=ledger.now_ms(),
    )
    configs, sender = _make_push(base, agents.exchange)
    admission = _make_admission(base, agents, base_url, published, pool)
    services = A2AServices(agents.exchange, extended_cards(cards), configs)
    mcp = _make_mcp(base, agents)
    routes = [
        *tenant_routes(
            settings.a2a,
            ledger,
            access.catalogue,
            agents.exchange,
            access.tenant_auth,
            meter=meter,
            tools=agents.features.from_settings.tools,
            link=_file_link(base),
        ),
        *pages.routes(),
        *_file_routes(base, base_url),
        *mcp.routes(),
        *(peers.routes(pool) if peers is not None else ()),
    ]
    own = _make_own_agents(base, admission, services, pages)
    api = ApiContext(
        services=_make_services(base, agents, peers, sources, own),
        identity_auth=access.identity_auth,
        waits=waits,
        meter=meter,
        version=covenant.__version__,
        limiter=access.tenant_auth.limiter,
        legacy_kinds=settings.doors.legacy_kinds,
    )
    a2a = A2ADoor(admission, services, pages.agent_page(), body_bytes_max=settings.http.body_bytes_max)
    codes = api.services.login_codes
    dashboard = _make_dashboard(base, api, codes, base_url) if codes is not None else None
    if dashboard is not None:
        routes += dashboard.routes()
    new_exchange = capture_into(telemetry.frames) if telemetry.frames is not None else HttpExchange
    door = _make_http(settings.http, api, routes, a2a, agents.notices, dashboard=HOME if dashboard is not None else "")
    traced = TracedDoor(door, telemetry.tracer) if telemetry.tracer.on else door
    return Doors(
        waits=waits,
        http=make_server(traced, settings.http, door.refusal_form, tls, new_exchange),
        peers=_make_peer_server(base, peers, pool, tls),
        ipc=_make_ipc(settings, api),
        dashboard=dashboard,
        grpc=_make_grpc(base, admission, services, tls),
        schedulers=(
            *(each for each in (mcp, sender, base.listeners.tls, telemetry.frames) if each is not None),
            *(dashboard.schedulers if dashboard is not None else ()),
        ),
    )


def _make_admission(
    base: Base, agents: Agents, base_url: BaseUrl, published: PublishedAgent, pool: AnonymousPool
) -> Admission:
    access = base.access
    return Admission(
        access.tenant_auth,
        access.catalogue,
        base.telemetry.meter,
        base_url.of,
        published.admits,
        pool,
        files=access.files.links,
        peer_profiles=agents.features.from_settings.peer_profiles,
    )


def _make_peer_server(base: Base, peers: Peers | None, pool: AnonymousPool, tls: ServerTls | None) -> HttpServer | None:
    if peers is None or base.listeners.peers is None:
        return None
    http = base.settings.http
    few = replace(http, connections_max=min(http.connections_max, PEER_CONNECTIONS_MAX))
    door = SealedDoor(peers.routes(pool))
    return make_server(door, few, door.refusal_form, tls)


def _make_own_agents(base: Base, admission: Admission, services: A2AServices, pages: CardPages) -> OwnAgents:
    """The same doors once more, for an operator who acts as a tenant."""
    auth = ActingTenantAuth(base.access.tenant_auth.tenancy, base.access.tenant_auth.limiter)
    acting = replace(admission, tenants=auth, admits=lambda _agent, _scope: False)
    cards = pages.with_auth(auth)
    door = A2ADoor(acting, services, cards.agent_page(), body_bytes_max=base.settings.http.body_bytes_max)
    return OwnAgents(door, cards.routes(), _make_acting_grpc(base, acting, services))


def _make_services(
    base: Base, agents: Agents, peers: Peers | None, sources: Mapping[str, Source], own: OwnAgents
) -> Services:
    access, ledger, limiter = base.access, base.storage.ledger, base.access.tenant_auth.limiter
    codes = LoginCodes(ledger, access.identity_auth, _local_url(base)) if _serves_ui(base.settings) else None
    return Services(
        access.mailbox,
        access.identity_admin,
        ledger,
        access.tenant_auth.tenancy,
        access.catalogue,
        base.telemetry.task_logs,
        access.intake,
        TenantUsage(ledger, limiter, access.files, _default_limits(base.settings), agents.workers.turns),
        peers=peers.admin if peers is not None else None,
        login_codes=codes,
        backups=base.storage.backups,
        removals=access.removals,
        settings=tuple(SettingShown(**row._asdict()) for row in rows(Loaded(base.settings, sources))),
        frames=base.telemetry.frames,
        files=access.files,
        http_url=_listener_url(base) if base.listeners.tls is None else _local_url(base),
        inspector=AgentInspector(
            Inspector(base.outbound.fetcher, base.settings.outbound, ledger.now_ms),
            own,
            _local_url(base),
            published=base.settings.a2a.publish,
        ),
        schedules=agents.schedules,
    )


def _server_tls(base: Base) -> ServerTls | None:
    """None: the doors speak without TLS."""
    files, tenancy, identities = base.listeners.tls, base.access.tenant_auth.tenancy, base.access.identity_auth

    def credential_of(names: Sequence[str]) -> bytes | None:
        """None if the certificate names no tenant: its client is treated as one without a certificate."""
        known = tenancy.recognise_certificate(names) or identities.recognise_certificate(names)
        return certificate_credential(names) if known is not None else None

    return ServerTls(files.context, certificate_names, credential_of) if files is not None else None


def _published(settings: Settings) -> PublishedAgent:
    a2a, http = settings.a2a, settings.http
    return PublishedAgent(a2a.publish, a2a.publish_anonymous, http.bind_addr, AllowedOrigins(http.origins))


def _anonymous_pool(settings: HttpSettings) -> AnonymousPool:
    return AnonymousPool(bytes_max=settings.stranger_bytes_max, body_ms=settings.stranger_body_ms)


def tenant_routes(
    settings: A2aSettings,
    ledger: Ledger,
    catalogue: Catalogue,
    exchange: A2AExchange,
    auth: TenantAuth,
    *,
    meter: Meter,
    tools: Sequence[Tool],
    link: Link,
) -> list[BaseRoute]:
    """The routes for a tenant's token beside A2A: its agents, its requests, and the simple door."""
    new_id = uuid_source()
    limits = SimpleLimits(rate_per_min=settings.inbound_rate_per_min)
    tasks = TaskLookup(ledger, catalogue)
    runs = native.RunDoor(
        NativeRuns(catalogue, exchange, tasks, new_id),
        Conversations(ledger, catalogue, new_id, exchange.writer.intake),
        exchange,
    )
    texts = SimpleExchange(ledger, catalogue, exchange, new_id, tools=tools, limits=limits, living=ledger.living)
    return [
        *endpoint.tenant_routes(native.AgentDoor(catalogue), auth, meter, body_bytes_max=native.AGENT_BYTES_MAX),
        *endpoint.tenant_routes(native.RequestDoor(tasks), auth, meter, body_bytes_max=native.REQUEST_BYTES_MAX),
        *endpoint.tenant_routes(runs, auth, meter, body_bytes_max=2 * settings.message_bytes_max),
        *endpoint.tenant_routes(
            simple.SimpleDoor(texts, link), auth, meter, body_bytes_max=simple.BODY_BYTES_MAX, style=simple.STYLE
        ),
    ]


def _make_push(base: Base, exchange: A2AExchange) -> tuple[PushConfigs, Scheduler] | tuple[None, None]:
    """The service for push configurations, and the sender of notifications, which are signed with the daemon's key."""
    settings, ledger = base.settings, base.storage.ledger
    if not settings.a2a.push_notifications:
        return None, None
    webhooks = WebhookClient(base.outbound.fetcher, WebhookSigner(base.storage.key), ledger.now_ms)
    sender = PushSender(
        ledger,
        webhooks,
        settings.push,
        chance=random.random,
        tally=base.telemetry.meter.pushed,
        shared=base.storage.shared,
        link=_file_link(base),
    )
    return PushConfigs(ledger, exchange.scope, check_push), base.storage.singleton("pushes", sender)


def _file_link(base: Base) -> Link:
    """Makes links to files for answers whose request had no host name."""
    files, url = base.access.files, _local_url(base)
    return lambda file: files.links.url_of(file, url)


def _file_routes(base: Base, base_url: BaseUrl) -> list[BaseRoute]:
    access = base.access
    shared = FileAccess(access.files, access.tenant_auth, access.identity_auth, base_url)
    return file_routes(shared, base.telemetry.meter)


def _make_mcp(base: Base, agents: Agents) -> McpDoor:
    auth, exchange, catalogue, new_id = base.access.tenant_auth, agents.exchange, base.access.catalogue, uuid_source()
    lookup = TaskLookup(base.storage.ledger, catalogue, base.storage.operator)
    handlers = ToolCalls(
        exchange,
        lookup,
        catalogue,
        auth.tenancy,
        limiter=auth.limiter,
        new_id=new_id,
        link=_file_link(base),
        remote=RemoteTools(
            exchange,
            lookup,
            catalogue,
            card_of=agents.remotes.card,
            registry=agents.remotes.registry,
            new_id=new_id,
        ),
    )
    return McpDoor(
        handlers,
        auth,
        base.telemetry.meter,
        version=covenant.__version__,
        body_bytes_max=base.settings.http.body_bytes_max,
        present=installed(),
    )


def _serves_ui(settings: Settings) -> bool:
    enabled = settings.ui.enabled
    return enabled == "on" or (enabled == "auto" and ip_address(settings.http.bind_addr).is_loopback)


def _local_url(base: Base) -> str:
    """The URL of HTTP for a browser on this machine."""
    return base.settings.http.public_base_url.rstrip("/") or _listener_url(base)


def _listener_url(base: Base) -> str:
    url = urlsplit(base.listeners.url)
    anywhere = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(url.hostname or "")  # noqa: S104  (not bound by this)
    return f"{url.scheme}://{anywhere}:{url.port}" if anywhere else base.listeners.url


def _make_dashboard(base: Base, api: ApiContext, codes: LoginCodes, base_url: BaseUrl) -> Dashboard:
    access, tenancy = base.access, base.access.tenant_auth.tenancy
    sessions = Sessions(
        base.storage.ledger, access.identity_auth, tenancy, access.catalogue, codes=codes, settings=base.settings.ui
    )
    return Dashboard(
        api,
        sessions,
        base_url,
        node=base.storage.ledger.node,
        operator=base.storage.operator,
        body_bytes_max=base.settings.http.body_bytes_max,
    )


def _make_ipc(settings: Settings, api: ApiContext) -> IpcServer:
    return IpcServer(
        settings.home / SOCKET_NAME,
        api,
        frame_bytes_max=settings.ipc.frame_bytes_max,
        connections_max=settings.ipc.connections_max,
    )


def _make_http(
    settings: HttpSettings,
    api: ApiContext,
    routes: Sequence[BaseRoute],
    a2a: A2ADoor,
    notices: Callable[[], Sequence[str]],
    *,
    dashboard: str,
) -> HttpDoor:
    return build_http(
        api,
        allowed_hosts=_allowed_hosts(settings),
        origins=settings.origins,
        body_bytes_max=settings.body_bytes_max,
        metrics_token=read_token_file(settings.metrics_token_file, "http.metrics_token_file"),
        notices=notices,
        more_routes=routes,
        a2a=a2a,
        dashboard=dashboard,
        described=(
            *TENANT_DESCRIBED,
            *a2a_cards.DESCRIBED,
            *A2A_DESCRIBED,
            *FILES_DESCRIBED,
            *MCP_DESCRIBED,
            *PEERS_DESCRIBED,
        ),
    )


def _allowed_hosts(http: HttpSettings) -> tuple[str, ...]:
    public = urlsplit(http.public_base_url).hostname
    return (*http.allowed_hosts, as_host(http.bind_addr), *((as_host(public),) if public else ()))


def _make_grpc(base: Base, admission: Admission, services: A2AServices, tls: ServerTls | None) -> GrpcCalls | None:
    """The calls over gRPC; None if gRPC is switched off."""
    settings, listeners = base.settings, base.listeners
    if listeners.grpc is None:
        return None
    from covenant.doors.a2a.grpc import GrpcCalls, GrpcTenants  # noqa: PLC0415  an extra

    # Whether callers are on this machine depends on where this port listens, not on where HTTP does.
    published = _published(settings)._replace(bind_addr=settings.grpc.bind_addr)
    auth = admission.tenants
    return GrpcCalls(
        replace(admission, tenants=GrpcTenants(auth.tenancy, auth.limiter), admits=published.admits),
        services,
        # A pool of its own: gRPC does not tell a message's length in advance, so each reserves the longest.
        _anonymous_pool(settings.http),
        message_bytes_max=settings.grpc.message_bytes_max,
        published=settings.a2a.publish,
        http_at=listeners.http_at,
        tls=tls,
        frames=base.telemetry.frames,
    )


def _make_acting_grpc(base: Base, acting: Admission, services: A2AServices) -> ActingCalls | None:
    """None: switched off."""
    settings, listeners = base.settings, base.listeners
    if listeners.grpc is None:
        return None
    from covenant.doors.a2a.in_process_grpc import ActingCalls  # noqa: PLC0415  an extra

    return ActingCalls(
        acting,
        services,
        _anonymous_pool(settings.http),
        message_bytes_max=settings.grpc.message_bytes_max,
        published=settings.a2a.publish,
        http_at=listeners.http_at,
    )


def _default_limits(settings: Settings) -> TenantLimits:
    """The limits of tenants that have none of their own."""
    kept = settings.retention
    return TenantLimits(**asdict(settings.tenants), kept_hours=kept.task_hours, kept_bytes=kept.tenant_bytes)
