"""Peers in a daemon: the parts of sealed delegation, put together, run and taken apart.

Without `peers.enabled` there is none of this: no route, no key to seal to, and nobody is called.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import asdict, dataclass, replace
from urllib.parse import urlsplit
from uuid import uuid4

from starlette.routing import BaseRoute

import covenant
from covenant.agents.runtime.worker_pool import WorkerPool
from covenant.daemon.environment import monotonic_ms, now_ms
from covenant.daemon.keystore import Keystore
from covenant.daemon.logs import Log
from covenant.daemon.peer_http import PeerLines
from covenant.daemon.settings import Settings
from covenant.doors.http.request_body import AnonymousPool
from covenant.doors.metrics import Meter
from covenant.doors.peer_envelopes import sealed_routes
from covenant.exchange.catalogue import Catalogue
from covenant.exchange.tasks.writer import TaskWriter
from covenant.ledger.contract.ledger import Ledger
from covenant.model.ids import AgentId
from covenant.model.peers.instance import SUPPORTED_VERSIONS, InstanceId
from covenant.model.tracing import Tracer
from covenant.outbound.address_guard import AddressGuard
from covenant.outbound.http_fetcher import Fetcher
from covenant.peers.directory.instance_keys import InstanceKeys
from covenant.peers.directory.peer_directory import read_peer_entry
from covenant.peers.discovery.discovery_service import Discovery
from covenant.peers.discovery.dns_sd import TxtRecord
from covenant.peers.discovery.mdns import Announcement
from covenant.peers.peer_admin import PeerAdmin
from covenant.peers.peer_services import PeerServices
from covenant.peers.peer_settings import DiscoverySettings, PeerContext
from covenant.seal.identity import fingerprint
from covenant.wire.peers import Introduction


@dataclass(frozen=True, slots=True, kw_only=True)
class Around:
    """What a daemon has besides, that peers need. `us`: who is in the audit for what the daemon does by itself."""

    settings: Settings
    ledger: Ledger
    catalogue: Catalogue
    meter: Meter
    us: AgentId
    pool: AnonymousPool


@dataclass(frozen=True, slots=True, kw_only=True)
class Outside:
    """How others are called, and what they seal to. `keyring` is None where there are no peers."""

    guard: AddressGuard
    fetcher: Fetcher
    keyring: InstanceKeys | None


class Peering:
    """Made before the daemon listens; `run` once it does, and cancel that to end it."""

    def __init__(self, around: Around, workers: WorkerPool, outside: Outside, *, tracer: Tracer) -> None:
        settings, ledger, us = around.settings, around.ledger, around.us
        keyring = outside.keyring
        assert keyring is not None
        self._around = around
        self._fetcher = outside.fetcher
        self._lines = PeerLines(outside.guard, user_agent=f"covenant/{covenant.__version__}")
        context = PeerContext(
            ledger=ledger,
            keyring=keyring,
            connections=self._lines,
            settings=settings.peers,
            us=us,
            depth_max=settings.delegation.depth_max,
            chance=random.random,
        )
        self._keyring = keyring
        self._services = PeerServices(context, around.catalogue, workers.used)
        self.requester = self._services.requester
        self._discovery = self._look_around(settings.http.bind_addr, settings.http.port)
        self.desk = PeerAdmin(
            self._services,
            TaskWriter(ledger, workers, tracer),
            asdict(settings.peers),
            discovery=lambda: self._discovery,
            new_id=lambda: str(uuid4()),
        )

    @property
    def id(self) -> InstanceId:
        return self._keyring.id

    def routes(self) -> list[BaseRoute]:
        return sealed_routes(self._services.inbox, self._introduction, self._around.meter, self._around.pool)

    def _introduction(self) -> Introduction:
        return Introduction(name=self.desk.name, keys=self._keyring.bundle(self._around.ledger.now_ms()))

    def listening(self, address: str, port: int) -> None:
        """Where this daemon can be called: before `run`, so that others are told."""
        self._discovery = self._look_around(address, port)

    async def run(self) -> None:
        await self._discovery.start()
        try:
            await self._services.run(self._around.settings.peers.static)
        finally:
            await self._discovery.stop()

    def hush(self) -> None:
        """Answer those who wait to fetch something: the daemon is about to stop."""
        self._services.inbox.close()

    async def close(self) -> None:
        await self._services.stop()
        await self._lines.close()

    def _look_around(self, address: str, port: int) -> Discovery:
        ours, http = self._around.settings.peers, self._around.settings.http
        places = [read_peer_entry(entry).url for entry in ours.static]
        settings = DiscoverySettings(
            static=tuple(url for url in places if url is not None),
            mdns=ours.mdns,
            mdns_interfaces=ours.mdns_interfaces,
            dns_domains=ours.dns_domains,
            dns_servers=ours.dns_servers,
            name=ours.name or self.id[-8:],
        )
        said = TxtRecord(instance_id=self.id, versions=SUPPORTED_VERSIONS, fingerprint=fingerprint(self._keyring.key))
        announcement = Announcement(said=said, port=port, listens=(address,))
        if http.public_base_url:
            announcement = _announced_as(announcement, http.public_base_url)
        ledger = self._around.ledger
        return Discovery(
            settings,
            own_id=self.id,
            known=lambda: {peer.id: peer.url for peer in ledger.peers()},
            now_ms=ledger.now_ms,
            monotonic_ms=monotonic_ms,
            fetcher=self._fetcher,
            announcement=announcement,
        )


def _announced_as(announcement: Announcement, public_url: str) -> Announcement:
    """What stands before us, such as a proxy with a certificate, is what others call."""
    public = urlsplit(public_url)
    tls = public.scheme == "https"
    port = public.port or (443 if tls else 80)
    return replace(
        announcement, said=replace(announcement.said, tls=tls), port=port, host=public.hostname or announcement.host
    )


async def open_keyring(settings: Settings, key: bytes, keystore: Keystore) -> InstanceKeys | None:
    """The keys that others seal to, with a fresh one if it is time; None: peers are switched off."""
    if not settings.peers.enabled:
        return None
    prekeys = await asyncio.to_thread(keystore.read_prekeys)
    change = await asyncio.to_thread(keystore.read_change)
    keyring = InstanceKeys(key, prekeys, keystore.save_prekeys, change=change)
    await asyncio.to_thread(keyring.rotate, now_ms())
    return keyring


def join_peers(around: Around, workers: WorkerPool, outside: Outside, *, tracer: Tracer, log: Log) -> Peering | None:
    """Make them known to the daemon's own agents, too."""
    if outside.keyring is None:
        return None
    peering = Peering(around, workers, outside, tracer=tracer)
    if workers.delegations is not None:
        workers.delegations.peers = peering.requester.callee
    log.info("peers.on", id=peering.id, peers=len(around.ledger.peers()))
    return peering
