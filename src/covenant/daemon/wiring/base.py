"""What every other part of a daemon is built on: the home, the sockets, calls to others, and who may do what."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from covenant.daemon.environment import environment
from covenant.daemon.listeners import Listeners, open_listeners
from covenant.daemon.logs import Log
from covenant.daemon.settings import Settings
from covenant.daemon.telemetry import Telemetry, open_telemetry
from covenant.daemon.wiring.access import Access, open_access
from covenant.daemon.wiring.remote_agents import Outbound, open_outbound
from covenant.daemon.wiring.storage import SYSTEM_CLOCKS, Clocks, Storage, open_storage


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    settings: Settings
    telemetry: Telemetry
    storage: Storage
    listeners: Listeners
    outbound: Outbound
    access: Access


@asynccontextmanager
async def open_base(
    settings: Settings, log: Log, *, clocks: Clocks = SYSTEM_CLOCKS, archive_apart: bool = True
) -> AsyncIterator[Base]:
    async with (
        open_storage(settings, log, clocks=clocks, archive_apart=archive_apart) as storage,
        open_telemetry(settings.telemetry, environment(), log) as telemetry,
        open_listeners(settings, log) as listeners,
        open_outbound(settings.outbound) as outbound,
    ):
        yield Base(
            settings=settings,
            telemetry=telemetry,
            storage=storage,
            listeners=listeners,
            outbound=outbound,
            access=await open_access(settings, storage, telemetry),
        )
