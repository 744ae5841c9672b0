"""Instances for tests: a real ledger in a folder, real keys, a real port on loopback; and those who listen there."""

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from inspect import isawaitable
from pathlib import Path
from typing import Any, Final
from uuid import UUID

import msgspec
from starlette.routing import BaseRoute, Router

from covenant.agents.runtime.worker_pool import PoolRegister
from covenant.daemon.listeners import make_server
from covenant.daemon.settings import HttpSettings
from covenant.doors.http.request_body import AnonymousPool
from covenant.doors.metrics import Meter
from covenant.doors.peer_envelopes import sealed_routes
from covenant.exchange.tasks.writer import LocalWorkers, TaskWriter
from covenant.ledger.embedded.engine import EmbeddedLedger
from covenant.ledger.embedded.open import open_ledger
from covenant.ledger.machine.peer_commands import AddPeer, PeerMessage, ReceivedFromPeer, ReceiveFromPeer, SendToPeer
from covenant.model.errors import Refusal
from covenant.model.ids import TaskId
from covenant.model.peers.delegation import (
    Delegation,
    DelegationKey,
    DelegationRole,
    DelegationState,
    OutboxMessage,
    Peer,
)
from covenant.model.peers.delegation_messages import (
    DelegationAccept,
    DelegationCancel,
    DelegationMessage,
    DelegationOffer,
    DelegationResult,
    StatusReport,
)
from covenant.model.peers.instance import IdentityChange, InstanceId, Prekey, Trust
from covenant.model.settings import Limits
from covenant.outbound.address_guard import AddressGuard, Unresolved
from covenant.peers.directory.instance_keys import InstanceKeys
from covenant.peers.directory.peer_directory import PeerDirectory
from covenant.peers.peer_settings import PeerContext, PeerSettings
from covenant.peers.provider.offer_admission import OfferedProfiles
from covenant.peers.transport.inbox import Inbox, IncomingMessage
from covenant.peers.transport.outbox_sender import OutboxSender
from covenant.peers.transport.peer_client import PeerConnections
from covenant.seal.identity import PrivatePrekey, prekey_to_use
from covenant.seal.keys import new_private_key
from covenant.wire import peers
from covenant.wire.peers import Introduction
from tests.doors.http.server.server_under_test import AsgiDoor
from tests.ledger_contract.samples import OPERATOR
from tests.places import free_port
from tests.waits import BOUND_S

DEPTH_MAX: Final = 3
NOTHING: Final = OfferedProfiles((), 0, 0)
QUICK: Final = PeerSettings(retry_first_ms=10, retry_max_ms=50, poll_wait_ms=1_000)


class Clock:
    """The time, which a test may move."""

    def __init__(self) -> None:
        self.ahead_ms = 0
        """Time that has passed, for the test."""
        self.stepped_ms = 0
        """By how much the wall clock was set, without time passing."""

    def __call__(self) -> int:
        return time.time_ns() // 1_000_000 + self.ahead_ms + self.stepped_ms

    def monotonic_ms(self) -> int:
        return time.monotonic_ns() // 1_000_000 + self.ahead_ms


def offer_id(number: int) -> str:
    return str(UUID(int=number))


def raw(message: DelegationMessage) -> msgspec.Raw:
    return msgspec.Raw(peers.encode(message))


def said(message: DelegationMessage, *, latest: bool = False) -> PeerMessage:
    return PeerMessage(typ=peers.type_of(message), body=raw(message), latest=latest)


def offer(number: int = 1, task: str = "do it") -> DelegationOffer:
    return DelegationOffer(offer_id=offer_id(number), profile="worker", task=task, max_token_budget=100, timeout=60_000)


def accept(number: int = 1) -> DelegationAccept:
    return DelegationAccept(
        offer_id=offer_id(number), delegation_id=offer_id(number), max_token_budget=100, timeout=60_000
    )


def status(number: int, seq: int) -> StatusReport:
    return StatusReport(offer_id=offer_id(number), delegation_id=offer_id(number), seq=seq, status="running")


def result(number: int = 1, text: str = "done") -> DelegationResult:
    return DelegationResult(
        offer_id=offer_id(number), delegation_id=offer_id(number), profile="worker", status="completed", result=text
    )


def cancel(number: int = 1) -> DelegationCancel:
    return DelegationCancel(offer_id=offer_id(number))


def begun(role: DelegationRole, peer: InstanceId, number: int) -> Delegation:
    return Delegation(
        role=role,
        peer=peer,
        offer_id=offer_id(number),
        task_id=TaskId(offer_id(number)),
        profile="worker",
        state=DelegationState.OFFERED,
        budget=100,
        timeout_ms=60_000,
    )


class Listener:
    """Takes in what is said of delegations, as the table of states has it, and remembers what was new to it."""

    def __init__(self, ledger: EmbeddedLedger, role: DelegationRole) -> None:
        self._ledger = ledger
        self._role = role
        self.heard: list[tuple[str, str, int]] = []
        self.messages: list[DelegationMessage] = []
        self._changed = asyncio.Condition()

    async def receive(self, incoming: IncomingMessage) -> ReceivedFromPeer:
        peer, envelope, message, key = incoming
        assert key.role is self._role
        number = key.offer_id
        heard = await self._ledger.commit(
            ReceiveFromPeer(
                envelope=envelope,
                key=key,
                begin=begun(self._role, peer.id, UUID(number).int) if isinstance(message, DelegationOffer) else None,
                transitions=_happenings(message),
            )
        )
        if heard.moved is not None and heard.moved.changed:
            assert envelope.seq is not None
            self.heard.append((envelope.typ, number, envelope.seq))
            self.messages.append(message)
        async with self._changed:
            self._changed.notify_all()
        return heard

    async def until(self, count: int) -> None:
        async with asyncio.timeout(BOUND_S), self._changed:
            await self._changed.wait_for(lambda: len(self.heard) >= count)


def _happenings(message: DelegationMessage) -> tuple[str, ...]:
    match message:
        case DelegationOffer():
            return ("offer", "accept")
        case DelegationAccept():
            return ("accept",)
        case StatusReport():
            return ("status",)
        case DelegationResult():
            return (f"result_{message.status}",)
        case _:
            return ("cancel",)


async def nobody(name: str) -> Any:
    raise Unresolved(f"nobody answers for {name}", transient=False)


@dataclass
class Keys:
    """What of an instance outlives it besides its folder: its keys, and its port."""

    private_key: bytes = field(default_factory=new_private_key)
    prekeys: list[PrivatePrekey] = field(default_factory=list)
    port: int = field(default_factory=free_port)
    change: IdentityChange | None = None
    hybrid: bool = False

    def save(self, prekeys: Any) -> None:
        self.prekeys = list(prekeys)


class InstanceUnderTest:
    """The names of an instance, and waits for what becomes of its ledger."""

    clock: Clock
    keys: Keys
    ledger: EmbeddedLedger
    keyring: InstanceKeys
    inbox: Inbox
    outbox: OutboxSender
    bells: list[asyncio.Event]

    @property
    def id(self) -> InstanceId:
        return self.keyring.id

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.keys.port}"

    def prekey(self) -> Prekey:
        prekey = prekey_to_use(self.keyring.bundle(self.clock()).prekeys, self.clock())
        assert prekey is not None
        return prekey

    def ring(self, _: InstanceId) -> None:
        for bell in self.bells:
            bell.set()

    async def until(self, holds: Callable[[], Any]) -> None:
        """Until something that peers have to do with has become so. `holds` may have to be awaited."""
        bell = asyncio.Event()
        self.bells.append(bell)
        try:
            async with asyncio.timeout(BOUND_S):
                while not (await found if isawaitable(found := holds()) else found):
                    bell.clear()
                    await bell.wait()
        finally:
            self.bells.remove(bell)

    async def until_parcels(self, peer: InstanceId, holds: Callable[[Sequence[OutboxMessage]], Any]) -> None:
        async def look() -> Any:
            return holds(await self.ledger.peer_outbox(peer))

        await self.until(look)

    async def until_addressees(self, holds: Callable[[Sequence[InstanceId]], Any]) -> None:
        async def look() -> Any:
            return holds(await self.ledger.addressees())

        await self.until(look)

    async def until_delegation(self, task_id: TaskId, holds: Callable[[Delegation], Any]) -> None:
        async def look() -> Any:
            found = await self.ledger.delegation_of(task_id)
            return found is not None and holds(found)

        await self.until(look)


@dataclass
class TransportUnderTest(InstanceUnderTest):
    folder: Path
    clock: Clock
    keys: Keys
    ledger: EmbeddedLedger
    keyring: InstanceKeys
    context: PeerContext
    connections: PeerConnections
    directory: PeerDirectory
    provider: Listener
    requester: Listener
    inbox: Inbox
    outbox: OutboxSender
    bells: list[asyncio.Event] = field(default_factory=list)

    async def knows(
        self, other: "TransportUnderTest", *, trust: Trust = Trust.VERIFIED, url: str | None = "", keys: bool = True
    ) -> Peer:
        """`url` None: it cannot be reached from here."""
        return await self.ledger.commit(
            AddPeer(
                by=OPERATOR,
                peer=Peer(
                    id=other.id,
                    name=f"n{other.id[-8:]}",
                    url=other.url if url == "" else url,
                    trust=trust,
                    keys=other.keyring.bundle(self.clock()) if keys else None,
                ),
            )
        )

    async def offers(
        self, to: InstanceId, number: int = 1, *more: DelegationMessage, task: str = "do it"
    ) -> DelegationKey:
        key = DelegationKey(DelegationRole.REQUESTER, to, offer_id(number))
        await self.ledger.commit(
            SendToPeer(
                key=key,
                begin=begun(DelegationRole.REQUESTER, to, number),
                transitions=("offer",),
                messages=(said(offer(number, task)), *map(said, more)),
            )
        )
        return key

    async def says(
        self,
        role: DelegationRole,
        to: InstanceId,
        number: int,
        *messages: DelegationMessage,
        transitions: tuple[str, ...] = (),
    ) -> None:
        key = DelegationKey(role, to, offer_id(number))
        await self.ledger.commit(SendToPeer(key=key, transitions=transitions, messages=tuple(map(said, messages))))

    def sealed(
        self, message: DelegationMessage, to: "TransportUnderTest", *, seq: int | None = None, **more: Any
    ) -> bytes:
        """An envelope, as this instance would make it."""
        return self.keyring.seal(
            peers.encode(message),
            typ=more.pop("typ", peers.type_of(message)),
            to=to.id,
            prekey=more.pop("prekey", None) or to.prekey(),
            now_ms=more.pop("now_ms", self.clock()),
            seq=seq,
        )

    async def delivered(self) -> None:
        await self.until_addressees(lambda waiting: not waiting)

    async def audit(self, kind: str = "envelope_refused") -> list[dict[str, Any]]:
        rows = [json.loads(record.row)["kind"] for record in await self.ledger.audit_recent(None, 1_000, None)]
        return [row for row in rows if row["type"] == kind]


def peer_context(
    ledger: EmbeddedLedger,
    keyring: InstanceKeys,
    connections: PeerConnections,
    settings: PeerSettings,
    workers: LocalWorkers | None = None,
) -> PeerContext:
    return PeerContext(
        ledger=ledger,
        keyring=keyring,
        connections=connections,
        settings=settings,
        writer=TaskWriter(ledger, workers or PoolRegister()),
        us=OPERATOR,
        depth_max=DEPTH_MAX,
        chance=lambda: 0.5,
    )


@asynccontextmanager
async def transport_under_test(
    folder: Path,
    keys: Keys | None = None,
    *,
    settings: PeerSettings = QUICK,
    clock: Clock | None = None,
    limits: Limits | None = None,
    offering: OfferedProfiles = NOTHING,
) -> AsyncIterator[TransportUnderTest]:
    """An instance that is open, listens nowhere and delivers nothing yet."""
    keys, clock = keys or Keys(), clock or Clock()
    ledger = await open_ledger(folder, clock=clock, monotonic_ms=clock.monotonic_ms, limits=limits)
    keyring = InstanceKeys(
        keys.private_key,
        keys.prekeys,
        keys.save,
        changes=(keys.change,) if keys.change is not None else (),
        hybrid=keys.hybrid,
    )
    keyring.rotate(clock())
    connections = PeerConnections(AddressGuard((), resolver=nobody))

    async def offered(_: Peer) -> OfferedProfiles:
        return offering

    context = peer_context(ledger, keyring, connections, settings)
    directory = PeerDirectory(context, offered)
    provider, requester = Listener(ledger, DelegationRole.PROVIDER), Listener(ledger, DelegationRole.REQUESTER)
    inbox = Inbox(context, directory, provider, requester)
    outbox = OutboxSender(context, directory, inbox)
    made = TransportUnderTest(
        folder, clock, keys, ledger, keyring, context, connections, directory, provider, requester, inbox, outbox
    )
    ledger.on_peer(made.ring)
    try:
        yield made
    finally:
        inbox.close()
        await directory.stop()
        await connections.close()
        await ledger.close()


def stranger_pool() -> AnonymousPool:
    return AnonymousPool(bytes_max=64 * 2**20, body_ms=20_000)


@asynccontextmanager
async def listening(
    at: InstanceUnderTest, alter: Callable[[Introduction], Introduction] = lambda shown: shown
) -> AsyncIterator[None]:
    """It takes envelopes at its port, which stays the same when it listens again. `alter`: by somebody on the way."""

    def introduce() -> Introduction:
        return alter(at.keyring.introduction(at.clock(), "house"))

    async with serving(
        sealed_routes(at.inbox, introduce, Meter(), stranger_pool()),
        at.keys.port,
    ) as port:
        at.keys.port = port
        yield


@asynccontextmanager
async def serving(routes: list[BaseRoute], port: int = 0) -> AsyncIterator[int]:
    """These routes on loopback, for a while."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as bound:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(("127.0.0.1", port))
        server = make_server(AsgiDoor(Router(routes)), HttpSettings())
        await server.start(bound)
        try:
            yield bound.getsockname()[1]
        finally:
            await asyncio.wait_for(server.stop(0), BOUND_S)


@asynccontextmanager
async def delivering(at: InstanceUnderTest) -> AsyncIterator[None]:
    running = asyncio.create_task(at.outbox.run())
    try:
        yield
    finally:
        await asyncio.wait_for(at.outbox.stop(), BOUND_S)
        await asyncio.wait_for(running, BOUND_S)


async def refused(call: Awaitable[Any]) -> Refusal:
    """The refusal that this call raises; anything else that it raises is a fault."""
    try:
        await call
    except Refusal as refusal:
        return refusal
    raise AssertionError("nothing was refused")
