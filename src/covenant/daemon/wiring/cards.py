"""What the daemon's settings, its key and the home's `mcp_servers.json` make of cards."""

from __future__ import annotations

from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import msgspec

from covenant.daemon.settings import Settings
from covenant.doors.a2a.cards import CardPages, PublishedAgent
from covenant.doors.http.bearer_auth import TenantGate
from covenant.doors.http.host_names import AllowedOrigins, BaseUrl
from covenant.doors.metrics import Meter
from covenant.exchange.cards import CardFeatures, Cards
from covenant.exchange.catalogue import Catalogue
from covenant.model.agent_card import Provider
from covenant.model.errors import Invalid, SettingsError
from covenant.model.mcp_servers import McpServer, read_mcp_servers, tools_of
from covenant.seal.cards import CardSigner

SERVERS_NAME: Final = "mcp_servers.json"


def mcp_servers(home: Path) -> dict[str, McpServer]:
    """The MCP servers of this home, by name; none if there is no file. Raises SettingsError if it cannot be used."""
    path = home / SERVERS_NAME
    try:
        return dict(read_mcp_servers(msgspec.json.decode(path.read_bytes())))
    except FileNotFoundError:
        return {}
    except Invalid as wrong:
        raise SettingsError(f"{path}: {wrong.message}") from None
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read: {error}") from error
    except (ValueError, RecursionError) as wrong:
        raise SettingsError(f"{path}: not JSON: {wrong}") from None


def make_cards(settings: Settings, key: bytes, servers: dict[str, McpServer]) -> Cards:
    """Cards signed with the daemon's own key."""
    return Cards(offer_of(settings, servers), CardSigner(key))


def offer_of(settings: Settings, servers: dict[str, McpServer]) -> CardFeatures:
    a2a = settings.a2a
    organization = a2a.provider_org or urlsplit(a2a.provider_url).hostname
    return CardFeatures(
        provider=Provider(organization=organization, url=a2a.provider_url) if organization else None,
        documentation_url=a2a.docs_url or None,
        push_notifications=a2a.push_notifications,
        tools=tools_of(servers),
    )


def base_url_of(settings: Settings) -> BaseUrl:
    return BaseUrl(settings.http.public_base_url, settings.http.trusted_proxies)


def publishing_of(settings: Settings) -> PublishedAgent:
    a2a, http = settings.a2a, settings.http
    return PublishedAgent(a2a.publish, a2a.publish_anonymous, http.bind_addr, AllowedOrigins(http.origins))


def card_pages(
    settings: Settings, cards: Cards, catalogue: Catalogue, gate: TenantGate, meter: Meter, *, started_ms: int
) -> CardPages:
    return CardPages(
        cards,
        catalogue,
        gate,
        meter,
        base_url=base_url_of(settings),
        publishing=publishing_of(settings),
        started_ms=started_ms,
    )
