"""The one client by which a daemon calls others, made from its settings."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import fields

import covenant
from covenant.daemon.settings import OutboundSettings
from covenant.outbound.address_guard import DNS_PORT, AddressGuard, NameServerResolver, SystemResolver
from covenant.outbound.http_fetcher import Fetcher, FetchLimits
from covenant.outbound.urls import read_address


@asynccontextmanager
async def open_outbound(settings: OutboundSettings) -> AsyncIterator[tuple[AddressGuard, Fetcher]]:
    """The guard, for URLs that somebody gives us, and the fetcher that calls them. Nothing is opened before a call."""
    patience_s = settings.connect_ms / 1000
    resolver = _resolver(settings, patience_s)
    guard = AddressGuard(settings.allow, resolver=resolver, resolve_s=patience_s)
    limits = FetchLimits(**{part.name: getattr(settings, part.name) for part in fields(FetchLimits)})
    fetcher = Fetcher(guard, limits, user_agent=f"covenant/{covenant.__version__}")
    try:
        yield guard, fetcher
    finally:
        await fetcher.close()
        resolver.close()


def _resolver(settings: OutboundSettings, patience_s: float) -> SystemResolver | NameServerResolver:
    if not settings.name_servers:
        return SystemResolver()
    servers = [read_address(text, DNS_PORT) for text in settings.name_servers]
    return NameServerResolver(servers, patience_s=patience_s)
