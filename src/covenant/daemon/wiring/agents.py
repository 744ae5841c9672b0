"""The agents of a daemon: who works in it, what they may call and use, and the A2A exchange that gives them work."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from covenant.agents.agent_directory import AgentDirectory, RemoteCards
from covenant.agents.agent_loader import AgentStacks, LoadedAgent
from covenant.agents.model.agent_memory import AgentMemories
from covenant.agents.model.mcp_tools import McpTools
from covenant.agents.model.toolbox import ToolServices
from covenant.agents.model.web_fetch import WebPages, WebSearch
from covenant.agents.peer_agent import PeerAgent, PeerRequester
from covenant.agents.process_agent import ProcessAgent
from covenant.agents.retried_agent import RetriedAgent
from covenant.agents.router import IndexAgent, UnavailableAgent
from covenant.agents.runtime.job import RunnableAgent
from covenant.agents.runtime.worker_pool import RunningJobs, WorkerPool
from covenant.daemon.agent_files import AgentFiles
from covenant.daemon.agent_reload import AgentReloader
from covenant.daemon.environment import environment, now_ms, program_environment
from covenant.daemon.schedulers import Scheduler
from covenant.daemon.settings import ModelSettings
from covenant.daemon.telemetry import Log
from covenant.daemon.tenant_files import MEMORY_NAME
from covenant.daemon.wiring.core import Base, card_features, mcp_servers
from covenant.daemon.wiring.remote_agents import RemoteAgents
from covenant.exchange.a2a_service import A2AExchange
from covenant.exchange.cards import CardFeatures
from covenant.exchange.catalogue import Catalogue
from covenant.exchange.delegation import Delegations, OrphanCanceller
from covenant.exchange.push import check_config
from covenant.exchange.schedules import ScheduleRunner
from covenant.exchange.tasks.writer import TaskWriter
from covenant.ledger.clock import Uuids
from covenant.ledger.contract.identities import IdentityLedger
from covenant.model.a2a_requests import PushConfig
from covenant.model.agent_definition import INDEX, AgentDefinition, Retries
from covenant.model.extras import install_command
from covenant.model.kinds import AgentKind
from covenant.model.task import ELSEWHERE, PEERS, Target
from covenant.model.tenants import DEFAULT
from covenant.outbound.urls import read_url

if TYPE_CHECKING:
    from pydantic_ai.models import Model

    from covenant.peers.requester.requester_service import Requester

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
        remotes: RemoteAgents | None = None,
        models: ModelAgents | None = None,
        peers: PeerRequester | None = None,
        remote_concurrency: int = 0,
    ) -> None:
        """Without `remotes`, `models` or `peers` there are no agents of that kind.

        `remote_concurrency`: calls at once of a remote agent that does not say how many; 0: as any other agent.
        """
        self._ledger = ledger
        self._catalogue = catalogue
        self._workers = workers
        self._log = log
        self._programs: dict[tuple[str, str], AgentDefinition] = {}
        self._remotes = remotes
        self._models = models
        self._peers = peers
        self._seen = -1
        self._served: set[str] = set()
        self.stacks = AgentStacks()
        self._remote_concurrency = remote_concurrency

    def serve(self, found: Sequence[LoadedAgent]) -> None:
        """In place of those that were served before: turns under way end with the code that they began with."""
        for agent_id in self._served.difference(agent.definition.id for agent in found):
            self._catalogue.remove_resident(DEFAULT, agent_id)
            self._unregister(DEFAULT, agent_id)
        self._served = {agent.definition.id for agent in found}
        self.stacks.learn(found)
        for agent in found:
            self._catalogue.add_resident(DEFAULT, agent.definition, "code")
            self._register(DEFAULT, agent.definition, agent.body)
            self._log.info("agents.served", agent=agent.definition.id, file=str(agent.path))

    async def step(self) -> None:
        """One look at the catalogue, if it has changed since the last one."""
        seen = self._catalogue.changes
        if seen == self._seen:
            return
        wanted: dict[tuple[str, str], AgentDefinition] = {}
        for tenant in await self._ledger.tenants():
            if self._peers is not None:
                wanted[tenant.name, PEERS] = _OF_PEERS
            if self._remotes is not None:
                wanted[tenant.name, ELSEWHERE] = _CALLED_BY_ADDRESS
            for agent in self._catalogue.agents(tenant.name):
                rules = agent.definition.kind_rules
                if rules.pooled and (tenant.name == DEFAULT or not rules.first_tenant_only):
                    wanted[tenant.name, agent.id] = agent.definition
        for key in self._programs.keys() - wanted.keys():
            self._unregister(*key)
        for (tenant_name, agent_id), definition in wanted.items():
            make = self._runners.get(definition.kind)
            body = make(definition) if make is not None else None
            if body is not None and definition.kind_rules.retried:
                body = RetriedAgent(body, definition.retries or Retries())
            if body is not None and self._programs.get((tenant_name, agent_id)) != definition:
                self._register(tenant_name, definition, body)
                if self._remotes is not None and definition.kind_rules.place == "remote":
                    identity = self._catalogue.identity(tenant_name, agent_id)
                    self._remotes.cancels.look_after(identity, _target(definition))
                if agent_id not in (INDEX, ELSEWHERE, PEERS):
                    self._log.info("agents.registered", agent=agent_id, tenant=tenant_name)
        self._programs, self._seen = wanted, seen

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
            found["peer"] = lambda definition: PeerAgent(peers, _done_by(definition))
        return found

    async def run(self) -> None:
        while True:
            await asyncio.sleep(INTERVAL_S)
            await self.step()

    def _register(self, tenant: str, definition: AgentDefinition, body: RunnableAgent) -> None:
        rules = definition.kind_rules
        usual = self._remote_concurrency if rules.waits_for_others else 0
        again = rules.repeatable or (self._models is not None and self._models.repeatable(definition))
        self._workers.register(
            self._catalogue.identity(tenant, definition.id),
            body,
            concurrency=definition.concurrency or usual,
            timeout_ms=definition.turn_timeout_ms,
            idempotent=definition.idempotent or again,
            on_lost="requeue" if again else definition.on_lost,
            follows=rules.repeatable,
            rate_per_min=definition.rate_per_min,
        )

    def _unregister(self, tenant: str, agent_id: str) -> None:
        agent = self._catalogue.agent(tenant, agent_id)
        # One from code may have taken its place: that works already.
        if agent is None or agent.source != "code":
            self._workers.unregister(self._catalogue.identity(tenant, agent_id))
            self._log.info("agents.unregistered", agent=agent_id, tenant=tenant)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Agents:
    workers: WorkerPool
    remotes: RemoteAgents
    exchange: A2AExchange
    features: Features
    stacks: AgentStacks
    schedulers: tuple[Scheduler, ...]


@dataclass(frozen=True, slots=True)
class Features:
    """What agents can use, as cards tell it: read for each card, since servers of tools come and go."""

    set_up: CardFeatures
    tools: McpTools
    services: ToolServices
    models: Models
    remotes: RemoteAgents

    def now(self) -> CardFeatures:
        return msgspec.structs.replace(
            self.set_up,
            tools=self.tools.all,
            abilities=self.services.abilities if self.models.default is not None else frozenset(),
            mcp_tenants=self.tools.tenants,
            remote_tenants=self.remotes.registry.tenants,
        )


@asynccontextmanager
async def open_agents(
    base: Base,
    requester: Requester | None,
    jobs: RunningJobs,
    served: Sequence[LoadedAgent] = (),
    reloaded: Sequence[Path] = (),
) -> AsyncIterator[Agents]:
    """`requester` delegates to peers. `served`: agents from Python files, which belong to the first tenant.

    `reloaded`: files whose agents are loaded again when they change.
    """
    settings, log = base.settings, base.telemetry.log
    ledger, catalogue, fetcher = base.storage.ledger, base.access.catalogue, base.outbound.fetcher
    servers = mcp_servers(settings.home)
    async with AsyncExitStack() as stack:
        tools = McpTools(servers, program_environment())
        stack.push_async_callback(tools.close)
        models = Models(settings.model)
        stack.push_async_callback(models.close)
        if settings.model.name and models.default is None:
            log.warning("model.unusable", model=settings.model.name, why=models.trouble)
        remotes = RemoteAgents(settings.home, fetcher, ledger, depth_max=settings.delegation.depth_max, log=log)
        stack.push_async_callback(remotes.close)
        remote_cards = RemoteCards(remotes.registry, remotes.card, time.monotonic)
        services = ToolServices(
            # The token of an entry was given for the tenants of that entry, and for nobody else.
            directory=AgentDirectory(catalogue, models.can_work, remote_cards, callable_by=remotes.registry.names_of),
            pages=(pages := WebPages(fetcher)),
            memories=AgentMemories(settings.home / MEMORY_NAME, now_ms),
            mcp=tools if servers else None,
            search=WebSearch(settings.model.search, pages, tools) if settings.model.search else None,
        )
        workers = _make_workers(base, remotes, requester, jobs)
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
        files.refresh()
        sync.serve(served)
        await remotes.prepare()
        await sync.step()
        set_up, grpc = card_features(settings, servers), base.listeners.grpc
        if grpc is not None:
            set_up = msgspec.structs.replace(set_up, grpc_port=grpc.port)
        writer = TaskWriter(ledger, workers, base.telemetry.tracer, base.access.intake, base.access.files)
        schedules = ScheduleRunner(ledger, catalogue, writer)
        yield Agents(
            workers=workers,
            remotes=remotes,
            exchange=_make_exchange(base, workers),
            features=Features(set_up, tools, services, models, remotes),
            stacks=sync.stacks,
            schedulers=(
                *(OrphanCanceller(ledger), files, remote_cards, sync, schedules),
                *_reloaders(sync, served, reloaded),
            ),
        )


def _reloaders(sync: AgentSync, served: Sequence[LoadedAgent], files: Sequence[Path]) -> Sequence[Scheduler]:
    others = [agent for agent in served if agent.path not in files]
    return (AgentReloader(files, lambda found: sync.serve([*found, *others]), Log()),) if files else ()


def _make_exchange(base: Base, workers: WorkerPool) -> A2AExchange:
    settings = base.settings
    return A2AExchange(
        base.storage.ledger,
        base.access.catalogue,
        workers,
        Uuids(),
        settings.a2a,
        depth_max=settings.delegation.depth_max,
        check_push=check_push if settings.a2a.push_notifications else None,
        tracer=base.telemetry.tracer,
        intake=base.access.intake,
        files=base.access.files,
    )


def _make_workers(base: Base, remotes: RemoteAgents, requester: Requester | None, jobs: RunningJobs) -> WorkerPool:
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
        )

    return WorkerPool(
        ledger,
        limits=a2a,
        concurrency=a2a.agent_concurrency,
        tenant_concurrency=base.settings.tenants.concurrency,
        delegations=delegations,
        jobs=jobs,
        tracer=tracer,
        files=base.access.files,
    )


def check_push(config: PushConfig) -> None:
    """Check a configuration by its text alone; where its address leads is judged when it is called."""
    check_config(config, read_url)


LIBRARY: Final = "pydantic_ai"


class Models:
    """By `provider:name`. `trouble` says why there is none."""

    def __init__(self, settings: ModelSettings) -> None:
        self._settings = settings
        self._made: dict[str, Model] = {}
        self.trouble = ""
        self.default = self._open(settings.name) if settings.name else None

    def of(self, definition: AgentDefinition) -> Model | None:
        """The daemon's, unless the definition names another one that the operator allows."""
        return (self.named(definition.model) if definition.model else None) or self.default

    def fallbacks(self, definition: AgentDefinition) -> tuple[Model, ...]:
        """Those that its definition names and the operator allows, each once."""
        found = {id(model): model for name in definition.fallback_models if (model := self.named(name)) is not None}
        found.pop(id(self.of(definition)), None)
        return tuple(found.values())

    def named(self, name: str) -> Model | None:
        """This one, if the operator allows it and it can be used."""
        name = name.replace("/", ":", 1)
        if self.default is None or name == self._settings.name:
            return self.default
        if name not in self._settings.others:
            return None
        if name not in self._made:
            other = self._open(name)
            if other is None:
                return None
            self._made[name] = other
        return self._made[name]

    def can_work(self, definition: AgentDefinition) -> bool:
        """Whether somebody does the work of this agent, as far as is known."""
        rules = definition.kind_rules
        return self.default is not None if rules.needs_model else rules.routed

    async def close(self) -> None:
        """Models close their connections when their context is left."""
        for model in filter(None, (self.default, *self._made.values())):
            async with model:
                pass

    def _open(self, name: str) -> Model | None:
        if find_spec(LIBRARY) is None:
            self.trouble = f"the extra is not installed: {install_command('model')}"
            return None
        try:
            return self._infer(name)
        except Exception as error:  # noqa: BLE001  (whatever a provider raises when a key or a package is missing)
            self.trouble = f"the model {name} cannot be used: {error}"
            return None

    def _infer(self, name: str) -> Model:
        from pydantic_ai.models import infer_model  # noqa: PLC0415  (see the module's contract)

        if not self._settings.base_url or _provider(name) != _provider(self._settings.name):
            return infer_model(name)
        from pydantic_ai.models.openai import OpenAIChatModel  # noqa: PLC0415
        from pydantic_ai.providers.openai import OpenAIProvider  # noqa: PLC0415

        variable = self._settings.api_key_env
        key = environment().get(variable) if variable else None
        provider = OpenAIProvider(base_url=self._settings.base_url, api_key=key or "none")
        return OpenAIChatModel(name.partition(":")[2] or name, provider=provider)


def _provider(name: str) -> str:
    """`base_url`, and the key for it, are one provider's: that of the daemon's own model."""
    return name.partition(":")[0]


class ModelAgents:
    def __init__(self, settings: ModelSettings, models: Models, services: ToolServices) -> None:
        self._settings = settings
        self._models = models
        self._services = services
        self._index = IndexAgent(self, services.directory)

    def repeatable(self, definition: AgentDefinition) -> bool:
        """Whether what was cut short may be begun again by itself, whatever the definition says."""
        return definition.id == INDEX and self._index.repeatable

    def body(self, definition: AgentDefinition) -> RunnableAgent:
        if definition.id == INDEX:
            return self._index
        return self.model(definition) or UnavailableAgent()

    def model(self, definition: AgentDefinition, *, remembers: bool = True) -> RunnableAgent | None:
        model = self._models.of(definition)
        if model is None:
            return None
        from covenant.agents.model.model_agent import ModelAdvisor, ModelAgent  # noqa: PLC0415  (needs an extra)

        request_s, advisor, adviser = self._settings.request_ms / 1000, definition.advisor, None
        if advisor is not None and advisor.mode != "off":
            second = self._models.named(advisor.model)
            if second is not None:
                adviser = ModelAdvisor(second, advisor, request_s=request_s)
            elif advisor.mode == "gate":
                return UnavailableAgent(
                    f"the model of this agent's advisor, {advisor.model}, cannot be used: name it in model.others"
                )
        return ModelAgent(
            model,
            definition,
            self._services,
            tokens_max=self._settings.task_tokens_max,
            request_s=request_s,
            remembers=remembers,
            adviser=adviser,
            fallbacks=self._models.fallbacks(definition),
        )
