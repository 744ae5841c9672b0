"""A whole daemon, built bottom up: each layer is opened with the layers below it, and closed before them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

from covenant.agents.agent_loader import LoadedAgent, ServedFile
from covenant.agents.runtime.worker_pool import PoolRegister
from covenant.daemon.schedulers import Scheduler
from covenant.daemon.settings import Settings
from covenant.daemon.settings_loader import Source
from covenant.daemon.telemetry import Log
from covenant.daemon.wiring.agents import Agents, open_agents
from covenant.daemon.wiring.core import Base, open_base
from covenant.daemon.wiring.doors import Doors, make_doors
from covenant.daemon.wiring.storage import SYSTEM_CLOCKS, Clocks
from covenant.model.extras import not_installed

if TYPE_CHECKING:
    from covenant.daemon.wiring.peers import Peers

PEER_PACKAGES: Final = {
    "dns": "dnspython",
    "ifaddr": "ifaddr",
    "zeroconf": "zeroconf",
}
"""Modules that peers need, and the distributions of the extra `peers` that bring them."""


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
    reloaded: Sequence[ServedFile] = (),
    clocks: Clocks = SYSTEM_CLOCKS,
    archive_process: bool = True,
    sources: Mapping[str, Source] | None = None,
) -> AsyncIterator[Daemon]:
    """`served`: agents from Python files. `reloaded`: those of the files that are loaded again when they change.
    `sources`: where each setting came from.

    `archive_process`: a process of its own writes the archive.

    Raises HomeLocked, Damaged, UnsafeHome, CannotListen or SettingsError, each with what to do about it.
    """
    _check_extras(settings)
    register = PoolRegister()
    async with (
        open_base(settings, log, register.jobs.__len__, clocks=clocks, archive_process=archive_process) as base,
        _open_peers(base, register) as peers,
        open_agents(base, peers.requester if peers is not None else None, register, served, reloaded) as agents,
    ):
        yield Daemon(base=base, agents=agents, peers=peers, doors=make_doors(base, agents, peers, sources or {}))


def _check_extras(settings: Settings) -> None:
    """Refuses settings whose extra is not installed. Called before anything is opened or written."""
    if settings.peers.enabled:
        for module, package in PEER_PACKAGES.items():
            if find_spec(module) is None:
                raise not_installed("peers.enabled", "peers", package)


@asynccontextmanager
async def _open_peers(base: Base, register: PoolRegister) -> AsyncIterator[Peers | None]:
    """None: peers are switched off."""
    if not base.settings.peers.enabled:
        yield None
        return
    from covenant.daemon.wiring.peers import open_peers  # noqa: PLC0415  (an extra)

    async with open_peers(base, register) as peers:
        yield peers
