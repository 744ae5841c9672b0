"""Both doors, open on real sockets, over a real ledger in a folder, with some who may use them."""

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from covenant.daemon.keystore import admit_operator
from covenant.daemon.listeners import bound, make_server
from covenant.daemon.settings import HttpSettings
from covenant.daemon.tenant_files import HomeFiles
from covenant.doors import native
from covenant.doors.http.app import HttpDoor, build_http
from covenant.doors.http.bearer_auth import TenantAuth
from covenant.doors.http.endpoint import tenant_routes
from covenant.doors.http.openapi import routes_of
from covenant.doors.http.server.http_exchange import Door
from covenant.doors.http.server.http_refusals import RefusalForm, plain_form
from covenant.doors.ipc_server import IpcServer
from covenant.doors.metrics import Meter
from covenant.doors.operator_api.operation import ApiContext, Services
from covenant.doors.waits import Pause, Waits
from covenant.exchange.access.identities import IdentityAdmin, operator_agent
from covenant.exchange.access.principals import IdentityAuth, Principal
from covenant.exchange.access.tenants import TenantAccess, TenantLimiter
from covenant.exchange.catalogue import Catalogue
from covenant.exchange.file_links import FileLinks
from covenant.exchange.mailbox import MailboxExchange
from covenant.exchange.schedules import ScheduleAdmin
from covenant.exchange.stored_files import StoredFiles
from covenant.exchange.task_logs import TaskLogs
from covenant.exchange.tasks.writer import Intake, TaskWriter
from covenant.exchange.tenant_removal import TenantRemovals
from covenant.exchange.tenant_use import TenantUsage
from covenant.ledger.clock import uuid_source
from covenant.ledger.contract.ledger import Ledger
from covenant.ledger.embedded.backup_file import StagedBackups
from covenant.ledger.embedded.blob_folder import BlobFolder
from covenant.ledger.embedded.engine import EmbeddedLedger
from covenant.model.ids import AgentId
from covenant.model.settings import BlobSettings, Limits
from covenant.model.tenants import TenantLimits
from covenant.seal.keys import new_private_key, new_token, token_hash
from tests.doors.clients import Http, Ipc
from tests.engine_under_test import open_ledger
from tests.exchange.services import NoWorkers
from tests.waits import BOUND_S

VERSION: Final = "0.0.test"


class WatchedWaits(Waits):
    """Tells a test when waits begin and end."""

    def __init__(self, identity_auth: IdentityAuth, limits: Limits) -> None:
        super().__init__(identity_auth, limits)
        self._count = 0
        self._changed = asyncio.Event()

    @contextmanager
    def pause(self, principal: Principal) -> Iterator[Pause]:
        self._change(1)
        try:
            with super().pause(principal) as pause:
                yield pause
        finally:
            self._change(-1)

    def _change(self, by: int) -> None:
        self._count += by
        self._changed.set()

    async def until(self, count: int) -> None:
        """Until exactly so many are open."""
        async with asyncio.timeout(BOUND_S):
            while self._count != count:
                self._changed.clear()
                await self._changed.wait()


@dataclass(frozen=True, slots=True)
class EnrolledCaller:
    """Somebody with a token."""

    agent: AgentId
    token: str
    http: Http

    @property
    def wire(self) -> dict[str, str]:
        return {"display": self.agent.display, "pubkey": self.agent.pubkey}


@dataclass(slots=True, kw_only=True)
class DoorsUnderTest:
    ledger: Ledger
    exchange: MailboxExchange
    registry: IdentityAdmin
    tenancy: TenantAccess
    catalogue: Catalogue
    limiter: TenantLimiter
    identity_auth: IdentityAuth
    waits: WatchedWaits
    meter: Meter
    door: HttpDoor
    ipc: IpcServer
    socket: Path
    port: int
    operator: EnrolledCaller
    files: StoredFiles
    saved_tokens: list[str] = field(default_factory=list)

    @property
    def office(self) -> Services:
        return Services(
            self.exchange,
            self.registry,
            self.ledger,
            self.tenancy,
            self.catalogue,
            TaskLogs(self.ledger.now_ms),
            Intake(),
            TenantUsage(self.ledger, self.limiter, self.files, TenantLimits(), lambda _: 0),
        )

    async def tenant(self, name: str, **limits: int) -> Http:
        """A new tenant, asking over HTTP."""
        minted = await self.tenancy.add(self.principal, name, TenantLimits(**limits))
        return Http(self.port, minted.token)

    @property
    def principal(self) -> Principal:
        return Principal(self.operator.agent, True, token_hash(self.operator.token))

    async def enroll(self, display: str, *actions: str) -> EnrolledCaller:
        enrolled = await self.registry.enroll(self.principal, display, actions=actions)
        return EnrolledCaller(enrolled.identity.agent, enrolled.token, Http(self.port, enrolled.token))

    async def grant(self, action: str, to: EnrolledCaller, **scope: Any) -> None:
        given = {"version": 1, **scope} if scope else None
        await self.registry.grant(self.principal, action, to=to.agent.display, scope=given)

    async def pair(self) -> tuple[EnrolledCaller, EnrolledCaller]:
        """Two who may send to and answer each other: alice sends, bob works."""
        return (
            await self.enroll("alice@test", "a2a.send.bob@test", "a2a.respond.bob@test"),
            await self.enroll("bob@test", "a2a.send.alice@test", "a2a.respond.alice@test"),
        )

    def connect(self) -> Ipc:
        return Ipc(self.socket)

    async def audit(self, kind: str) -> list[dict[str, Any]]:
        """The newest rows of one type, newest first, as they were written."""
        rows = [json.loads(record.row) for record in await self.ledger.audit_recent(None, 1_000, None)]
        return [row for row in reversed(rows) if row["kind"]["type"] == kind]


def new_task(to: EnrolledCaller | AgentId, intent: str = "do it", **fields: Any) -> dict[str, Any]:
    agent = to.agent if isinstance(to, EnrolledCaller) else to
    return {"id": str(uuid.uuid4()), "recipient": {"display": agent.display}, "intent_text": intent, **fields}


def now_ms() -> int:
    return time.time_ns() // 1_000_000


@asynccontextmanager
async def open_doors(folder: Path, **options: Any) -> AsyncIterator[DoorsUnderTest]:
    """`options` are those of the doors; `limits` are the ledger's, `mailbox` is for the exchange."""
    ledger = await open_ledger(folder / "home", clock=now_ms, limits=options.pop("limits", Limits()))
    try:
        async with _open_doors(ledger, folder, options) as under_test:
            yield under_test
    finally:
        await ledger.close()


@asynccontextmanager
async def _open_doors(ledger: Ledger, folder: Path, options: dict[str, Any]) -> AsyncIterator[DoorsUnderTest]:
    key, token = new_private_key(), new_token()
    operator = operator_agent("operator@test", key)
    saved: list[str] = []
    await admit_operator(ledger, operator, token, saved.append)
    identity_auth = IdentityAuth(ledger, operator)
    exchange = MailboxExchange(ledger, operator, **options.pop("mailbox", {}))
    catalogue = Catalogue(ledger, key)
    registry = IdentityAdmin(ledger, identity_auth, operator, key, saved.append, reserved=catalogue.reserved_identity)
    tenancy = TenantAccess(ledger, operator, identity_auth)
    await tenancy.open()
    limiter = TenantLimiter(now_ms, options.pop("tenant_limits", None))
    waits, meter, logs = WatchedWaits(identity_auth, ledger.limits), Meter(), TaskLogs(ledger.now_ms)
    removals = TenantRemovals(ledger, catalogue, logs, HomeFiles(folder / "home"), operator)
    # As in a daemon: what is in a database is not backed up by files.
    backups = StagedBackups(folder / "home", ledger, uuid_source()) if isinstance(ledger, EmbeddedLedger) else None
    links = FileLinks(token_hash(token).encode(), ledger.now_ms, 1_000)
    (folder / "home").mkdir(mode=0o700, exist_ok=True)  # a ledger on PostgreSQL has not made it
    files = StoredFiles(BlobFolder(folder / "home" / "blobs", uuid_source()), ledger, links, BlobSettings())
    api = ApiContext(
        services=Services(
            exchange,
            registry,
            ledger,
            tenancy,
            catalogue,
            logs,
            Intake(),
            TenantUsage(ledger, limiter, files, TenantLimits(live_tasks=9), lambda _: 0),
            options.pop("peers", None),
            backups=options.pop("backups", backups),
            removals=removals,
            files=files,
            http_url="http://files.test",
            schedules=ScheduleAdmin(ledger, catalogue, TaskWriter(ledger, NoWorkers())),
        ),
        identity_auth=identity_auth,
        waits=waits,
        meter=meter,
        version=VERSION,
        limiter=limiter,
        legacy_kinds=options.pop("legacy_kinds", False),
    )
    of_ipc = {
        name: options.pop(name) for name in ("frame_bytes_max", "connections_max", "handshake_s") if name in options
    }
    agents, gate = native.AgentDoor(catalogue), TenantAuth(tenancy, limiter)
    routes = tenant_routes(agents, gate, meter, body_bytes_max=native.AGENT_BYTES_MAX)
    routes += options.pop("more_routes", ())
    door = build_http(api, **options, more_routes=routes, described=routes_of(native.AgentDoor))
    ipc = IpcServer(folder / "sock", api, **of_ipc)
    await ipc.start()
    removing = asyncio.create_task(removals.run())
    async with _listening(door, door.refusal_form) as port:
        try:
            yield DoorsUnderTest(
                ledger=ledger,
                exchange=exchange,
                registry=registry,
                tenancy=tenancy,
                catalogue=catalogue,
                limiter=limiter,
                identity_auth=identity_auth,
                waits=waits,
                meter=meter,
                door=door,
                ipc=ipc,
                socket=folder / "sock",
                port=port,
                operator=EnrolledCaller(operator, token, Http(port, token)),
                files=files,
                saved_tokens=saved,
            )
        finally:
            waits.stop()
            removing.cancel()
            await asyncio.wait((removing,))
            await ipc.stop()


@asynccontextmanager
async def _listening(door: Door, refusal_form: RefusalForm = plain_form) -> AsyncIterator[int]:
    """Our own server, on a port of its own."""
    with bound(HttpSettings(port=0)) as listener:
        server = make_server(door, HttpSettings(), refusal_form)
        await server.start(listener)
        try:
            yield int(listener.getsockname()[1])
        finally:
            await server.stop(BOUND_S)
