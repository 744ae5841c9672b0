"""Delegation in a daemon: what its agents may call, and how those elsewhere are reached.

Agents elsewhere are called through the daemon's one fetcher, and so only where `outbound` allows it. Those of
`a2a_agents.json` are the first tenant's: whoever wrote that file gave their tokens to nobody else.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from covenant.agents.crew import Crew
from covenant.agents.remote import RemoteBody
from covenant.agents.withdrawing import Withdrawals
from covenant.daemon.connecting import Options, open_remote
from covenant.daemon.settings import Settings
from covenant.exchange.catalogue import Catalogue
from covenant.exchange.delegation import DelegationLimits, Delegations
from covenant.ledger.contract import Ledger
from covenant.model.errors import Refusal
from covenant.model.tenant import DEFAULT
from covenant.model.tracing import OFF, Tracer
from covenant.outbound.fetching import Fetcher
from covenant.outbound.registry import Remotes
from covenant.outbound.remote import Remote


class Elsewhere:
    """Agents that are not here: known by the registry, or by their address alone."""

    def __init__(self, home: Path, fetcher: Fetcher, ledger: Ledger, *, depth_max: int) -> None:
        self.withdrawals = Withdrawals(ledger, self.open)
        self._home = home
        self._fetcher = fetcher
        self._depth_max = depth_max
        self._registry = Remotes(home)

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
        if name is not None:
            # With a fetcher of its own, that may call where its entry says: whoever wrote the entry means that.
            return await open_remote(name, Options(home=self._home))
        return await open_remote(target["url"], Options(home=self._home, fetcher=self._fetcher))

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
