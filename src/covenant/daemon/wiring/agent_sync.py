"""AgentSync: which agents of the catalogue this daemon works for itself, and keeping its workers in line with that.

Agents from served Python files belong to the first tenant, and stay for as long as the daemon runs. Programs, models
and remote ones come and go with the catalogue, of whichever tenant: a change of it is noticed within a second. Every
tenant has its `index`, and one employment for agents that are called by their address alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Final

from covenant.agents.agent_loader import LoadedAgent
from covenant.agents.peer_agent import PeerAgent, PeerRequester
from covenant.agents.process_agent import ProcessAgent
from covenant.agents.runtime.job import RunnableAgent
from covenant.agents.runtime.worker_pool import WorkerPool
from covenant.daemon.environment import program_environment
from covenant.daemon.logs import Log
from covenant.daemon.wiring.model_registry import ModelAgents
from covenant.daemon.wiring.remote_agents import Elsewhere
from covenant.exchange.catalogue import Catalogue
from covenant.ledger.contract.identities import IdentityLedger
from covenant.model.agent_definition import INDEX, AgentDefinition
from covenant.model.kinds import AgentKind
from covenant.model.task import ELSEWHERE, PEERS, Target
from covenant.model.tenants import DEFAULT

INTERVAL_S: Final = 1.0
_CALLED_BY_ADDRESS: Final = AgentDefinition(id=ELSEWHERE, kind="remote")
_OF_PEERS: Final = AgentDefinition(id=PEERS, kind="peer")


class AgentSync:
    def __init__(
        self,
        ledger: IdentityLedger,
        catalogue: Catalogue,
        workers: WorkerPool,
        log: Log,
        *,
        elsewhere: Elsewhere | None = None,
        cast: ModelAgents | None = None,
        peers: PeerRequester | None = None,
        remote_concurrency: int = 0,
    ) -> None:
        """`elsewhere`: how agents that are not here are called. `cast`: who plays those that a model plays.
        `peers`: who delegates to other instances, for the first tenant. Without them there are no such agents.

        `remote_concurrency`: calls elsewhere at once, of one agent that does not say how many; 0: as any other agent.
        """
        self._ledger = ledger
        self._catalogue = catalogue
        self._workers = workers
        self._log = log
        self._programs: dict[tuple[str, str], AgentDefinition] = {}
        self._elsewhere = elsewhere
        self._cast = cast
        self._peers = peers
        self._seen = -1
        self._remote_concurrency = remote_concurrency

    def serve(self, found: Sequence[LoadedAgent]) -> None:
        for agent in found:
            self._catalogue.add_resident(DEFAULT, agent.definition, "code")
            self._employ(DEFAULT, agent.definition, agent.body)
            self._log.info("agents.served", agent=agent.definition.id, file=str(agent.path))

    async def step(self) -> None:
        """One look at the catalogue, if it has changed since the last one."""
        seen = self._catalogue.changes
        if seen == self._seen:
            return
        wanted: dict[tuple[str, str], AgentDefinition] = {}
        if self._peers is not None:
            wanted[DEFAULT, PEERS] = _OF_PEERS
        for tenant in await self._ledger.tenants():
            if self._elsewhere is not None:
                wanted[tenant.name, ELSEWHERE] = _CALLED_BY_ADDRESS
            for agent in self._catalogue.agents(tenant.name):
                rules = agent.definition.kind_rules
                if rules.pooled and (tenant.name == DEFAULT or not rules.first_tenant_only):
                    wanted[tenant.name, agent.id] = agent.definition
        for key in self._programs.keys() - wanted.keys():
            self._dismiss(*key)
        for (tenant_name, agent_id), definition in wanted.items():
            body = self._body(definition)
            if body is not None and self._programs.get((tenant_name, agent_id)) != definition:
                self._employ(tenant_name, definition, body)
                if self._elsewhere is not None and definition.kind_rules.place == "remote":
                    identity = self._catalogue.identity(tenant_name, agent_id)
                    self._elsewhere.withdrawals.look_after(identity, _target(definition))
                if agent_id not in (INDEX, ELSEWHERE, PEERS):
                    self._log.info("agents.employed", agent=agent_id, tenant=tenant_name)
        self._programs, self._seen = wanted, seen

    def _body(self, definition: AgentDefinition) -> RunnableAgent | None:
        make = self._runners.get(definition.kind)
        return make(definition) if make is not None else None

    @cached_property
    def _runners(self) -> Mapping[AgentKind, Callable[[AgentDefinition], RunnableAgent | None]]:
        """What runs an agent of each pooled kind; a kind is left out while this daemon cannot run it."""
        found: dict[AgentKind, Callable[[AgentDefinition], RunnableAgent | None]] = {
            "process": lambda definition: ProcessAgent(definition.command, environment=program_environment())
        }
        if (cast := self._cast) is not None:
            found["model"] = cast.body
        if (elsewhere := self._elsewhere) is not None:
            found["remote"] = lambda definition: elsewhere.body(_target(definition))
        if (peers := self._peers) is not None:
            found["peer"] = lambda definition: PeerAgent(peers, _done_by(definition))
        return found

    async def run(self) -> None:
        while True:
            await asyncio.sleep(INTERVAL_S)
            await self.step()

    def _employ(self, tenant: str, definition: AgentDefinition, body: RunnableAgent) -> None:
        rules = definition.kind_rules
        usual = self._remote_concurrency if rules.waits_for_others else 0
        again = rules.repeatable or (self._cast is not None and self._cast.repeatable(definition))
        self._workers.register(
            self._catalogue.identity(tenant, definition.id),
            body,
            concurrency=definition.concurrency or usual,
            timeout_ms=definition.turn_timeout_ms,
            idempotent=definition.idempotent or again,
            on_lost="requeue" if again else definition.on_lost,
            follows=rules.repeatable,
        )

    def _dismiss(self, tenant: str, agent_id: str) -> None:
        agent = self._catalogue.agent(tenant, agent_id)
        # One from code may have taken its place: that works already.
        if agent is None or agent.source != "code":
            self._workers.unregister(self._catalogue.identity(tenant, agent_id))
            self._log.info("agents.dismissed", agent=agent_id, tenant=tenant)


def _target(definition: AgentDefinition) -> Target | None:
    """Where a remote agent is; None where each task says so."""
    if definition is _CALLED_BY_ADDRESS:
        return None
    return Target(url=definition.url) if definition.url else Target(name=definition.id)


def _done_by(definition: AgentDefinition) -> Target | None:
    """Which peer does an agent's work, as what; None where each task says so."""
    if definition is _OF_PEERS:
        return None
    peer, _, profile = definition.peer.partition("/")
    return Target(peer=peer, profile=profile or definition.id)
