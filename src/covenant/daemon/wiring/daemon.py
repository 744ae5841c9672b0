"""A whole daemon, built bottom up: each layer is opened with the layers below it, and closed before them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from covenant.agents.agent_loader import LoadedAgent
from covenant.agents.runtime.worker_pool import RunningJobs
from covenant.daemon.schedulers import Scheduler
from covenant.daemon.settings import Settings
from covenant.daemon.telemetry import Log
from covenant.daemon.wiring.agents import Agents, open_agents
from covenant.daemon.wiring.core import Base, open_base
from covenant.daemon.wiring.doors import Doors, make_doors
from covenant.daemon.wiring.peers import Peers, open_peer_services
from covenant.daemon.wiring.storage import SYSTEM_CLOCKS, Clocks


@dataclass(frozen=True, slots=True, kw_only=True)
class Daemon:
    """Open and bound, and not serving yet: see `lifecycle.serving`."""

    base: Base
    agents: Agents
    peers: Peers | None
    """None: switched off."""
    doors: Doors

    @property
    def schedulers(self) -> tuple[Scheduler, ...]:
        layers = (self.base.storage, self.base.access, self.agents, self.doors)
        found = [each for layer in layers for each in layer.schedulers]
        return (*found, self.peers) if self.peers is not None else tuple(found)


@asynccontextmanager
async def open_daemon(
    settings: Settings,
    log: Log,
    *,
    served: Sequence[LoadedAgent] = (),
    clocks: Clocks = SYSTEM_CLOCKS,
    archive_apart: bool = True,
) -> AsyncIterator[Daemon]:
    """`served`: agents from Python files. `archive_apart`: a process of its own writes the archive.

    Raises HomeLocked, Damaged, UnsafeHome, CannotListen or SettingsError, each with what to do about it.
    """
    jobs = RunningJobs()
    async with (
        open_base(settings, log, clocks=clocks, archive_apart=archive_apart) as base,
        open_peer_services(base, jobs) as services,
        open_agents(base, services.requester if services is not None else None, jobs, served) as agents,
    ):
        peers = Peers(base, services, agents) if services is not None else None
        yield Daemon(base=base, agents=agents, peers=peers, doors=make_doors(base, agents, peers))
