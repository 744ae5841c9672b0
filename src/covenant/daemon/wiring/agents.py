"""The agents of a daemon: who works in it, what they may call and use, and the A2A exchange that gives them work."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Final

import msgspec

from covenant.agents.agent_directory import AgentDirectory, RemoteCards
from covenant.agents.agent_loader import LoadedAgent
from covenant.agents.model.agent_memory import AgentMemories
from covenant.agents.model.mcp_tools import McpTools
from covenant.agents.model.toolbox import ToolServices
from covenant.agents.model.web_fetch import WebPages
from covenant.agents.runtime.job import JobLimits
from covenant.agents.runtime.worker_pool import RunningJobs, WorkerPool
from covenant.daemon.agent_files import AgentFiles
from covenant.daemon.environment import now_ms, program_environment
from covenant.daemon.schedulers import Scheduler
from covenant.daemon.wiring.agent_sync import AgentSync
from covenant.daemon.wiring.base import Base
from covenant.daemon.wiring.cards import card_features, mcp_servers
from covenant.daemon.wiring.model_registry import ModelAgents, Models, can_work
from covenant.daemon.wiring.remote_agents import Elsewhere
from covenant.exchange.a2a_service import A2AExchange, A2ALimits
from covenant.exchange.cards import CardFeatures
from covenant.exchange.delegation import DelegationLimits, Delegations, OrphanCanceller
from covenant.exchange.push import check_config
from covenant.ledger.clock import Uuids
from covenant.model.a2a_requests import PushConfig
from covenant.outbound.urls import read_url
from covenant.peers.requester.requester_service import Requester

MEMORY_FOLDER: Final = "memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class Agents:
    workers: WorkerPool
    remotes: Elsewhere
    exchange: A2AExchange
    features: Features
    schedulers: tuple[Scheduler, ...]


@dataclass(frozen=True, slots=True)
class Features:
    """What agents can use, as cards tell it: read anew for each card, since servers of tools come and go."""

    set_up: CardFeatures
    tools: McpTools
    services: ToolServices
    models: Models
    remotes: Elsewhere

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
    base: Base, requester: Requester | None, jobs: RunningJobs, served: Sequence[LoadedAgent] = ()
) -> AsyncIterator[Agents]:
    """`requester` delegates to peers. `served`: agents from Python files, which belong to the first tenant."""
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
        remotes = Elsewhere(settings.home, fetcher, ledger, depth_max=settings.delegation.depth_max, log=log)
        stack.push_async_callback(remotes.close)
        remote_cards = RemoteCards(remotes.registry, remotes.card, time.monotonic)
        services = ToolServices(
            # The token of an entry was given for the tenants of that entry, and for nobody else.
            directory=AgentDirectory(
                catalogue,
                lambda definition: can_work(definition, models),
                remote_cards,
                callable_by=remotes.registry.names_of,
            ),
            pages=WebPages(fetcher),
            memories=AgentMemories(settings.home / MEMORY_FOLDER, now_ms),
            mcp=tools if servers else None,
        )
        workers = _make_workers(base, remotes, requester, jobs)
        sync = AgentSync(
            ledger,
            catalogue,
            workers,
            log,
            elsewhere=remotes,
            cast=ModelAgents(settings.model, models, services),
            peers=requester,
            remote_concurrency=settings.delegation.remote_concurrency,
        )
        files = AgentFiles(settings.home, catalogue, log)
        files.refresh()
        sync.serve(served)
        await remotes.prepare()
        await sync.step()
        grpc = base.listeners.grpc
        set_up = msgspec.structs.replace(
            card_features(settings, servers), grpc_port=grpc.port if grpc is not None else None
        )
        yield Agents(
            workers=workers,
            remotes=remotes,
            exchange=_make_exchange(base, workers),
            features=Features(set_up, tools, services, models, remotes),
            schedulers=(OrphanCanceller(ledger), files, remote_cards, sync),
        )


def _make_workers(base: Base, remotes: Elsewhere, requester: Requester | None, jobs: RunningJobs) -> WorkerPool:
    ledger, tracer = base.storage.ledger, base.telemetry.tracer
    a2a, delegation = base.settings.a2a, base.settings.delegation
    limits = DelegationLimits(
        calls_max=delegation.calls_max,
        agents_max=delegation.agents_max,
        cooldown_ms=delegation.cooldown_ms,
        children_max=delegation.children_max,
        depth_max=delegation.depth_max,
        message_bytes_max=a2a.message_bytes_max,
    )

    def delegations(workers: WorkerPool) -> Delegations:
        return Delegations(
            ledger,
            base.access.catalogue,
            workers,
            limits,
            registered=remotes.registered,
            peers=requester.callee if requester is not None else lambda _tenant, _name: None,
            tracer=tracer,
        )

    return WorkerPool(
        ledger,
        limits=JobLimits(updates_max=a2a.turn_updates_max, bytes_max=a2a.turn_bytes_max),
        concurrency=a2a.agent_concurrency,
        tenant_concurrency=base.settings.tenants.concurrency,
        delegations=delegations,
        jobs=jobs,
        tracer=tracer,
    )


def _make_exchange(base: Base, workers: WorkerPool) -> A2AExchange:
    a2a = base.settings.a2a
    limits = A2ALimits(
        message_bytes_max=a2a.message_bytes_max,
        blocking_ms_max=a2a.blocking_ms_max,
        depth_max=base.settings.delegation.depth_max,
    )
    return A2AExchange(
        base.storage.ledger,
        base.access.catalogue,
        workers,
        Uuids(),
        limits,
        check_push=check_push if a2a.push_notifications else None,
        tracer=base.telemetry.tracer,
    )


def check_push(config: PushConfig) -> None:
    """Check a configuration by its text alone; where its address leads is judged when it is called."""
    check_config(config, _check_url)


def _check_url(text: str) -> None:
    read_url(text)
