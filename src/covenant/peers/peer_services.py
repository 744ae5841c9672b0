"""The services of peers, put together, run and stopped; and the upkeep of what is known of each peer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final, NamedTuple

from covenant.exchange.catalogue import Catalogue
from covenant.model.errors import Conflict, CovenantError, Refusal
from covenant.model.ids import TaskId
from covenant.model.peers.delegation import (
    Peer,
)
from covenant.model.peers.instance import InstanceId, Trust
from covenant.model.rate_limits import Backoff
from covenant.peers.directory.peer_directory import PeerDirectory, read_peer_entry
from covenant.peers.peer_settings import PeerContext, PeerService
from covenant.peers.provider.provider_service import Provider
from covenant.peers.requester.requester_service import Requester
from covenant.peers.transport.inbox import Inbox
from covenant.peers.transport.outbox_sender import OutboxSender

AT_ONCE_MAX: Final = 64
"""Peers that are tried at once. One that is silent takes its time, and holds up nobody."""
FIRST_MS: Final = 1_000
RETRIES: Final = Backoff(FIRST_MS, longest=300_000)
STATIC_RETRIES: Final = Backoff(FIRST_MS, longest=10_000)
"""Tasks may wait for one of the settings whom nobody has met yet."""
ROUND_S: Final = 1.0

log = logging.getLogger(__name__)


class _Tried(NamedTuple):
    times: int
    at_ms: int
    next_ms: int
    heard_at_ms: int
    """When it had been heard from, the last time that it was tried."""


_NEVER: Final = _Tried(0, 0, 0, 0)


class PeerMaintenance(PeerService):
    def __init__(self, context: PeerContext, directory: PeerDirectory) -> None:
        super().__init__(context)
        self._directory = directory
        self._unsettled: dict[str, None] = {}
        self._tried: dict[str, _Tried] = {}
        self._trying: dict[str, asyncio.Task[None]] = {}
        self._places = asyncio.Semaphore(AT_ONCE_MAX)
        self._met: set[InstanceId] = set()
        self._stirred = asyncio.Event()
        self._running: asyncio.Task[None] | None = None
        context.ledger.on_peer(self._stir)
        context.introducing.append(lambda: bool(self._unsettled))

    def _stir(self, peer_id: InstanceId) -> None:
        peer = self._ledger.peer(peer_id)
        if peer is not None and self._wanting(peer):
            self._stirred.set()

    async def run(self) -> None:
        self._running = asyncio.current_task()
        while True:
            self._stirred.clear()
            await self._begin()
            with suppress(TimeoutError):
                async with asyncio.timeout(ROUND_S):
                    await self._stirred.wait()

    async def stop(self) -> None:
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
        trying = tuple(self._trying.values())
        for each in trying:
            each.cancel()
        await asyncio.gather(*trying, return_exceptions=True)
        await self._directory.stop()

    def add_static(self, entries: Iterable[str]) -> None:
        """The peers that the settings give (`read_peer_entry`): they are added as soon as that can be done."""
        self._unsettled = dict.fromkeys(entries)
        self._tried = {key: tried for key, tried in self._tried.items() if key not in self._unsettled}
        self._stirred.set()

    async def settle_static(self, entries: Iterable[str]) -> None:
        self.add_static(entries)
        await self.sweep()

    async def sweep(self) -> None:
        """Try all that are due, and wait until each was."""
        await self._begin()
        await asyncio.gather(*self._trying.values())

    async def _begin(self) -> None:
        """Each by itself, and no two tries of one at once."""
        await self._rotate()
        self._forget()
        entries = [entry for entry in self._unsettled if self._monotonic_ms() >= self._tried.get(entry, _NEVER).next_ms]
        due = [(entry, 0, partial(self._settle, entry)) for entry in entries]
        due += [
            (peer.id, peer.heard_at_ms, partial(self._look, peer))
            for peer in self._ledger.peers()
            if self._wanting(peer)
        ]
        for key, heard_at_ms, work in due:
            if key not in self._trying:
                self._trying[key] = asyncio.create_task(self._try(key, heard_at_ms, work))

    async def _rotate(self) -> None:
        clock = self._ledger.clock
        if clock.is_paused() and clock.ages.steps[-1].step_ms > 0:
            # By a clock that was set forward just now, no key is thrown away.
            return
        if not self._keyring.due(self._now_ms()):
            return
        try:
            await asyncio.to_thread(self._keyring.rotate, self._now_ms())
        except (OSError, CovenantError) as error:  # those that there are go on for another day
            log.warning("peers.prekeys_not_renewed", extra={"reason": str(error)})

    def _wanting(self, peer: Peer) -> bool:
        untold = self._is_untold(peer)
        if peer.url is None and untold and peer.challenge is None and not peer.denied:
            return True  # it hears of it when it fetches
        if peer.url is None or peer.denied or not (_unverified(peer) or peer.conflict is not None or untold):
            return False
        tried, now_ms = self._tried.get(peer.id, _NEVER), self._monotonic_ms()
        # One that is heard from knows us, and answers; one that talks without end is not called without end.
        heard = peer.heard_at_ms > tried.heard_at_ms and now_ms >= tried.at_ms + FIRST_MS
        return heard or now_ms >= tried.next_ms

    async def _try(self, key: str, heard_at_ms: int, work: Callable[[], Awaitable[None]]) -> None:
        async with self._places:
            try:
                await work()
            except Refusal as failed:
                times = self._tried.get(key, _NEVER).times
                if times == 0:
                    log.warning("peer.retried", extra={"peer": key, "reason": str(failed)})
                now_ms = self._monotonic_ms()
                retries = STATIC_RETRIES if key in self._unsettled else RETRIES
                next_ms = now_ms + int(retries.pause(times + 1))
                self._tried[key] = _Tried(times + 1, now_ms, next_ms, heard_at_ms)
            else:
                self._tried.pop(key, None)
            finally:
                del self._trying[key]

    async def _settle(self, entry: str) -> None:
        place = read_peer_entry(entry)
        try:
            await self._directory.add(self._us, url=place.url, peer_id=place.peer_id, name=place.name, source="setting")
        except Conflict as conflict:
            if conflict.code != "peer_exists":
                raise
            # An operator has changed its name or address since: that is newer than the setting.
        self._unsettled.pop(entry, None)

    async def _look(self, peer: Peer) -> None:
        if peer.conflict is not None:
            peer = await self._directory.refresh(peer)
            if peer.conflict is not None:
                raise Conflict(peer.conflict, f"something else is at the address of {peer.name}")
        if self._is_untold_identity(peer):
            await self._directory.announce(peer)
        if _unverified(peer) or self._is_untold(peer):
            await self._directory.verify(peer)
        self._met.add(peer.id)

    def _is_untold(self, peer: Peer) -> bool:
        """Whether it may not know of our ledger's present life, or of our present identity."""
        return self._epoch_for(peer) != peer.told_epoch or self._is_untold_identity(peer) or self._is_unmet(peer)

    def _is_unmet(self, peer: Peer) -> bool:
        """Each is asked once after a start: it may remember more of our ledger than there is."""
        ends = peer.keys is not None and peer.keys.has_ends and self._context.ledger_end() is not None
        return ends and peer.verified_at_ms is not None and peer.id not in self._met

    def _is_untold_identity(self, peer: Peer) -> bool:
        return bool(self._keyring.former) and peer.told_id != self._keyring.id

    def _forget(self) -> None:
        known = {*self._unsettled, *(peer.id for peer in self._ledger.peers())}
        self._tried = {key: tried for key, tried in self._tried.items() if key in known}


def _unverified(peer: Peer) -> bool:
    """Never verified. One that was, and is a mere peer, was lowered by an operator."""
    return peer.trust is Trust.PEER and peer.verified_at_ms is None


class PeerServices:
    """For one loop. `used`: what a task at work has used so far, where that is known here. `draining`: whether nothing
    new is taken any more."""

    def __init__(
        self,
        context: PeerContext,
        catalogue: Catalogue,
        used: Callable[[TaskId], Mapping[str, Any] | None] = lambda _: None,
        draining: Callable[[], bool] = lambda: False,
    ) -> None:
        self.context = context
        self.catalogue = catalogue
        self.provider = Provider(context, catalogue, used, draining)
        self.directory = PeerDirectory(context, self.provider.offering)
        self.requester = Requester(context, self.directory)
        self.inbox = Inbox(context, self.directory, self.provider, self.requester)
        self.outbox = OutboxSender(context, self.directory, self.inbox)
        self.maintenance = PeerMaintenance(context, self.directory)

    async def run(self, static: Sequence[str]) -> None:
        async with asyncio.TaskGroup() as group:
            for run in (self.provider.run, self.requester.run, self.outbox.run):
                group.create_task(run())
            self.maintenance.add_static(static)
            await self.maintenance.run()

    async def stop(self) -> None:
        """Before the ledger closes. Work that is under way is found again by the next run."""
        self.inbox.close()
        await self.provider.stop()
        await self.requester.stop()
        await self.outbox.stop()
        await self.maintenance.stop()
