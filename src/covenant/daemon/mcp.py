"""MCP at a daemon: its own tools at `/mcp`, and the tools of the servers that its home configures."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

import covenant
from covenant.agents.model.mcp_tools import McpTools
from covenant.daemon.delegating import Elsewhere
from covenant.daemon.environment import program_environment
from covenant.daemon.settings import Settings
from covenant.daemon.tenant_doors import Built
from covenant.doors.mcp.remote_tools import RemoteTools
from covenant.doors.mcp.streamable_http import McpDoor, installed
from covenant.doors.mcp.tool_handlers import ToolHandlers
from covenant.exchange.access.principals import Principal
from covenant.exchange.cards import Cards
from covenant.exchange.task_lookup import TaskLookup
from covenant.ledger.clock import Uuids
from covenant.model.mcp_servers import McpServer, Tool


def make_mcp(settings: Settings, built: Built, operator: Principal, elsewhere: Elsewhere) -> McpDoor:
    gate, new_id = built.gate, Uuids()
    oversight = TaskLookup(built.ledger, built.catalogue, operator)
    desk = ToolHandlers(
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
