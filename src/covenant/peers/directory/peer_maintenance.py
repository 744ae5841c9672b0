"""Periodic work on peers, retried until it succeeds.

Prekeys are rotated. Peers from the settings are added. An unverified peer with an address is challenged: at once when
something was heard from it, otherwise with growing pauses. A peer at whose address another identity was found is looked
up again. Nothing here ever fails a start.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Final, NamedTuple

from covenant.model.errors import Conflict, CovenantError, Refusal
from covenant.model.peers.instance import InstanceId, Trust
from covenant.model.peers.peer_record import Peer
from covenant.model.rate_limits import Backoff
from covenant.peers.directory.peer_directory import PeerDirectory, read_peer_entry
from covenant.peers.peer_settings import PeerContext, PeerService
from covenant.peers.transport.peer_client import PeerCallFailed

AT_ONCE_MAX: Final = 8
FIRST_MS: Final = 1_000
RETRIES: Final = Backoff(FIRST_MS, longest=300_000)
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
        self._stirred = asyncio.Event()
        self._running: asyncio.Task[None] | None = None
        context.ledger.on_peer(self._stir)

    def _stir(self, peer_id: InstanceId) -> None:
        peer = self._ledger.peer(peer_id)
        if peer is not None and self._wanting(peer):
            self._stirred.set()

    async def run(self) -> None:
        """Until it is cancelled, or `stop` is called."""
        self._running = asyncio.current_task()
        while True:
            self._stirred.clear()
            await self.sweep()
            with suppress(TimeoutError):
                async with asyncio.timeout(ROUND_S):
                    await self._stirred.wait()

    async def stop(self) -> None:
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
        await self._directory.stop()

    async def settle_static(self, entries: Iterable[str]) -> None:
        """Add the peers that the settings give (`read_peer_entry`); what cannot be done yet is tried again."""
        self._unsettled = dict.fromkeys(entries)
        self._tried = {key: tried for key, tried in self._tried.items() if key not in self._unsettled}
        await self.sweep()

    async def sweep(self) -> None:
        """One round of what is due."""
        await self._rotate()
        places = asyncio.Semaphore(AT_ONCE_MAX)
        entries = [entry for entry in self._unsettled if self._monotonic_ms() >= self._tried.get(entry, _NEVER).next_ms]
        peers = [peer for peer in self._ledger.peers() if self._wanting(peer)]
        await asyncio.gather(
            *(self._try(places, entry, 0, partial(self._settle, entry)) for entry in entries),
            *(self._try(places, peer.id, peer.heard_at_ms, partial(self._look, peer)) for peer in peers),
        )
        self._forget()

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
        if peer.url is None or peer.denied or not (_unverified(peer) or peer.conflict is not None):
            return False
        tried, now_ms = self._tried.get(peer.id, _NEVER), self._monotonic_ms()
        # One that is heard from knows us, and answers; one that talks without end is not called without end.
        heard = peer.heard_at_ms > tried.heard_at_ms and now_ms >= tried.at_ms + FIRST_MS
        return heard or now_ms >= tried.next_ms

    async def _try(
        self, places: asyncio.Semaphore, key: str, heard_at_ms: int, work: Callable[[], Awaitable[None]]
    ) -> None:
        async with places:
            try:
                await work()
            except (PeerCallFailed, Refusal) as failed:
                times = self._tried.get(key, _NEVER).times
                if times == 0:
                    log.warning("peer.retried", extra={"peer": key, "reason": str(failed)})
                now_ms = self._monotonic_ms()
                next_ms = now_ms + int(RETRIES.pause(times + 1))
                self._tried[key] = _Tried(times + 1, now_ms, next_ms, heard_at_ms)
            else:
                self._tried.pop(key, None)

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
        if _unverified(peer):
            await self._directory.verify(peer)

    def _forget(self) -> None:
        known = {*self._unsettled, *(peer.id for peer in self._ledger.peers())}
        self._tried = {key: tried for key, tried in self._tried.items() if key in known}


def _unverified(peer: Peer) -> bool:
    """Never verified. One that was, and is a mere peer, was lowered by an operator."""
    return peer.trust is Trust.PEER and peer.verified_at_ms is None
