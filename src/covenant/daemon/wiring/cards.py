"""What the settings, the key and the home's `mcp_servers.json` make of agent cards."""

from __future__ import annotations

from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import msgspec

from covenant.daemon.settings import Settings
from covenant.exchange.cards import CardFeatures
from covenant.model.agent_card import Provider
from covenant.model.errors import Invalid, SettingsError
from covenant.model.mcp_servers import McpServer, read_mcp_servers, tools_of

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


def card_features(settings: Settings, servers: dict[str, McpServer]) -> CardFeatures:
    """What can be told of a daemon from its settings alone."""
    a2a = settings.a2a
    organization = a2a.provider_org or urlsplit(a2a.provider_url).hostname
    return CardFeatures(
        provider=Provider(organization=organization, url=a2a.provider_url) if organization else None,
        documentation_url=a2a.docs_url or None,
        push_notifications=a2a.push_notifications,
        tools=tools_of(servers),
    )
