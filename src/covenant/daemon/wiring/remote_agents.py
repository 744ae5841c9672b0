"""Remote agents of a daemon: calls go through its one fetcher, and so only where `outbound` allows them.

An entry of `a2a_agents.json` is for the first tenant and for the tenants that it lists: no other tenant uses
its token.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Final

from covenant.agents.remote_agent import RemoteAgent, RemoteCancels
from covenant.daemon.environment import environment
from covenant.daemon.telemetry import Log
from covenant.ledger.contract.ledger import Ledger
from covenant.model.agent_card import RemoteCard
from covenant.model.errors import NotFound
from covenant.model.task import Target
from covenant.outbound.call_errors import NoCard
from covenant.outbound.http_fetcher import Fetcher
from covenant.outbound.remote.card_lookup import CardCache, card_or_none, choose_interfaces, find_card, verified
from covenant.outbound.remote.remote_client import Remote, RemoteOptions
from covenant.outbound.remote.remote_registry import Credentials, RemoteEntry, RemoteRegistry

CARDS_MAX: Final = 1_000
FETCHERS_MAX: Final = 1_000
CALL_S_MAX: Final = 24 * 3600.0


class RemoteAgents:
    """Remote agents, by their name in the registry or by their URL."""

    def __init__(self, home: Path, fetcher: Fetcher, ledger: Ledger, *, depth_max: int, log: Log) -> None:
        self.cancels = RemoteCancels(ledger, self.open)
        self.registry = RemoteRegistry(home, on_read=self._log_problems)
        self._fetcher = fetcher
        self._left_ms = ledger.clock.left_ms
        self._depth_max = depth_max
        self._log = log
        # Of the errors only `NoCard` is cached: an agent that did not answer may answer the next caller.
        self._cards = CardCache(cards_max=CARDS_MAX, keeps=lambda error: isinstance(error, NoCard))
        self._entry_fetchers: dict[str, Fetcher] = {}

    def registered(self, tenant: str, name: str) -> str | None:
        """The URL of an agent that the tenant may call by its name. Raises Invalid if its entry cannot be used."""
        try:
            return self.registry.entry_of(tenant, name).url
        except NotFound:
            return None

    async def prepare(self) -> None:
        """Imports the HTTP library now if remote calls are expected, so that no turn waits for the import."""
        if any(True for _ in self.registry):
            await self._fetcher.open()

    async def open(self, tenant: str, target: Target) -> Remote:
        name = target.name
        entry = RemoteEntry(url=target.url or "") if name is None else self.registry.entry_of(tenant, name)
        fetcher, credentials = self._fetcher_for(name, entry), _credentials(entry)

        async def fetch() -> RemoteCard:
            return await find_card(fetcher, entry.url, credentials)

        # A card that was fetched with a token is not shown to callers without that token.
        card = await card_or_none(self._cards.get(f"{name or ''} {entry.url}", fetch), entry.url)
        # The task's timeout limits the call, unless the entry has one of its own.
        options = RemoteOptions(timeout_s=entry.timeout or CALL_S_MAX, chance=random.random, left_ms=self._left_ms)
        interfaces = choose_interfaces(card, entry.url, credentials.covers)
        return Remote(interfaces, fetcher, credentials, card=card, options=options)

    async def card(self, url_or_name: str, *, verify: bool = False) -> RemoteCard:
        """Fetches the card. Raises NoCard, and the errors of the fetch."""
        name = None if "://" in url_or_name else url_or_name
        entry = RemoteEntry(url=url_or_name) if name is None else self.registry.entry(name)
        fetcher = self._fetcher_for(name, entry)
        card = await find_card(fetcher, entry.url, _credentials(entry))
        return await verified(fetcher, card) if verify else card

    def body(self, target: Target | None = None) -> RemoteAgent:
        return RemoteAgent(self.open, target, depth_max=self._depth_max, cancels=self.cancels)

    async def close(self) -> None:
        await self.cancels.stop()
        for fetcher in self._entry_fetchers.values():
            await fetcher.close()

    def _fetcher_for(self, name: str | None, entry: RemoteEntry) -> Fetcher:
        """A registered agent may be called even at a private address, since the operator wrote its entry."""
        if name is None:
            return self._fetcher
        place = entry.host_and_port
        if place not in self._entry_fetchers:
            if len(self._entry_fetchers) >= FETCHERS_MAX:
                # Calls under way keep their client. Clients hold nothing open between calls.
                self._entry_fetchers.clear()
            self._entry_fetchers[place] = self._fetcher.allowing(place)
        return self._entry_fetchers[place]

    def _log_problems(self, registry: RemoteRegistry) -> None:
        """Logs once which entries of the file cannot be used, and how to correct them."""
        for name, why in registry.problems.items():
            self._log.warning("remotes.unusable", entry=name, why=why)
        variables = environment()
        for name in registry:
            missing = registry.entry(name).missing_variable(variables)
            if missing is not None:
                why = "the variable is not set where the daemon was started; it is called without a token"
                self._log.warning("remotes.no_token", entry=name, token_env=missing, why=why)


def _credentials(entry: RemoteEntry) -> Credentials:
    return Credentials(entry.url, token=entry.token(environment()), headers=entry.headers)
