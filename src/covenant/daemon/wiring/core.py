"""The base of all other parts of a daemon: the home, the sockets, outgoing calls, and access control."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import msgspec

from covenant.daemon.connect import Outbound, open_outbound
from covenant.daemon.environment import environment
from covenant.daemon.home import save_token
from covenant.daemon.listeners import Listeners, open_listeners
from covenant.daemon.log_capture import open_task_logs
from covenant.daemon.schedulers import FileCollector, Retention, RetryScheduler, Scheduler
from covenant.daemon.settings import Settings
from covenant.daemon.telemetry import Log, Telemetry, open_tracer
from covenant.daemon.tenant_files import HomeFiles
from covenant.daemon.watched_file import read_home_file
from covenant.daemon.wiring.storage import SYSTEM_CLOCKS, Clocks, Storage, open_storage
from covenant.doors.http.bearer_auth import TenantAuth
from covenant.exchange.access.identities import IdentityAdmin
from covenant.exchange.access.principals import IdentityAuth
from covenant.exchange.access.tenants import TenantAccess, TenantLimiter
from covenant.exchange.cards import CardFeatures
from covenant.exchange.catalogue import Catalogue
from covenant.exchange.file_links import FileLinks
from covenant.exchange.frame_log import FrameLog
from covenant.exchange.mailbox import MailboxExchange
from covenant.exchange.stored_files import StoredFiles
from covenant.exchange.tasks.writer import Intake
from covenant.exchange.tenant_removal import RemovalFollower, TenantRemovals
from covenant.exchange.worker_presence import WorkerPresence
from covenant.model.agent_card import Provider
from covenant.model.mcp_servers import McpServer, read_mcp_servers, tools_of
from covenant.model.retry_policy import RetryPolicy
from covenant.seal.keys import derived_secret
from covenant.seal.suites import suites_spoken

SERVERS_NAME: Final = "mcp_servers.json"
PRICES_NAME: Final = "model_prices.json"


def mcp_servers(home: Path) -> dict[str, McpServer]:
    """The MCP servers of this home, by name; none if there is no file. Raises SettingsError if it cannot be used."""
    return dict(read_home_file(home / SERVERS_NAME, read_mcp_servers) or {})


def card_features(settings: Settings, servers: Mapping[str, McpServer]) -> CardFeatures:
    """The features of cards that follow from the settings alone."""
    a2a = settings.a2a
    organization = a2a.provider_org or urlsplit(a2a.provider_url).hostname
    return CardFeatures(
        provider=Provider(organization=organization, url=a2a.provider_url) if organization else None,
        documentation_url=a2a.docs_url or None,
        push_notifications=a2a.push_notifications,
        published=a2a.publish,
        tools=tools_of(servers),
        peer_profiles=settings.peers.profiles if settings.peers.enabled else None,
        peer_suites=suites_spoken(hybrid=settings.peers.suite == "hybrid"),
    )


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
    settings: Settings,
    log: Log,
    running: Callable[[], int],
    *,
    clocks: Clocks = SYSTEM_CLOCKS,
    archive_process: bool = True,
) -> AsyncIterator[Base]:
    """`running` counts the turns of the daemon's own agents."""
    async with (
        open_storage(settings, log, clocks=clocks, archive_process=archive_process) as storage,
        open_tracer(settings.telemetry, environment(), log) as tracer,
        open_listeners(settings, log) as listeners,
        open_task_logs(settings.home, bytes_max=settings.log.task_bytes_max) as task_logs,
        AsyncExitStack() as stack,
    ):
        frames = _make_frame_log(settings, storage)
        telemetry = Telemetry(log, task_logs, tracer, frames)
        outbound = await stack.enter_async_context(open_outbound(settings.outbound, frames))
        yield Base(
            settings=settings,
            telemetry=telemetry,
            storage=storage,
            listeners=listeners,
            outbound=outbound,
            access=await open_access(settings, storage, telemetry, running),
        )


def _make_frame_log(settings: Settings, storage: Storage) -> FrameLog | None:
    """None: switched off."""
    bytes_max, ledger = settings.log.frame_bytes_max, storage.ledger
    if not bytes_max:
        return None
    frames = FrameLog(ledger.now_ms, bytes_max=bytes_max, find_task=ledger.parties)
    ledger.on_erased(frames.on_erased)
    return frames


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    identity_auth: IdentityAuth
    identity_admin: IdentityAdmin
    tenant_auth: TenantAuth
    catalogue: Catalogue
    mailbox: MailboxExchange
    intake: Intake
    files: StoredFiles
    presence: WorkerPresence
    removals: TenantRemovals
    schedulers: tuple[Scheduler, ...]


async def open_access(settings: Settings, storage: Storage, telemetry: Telemetry, running: Callable[[], int]) -> Access:
    ledger, operator = storage.ledger, storage.operator
    identity_auth, catalogue = IdentityAuth(ledger, operator.agent), Catalogue(ledger, storage.key)
    tenants = TenantAccess(ledger, operator.agent, identity_auth)
    await tenants.open()
    intake = Intake(running, ledger.clock.monotonic_ms)
    files = _make_files(settings, storage)
    presence = WorkerPresence(ledger, ledger.clock.monotonic_ms, shared=storage.shared)
    mailbox = MailboxExchange(
        ledger,
        operator.agent,
        telemetry.tracer,
        recipient_admission=settings.access.recipient_admission,
        depth_max=settings.delegation.depth_max,
        intake=intake,
        files=files,
        presence=presence,
    )
    retry = settings.retry
    policy = msgspec.convert({**asdict(retry), "enabled": True}, RetryPolicy)
    scheduler = RetryScheduler(ledger, operator, policy, interval_ms=retry.interval_ms, log=telemetry.log)
    identity_admin = IdentityAdmin(
        ledger,
        identity_auth,
        operator.agent,
        storage.key,
        partial(save_token, settings.home),
        reserved=catalogue.reserved_identity,
    )
    retention = Retention(ledger, identity_admin, operator, settings.retention, telemetry.log)
    removals = TenantRemovals(
        ledger,
        catalogue,
        telemetry.task_logs,
        HomeFiles(settings.home),
        operator.agent,
        frames=telemetry.frames,
        stored=files,
    )
    collector = FileCollector(files, telemetry)
    return Access(
        identity_auth=identity_auth,
        identity_admin=identity_admin,
        tenant_auth=TenantAuth(tenants, TenantLimiter(ledger.clock.monotonic_ms, settings.tenants, ledger.living)),
        catalogue=catalogue,
        mailbox=mailbox,
        intake=intake,
        files=files,
        presence=presence,
        removals=removals,
        schedulers=(
            *((storage.singleton("retries", scheduler),) if retry.scheduler else ()),
            storage.singleton("retention", retention),
            storage.singleton("removals", removals),
            *((RemovalFollower(removals, storage.shared_ledger),) if storage.shared_ledger is not None else ()),
            storage.singleton("files", collector),
        ),
    )


def _make_files(settings: Settings, storage: Storage) -> StoredFiles:
    secret = derived_secret(storage.key, "covenant.file_links")
    links = FileLinks(secret, storage.ledger.now_ms, settings.blobs.link_ms)
    return StoredFiles(storage.blobs, storage.ledger, links, settings.blobs)
