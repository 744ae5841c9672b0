"""Peers of a daemon: sealed delegation to and from other instances.

Without `peers.enabled` there are no routes for peers and no prekeys, and no peer is called. Then this module is
not imported either, since it needs the extra `peers`.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, replace
from functools import partial
from typing import Final
from urllib.parse import urlsplit
from uuid import uuid4

import msgspec
from starlette.routing import BaseRoute

import covenant
from covenant.agents.runtime.worker_pool import PoolRegister
from covenant.daemon.wiring.core import Base
from covenant.doors.http.request_body import AnonymousPool
from covenant.doors.peer_envelopes import sealed_routes
from covenant.exchange.tasks.writer import TaskWriter
from covenant.ledger.clock import uuid_source
from covenant.ledger.embedded.backup_file import INCARNATION_NAME, ORIGINAL, Incarnation, read_incarnation
from covenant.ledger.embedded.disk import replace_private
from covenant.ledger.embedded.engine import EmbeddedLedger
from covenant.peers.discovery.discovery_service import Discovery
from covenant.peers.discovery.dns_sd import TxtRecord
from covenant.peers.discovery.mdns import Announcement
from covenant.peers.peer_admin import PeerAdmin
from covenant.peers.peer_services import PeerServices
from covenant.peers.peer_settings import PeerContext, SharedInstance
from covenant.peers.transport.peer_client import PeerConnections
from covenant.peers.transport.relay import FOLDER_NAME as RELAY_FOLDER_NAME
from covenant.seal.identity import fingerprint
from covenant.wire.peers import Introduction

SHARDS: Final = 16
"""Peers are divided into this many shards among the daemons on one ledger. One daemon at a time serves a peer."""


def _epoch(base: Base) -> str | None:
    """The epoch of the ledger in the home."""
    found = read_incarnation(base.settings.home).id
    return None if found == ORIGINAL else found


def _shared_instance(base: Base) -> SharedInstance | None:
    """None: the ledger is in the home."""
    keys = base.storage.shared_keys
    if keys is None:
        return None
    ledger = keys.ledger
    return SharedInstance(
        ledger_epoch=ledger.ledger_epoch,
        serves=lambda peer: ledger.shares("peers", str(zlib.crc32(peer.encode()) % SHARDS)),
        renew_keys=keys.renew,
        refresh_keys=keys.refresh,
        replace_keys=keys.replace_purpose_keys,
        on_void=keys.on_void,
    )


def _ledger_end(base: Base) -> int | None:
    ledger, keys = base.storage.ledger, base.storage.shared_keys
    if isinstance(ledger, EmbeddedLedger):
        return ledger.durable_seq
    return keys.ledger.committed_batches() if keys is not None else None


def _begin_epoch(base: Base) -> str:
    """Begins a new epoch of the ledger: the home was restored without a mark, as by a plain copy of its files."""
    ledger, home = base.storage.ledger, base.settings.home
    found = Incarnation(
        id=str(uuid4()),
        restored_from=read_incarnation(home).restored_from,
        position=_ledger_end(base) or 0,
        restored_at_ms=ledger.now_ms(),
    )
    replace_private(home / INCARNATION_NAME, msgspec.json.encode(found))
    return found.id


@asynccontextmanager
async def open_peers(base: Base, register: PoolRegister) -> AsyncIterator[Peers]:
    """`register`: the daemon's own agents."""
    keys = base.storage.instance_keys
    assert keys is not None, "there are keys if peers are switched on"
    async with AsyncExitStack() as stack:
        connections = PeerConnections(base.outbound.guard, user_agent=f"covenant/{covenant.__version__}")
        stack.push_async_callback(connections.close)
        context = PeerContext(
            ledger=base.storage.ledger,
            keyring=keys,
            connections=connections,
            settings=base.settings.peers,
            writer=TaskWriter(base.storage.ledger, register, base.telemetry.tracer, files=base.access.files),
            us=base.storage.operator.agent,
            depth_max=base.settings.delegation.depth_max,
            chance=random.random,
            files=base.access.files,
            relay_folder=base.settings.home / RELAY_FOLDER_NAME,
            epoch=_epoch(base),
            ledger_end=partial(_ledger_end, base),
            # Other daemons work on a shared ledger, so only an operator marks it as restored.
            begin_epoch=partial(_begin_epoch, base) if base.storage.shared_keys is None else None,
            shared=_shared_instance(base),
        )
        services = PeerServices(
            context, base.access.catalogue, register.usage_of, base.access.intake.drain_requested.is_set
        )
        await services.inbox.relay.open()
        stack.push_async_callback(services.directory.stop)
        stack.push_async_callback(services.stop)
        base.telemetry.log.info("peers.on", id=keys.id, peers=len(base.storage.ledger.peers()))
        yield Peers(base, services)


class Peers:
    """The routes for peers, and the operator's view of them. A scheduler of the daemon."""

    def __init__(self, base: Base, services: PeerServices) -> None:
        self.requester = services.requester
        self._base = base
        self._services = services
        self._keys = services.context.keyring
        self._discovery = _make_discovery(base, services.context)
        self.admin = PeerAdmin(
            services,
            asdict(base.settings.peers),
            discovery=self._discovery,
            new_id=uuid_source(),
        )

    def routes(self, pool: AnonymousPool) -> list[BaseRoute]:
        return sealed_routes(self._services.inbox, self._introduction, self._base.telemetry.meter, pool)

    def _introduction(self) -> Introduction:
        return self._keys.introduction(self._base.storage.ledger.now_ms(), self.admin.name)

    async def run(self) -> None:
        await self._discovery.start()
        try:
            await self._services.run(self._base.settings.peers.static)
        finally:
            await self._discovery.stop()

    def end_polls(self) -> None:
        """Ends the polls of peers that wait for messages: the daemon is about to stop."""
        self._services.inbox.close()


def _make_discovery(base: Base, context: PeerContext) -> Discovery:
    settings, ledger, keys = base.settings, base.storage.ledger, context.keyring
    record = TxtRecord(instance_id=keys.id, versions=keys.versions, fingerprint=fingerprint(keys.key))
    address, port = base.listeners.peers_at
    announcement = Announcement(record=record, port=port, listen_addresses=(address,))
    if base.listeners.peers is not None:
        details = replace(announcement.record, tls=base.listeners.tls is not None)
        announcement = replace(announcement, record=details)
    elif settings.http.public_base_url:
        announcement = _announced_as(announcement, settings.http.public_base_url)
    return Discovery(
        settings.peers,
        own_id=keys.id,
        known=lambda: {peer.id: peer.url for peer in ledger.peers()},
        now_ms=ledger.now_ms,
        monotonic_ms=ledger.clock.monotonic_ms,
        connections=context.connections,
        announcement=announcement,
    )


def _announced_as(announcement: Announcement, public_url: str) -> Announcement:
    """Announces the public URL, such as that of a proxy in front of this daemon."""
    public = urlsplit(public_url)
    tls = public.scheme == "https"
    port = public.port or (443 if tls else 80)
    return replace(
        announcement, record=replace(announcement.record, tls=tls), port=port, host=public.hostname or announcement.host
    )
