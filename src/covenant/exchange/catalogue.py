"""The catalogue: each tenant's agents, and who they are in the ledger.

`index` is always there. Agents from code and from files live in memory and come back with their source; stored ones are
in the ledger. One declared in code or a file hides a stored one of the same id.

An agent's identity is `<agent>@<tenant>`, and a tenant's callers are `client@<tenant>`. Their keys are derived from the
daemon's own, so nothing more is kept, and they are the same after every restart.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from typing import Final

from covenant.exchange.access.identities import ReservedIdentity
from covenant.exchange.access.tenants import Caller
from covenant.exchange.cron import check_schedules
from covenant.ledger.contract.identities import IdentityLedger, Register, RegisterChange
from covenant.ledger.machine.decisions.identities import agent_exists, unknown_agent, unknown_tenant
from covenant.ledger.machine.identity_commands import PutAgent, RemoveAgent
from covenant.model.agent_definition import (
    INDEX,
    INDEX_DEFINITION,
    RESERVED,
    AgentDefinition,
    AgentSource,
    CatalogueAgent,
)
from covenant.model.errors import Conflict, Forbidden, Invalid
from covenant.model.grant import respond_actions
from covenant.model.ids import AgentId, uuid_of
from covenant.seal.keys import derived_key, derived_secret, public_key

CLIENT: Final = "client"

_RANK: Final = {"builtin": 0, "code": 1, "file": 2, "stored": 3}


class Catalogue:
    def __init__(self, ledger: IdentityLedger, private_key: bytes) -> None:
        self._ledger = ledger
        self._private_key = private_key
        self._operator_key = public_key(private_key)
        self._id_secret = derived_secret(private_key, "task ids")
        self._identities: dict[tuple[str, str], AgentId] = {}
        self._residents: dict[tuple[str, str], CatalogueAgent] = {}
        self.changes = 0
        """Grows with every change, by whomever: whoever follows the catalogue need not look through all of it."""
        ledger.on_registers(self._changed)

    def _changed(self, change: RegisterChange) -> None:
        if change.register is not Register.IDENTITIES:
            self.changes += 1

    def agent(self, tenant: str, agent_id: str) -> CatalogueAgent | None:
        """The hot path: a dictionary look-up or two."""
        if agent_id == INDEX:
            return _index(tenant)
        return self._residents.get((tenant, agent_id)) or self._ledger.agent(tenant, agent_id)

    def agents(self, tenant: str) -> Sequence[CatalogueAgent]:
        """`index`, then what code declares, then files by id, then the stored ones, the oldest first.

        What is declared has been there from the start, and its order must not depend on when that was.
        """
        found = {agent.id: agent for agent in self._ledger.agents(tenant)}
        for (owner, agent_id), agent in self._residents.items():
            if owner == tenant:
                found.pop(agent_id, None)
                found[agent_id] = agent
        return (_index(tenant), *sorted(found.values(), key=_place))

    async def list(self, tenant: str) -> Sequence[CatalogueAgent]:
        """For callers: nothing that is not durable."""
        await self._ledger.durable()
        return self.agents(tenant)

    async def show(self, tenant: str, agent_id: str) -> CatalogueAgent:
        await self._ledger.durable()
        agent = self.agent(tenant, agent_id)
        if agent is None:
            raise unknown_agent(agent_id)
        return agent

    def identity(self, tenant: str, agent_id: str) -> AgentId:
        key = (tenant, agent_id)
        known = self._identities.get(key)
        if known is None:
            display = f"{agent_id}@{tenant}"
            known = AgentId(display, public_key(derived_key(self._private_key, display)))
            self._identities[key] = known
        return known

    def secret_id(self, scope: str) -> str:
        """The UUID that this daemon gives to a scope, always the same. Whoever lacks its key cannot compute it."""
        return uuid_of(hmac.digest(self._id_secret, scope.encode(), "sha256"))

    def named(self, agent: AgentId) -> AgentId | None:
        """Who is meant by a display or a key: whoever is enrolled so, or an agent of the catalogue by its display."""
        known = self._ledger.enrolled(agent)
        if known is not None:
            return known
        agent_id, _, tenant = agent.display.partition("@")
        return self.identity(tenant, agent_id) if self.agent(tenant, agent_id) is not None else None

    def client(self, tenant: str) -> AgentId:
        """As whom a tenant's callers send."""
        return self.identity(tenant, CLIENT)

    def seat(self, display: str) -> ReservedIdentity | None:
        """What an identity enrolled under this name must be; None if the catalogue has nothing to say about it.

        A worker's is its agent's key, so that it leases the agent's tasks, and the right to answer its tenant.
        """
        agent_id, _, tenant = display.partition("@")
        if self._ledger.tenant(tenant) is None:
            return None
        agent = self.agent(tenant, agent_id)
        if agent_id not in RESERVED and agent is None:
            return None
        if agent is None or not agent.definition.kind_rules.enrolled:
            raise Conflict(
                "display_reserved", f"{display} is an agent of this daemon; only a worker agent can be enrolled"
            )
        return ReservedIdentity(self.identity(tenant, agent_id).pubkey, respond_actions(self.client(tenant))[:1])

    def add_resident(
        self, tenant: str, definition: AgentDefinition, source: AgentSource, *, changed_at_ms: int | None = None
    ) -> CatalogueAgent:
        """Declare an agent from code or a file, in place of what was declared under its id before."""
        if self._ledger.tenant(tenant) is None:
            raise unknown_tenant(tenant)
        if definition.id in RESERVED:
            raise Invalid("invalid_agent", f"/id: {definition.id!r} is reserved")
        if definition.kind_rules.stored_by == "code" and source != "code":
            raise _only_code()
        identity = self.identity(tenant, definition.id)
        enrolled = self._ledger.enrolled(identity)
        if enrolled is not None and enrolled != identity:
            raise Conflict("display_taken", f"/id: {identity.display} is an identity of its own; revoke it first")
        now_ms = changed_at_ms if changed_at_ms is not None else self._ledger.now_ms()
        old = self._residents.get((tenant, definition.id))
        same = old is not None and (old.definition, old.source) == (definition, source)
        agent = CatalogueAgent(
            tenant=tenant,
            definition=definition,
            created_at_ms=old.created_at_ms if old is not None else now_ms,
            updated_at_ms=old.updated_at_ms if old is not None and same else now_ms,
            source=source,
        )
        self._residents[tenant, definition.id] = agent
        self.changes += 1
        return agent

    def remove_resident(self, tenant: str, agent_id: str) -> None:
        self._residents.pop((tenant, agent_id), None)
        self.changes += 1

    async def store(self, caller: Caller, definition: AgentDefinition) -> CatalogueAgent:
        """Refused as `agent_exists` if the tenant has one of that id, wherever it is kept."""
        tenant = caller.tenant.name
        self._check(caller, definition)
        if (tenant, definition.id) in self._residents:
            raise agent_exists(definition.id)
        return await self._put(caller, definition, replace=False)

    async def replace(self, caller: Caller, definition: AgentDefinition) -> CatalogueAgent:
        """Wholesale: what the new definition does not say is back at its default."""
        self._check(caller, definition)
        self._check_stored(caller.tenant.name, definition.id)
        return await self._put(caller, definition, replace=True)

    async def remove(self, caller: Caller, agent_id: str) -> CatalogueAgent:
        tenant = caller.tenant.name
        self._check_stored(tenant, agent_id)
        return await self._ledger.commit(RemoveAgent(by=self._by(caller), tenant=tenant, agent_id=agent_id))

    async def _put(self, caller: Caller, definition: AgentDefinition, *, replace: bool) -> CatalogueAgent:
        tenant = caller.tenant.name
        return await self._ledger.commit(
            PutAgent(
                by=self._by(caller),
                tenant=tenant,
                definition=definition,
                identity=self.identity(tenant, definition.id),
                replace=replace,
            )
        )

    def _by(self, caller: Caller) -> AgentId:
        return AgentId(caller.name, self._operator_key) if caller.operator else self.client(caller.tenant.name)

    def _check(self, caller: Caller, definition: AgentDefinition) -> None:
        stored_by = definition.kind_rules.stored_by
        if stored_by == "code":
            raise _only_code()
        check_schedules(definition.schedules)
        if stored_by == "operator" and not caller.operator:
            raise Forbidden("kind_not_allowed", f'/kind: only the operator may add a "{definition.kind}" agent')

    def _check_stored(self, tenant: str, agent_id: str) -> None:
        """What is kept elsewhere is changed there."""
        if agent_id == INDEX:
            raise Conflict("agent_immutable", "index is built in; it cannot be changed or removed")
        resident = self._residents.get((tenant, agent_id))
        if resident is not None:
            where = "a file in the home's agents folder" if resident.source == "file" else "code"
            raise Conflict("agent_immutable", f"{agent_id} comes from {where}; change it there")


def _place(agent: CatalogueAgent) -> tuple[int, str]:
    return _RANK[agent.source], agent.id if agent.source == "file" else ""


def _index(tenant: str) -> CatalogueAgent:
    return CatalogueAgent(tenant=tenant, definition=INDEX_DEFINITION, source="builtin")


def _only_code() -> Invalid:
    return Invalid("invalid_agent", '/kind: a "function" agent comes from code; see `covenant serve`')
