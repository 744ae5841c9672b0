"""The catalogue: each tenant's agents, and their identities in the ledger.

`index` always exists. Agents from code and from files are kept in memory and come back with their source; stored agents
are in the ledger. An agent declared in code or a file hides a stored agent of the same id.

An agent's identity is `<agent>@<tenant>`, and a tenant's callers are `client@<tenant>`. Their keys are derived from the
daemon's own key, so nothing more is stored, and they are the same after every restart.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Mapping, Sequence
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
from covenant.model.errors import Conflict, Forbidden, Invalid, Refusal, Unavailable
from covenant.model.grant import respond_actions
from covenant.model.ids import AgentId, uuid_of
from covenant.seal.keys import CursorSeal, derived_key, derived_secret, public_key

CLIENT: Final = "client"
AWAY_RETRY_MS: Final = 2_000

_SOURCE_RANK: Final = {"builtin": 0, "code": 1, "file": 2, "stored": 3}


class Catalogue:
    def __init__(self, ledger: IdentityLedger, private_key: bytes) -> None:
        self._ledger = ledger
        self._private_key = private_key
        self._operator_key = public_key(private_key)
        self._id_secret = derived_secret(private_key, "task ids")
        self.cursors = CursorSeal(private_key)
        self.identities: dict[tuple[str, str], AgentId] = {}
        """Identities that `identity` has derived, by tenant and agent."""
        self._residents: dict[tuple[str, str], CatalogueAgent] = {}
        self._remote: dict[tuple[str, str], CatalogueAgent] = {}
        """Agents that other nodes serve from code and files."""
        self._announced: Sequence[CatalogueAgent] | None = None
        self.changes = 0
        """Grows with every change, by any node, so that a listener can skip an unchanged catalogue."""
        self._listeners: list[Callable[[], None]] = []
        ledger.on_registers(self._changed)
        self._read_remote()

    def on_change(self, callback: Callable[[], None]) -> None:
        """Registers a listener, called after every change by any node."""
        self._listeners.append(callback)

    def _changed(self, change: RegisterChange) -> None:
        if change.register is Register.AGENTS:
            self._read_remote()
        if change.register is not Register.IDENTITIES:
            self._note_change()

    def _note_change(self) -> None:
        self.changes += 1
        for listener in self._listeners:
            listener()

    def _read_remote(self) -> None:
        found = [each.agent for each in self._ledger.residents() if each.alive]
        self._remote = {(agent.tenant, agent.id): agent for agent in found}

    def agent(self, tenant: str, agent_id: str) -> CatalogueAgent | None:
        """The agent of this id. A hot path: one to three dictionary look-ups."""
        if agent_id == INDEX:
            return _index(tenant)
        key = (tenant, agent_id)
        return self._residents.get(key) or self._remote.get(key) or self._ledger.agent(tenant, agent_id)

    def known(self, tenant: str, agent_id: str) -> CatalogueAgent | None:
        """The agent, even if all of its nodes are away: its tasks are read, canceled and answered all the same."""
        found = (each.agent for each in self._ledger.residents() if _key(each.agent) == (tenant, agent_id))
        return self.agent(tenant, agent_id) or next(found, None)

    def agents(self, tenant: str, *, away: bool = False) -> Sequence[CatalogueAgent]:
        """`index`, then agents from code, then files by id, then stored agents, oldest first.

        The order of declared agents must not depend on when they were declared. `away`: with those of absent nodes.
        """
        known = {_key(each.agent): each.agent for each in self._ledger.residents()} if away else {}
        return self._listed(tenant, {**known, **self._remote, **self._residents})

    def agents_here(self, tenant: str) -> Sequence[CatalogueAgent]:
        """The same without agents that only other nodes can serve."""
        return self._listed(tenant, self._residents)

    def _listed(self, tenant: str, declared: Mapping[tuple[str, str], CatalogueAgent]) -> Sequence[CatalogueAgent]:
        found = {agent.id: agent for agent in self._ledger.agents(tenant)}
        for (owner, agent_id), agent in declared.items():
            if owner == tenant:
                found.pop(agent_id, None)
                found[agent_id] = agent
        return (_index(tenant), *sorted(found.values(), key=_listing_order))

    async def announce(self) -> None:
        """Tells the other nodes which agents this one serves from code and files."""
        serving = tuple(self._residents.values())
        if serving != self._announced:
            await self._ledger.announce(serving)
            self._announced = serving

    def nodes(self, agent: CatalogueAgent) -> Sequence[str]:
        """The nodes that serve an agent from code or a file. Empty: all can, or there is no other node."""
        residents = self._ledger.residents()
        if agent.source not in ("code", "file") or not residents:
            return ()
        key = _key(agent)
        others = [each.node for each in residents if each.alive and _key(each.agent) == key]
        return sorted([*others, *((self._ledger.node,) if key in self._residents else ())])

    def missing(self, tenant: str, agent_id: str) -> Refusal:
        """The refusal for an agent that is not there: nobody has it, or the node that serves it is away."""
        key = (tenant, agent_id)
        away = [each.node for each in self._ledger.residents() if not each.alive and _key(each.agent) == key]
        if not away:
            return unknown_agent(agent_id)
        return Unavailable(
            "agent_away",
            f"the agent {agent_id!r} is served by {', '.join(sorted(away))}, which is away now; send again later",
            retry_after_ms=AWAY_RETRY_MS,
        )

    async def list(self, tenant: str) -> Sequence[CatalogueAgent]:
        """The tenant's agents for callers: only durable ones."""
        await self._ledger.durable()
        return self.agents(tenant)

    async def show(self, tenant: str, agent_id: str, *, away: bool = False) -> CatalogueAgent:
        """`away`: an agent whose nodes are all away is shown, too."""
        await self._ledger.durable()
        agent = (self.known if away else self.agent)(tenant, agent_id)
        if agent is None:
            raise self.missing(tenant, agent_id)
        return agent

    def identity(self, tenant: str, agent_id: str) -> AgentId:
        key = (tenant, agent_id)
        known = self.identities.get(key)
        if known is None:
            display = f"{agent_id}@{tenant}"
            known = AgentId(display, public_key(derived_key(self._private_key, display)))
            self.identities[key] = known
        return known

    def secret_id(self, scope: str) -> str:
        """The UUID that this daemon derives for a scope, always the same. It needs the daemon's key."""
        return uuid_of(hmac.digest(self._id_secret, scope.encode(), "sha256"))

    def named(self, agent: AgentId) -> AgentId | None:
        """The identity that a display or key names: an enrolled one, or an agent of the catalogue by its display."""
        known = self._ledger.enrolled(agent)
        if known is not None:
            return known
        agent_id, _, tenant = agent.display.partition("@")
        return self.identity(tenant, agent_id) if self.agent(tenant, agent_id) is not None else None

    def client(self, tenant: str) -> AgentId:
        """The sender of a tenant's callers."""
        return self.identity(tenant, CLIENT)

    def reserved_identity(self, display: str) -> ReservedIdentity | None:
        """The key and grants that an identity under this name must have; None for a name that no agent has.

        A worker gets its agent's key, so that it leases the agent's tasks, and the right to answer its tenant.
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
        """Declares an agent from code or a file, in place of an earlier one of the same id."""
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
        self._note_change()
        return agent

    def remove_resident(self, tenant: str, agent_id: str) -> None:
        self._residents.pop((tenant, agent_id), None)
        self._note_change()

    async def store(self, caller: Caller, definition: AgentDefinition) -> CatalogueAgent:
        """Stores an agent. Refused as `agent_exists` if the tenant has one of that id, from any source."""
        tenant = caller.tenant.name
        self._check(caller, definition)
        if (tenant, definition.id) in self._residents or (tenant, definition.id) in self._remote:
            raise agent_exists(definition.id)
        return await self._put(caller, definition, replace=False)

    async def replace(
        self, caller: Caller, definition: AgentDefinition, expected: AgentDefinition | None = None
    ) -> CatalogueAgent:
        """Replaces the whole definition: fields that the new one leaves out get their defaults.

        `expected`: refused as `agent_changed` unless this is the definition that is replaced.
        """
        self._check(caller, definition)
        self.check_stored(caller.tenant.name, definition.id)
        return await self._put(caller, definition, replace=True, expected=expected)

    async def remove(self, caller: Caller, agent_id: str) -> CatalogueAgent:
        tenant = caller.tenant.name
        self.check_stored(tenant, agent_id)
        return await self._ledger.commit(RemoveAgent(by=self.author(caller), tenant=tenant, agent_id=agent_id))

    async def _put(
        self, caller: Caller, definition: AgentDefinition, *, replace: bool, expected: AgentDefinition | None = None
    ) -> CatalogueAgent:
        tenant = caller.tenant.name
        return await self._ledger.commit(
            PutAgent(
                by=self.author(caller),
                tenant=tenant,
                definition=definition,
                identity=self.identity(tenant, definition.id),
                replace=replace,
                expected=expected,
            )
        )

    def author(self, caller: Caller) -> AgentId:
        """The caller's identity in the audit."""
        return AgentId(caller.name, self._operator_key) if caller.operator else self.client(caller.tenant.name)

    def _check(self, caller: Caller, definition: AgentDefinition) -> None:
        stored_by = definition.kind_rules.stored_by
        if stored_by == "code":
            raise _only_code()
        check_schedules(definition.schedules)
        if stored_by == "operator" and not caller.operator:
            raise Forbidden("kind_not_allowed", f'/kind: only the operator may add a "{definition.kind}" agent')

    def check_stored(self, tenant: str, agent_id: str) -> None:
        """Refuses an agent that is not stored: it must be changed at its source."""
        if agent_id == INDEX:
            raise Conflict("agent_immutable", "index is built in; it cannot be changed or removed")
        resident = self._residents.get((tenant, agent_id)) or self._remote.get((tenant, agent_id))
        if resident is not None:
            where = "a file in the home's agents folder" if resident.source == "file" else "code"
            raise Conflict("agent_immutable", f"{agent_id} comes from {where}; change it there")


def _key(agent: CatalogueAgent) -> tuple[str, str]:
    return agent.tenant, agent.id


def _listing_order(agent: CatalogueAgent) -> tuple[int, str]:
    return _SOURCE_RANK[agent.source], agent.id if agent.source == "file" else ""


def _index(tenant: str) -> CatalogueAgent:
    return CatalogueAgent(tenant=tenant, definition=INDEX_DEFINITION, source="builtin")


def _only_code() -> Invalid:
    return Invalid("invalid_agent", '/kind: a "function" agent comes from code; see `covenant serve`')
