"""Which parts a daemon is made of, and in which order they are put together and taken apart.

The home first, then the ledger (whose lock lets one daemon in), then what is built on it. What was signed is checked
once, here: every live grant's signature, and the audit rows that are new since the last start.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypedDict
from urllib.parse import urlsplit

from starlette.routing import BaseRoute

import covenant
from covenant.agents.model.mcp_tools import McpTools
from covenant.agents.runtime.worker_pool import WorkerPool
from covenant.daemon.agent_files import AgentFiles
from covenant.daemon.environment import environment, machine_name, monotonic_ms, now_ms
from covenant.daemon.home import (
    KEY_NAME,
    SOCKET_NAME,
    UnsafeHome,
    make_home,
    read_or_make_token,
    read_token_file,
    save_token,
)
from covenant.daemon.keystore import Keystore, find_passphrase
from covenant.daemon.logs import Log
from covenant.daemon.operator import OPERATOR_DISPLAY, admit_operator
from covenant.daemon.settings import HttpSettings, Settings, ledger_limits
from covenant.daemon.telemetry import open_tracer
from covenant.daemon.wiring.cards import card_pages, make_cards, mcp_servers
from covenant.daemon.wiring.door_services import DESCRIBED as TENANT_DESCRIBED
from covenant.daemon.wiring.door_services import (
    Built,
    make_conversations,
    make_door,
    make_gate,
    make_mcp,
    make_office,
    make_tools,
    make_workers,
    open_grpc,
    tenant_routes,
)
from covenant.daemon.wiring.model_registry import Cast, Reach, make_cast
from covenant.daemon.wiring.peers import Around, Outside, Peering, join_peers, open_keyring
from covenant.daemon.wiring.push import make_pushes
from covenant.daemon.wiring.remote_agents import Elsewhere, make_delegations, open_outbound
from covenant.doors.a2a.admission import Admission
from covenant.doors.a2a.cards import DESCRIBED as CARDS_DESCRIBED
from covenant.doors.a2a.http_bindings import PREFIX
from covenant.doors.a2a.operations import A2AServices
from covenant.doors.http.app import DoorUnder, HttpDoor, build_http
from covenant.doors.http.bearer_auth import TenantGate
from covenant.doors.http.host_names import as_host
from covenant.doors.http.request_body import AnonymousPool
from covenant.doors.ipc_server import IpcServer
from covenant.doors.mcp.streamable_http import McpDoor
from covenant.doors.metrics import Meter
from covenant.doors.operator_api.peers import PeerOperations
from covenant.doors.peer_envelopes import DESCRIBED as SEALED_DESCRIBED
from covenant.doors.waits import Waits
from covenant.exchange.a2a_service import A2AExchange
from covenant.exchange.access.identities import IdentityAdmin, operator_agent
from covenant.exchange.access.principals import IdentityAuth, Principal
from covenant.exchange.access.tenants import TenantAccess, TenantLimiter
from covenant.exchange.cards import Cards
from covenant.exchange.catalogue import Catalogue
from covenant.exchange.delegation import Delegations
from covenant.exchange.mailbox import MailboxExchange, MailboxLimits
from covenant.ledger.contract.ledger import Ledger
from covenant.ledger.embedded.engine import EmbeddedLedger
from covenant.ledger.embedded.open import open_ledger
from covenant.model.errors import Unavailable
from covenant.model.grant import Grant
from covenant.model.ids import PublicKey
from covenant.model.mcp_servers import McpServer
from covenant.model.tenants import TenantLimits
from covenant.model.tracing import Tracer
from covenant.outbound.http_fetcher import Fetcher
from covenant.outbound.push_sender import PushSender
from covenant.seal.grants import verify_grant
from covenant.seal.keys import new_private_key, new_token

if TYPE_CHECKING:
    from covenant.doors.a2a.grpc import GrpcServer


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A daemon that is open and does not listen yet."""

    settings: Settings
    operator: Principal
    ledger: EmbeddedLedger
    exchange: MailboxExchange
    registry: IdentityAdmin
    tenancy: TenantAccess
    catalogue: Catalogue
    limiter: TenantLimiter
    workers: WorkerPool
    elsewhere: Elsewhere
    cast: Cast
    reach: Reach
    conversations: A2AExchange
    a2a_gate: Admission
    a2a_office: A2AServices
    push_runner: PushSender | None
    """None: push notifications are off."""
    peering: Peering | None
    """None: switched off."""
    agent_files: AgentFiles
    waits: Waits
    meter: Meter
    http: HttpDoor
    grpc: GrpcServer | None
    """None: switched off."""
    ipc: IpcServer
    mcp: McpDoor
    tracer: Tracer
    tools: McpTools
    """Of the MCP servers that are configured, for the agents that may use them."""


class _Behind(TypedDict):
    """What is behind both doors of the mailbox."""

    exchange: MailboxExchange
    registry: IdentityAdmin
    tenancy: TenantAccess
    catalogue: Catalogue
    doorkeeper: IdentityAuth
    ledger: Ledger
    waits: Waits
    meter: Meter
    version: str
    legacy_kinds: bool
    peers: PeerOperations | None


class _Working(TypedDict):
    """Who works inside the daemon, and what they can use."""

    workers: WorkerPool
    elsewhere: Elsewhere
    tools: McpTools
    cast: Cast
    reach: Reach
    tracer: Tracer


@asynccontextmanager
async def open_node(settings: Settings, log: Log) -> AsyncIterator[Node]:
    """Raises HomeLocked, Damaged, UnsafeHome or SettingsError, each with what to do about it."""
    home = settings.home
    make_home(home)
    keystore = Keystore(home, find_passphrase(environment()))
    key, token = await asyncio.to_thread(keystore.read_key), read_or_make_token(home, new_token)
    ledger = await open_ledger(
        home,
        clock=now_ms,
        monotonic_ms=monotonic_ms,
        clock_pause_ms=settings.daemon.clock_pause_ms,
        limits=ledger_limits(settings),
        node=settings.daemon.node or machine_name(),
        durability=settings.ledger.durability,
        segment_bytes=settings.ledger.segment_bytes,
        archive_apart=True,
    )
    try:
        if key is None:
            await _check_unsigned(ledger)
            key = await asyncio.to_thread(keystore.make_key, new_private_key)
        elif await asyncio.to_thread(keystore.lock_key):
            log.info("identity.locked", file=KEY_NAME)
        operator = operator_agent(OPERATOR_DISPLAY, key)
        await check_grants(ledger, operator.pubkey)
        principal = await admit_operator(ledger, operator, token, partial(save_token, home))
        await _report(ledger, log)
        async with (
            open_outbound(settings.outbound) as (guard, fetcher),
            open_tracer(settings.telemetry, environment(), log) as tracer,
        ):
            outside = Outside(guard=guard, fetcher=fetcher, keyring=await open_keyring(settings, key, keystore))
            node = _assemble(settings, ledger, principal, key, outside=outside, tracer=tracer, log=log)
            await node.tenancy.open()
            node.agent_files.refresh()
            await node.elsewhere.prepare()
            try:
                yield node
            finally:
                if node.peering is not None:
                    await node.peering.close()
                await node.elsewhere.close()
                await node.reach.close()
                await node.tools.close()
                if node.grpc is not None:
                    await node.grpc.stop(0)
    finally:
        await ledger.close()
        log.info("ledger.closed")


async def _check_unsigned(ledger: Ledger) -> None:
    if await ledger.identities():
        raise UnsafeHome(
            f"{KEY_NAME} is missing, and this home's grants are signed with it; put it back from a backup, "
            "or start with an empty home"
        )


async def _report(ledger: EmbeddedLedger, log: Log) -> None:
    """What an operator should know of the ledger that was just opened."""
    counts = await ledger.counts()
    log.info("ledger.opened", boot=ledger.boot, queued=counts.queued, in_flight=counts.leased)
    if ledger.torn is not None:
        torn = ledger.torn
        log.warning("journal.torn_tail_cut", file=torn.file, line=torn.line, length=torn.length, kept=torn.kept)
    if counts.holders_lost:
        log.warning("lease.holders_lost", count=counts.holders_lost, look="covenant a2a status")
    try:
        audit = await ledger.audit_verify_new()
    except Unavailable as refusal:
        # A machine too busy to archive now is no reason not to serve; `covenant audit verify` can be asked later.
        log.warning("audit.unverified", why=refusal.message, look="covenant audit verify")
        return
    if not audit.valid:
        # Serving goes on: whoever can break the record of who did what should not be able to stop the work as well.
        log.warning("audit.invalid", failures="; ".join(audit.failures), look="covenant audit verify")


def _assemble(
    settings: Settings,
    ledger: EmbeddedLedger,
    operator: Principal,
    key: bytes,
    *,
    outside: Outside,
    tracer: Tracer,
    log: Log,
) -> Node:
    home, fetcher = settings.home, outside.fetcher
    exchange = MailboxExchange(ledger, operator.agent, _mailbox_limits(settings), tracer)
    doorkeeper = IdentityAuth(ledger, operator.agent)
    catalogue = Catalogue(ledger, key)
    registry = IdentityAdmin(ledger, doorkeeper, operator.agent, key, partial(save_token, home), seat=catalogue.seat)
    tenancy = TenantAccess(ledger, operator.agent, doorkeeper)
    limiter = TenantLimiter(ledger.clock.monotonic_ms, _tenant_limits(settings))
    gate = TenantGate(tenancy, limiter)
    meter, servers = Meter(), mcp_servers(home)
    waits = _waits(settings, doorkeeper)
    cards = make_cards(settings, key, servers)
    pages = card_pages(settings, cards, catalogue, gate, meter, started_ms=ledger.now_ms())
    working = _workers(settings, ledger, catalogue, cards, servers, fetcher=fetcher, tracer=tracer, log=log)
    pool = AnonymousPool(bytes_max=settings.http.stranger_bytes_max, body_ms=settings.http.stranger_body_ms)
    around = Around(settings=settings, ledger=ledger, catalogue=catalogue, meter=meter, us=operator.agent, pool=pool)
    peering = join_peers(around, working["workers"], outside, tracer=tracer, log=log)
    conversations = make_conversations(settings, ledger, catalogue, working["workers"], tracer)
    pushes, runner = make_pushes(settings, ledger, conversations, fetcher=fetcher, key=key, meter=meter)
    a2a_gate, a2a_office = make_gate(settings, catalogue, gate, meter, pool), make_office(conversations, cards, pushes)
    built = Built(ledger, catalogue, conversations, gate, meter)
    mcp = make_mcp(settings, built, operator, working["elsewhere"])
    behind = _Behind(
        exchange=exchange,
        registry=registry,
        tenancy=tenancy,
        catalogue=catalogue,
        doorkeeper=doorkeeper,
        ledger=ledger,
        waits=waits,
        meter=meter,
        version=covenant.__version__,
        legacy_kinds=settings.doors.legacy_kinds,
        peers=peering.desk if peering is not None else None,
    )
    doors = [*tenant_routes(settings.a2a, built, cards.offer.tools), *pages.routes(), *mcp.routes()]
    if peering is not None:
        doors += peering.routes()
    return Node(
        settings=settings,
        operator=operator,
        ledger=ledger,
        exchange=exchange,
        registry=registry,
        tenancy=tenancy,
        catalogue=catalogue,
        limiter=limiter,
        conversations=conversations,
        a2a_gate=a2a_gate,
        a2a_office=a2a_office,
        push_runner=runner,
        peering=peering,
        agent_files=AgentFiles(home, catalogue, log),
        waits=waits,
        meter=meter,
        http=_http(settings, behind, doors, (PREFIX, make_door(settings, a2a_gate, a2a_office, pages))),
        grpc=open_grpc(settings, a2a_gate, a2a_office, cards),
        ipc=_ipc(settings, behind),
        mcp=mcp,
        **working,
    )


def _allowed_hosts(http: HttpSettings) -> tuple[str, ...]:
    """Those that are set, where HTTP listens, and where callers are told to reach it."""
    public = urlsplit(http.public_base_url).hostname
    return (*http.allowed_hosts, as_host(http.bind_addr), *((as_host(public),) if public else ()))


def _http(settings: Settings, behind: _Behind, doors: Sequence[BaseRoute], a2a: tuple[str, DoorUnder]) -> HttpDoor:
    return build_http(
        **behind,
        allowed_hosts=_allowed_hosts(settings.http),
        origins=settings.http.origins,
        body_bytes_max=settings.http.body_bytes_max,
        metrics_token=read_token_file(settings.http.metrics_token_file, "http.metrics_token_file"),
        more_routes=doors,
        under=[a2a],
        described=(*TENANT_DESCRIBED, *CARDS_DESCRIBED, *SEALED_DESCRIBED),
    )


def _ipc(settings: Settings, behind: _Behind) -> IpcServer:
    return IpcServer(
        settings.home / SOCKET_NAME,
        **behind,
        frame_bytes_max=settings.ipc.frame_bytes_max,
        connections_max=settings.ipc.connections_max,
    )


def _workers(
    settings: Settings,
    ledger: EmbeddedLedger,
    catalogue: Catalogue,
    cards: Cards,
    servers: dict[str, McpServer],
    *,
    fetcher: Fetcher,
    tracer: Tracer,
    log: Log,
) -> _Working:
    elsewhere = Elsewhere(settings.home, fetcher, ledger, depth_max=settings.delegation.depth_max, log=log)

    def delegations(workers: WorkerPool) -> Delegations:
        return make_delegations(settings, ledger, catalogue, workers, elsewhere, tracer=tracer)

    workers = make_workers(settings, ledger, delegations, tracer)
    tools = make_tools(servers, cards)
    usable = tools if servers else None
    cast, reach = make_cast(settings, catalogue, cards, elsewhere, fetcher=fetcher, tools=usable, log=log)
    return _Working(workers=workers, elsewhere=elsewhere, tools=tools, cast=cast, reach=reach, tracer=tracer)


async def check_grants(ledger: Ledger, operator: PublicKey) -> None:
    """Every live grant is signed by this home's operator. Requests then trust the ledger, and verify nothing."""
    now = ledger.now_ms()
    forged = [grant for grant in await ledger.grants() if grant.live(now) and not _signed(grant, operator)]
    if forged:
        named = "\n".join(f"  {grant.subject.display} {grant.action} {grant.signature_b58}" for grant in forged)
        raise UnsafeHome(
            "these grants are not signed by this home's key, so the journal or identity/local.key was changed; "
            f"put both back from a backup:\n{named}"
        )


def _signed(grant: Grant, operator: PublicKey) -> bool:
    return grant.granted_by.pubkey == operator and verify_grant(grant)


def _waits(settings: Settings, doorkeeper: IdentityAuth) -> Waits:
    limits = settings.limits
    return Waits(doorkeeper, waits_max=limits.waits_max, waits_per_caller_max=limits.waits_per_caller_max)


def _tenant_limits(settings: Settings) -> TenantLimits:
    return TenantLimits(**{name: getattr(settings.tenants, name) for name in TenantLimits.__struct_fields__})


def _mailbox_limits(settings: Settings) -> MailboxLimits:
    own = ("recipient_admission", "depth_max")
    named = {name: getattr(settings.limits, name) for name in MailboxLimits.__struct_fields__ if name not in own}
    admission, depth_max = settings.access.recipient_admission, settings.delegation.depth_max
    return MailboxLimits(**named, recipient_admission=admission, depth_max=depth_max)
