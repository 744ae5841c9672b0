"""MCP at a daemon: its tools over what the daemon is made of, at `/mcp`."""

from __future__ import annotations

import covenant
from covenant.daemon.settings import Settings
from covenant.daemon.tenant_doors import Built
from covenant.doors.mcp.desk import Desk
from covenant.doors.mcp.http import McpDoor, installed
from covenant.exchange.oversight import Oversight
from covenant.exchange.principal import Principal
from covenant.ledger.log.uuids import Uuids


def make_mcp(settings: Settings, built: Built, operator: Principal) -> McpDoor:
    gate = built.gate
    desk = Desk(
        built.conversations,
        Oversight(built.ledger, built.catalogue, operator),
        built.catalogue,
        gate.tenancy,
        limiter=gate.limiter,
        new_id=Uuids(),
    )
    return McpDoor(
        desk,
        gate,
        built.meter,
        version=covenant.__version__,
        body_bytes_max=settings.http.body_bytes_max,
        present=installed(),
    )
