"""The services of peers, put together, run and stopped."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from covenant.exchange.catalogue import Catalogue
from covenant.model.ids import TaskId
from covenant.peers.directory.peer_directory import PeerDirectory
from covenant.peers.directory.peer_maintenance import PeerMaintenance
from covenant.peers.peer_settings import PeerContext
from covenant.peers.provider.provider_service import Provider
from covenant.peers.requester.requester_service import Requester
from covenant.peers.transport.inbox import Inbox
from covenant.peers.transport.outbox_sender import OutboxSender


class PeerServices:
    """For one loop. `used`: what a task at work has used so far, where that is known here."""

    def __init__(
        self,
        context: PeerContext,
        catalogue: Catalogue,
        used: Callable[[TaskId], Mapping[str, Any] | None] = lambda _: None,
    ) -> None:
        self.context = context
        self.catalogue = catalogue
        self.provider = Provider(context, catalogue, used)
        self.directory = PeerDirectory(context, self.provider.offering)
        self.requester = Requester(context, self.directory)
        self.inbox = Inbox(context, self.directory, self.provider, self.requester)
        self.outbox = OutboxSender(context, self.directory, self.inbox)
        self.maintenance = PeerMaintenance(context, self.directory)

    async def run(self, static: Sequence[str]) -> None:
        """`static`: the peers that the settings give."""
        async with asyncio.TaskGroup() as group:
            for run in (self.provider.run, self.requester.run, self.outbox.run):
                group.create_task(run())
            await self.maintenance.settle_static(static)
            await self.maintenance.run()

    async def stop(self) -> None:
        """Before the ledger closes. Work that is under way is found again by the next run."""
        self.inbox.close()
        await self.provider.stop()
        await self.requester.stop()
        await self.outbox.stop()
        await self.maintenance.stop()
