"""The catalogue: each tenant's agents, and who they are in the ledger.

`index` is always there. Agents from code and from files live in memory and come back with their source; stored ones are
in the ledger. One declared in code or a file hides a stored one of the same id.

An agent's identity is `<agent>@<tenant>`, and a tenant's callers are `client@<tenant>`. Their keys are derived from the
daemon's own, so nothing more is kept, and they are the same after every restart.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from covenant.exchange.tenancy import Caller
from covenant.ledger.contract import Ledger
from covenant.model.constitution import INDEX, INDEX_CONSTITUTION, CatalogueAgent, Constitution, Source
from covenant.model.errors import Conflict, NotFound
from covenant.model.ids import AgentId
from covenant.seal.keys import derived_key, public_key

CLIENT: Final = "client"
_RANK: Final = {"builtin": 0, "code": 1, "file": 2, "stored": 3}


class Catalogue:
    def __init__(self, ledger: Ledger, private_key: bytes) -> None:
        self._ledger = ledger
        self._private_key = private_key
        self._identities: dict[tuple[str, str], AgentId] = {}
        self._residents: dict[tuple[str, str], CatalogueAgent] = {}
        self._stored: dict[tuple[str, str], CatalogueAgent] = {}

    def agent(self, tenant: str, agent_id: str) -> CatalogueAgent | None:
        """The hot path: a dictionary look-up or two."""
        if agent_id == INDEX:
            return _index(tenant)
        return self._residents.get((tenant, agent_id)) or self._stored.get((tenant, agent_id))

    def agents(self, tenant: str) -> Sequence[CatalogueAgent]:
        """`index` first, then what is declared in code and in files, then the stored ones, the oldest first."""
        found = {agent.id: agent for (owner, _), agent in self._stored.items() if owner == tenant}
        found |= {agent.id: agent for (owner, _), agent in self._residents.items() if owner == tenant}
        return (_index(tenant), *sorted(found.values(), key=lambda agent: (_RANK[agent.source], agent.created_at_ms)))

    def identity(self, tenant: str, agent_id: str) -> AgentId:
        key = (tenant, agent_id)
        known = self._identities.get(key)
        if known is None:
            display = f"{agent_id}@{tenant}"
            known = AgentId(display, public_key(derived_key(self._private_key, display)))
            self._identities[key] = known
        return known

    def client(self, tenant: str) -> AgentId:
        """As whom a tenant's callers send."""
        return self.identity(tenant, CLIENT)

    def add_resident(self, tenant: str, constitution: Constitution, source: Source) -> CatalogueAgent:
        """Declare an agent from code or a file, in place of what was declared under its id before."""
        key = (tenant, constitution.id)
        now_ms = self._ledger.now_ms()
        old = self._residents.get(key)
        agent = CatalogueAgent(
            tenant=tenant,
            constitution=constitution,
            created_at_ms=old.created_at_ms if old is not None else now_ms,
            updated_at_ms=now_ms,
            source=source,
        )
        self._residents[key] = agent
        return agent

    def remove_resident(self, tenant: str, agent_id: str) -> None:
        self._residents.pop((tenant, agent_id), None)

    async def store(self, caller: Caller, constitution: Constitution) -> CatalogueAgent:
        key = (caller.tenant.name, constitution.id)
        if self.agent(*key) is not None:
            raise Conflict("agent_exists", f"there is an agent {constitution.id!r} already")
        now_ms = self._ledger.now_ms()
        agent = CatalogueAgent(tenant=key[0], constitution=constitution, created_at_ms=now_ms, updated_at_ms=now_ms)
        self._stored[key] = agent
        return agent

    async def replace(self, caller: Caller, constitution: Constitution) -> CatalogueAgent:
        key = (caller.tenant.name, constitution.id)
        old = self._stored.get(key)
        if old is None:
            raise unknown_agent(constitution.id)
        agent = msgspec.structs.replace(old, constitution=constitution, updated_at_ms=self._ledger.now_ms())
        self._stored[key] = agent
        return agent

    async def remove(self, caller: Caller, agent_id: str) -> None:
        if self._stored.pop((caller.tenant.name, agent_id), None) is None:
            raise unknown_agent(agent_id)


def _index(tenant: str) -> CatalogueAgent:
    return CatalogueAgent(tenant=tenant, constitution=INDEX_CONSTITUTION, source="builtin")


def unknown_agent(agent_id: str) -> NotFound:
    """The same for an agent that is nowhere and for one that is another tenant's."""
    return NotFound("unknown_agent", f"no agent {agent_id[:80]!r} for this tenant")
