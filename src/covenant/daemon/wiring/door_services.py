"""What a tenant's token opens besides A2A: its agents, its requests, and the simple door."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
from starlette.routing import BaseRoute

import covenant
from covenant.agents.model.mcp_tools import McpTools
from covenant.agents.runtime.job import JobLimits
from covenant.agents.runtime.worker_pool import WorkerPool
from covenant.daemon.environment import program_environment
from covenant.daemon.http_listener import CannotListen
from covenant.daemon.settings import A2aSettings, Settings
from covenant.daemon.wiring.cards import base_url_of, publishing_of
from covenant.daemon.wiring.push import check_push
from covenant.daemon.wiring.remote_agents import Elsewhere
from covenant.doors import native, simple
from covenant.doors.a2a.admission import Admission
from covenant.doors.a2a.cards import CardPages, extended_cards
from covenant.doors.a2a.http_bindings import A2ADoor
from covenant.doors.a2a.operations import A2AServices, PushService
from covenant.doors.http.bearer_auth import TenantGate
from covenant.doors.http.request_body import AnonymousPool
from covenant.doors.mcp.remote_tools import RemoteTools
from covenant.doors.mcp.streamable_http import McpDoor, installed
from covenant.doors.mcp.tool_calls import ToolCalls
from covenant.doors.metrics import Meter
from covenant.exchange.a2a_service import A2AExchange, A2ALimits
from covenant.exchange.access.principals import Principal
from covenant.exchange.cards import Cards
from covenant.exchange.catalogue import Catalogue
from covenant.exchange.conversations import Conversations
from covenant.exchange.delegation import Delegations
from covenant.exchange.native import NativeRuns
from covenant.exchange.simple import SimpleExchange, SimpleLimits
from covenant.exchange.task_lookup import TaskLookup
from covenant.ledger.clock import Uuids
from covenant.ledger.contract.ledger import Ledger
from covenant.model.errors import SettingsError
from covenant.model.mcp_servers import McpServer, Tool
from covenant.model.tracing import OFF, Tracer

if TYPE_CHECKING:
    from covenant.doors.a2a.grpc import GrpcServer


DESCRIBED: Final = (*native.AGENT_ROUTES, *native.RUN_ROUTES, *native.REQUEST_ROUTES, *simple.DESCRIBED)


class Built(NamedTuple):
    """What the doors of tenants are built of."""

    ledger: Ledger
    catalogue: Catalogue
    conversations: A2AExchange
    gate: TenantGate
    meter: Meter


def tenant_routes(settings: A2aSettings, built: Built, tools: Sequence[Tool]) -> list[BaseRoute]:
    ledger, catalogue, conversations, gate, meter = built
    limits = SimpleLimits(rate_per_min=settings.inbound_rate_per_min, depth_max=conversations.limits.depth_max)
    tasks = SimpleExchange(ledger, catalogue, conversations, Uuids(), tools=tools, limits=limits)
    asked, new_id = TaskLookup(ledger, catalogue), Uuids()
    runs = NativeRuns(catalogue, conversations, asked, new_id)
    door = native.RunDoor(runs, Conversations(ledger, catalogue, new_id), conversations)
    return [
        *native.agent_routes(catalogue, gate, meter),
        *native.request_routes(asked, gate, meter),
        *native.run_routes(door, gate, meter, body_bytes_max=2 * settings.message_bytes_max),
        *simple.simple_routes(tasks, gate, meter),
    ]


def make_workers(
    settings: Settings, ledger: Ledger, delegations: Callable[[WorkerPool], Delegations], tracer: Tracer = OFF
) -> WorkerPool:
    a2a = settings.a2a
    return WorkerPool(
        ledger,
        limits=JobLimits(updates_max=a2a.turn_updates_max, bytes_max=a2a.turn_bytes_max),
        concurrency=a2a.agent_concurrency,
        tenant_concurrency=settings.tenants.concurrency,
        delegations=delegations,
        tracer=tracer,
    )


def make_conversations(
    settings: Settings, ledger: Ledger, catalogue: Catalogue, workers: WorkerPool, tracer: Tracer = OFF
) -> A2AExchange:
    a2a = settings.a2a
    limits = A2ALimits(
        message_bytes_max=a2a.message_bytes_max,
        blocking_ms_max=a2a.blocking_ms_max,
        depth_max=settings.delegation.depth_max,
    )
    check = check_push if a2a.push_notifications else None
    return A2AExchange(ledger, catalogue, workers, Uuids(), limits, check_push=check, tracer=tracer)


def make_office(conversations: A2AExchange, cards: Cards, pushes: PushService | None = None) -> A2AServices:
    return A2AServices(conversations, extended_cards(cards), pushes)


def make_gate(
    settings: Settings, catalogue: Catalogue, tenants: TenantGate, meter: Meter, pool: AnonymousPool
) -> Admission:
    return Admission(tenants, catalogue, meter, base_url_of(settings).of, publishing_of(settings).admits, pool)


def make_door(settings: Settings, gate: Admission, office: A2AServices, pages: CardPages) -> A2ADoor:
    return A2ADoor(gate, office, pages.agent_page(), body_bytes_max=settings.http.body_bytes_max)


def make_mcp(settings: Settings, built: Built, operator: Principal, elsewhere: Elsewhere) -> McpDoor:
    gate, new_id = built.gate, Uuids()
    oversight = TaskLookup(built.ledger, built.catalogue, operator)
    desk = ToolCalls(
        built.conversations,
        oversight,
        built.catalogue,
        gate.tenancy,
        limiter=gate.limiter,
        new_id=new_id,
        abroad=RemoteTools(
            built.conversations,
            oversight,
            built.catalogue,
            card_of=elsewhere.card,
            registry=elsewhere.registry,
            new_id=new_id,
        ),
    )
    return McpDoor(
        desk,
        gate,
        built.meter,
        version=covenant.__version__,
        body_bytes_max=settings.http.body_bytes_max,
        present=installed(),
    )


def make_tools(servers: Mapping[str, McpServer], cards: Cards) -> McpTools:
    """Cards name what the file declares, and what a server really has from when that is known."""

    def known(tools: tuple[Tool, ...]) -> None:
        cards.offer = msgspec.structs.replace(cards.offer, tools=tools)

    return McpTools(servers, program_environment(), known=known)


def open_grpc(settings: Settings, gate: Admission, office: A2AServices, cards: Cards) -> GrpcServer | None:
    """Bound, and not started; None if it is switched off. From here on cards name its port."""
    chosen = settings.grpc
    if not chosen.enabled:
        return None
    try:
        from covenant.doors.a2a.grpc import GrpcCalls, GrpcServer, GrpcTenants  # noqa: PLC0415  an extra
    except ModuleNotFoundError as missing:
        raise SettingsError(
            f"grpc.enabled needs the package {missing.name}, which is not installed: pip install 'covenant[grpc]'"
        ) from missing
    # Who is on this machine is a matter of where this port listens, not of where HTTP does.
    publishing = publishing_of(settings)._replace(bind_addr=chosen.bind_addr)
    tenants = GrpcTenants(gate.tenants.tenancy, gate.tenants.limiter)
    # A pool of its own: over gRPC nobody says how long a message is, so that each takes room for the longest.
    pool = AnonymousPool(bytes_max=settings.http.stranger_bytes_max, body_ms=settings.http.stranger_body_ms)
    calls = GrpcCalls(
        replace(gate, tenants=tenants, admits=publishing.admits),
        office,
        pool,
        message_bytes_max=chosen.message_bytes_max,
        published=settings.a2a.publish,
    )
    try:
        server = GrpcServer(
            calls,
            bind_addr=chosen.bind_addr,
            port=chosen.port,
            calls_max=chosen.calls_max,
        )
    except OSError as error:
        raise CannotListen(
            f"gRPC cannot listen on {chosen.bind_addr} port {chosen.port}; stop what uses it, or choose another with "
            "--grpc-port or --grpc-bind-addr"
        ) from error
    cards.offer = msgspec.structs.replace(cards.offer, grpc_port=server.port)
    return server
