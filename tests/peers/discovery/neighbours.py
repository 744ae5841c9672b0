"""Instances with keys of their own, what they announce and show, and how a test waits for what is found."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from zeroconf.asyncio import AsyncServiceInfo, AsyncZeroconf

from covenant.model.ids import PublicKey
from covenant.model.peers.instance import SUPPORTED_VERSIONS, InstanceId, KeyBundle
from covenant.outbound.address_guard import AddressGuard
from covenant.outbound.http_fetcher import TlsTrust
from covenant.peers.discovery.candidates import Candidate
from covenant.peers.discovery.discovery_service import Discovery
from covenant.peers.discovery.dns_sd import TxtRecord, encode_txt
from covenant.peers.discovery.mdns import SERVICE_TYPE, Announcement
from covenant.peers.peer_settings import PeerSettings
from covenant.peers.transport.peer_client import PeerConnections
from covenant.seal.identity import InstanceIdentity, fingerprint, new_prekey, sign_bundle
from covenant.seal.keys import new_private_key
from tests.outbound.http_servers import HERE, Answer, always, reply
from tests.peers.transport_under_test import nobody
from tests.waits import eventually

LOOPBACK = PeerSettings(mdns=True, mdns_interfaces=(HERE,))


def now_ms() -> int:
    return time.time_ns() // 1_000_000


class Neighbour:
    def __init__(self, private_key: bytes | None = None) -> None:
        self.private_key = private_key or new_private_key()
        self.identity = InstanceIdentity(self.private_key)

    @property
    def id(self) -> InstanceId:
        return self.identity.id

    @property
    def fingerprint(self) -> str:
        return fingerprint(PublicKey(self.identity.key))

    def says(self, **changes: Any) -> TxtRecord:
        given = {"instance_id": self.id, "versions": SUPPORTED_VERSIONS, "fingerprint": self.fingerprint}
        return TxtRecord(**{**given, **changes})

    def announces(self, port: int, **changes: Any) -> Announcement:
        return Announcement(**{"record": self.says(), "port": port, "listen_addresses": (HERE,), **changes})

    def bundle(self) -> KeyBundle:
        now = now_ms()
        return sign_bundle(self.private_key, [new_prekey(self.private_key, now).prekey], now)

    def shows(self, **more: object) -> Answer:
        """Its identity, over HTTP."""
        document = {"keys": msgspec.to_builtins(self.bundle()), **more}
        return always(reply(200, json.dumps(document).encode(), content_type="application/json"))

    def candidate(self, url: str = "http://10.0.0.1:8421", **changes: Any) -> Candidate:
        given: dict[str, Any] = {
            "instance_id": self.id,
            "url": url,
            "name": "neighbour",
            "source": "mdns",
            "versions": SUPPORTED_VERSIONS,
            "fingerprint": self.fingerprint,
            "seen_at_ms": 1_000,
        }
        return Candidate(**{**given, **changes})


@asynccontextmanager
async def discovery(
    settings: PeerSettings,
    us: Neighbour,
    *,
    known: Mapping[InstanceId, str | None] | None = None,
    trust: TlsTrust | None = None,
    **more: Any,
) -> AsyncIterator[Discovery]:
    """Started, and stopped in the end."""
    connections = PeerConnections(AddressGuard((), resolver=nobody), trust=trust)
    found = Discovery(
        settings,
        **{"own_id": us.id, "known": lambda: known or {}, "now_ms": now_ms, "connections": connections, **more},
    )
    await found.start()
    try:
        yield found
    finally:
        await found.stop()
        await connections.close()


async def until(met: Callable[[], object]) -> None:
    """The network of a test machine tells nobody what it has delivered."""

    async def look() -> object:
        return met()

    await eventually(look)


def of(finding: Discovery, instance_id: str) -> list[Candidate]:
    """Others may be on the same network."""
    return [each for each in finding.candidates() if each.instance_id == instance_id]


async def heard(finding: Discovery, instance_id: str, count: int = 1) -> list[Candidate]:
    await until(lambda: len(of(finding, instance_id)) >= count)
    return of(finding, instance_id)


@asynccontextmanager
async def announcing(
    label: str, txt: TxtRecord | bytes, *, port: int = 8421, addresses: tuple[str, ...] = (HERE,), server: str = ""
) -> AsyncIterator[AsyncServiceInfo]:
    """Whatever somebody on the network makes up, said once as it is, without asking whether the name is free."""
    network = AsyncZeroconf(interfaces=[HERE])
    info = AsyncServiceInfo(
        SERVICE_TYPE,
        f"{label}.{SERVICE_TYPE}",
        port=port,
        properties=encode_txt(txt) if isinstance(txt, TxtRecord) else txt,
        server=server or f"{label.replace(' ', '-')}.local.",
        parsed_addresses=list(addresses),
    )
    try:
        # It is said three times; whoever listens has it from the first, or asks.
        saying = asyncio.ensure_future(await network.async_register_service(info, cooperating_responders=True))
        yield info
        saying.cancel()
    finally:
        await network.async_close()
