"""What a tenant's token opens besides A2A: its agents, its requests, and the simple door."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from starlette.routing import BaseRoute

from covenant.daemon.settings import A2aSettings
from covenant.doors import simple
from covenant.doors.http.tenant import TenantGate
from covenant.doors.metrics import Meter
from covenant.doors.native import agents, requests
from covenant.exchange.catalogue import Catalogue
from covenant.exchange.conversation import Conversations
from covenant.exchange.requests import Requests
from covenant.exchange.simple import SimpleLimits, SimpleTasks
from covenant.ledger.contract import Ledger
from covenant.ledger.log.uuids import Uuids
from covenant.model.tools import Tool

DESCRIBED: Final = (*agents.DESCRIBED, *requests.DESCRIBED, *simple.DESCRIBED)


class Built(NamedTuple):
    """What the doors of tenants are built of."""

    ledger: Ledger
    catalogue: Catalogue
    conversations: Conversations
    gate: TenantGate
    meter: Meter


def tenant_routes(settings: A2aSettings, built: Built, tools: Sequence[Tool]) -> list[BaseRoute]:
    ledger, catalogue, conversations, gate, meter = built
    limits = SimpleLimits(rate_per_min=settings.inbound_rate_per_min)
    tasks = SimpleTasks(ledger, catalogue, conversations, Uuids(), tools=tools, limits=limits)
    return [
        *agents.agent_routes(catalogue, gate, meter),
        *requests.request_routes(Requests(ledger, catalogue), gate, meter),
        *simple.simple_routes(tasks, gate, meter),
    ]
