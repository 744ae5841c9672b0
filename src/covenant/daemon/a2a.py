"""The A2A door of a daemon: conversations over its ledger, its own workers to work, and its cards."""

from __future__ import annotations

from covenant.agents.runtime.job import JobLimits
from covenant.agents.runtime.worker_pool import WorkerPool
from covenant.daemon.cards import base_url_of, publishing_of
from covenant.daemon.pushing import check_push
from covenant.daemon.settings import Settings
from covenant.doors.a2a.admission import Admission
from covenant.doors.a2a.cards import CardPages, extended_cards
from covenant.doors.a2a.door import A2ADoor
from covenant.doors.a2a.operations import A2AServices, PushService
from covenant.doors.http.bearer_auth import TenantGate
from covenant.doors.http.request_body import AnonymousPool
from covenant.doors.metrics import Meter
from covenant.exchange.a2a_service import A2AExchange, A2ALimits
from covenant.exchange.cards import Cards
from covenant.exchange.catalogue import Catalogue
from covenant.ledger.clock import Uuids
from covenant.ledger.contract.ledger import Ledger
from covenant.model.tracing import OFF, Tracer


def make_crew(settings: Settings, ledger: Ledger, tracer: Tracer = OFF) -> WorkerPool:
    a2a = settings.a2a
    return WorkerPool(
        ledger,
        limits=JobLimits(updates_max=a2a.turn_updates_max, bytes_max=a2a.turn_bytes_max),
        concurrency=a2a.agent_concurrency,
        tenant_concurrency=settings.tenants.concurrency,
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
