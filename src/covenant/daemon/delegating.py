"""Delegation in a daemon: what its agents may call, and how those elsewhere are reached.

Agents elsewhere are called through the daemon's one fetcher, and so only where `outbound` allows it. Those of
`a2a_agents.json` are the first tenant's: whoever wrote that file gave their tokens to nobody else.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Final

from covenant.agents.crew import Crew
from covenant.agents.remote import RemoteBody
from covenant.agents.withdrawing import Withdrawals
from covenant.daemon.connecting import Options, look_up, open_fetcher
from covenant.daemon.environment import environment, now_ms
from covenant.daemon.settings import Settings
from covenant.exchange.catalogue import Catalogue
from covenant.exchange.delegation import DelegationLimits, Delegations
from covenant.ledger.contract import Ledger
from covenant.model.errors import Refusal
from covenant.model.remote_card import RemoteCard
from covenant.model.tenant import DEFAULT
from covenant.model.tracing import OFF, Tracer
from covenant.outbound.credentials import Credentials
from covenant.outbound.fetching import Fetcher
from covenant.outbound.registry import Entry, Remotes
from covenant.outbound.remote import Manners, Remote
from covenant.outbound.ways import ways_of

CARD_MS: Final = 300_000
CARDS_MAX: Final = 1_000
CALL_S_MAX: Final = 24 * 3600.0


class Elsewhere:
    """Agents that are not here: known by the registry, or by their address alone."""

    def __init__(self, home: Path, fetcher: Fetcher, ledger: Ledger, *, depth_max: int) -> None:
        self.withdrawals = Withdrawals(ledger, self.open)
        self._fetcher = fetcher
        self._depth_max = depth_max
        self._registry = Remotes(home)
        self._cards: dict[str, tuple[int, RemoteCard | None]] = {}
        self._own: dict[str, tuple[Fetcher, Callable[[], Awaitable[None]] | None]] = {}

    def registered(self, tenant: str, name: str) -> str | None:
        """The URL of an agent that the tenant may call by its name."""
        if tenant != DEFAULT:
            return None
        try:
            return self._registry.entry(name).url
        except Refusal:
            return None

    async def open(self, target: Mapping[str, str]) -> Remote:
        name = target.get("name")
        entry = self._registry.entry(name) if name is not None else Entry(url=target["url"])
        fetcher = self._fetcher if name is None else self._allowed(entry.place)
        credentials = Credentials(entry.url, token=entry.token(environment()), headers=entry.headers)
        card = await self._card(entry.url, fetcher, credentials)
        # How long it may take is the task's matter, unless its entry says so.
        manners = Manners(timeout_s=entry.timeout or CALL_S_MAX, chance=random.random, now_ms=now_ms)
        ways = ways_of(card, entry.url, credentials.covers)
        return Remote(ways, fetcher, credentials, card=card, manners=manners)

    async def close(self) -> None:
        await self.withdrawals.stop()
        for _, close in self._own.values():
            if close is not None:
                await close()

    def _allowed(self, place: str) -> Fetcher:
        """One that may call there, wherever that is: whoever wrote the entry means that."""
        if place not in self._own:
            self._own[place] = open_fetcher(Options(), (place,))
        return self._own[place][0]

    async def _card(self, url: str, fetcher: Fetcher, credentials: Credentials) -> RemoteCard | None:
        """As it was a while ago, at most. That there was none is not remembered: it may be back."""
        kept = self._cards.get(url)
        if kept is not None and kept[0] > now_ms():
            return kept[1]
        card = await look_up(fetcher, url, credentials)
        if len(self._cards) >= CARDS_MAX:
            self._cards.clear()
        self._cards[url] = (now_ms() + CARD_MS, card)
        return card

    def body(self, target: Mapping[str, str] | None = None) -> RemoteBody:
        return RemoteBody(self.open, target, depth_max=self._depth_max, withdrawals=self.withdrawals)


def make_delegations(
    settings: Settings,
    ledger: Ledger,
    catalogue: Catalogue,
    crew: Crew,
    elsewhere: Elsewhere,
    *,
    tracer: Tracer = OFF,
) -> Delegations:
    ours = settings.delegation
    limits = DelegationLimits(
        calls_max=ours.calls_max,
        agents_max=ours.agents_max,
        cooldown_ms=ours.cooldown_ms,
        children_max=ours.children_max,
        depth_max=ours.depth_max,
        message_bytes_max=settings.a2a.message_bytes_max,
    )
    return Delegations(ledger, catalogue, crew, limits, registered=elsewhere.registered, tracer=tracer)
