"""The agents of a daemon, their tools and calls, and the A2A exchange that gives them work."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import msgspec

from covenant.agents.agent_directory import AgentDirectory, RemoteCards
from covenant.agents.agent_loader import AgentStacks, LoadedAgent, ServedFile
from covenant.agents.model.agent_memory import AgentMemories
from covenant.agents.model.mcp_tools import McpTools
from covenant.agents.model.toolbox import ToolServices
from covenant.agents.model.web_fetch import WebPages, WebSearch
from covenant.agents.peer_agent import PeerAgent, PeerRequester
from covenant.agents.process_agent import ProcessAgent
from covenant.agents.remote_agent import RemoteAgents
from covenant.agents.retried_agent import RetriedAgent
from covenant.agents.runtime.job import RunnableAgent
from covenant.agents.runtime.model_calls import ModelCalls
from covenant.agents.runtime.worker_pool import PoolRegister, WorkerPool
from covenant.daemon.agent_files import AgentFiles, AgentReloader
from covenant.daemon.environment import environment, now_ms, program_environment
from covenant.daemon.schedulers import Scheduler
from covenant.daemon.telemetry import Log
from covenant.daemon.tenant_files import MEMORY_NAME
from covenant.daemon.watched_file import WatchedFile
from covenant.daemon.wiring.core import PRICES_NAME, SERVERS_NAME, Base, card_features
from covenant.daemon.wiring.language_models import ModelAgents, Models
from covenant.exchange.a2a_service import A2AExchange
from covenant.exchange.cards import CardFeatures
from covenant.exchange.catalogue import Catalogue
from covenant.exchange.delegation import Delegations, OrphanCanceller, peer_target
from covenant.exchange.push import check_config
from covenant.exchange.schedules import ScheduleAdmin, ScheduleRunner
from covenant.exchange.tasks.writer import TaskWriter
from covenant.ledger.clock import uuid_source
from covenant.ledger.contract.identities import IdentityLedger
from covenant.model.a2a_requests import PushConfig
from covenant.model.agent_definition import INDEX, AgentDefinition, Retries
from covenant.model.errors import Refusal
from covenant.model.kinds import AgentKind
from covenant.model.mcp_servers import McpServer, read_mcp_servers
from covenant.model.model_prices import NO_PRICES, ModelPrices, read_model_prices
from covenant.model.task import PEER_RECIPIENT, URL_RECIPIENT, Target
from covenant.model.tenants import DEFAULT
from covenant.outbound.urls import read_url

if TYPE_CHECKING:
    from covenant.peers.requester.requester_service import Requester

INTERVAL_S: Final = 1.0
_URL_AGENT: Final = AgentDefinition(id=URL_RECIPIENT, kind="remote")
_PEER_AGENT: Final = AgentDefinition(id=PEER_RECIPIENT, kind="peer")


class AgentSync:
    """A scheduler: keeps the worker pool's agents the same as the catalogue's."""

    def __init__(
        self,
        ledger: IdentityLedger,
        catalogue: Catalogue,
        workers: WorkerPool,
        log: Log,
        *,
        remotes: RemoteAgents | None = None,
        models: ModelAgents | None = None,
        peers: PeerRequester | None = None,
        remote_concurrency: int = 0,
    ) -> None:
        """Without `remotes`, `models` or `peers` there are no agents of that kind.

        `remote_concurrency`: most calls at once of a remote agent without a limit of its own; 0: as for other agents.
        """
        self._ledger = ledger
        self._catalogue = catalogue
        self._workers = workers
        self._log = log
        self._registered: dict[tuple[str, str], AgentDefinition] = {}
        self._remotes = remotes
        self._models = models
        self._peers = peers
        self._changes_seen = -1
        self._loaded: tuple[LoadedAgent, ...] = ()
        """The agents of the served files."""
        self._served: set[tuple[str, str]] = set()
        """The loaded agents whose tenant exists, by tenant and id."""
        self.stacks = AgentStacks()
        self._remote_concurrency = remote_concurrency

    def serve(self, found: Sequence[LoadedAgent]) -> None:
        """Replaces the agents that were served before. Turns under way end with the code that they began with.

        An agent whose tenant does not exist yet is served as soon as the tenant does.
        """
        for key in self._served.difference(agent.key for agent in found):
            self._stop_serving(*key)
        self.stacks.set_agents(found)
        self._loaded = tuple(found)
        for agent in found:
            if not self._tenant_exists(agent.tenant):
                self._log.warning("agents.no_tenant", agent=agent.definition.id, tenant=agent.tenant)
            else:
                self._serve(agent)

    def _serve(self, agent: LoadedAgent) -> None:
        self._catalogue.add_resident(agent.tenant, agent.definition, "code")
        self._register(agent.tenant, agent.definition, agent.body)
        self._served.add(agent.key)
        self._log.info("agents.served", agent=agent.definition.id, tenant=agent.tenant, file=str(agent.path))

    def _stop_serving(self, tenant: str, agent_id: str) -> None:
        self._catalogue.remove_resident(tenant, agent_id)
        self._unregister(tenant, agent_id)
        self._served.discard((tenant, agent_id))

    def _tenant_exists(self, name: str) -> bool:
        """Whether a tenant exists and is not being removed. Agents of a removed tenant would be a trace of it."""
        tenant = self._ledger.tenant(name)
        return tenant is not None and tenant.removal is None

    def _follow_tenants(self) -> None:
        """Serves the agents whose tenant has come, and stops those whose tenant goes."""
        for agent in self._loaded:
            exists = self._tenant_exists(agent.tenant)
            if exists and agent.key not in self._served:
                try:
                    self._serve(agent)
                except Refusal as refusal:
                    why = refusal.message
                    self._log.warning("agents.not_served", agent=agent.definition.id, tenant=agent.tenant, why=why)
            elif not exists and agent.key in self._served:
                self._stop_serving(*agent.key)

    async def step(self) -> None:
        """Registers and unregisters agents, if the catalogue has changed since the last step."""
        changes = self._catalogue.changes
        if changes == self._changes_seen:
            return
        self._follow_tenants()
        await self._catalogue.announce()
        wanted: dict[tuple[str, str], AgentDefinition] = {}
        for tenant in await self._ledger.tenants():
            if self._peers is not None:
                wanted[tenant.name, PEER_RECIPIENT] = _PEER_AGENT
            if self._remotes is not None:
                wanted[tenant.name, URL_RECIPIENT] = _URL_AGENT
            for agent in self._catalogue.agents_here(tenant.name):
                rules = agent.definition.kind_rules
                if rules.pooled and (tenant.name == DEFAULT or not rules.first_tenant_only):
                    wanted[tenant.name, agent.id] = agent.definition
        for key in self._registered.keys() - wanted.keys():
            self._unregister(*key)
        for (tenant_name, agent_id), definition in wanted.items():
            make = self._runners.get(definition.kind)
            body = make(definition) if make is not None else None
            if body is not None and definition.kind_rules.retried:
                body = RetriedAgent(body, definition.retries or Retries())
            if body is not None and self._registered.get((tenant_name, agent_id)) != definition:
                self._register(tenant_name, definition, body)
                if self._remotes is not None and definition.kind_rules.place == "remote":
                    identity = self._catalogue.identity(tenant_name, agent_id)
                    self._remotes.cancels.resume(identity, _target(definition))
                if agent_id not in (INDEX, URL_RECIPIENT, PEER_RECIPIENT):
                    self._log.info("agents.registered", agent=agent_id, tenant=tenant_name)
        self._registered, self._changes_seen = wanted, changes

    @cached_property
    def _runners(self) -> Mapping[AgentKind, Callable[[AgentDefinition], RunnableAgent | None]]:
        found: dict[AgentKind, Callable[[AgentDefinition], RunnableAgent | None]] = {
            "process": lambda definition: ProcessAgent(definition.command, environment=program_environment())
        }
        if (models := self._models) is not None:
            found["model"] = models.body
        if (remotes := self._remotes) is not None:
            found["remote"] = lambda definition: remotes.body(_target(definition))
        if (peers := self._peers) is not None:
            # A task for a peer that was called by name has its own target.
            found["peer"] = lambda definition: PeerAgent(
                peers, peer_target(definition) if definition is not _PEER_AGENT else None
            )
        return found

    async def run(self) -> None:
        while True:
            await asyncio.sleep(INTERVAL_S)
            await self.step()

    def _register(self, tenant: str, definition: AgentDefinition, body: RunnableAgent) -> None:
        rules = definition.kind_rules
        default_concurrency = self._remote_concurrency if rules.waits_for_others else 0
        repeatable = rules.repeatable or (self._models is not None and self._models.repeatable(definition))
        self._workers.register(
            self._catalogue.identity(tenant, definition.id),
            body,
            concurrency=definition.concurrency or default_concurrency,
            timeout_ms=definition.turn_timeout_ms,
            idempotent=definition.idempotent or repeatable,
            on_lost="requeue" if repeatable else definition.on_lost,
            follows=rules.repeatable,
            rate_per_min=definition.rate_per_min,
        )

    def _unregister(self, tenant: str, agent_id: str) -> None:
        agent = self._catalogue.agent(tenant, agent_id)
        # An agent from code may have taken its place, and is registered already.
        if agent is None or agent.source != "code":
            self._workers.unregister(self._catalogue.identity(tenant, agent_id))
            self._log.info("agents.unregistered", agent=agent_id, tenant=tenant)


def _target(definition: AgentDefinition) -> Target | None:
    """Where a remote agent is; None if each task has its own target."""
    if definition is _URL_AGENT:
        return None
    return Target(url=definition.url) if definition.url else Target(name=definition.id)


@dataclass(frozen=True, slots=True, kw_only=True)
class Agents:
    workers: WorkerPool
    remotes: RemoteAgents
    exchange: A2AExchange
    features: Features
    stacks: AgentStacks
    schedules: ScheduleAdmin
    files: tuple[WatchedFile[Any], ...]
    """The files that the operator may change while the daemon runs."""
    schedulers: tuple[Scheduler, ...]

    def notices(self) -> list[str]:
        """The problems as the public health page shows them: which file, but not its contents."""
        notice = "cannot be used as it is now: the last good one is in force; see `covenant doctor`"
        return [f"{file.path.name} {notice}" for file in self.files if file.problem]


@dataclass(frozen=True, slots=True)
class Features:
    """The features of agents, for their cards. Read for each card, since tool servers come and go."""

    from_settings: CardFeatures
    tools: McpTools
    services: ToolServices
    models: Models
    remotes: RemoteAgents

    def now(self) -> CardFeatures:
        return msgspec.structs.replace(
            self.from_settings,
            tools=self.tools.all,
            abilities=self.services.abilities if self.models.default is not None else frozenset(),
            mcp_tenants=self.tools.tenants,
            remote_tenants=self.remotes.registry.tenants,
        )


@asynccontextmanager
async def open_agents(
    base: Base,
    requester: Requester | None,
    register: PoolRegister,
    served: Sequence[LoadedAgent] = (),
    reloaded: Sequence[ServedFile] = (),
) -> AsyncIterator[Agents]:
    """`requester` delegates to peers. `served`: agents from Python files, each for the tenant of its file.

    `reloaded`: files whose agents are loaded again when they change.
    """
    settings, log = base.settings, base.telemetry.log
    ledger, catalogue, fetcher = base.storage.ledger, base.access.catalogue, base.outbound.fetcher
    none: Mapping[str, McpServer] = {}
    servers = WatchedFile(settings.home / SERVERS_NAME, read_mcp_servers, none, log)
    async with AsyncExitStack() as stack:
        tools = McpTools(servers.value, program_environment(), fetcher, environment())
        servers.on_change(tools.replace)
        stack.push_async_callback(tools.close)
        models = Models(settings.model)
        stack.push_async_callback(models.close)
        if settings.model.name and models.default is None:
            log.warning("model.unusable", model=settings.model.name, why=models.problem)
        remotes = _make_remotes(base)
        stack.push_async_callback(remotes.close)
        remote_cards = RemoteCards(remotes.registry, remotes.card, time.monotonic)
        services = ToolServices(
            # An entry's token is for the tenants of that entry alone.
            directory=AgentDirectory(catalogue, models.can_work, remote_cards, callable_by=remotes.registry.names_of),
            pages=(pages := WebPages(fetcher)),
            memories=AgentMemories(settings.home / MEMORY_NAME, now_ms, base.storage.shared_ledger),
            mcp=tools,
            search=WebSearch(settings.model.search, pages, tools) if settings.model.search else None,
        )
        calls, prices = _make_model_calls(base)
        workers = _make_workers(base, remotes, requester, register, calls)
        sync = AgentSync(
            ledger,
            catalogue,
            workers,
            log,
            remotes=remotes,
            models=ModelAgents(settings.model, models, services),
            peers=requester,
            remote_concurrency=settings.delegation.remote_concurrency,
        )
        files = AgentFiles(settings.home, catalogue, log)
        sync.serve(served)
        files.refresh()
        await remotes.prepare()
        await sync.step()
        from_settings, grpc = card_features(settings, servers.value), base.listeners.grpc
        if grpc is not None:
            address = settings.grpc.public_address
            from_settings = msgspec.structs.replace(from_settings, grpc_port=grpc.port, grpc_address=address)
        writer = TaskWriter(ledger, workers, base.telemetry.tracer, base.access.intake, base.access.files)
        yield Agents(
            workers=workers,
            remotes=remotes,
            exchange=_make_exchange(base, workers),
            features=Features(from_settings, tools, services, models, remotes),
            stacks=sync.stacks,
            schedules=ScheduleAdmin(ledger, catalogue, writer),
            files=(servers, prices),
            schedulers=(
                *(OrphanCanceller(ledger), files, remote_cards, sync, ScheduleRunner(ledger, catalogue, writer)),
                *(servers, prices),
                *_reloaders(sync, served, reloaded),
            ),
        )


def _reloaders(sync: AgentSync, served: Sequence[LoadedAgent], files: Sequence[ServedFile]) -> Sequence[Scheduler]:
    kept = [agent for agent in served if (agent.path, agent.tenant) not in files]
    return (AgentReloader(files, lambda found: sync.serve([*found, *kept]), Log()),) if files else ()


def _make_remotes(base: Base) -> RemoteAgents:
    return RemoteAgents(
        base.settings.home,
        base.outbound.fetcher,
        base.storage.ledger,
        depth_max=base.settings.delegation.depth_max,
        environment=environment,
        chance=random.random,
    )


def _make_exchange(base: Base, workers: WorkerPool) -> A2AExchange:
    settings = base.settings
    return A2AExchange(
        base.storage.ledger,
        base.access.catalogue,
        workers,
        uuid_source(),
        settings.a2a,
        depth_max=settings.delegation.depth_max,
        check_push=check_push if settings.a2a.push_notifications else None,
        tracer=base.telemetry.tracer,
        intake=base.access.intake,
        files=base.access.files,
        presence=base.access.presence,
    )


def _make_model_calls(base: Base) -> tuple[ModelCalls, WatchedFile[ModelPrices]]:
    telemetry = base.telemetry
    prices = WatchedFile(base.settings.home / PRICES_NAME, read_model_prices, NO_PRICES, telemetry.log)
    calls = ModelCalls(
        telemetry.tracer, telemetry.meter, prices.value, task_tokens_max=base.settings.model.task_tokens_max
    )
    prices.on_change(calls.price)
    return calls, prices


def _make_workers(
    base: Base, remotes: RemoteAgents, requester: Requester | None, register: PoolRegister, model_calls: ModelCalls
) -> WorkerPool:
    ledger, tracer = base.storage.ledger, base.telemetry.tracer
    a2a, delegation = base.settings.a2a, base.settings.delegation

    def delegations(workers: WorkerPool) -> Delegations:
        return Delegations(
            ledger,
            base.access.catalogue,
            workers,
            delegation,
            message_bytes_max=a2a.message_bytes_max,
            registered=remotes.registered,
            peers=requester.callee if requester is not None else lambda _tenant, _name: None,
            tracer=tracer,
            files=base.access.files,
            presence=base.access.presence,
        )

    return WorkerPool(
        ledger,
        limits=a2a,
        concurrency=a2a.agent_concurrency,
        tenant_concurrency=base.settings.tenants.concurrency,
        delegations=delegations,
        register=register,
        tracer=tracer,
        files=base.access.files,
        model_calls=model_calls,
    )


def check_push(config: PushConfig) -> None:
    """Checks the text of a push configuration. Its address is checked when it is called."""
    check_config(config, read_url)
