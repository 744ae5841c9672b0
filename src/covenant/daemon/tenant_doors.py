"""What a tenant's token opens besides A2A: its agents, its requests, and the simple door."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from starlette.routing import BaseRoute

from covenant.daemon.settings import A2aSettings
from covenant.doors import simple
from covenant.doors.http.bearer_auth import TenantGate
from covenant.doors.metrics import Meter
from covenant.doors.native import agent_routes as agents
from covenant.doors.native import request_routes as requests
from covenant.doors.native import run_routes as orchestrate
from covenant.exchange.a2a_service import A2AExchange
from covenant.exchange.catalogue import Catalogue
from covenant.exchange.conversations import Conversations
from covenant.exchange.native import NativeRuns, TenantTasks
from covenant.exchange.simple import SimpleExchange, SimpleLimits
from covenant.ledger.clock import Uuids
from covenant.ledger.contract.ledger import Ledger
from covenant.model.mcp_servers import Tool

DESCRIBED: Final = (*agents.DESCRIBED, *orchestrate.DESCRIBED, *requests.DESCRIBED, *simple.DESCRIBED)


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
    asked, new_id = TenantTasks(ledger, catalogue), Uuids()
    runs = NativeRuns(catalogue, conversations, asked, new_id)
    native = orchestrate.NativeDoor(runs, Conversations(ledger, catalogue, new_id), conversations)
    return [
        *agents.agent_routes(catalogue, gate, meter),
        *requests.request_routes(asked, gate, meter),
        *orchestrate.native_routes(native, gate, meter, body_bytes_max=2 * settings.message_bytes_max),
        *simple.simple_routes(tasks, gate, meter),
    ]
