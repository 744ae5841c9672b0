"""MCP at a daemon: its own tools at `/mcp`, and the tools of the servers that its home configures."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

import covenant
from covenant.agents.mcp_tools import Tools
from covenant.daemon.connecting import Options, open_card
from covenant.daemon.environment import program_environment
from covenant.daemon.settings import Settings
from covenant.daemon.tenant_doors import Built
from covenant.doors.mcp.abroad import Abroad
from covenant.doors.mcp.desk import Desk
from covenant.doors.mcp.http import McpDoor, installed
from covenant.exchange.cards import Cards
from covenant.exchange.oversight import Oversight
from covenant.exchange.principal import Principal
from covenant.ledger.log.uuids import Uuids
from covenant.model.remote_card import RemoteCard
from covenant.model.tools import McpServer, Tool
from covenant.outbound.fetching import Fetcher
from covenant.outbound.registry import Remotes


def make_mcp(settings: Settings, built: Built, operator: Principal, fetcher: Fetcher) -> McpDoor:
    gate, home, new_id = built.gate, settings.home, Uuids()
    oversight = Oversight(built.ledger, built.catalogue, operator)

    async def card_of(url_or_name: str, *, verify: bool) -> RemoteCard:
        # A name's entry says where it is, and may be called there; an address is judged as the daemon's calls are.
        options = Options(home=home, fetcher=fetcher if "://" in url_or_name else None)
        return await open_card(url_or_name, options, verify=verify)

    desk = Desk(
        built.conversations,
        oversight,
        built.catalogue,
        gate.tenancy,
        limiter=gate.limiter,
        new_id=new_id,
        abroad=Abroad(
            built.conversations,
            oversight,
            built.catalogue,
            card_of=card_of,
            registry=Remotes(home),
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


def make_tools(servers: Mapping[str, McpServer], cards: Cards) -> Tools:
    """Cards name what the file declares, and what a server really has from when that is known."""

    def known(tools: tuple[Tool, ...]) -> None:
        cards.offer = msgspec.structs.replace(cards.offer, tools=tools)

    return Tools(servers, program_environment(), known=known)
