"""The services of peers: built, run and stopped together; and the maintenance of each peer's record."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

from covenant.exchange.catalogue import Catalogue
from covenant.model.errors import Conflict, CovenantError, Refusal
from covenant.model.ids import TaskId
from covenant.model.peers.delegation import Peer
from covenant.model.peers.instance import InstanceId, Trust
from covenant.model.rate_limits import Backoff
from covenant.outbound.concurrency import wait_at_most
from covenant.peers.directory.peer_directory import PeerDirectory, read_peer_entry
from covenant.peers.peer_settings import PeerContext, PeerService
from covenant.peers.provider.provider_service import Provider
from covenant.peers.requester.delegation_sweep import DelegationSweep
from covenant.peers.requester.requester_service import Requester
from covenant.peers.transport.inbox import Inbox
from covenant.peers.transport.outbox_sender import OutboxSender

AT_ONCE_MAX: Final = 64
"""How many peers are tried at once. A silent peer holds up no other."""
FIRST_MS: Final = 1_000
RETRIES: Final = Backoff(FIRST_MS, longest=300_000)
STATIC_RETRIES: Final = Backoff(FIRST_MS, longest=10_000)
"""For peers of the settings that were never met: tasks may wait for them."""
ROUND_S: Final = 1.0
SHARES_S: Final = 0.25
"""The pause between two looks at which peers this daemon serves, if it shares its ledger."""
LOOK_AGAIN_S: Final = 30.0
"""The pause between two looks for work that another daemon may have left."""

log = logging.getLogger(__name__)


class _LastTry(NamedTuple):
    times: int
    at_ms: int
    next_ms: int
    heard_at_ms: int
    """When the peer was last heard from before this try."""


_NEVER: Final = _LastTry(0, 0, 0, 0)


class PeerMaintenance(PeerService):
    def __init__(self, context: PeerContext, directory: PeerDirectory) -> None:
        super().__init__(context)
        self._directory = directory
        self._static_pending: dict[str, None] = {}
        self._tried: dict[str, _LastTry] = {}
        self._trying: dict[str, asyncio.Task[None]] = {}
        self._slots = asyncio.Semaphore(AT_ONCE_MAX)
        self._asked_peers: set[InstanceId] = set()
        self._untold_keys: set[InstanceId] = set()
        """In memory only: after a start each of these peers is asked anyway."""
        self._woken = asyncio.Event()
        self._running: asyncio.Task[None] | None = None
        context.ledger.on_peer(self._on_peer)
        context.introducing.append(lambda: bool(self._static_pending))
        if context.shared is not None:
            context.shared.on_void.append(self.announce_keys)

    def _on_peer(self, peer_id: InstanceId) -> None:
        peer = self._ledger.peer(peer_id)
        if peer is not None and self._needs_call(peer):
            self._woken.set()

    async def run(self) -> None:
        self._running = asyncio.current_task()
        while True:
            self._woken.clear()
            await self._begin()
            await wait_at_most(self._woken, ROUND_S)

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
        """Adds the peers of the settings (`read_peer_entry`) as soon as each can be added."""
        self._static_pending = dict.fromkeys(entries)
        self._tried = {key: tried for key, tried in self._tried.items() if key not in self._static_pending}
        self._woken.set()

    def announce_keys(self) -> None:
        """Queries every peer that knows certificates, so that it learns of our new keys."""
        self._untold_keys = {
            peer.id for peer in self._ledger.peers() if peer.keys is not None and peer.keys.has_certificates
        }
        self._woken.set()

    async def sweep(self) -> None:
        """Tries all peers that are due, and waits until each was tried."""
        await self._begin()
        await asyncio.gather(*self._trying.values())

    async def _begin(self) -> None:
        """Begins a try for each peer that is due. One peer is never tried twice at once."""
        await self._rotate()
        self._forget()
        entries = [
            entry for entry in self._static_pending if self._monotonic_ms() >= self._tried.get(entry, _NEVER).next_ms
        ]
        due = [(entry, 0, partial(self._add_static_peer, entry)) for entry in entries]
        due += [
            (peer.id, peer.heard_at_ms, partial(self._maintain, peer))
            for peer in self._ledger.peers()
            if self._context.serves(peer.id) and self._needs_call(peer)
        ]
        for key, heard_at_ms, work in due:
            if key not in self._trying:
                self._trying[key] = asyncio.create_task(self._try(key, heard_at_ms, work))

    async def _rotate(self) -> None:
        clock = self._ledger.clock
        if clock.is_paused() and clock.ages.steps[-1].step_ms > 0:
            # A clock that was just set forward must not expire keys.
            return
        is_due, shared = self._keyring.is_due(self._now_ms()), self._context.shared
        try:
            if is_due and shared is not None:
                await shared.renew_keys(self._now_ms())
            elif is_due:
                await asyncio.to_thread(self._keyring.rotate, self._now_ms())
        except (OSError, CovenantError) as error:  # the present keys are good for another day
            log.warning("peers.prekeys_not_renewed", extra={"reason": str(error)})

    def _needs_call(self, peer: Peer) -> bool:
        untold = self._is_untold(peer)
        address = self._address(peer)
        if address is None and untold and peer.challenge is None and not peer.denied:
            return True  # it gets them when it polls
        if address is None or peer.denied or not (_unverified(peer) or peer.conflict is not None or untold):
            return False
        tried, now_ms = self._tried.get(peer.id, _NEVER), self._monotonic_ms()
        # A peer that was heard from knows us, and will answer. The pause keeps a talkative peer from being
        # called all the time.
        heard = peer.heard_at_ms > tried.heard_at_ms and now_ms >= tried.at_ms + FIRST_MS
        return heard or now_ms >= tried.next_ms

    async def _try(self, key: str, heard_at_ms: int, work: Callable[[], Awaitable[None]]) -> None:
        async with self._slots:
            try:
                await work()
            except Refusal as failed:
                times = self._tried.get(key, _NEVER).times
                if times == 0:
                    log.warning("peer.retried", extra={"peer": key, "reason": str(failed)})
                now_ms = self._monotonic_ms()
                retries = STATIC_RETRIES if key in self._static_pending else RETRIES
                next_ms = now_ms + int(retries.pause(times + 1))
                self._tried[key] = _LastTry(times + 1, now_ms, next_ms, heard_at_ms)
            else:
                self._tried.pop(key, None)
            finally:
                del self._trying[key]

    async def _add_static_peer(self, entry: str) -> None:
        read = read_peer_entry(entry)
        try:
            await self._directory.add(self._us, url=read.url, peer_id=read.peer_id, name=read.name, source="setting")
        except Conflict as conflict:
            if conflict.code != "peer_exists":
                raise
            # An operator has changed the peer's name or address since, which counts more than the setting.
        self._static_pending.pop(entry, None)

    async def _maintain(self, peer: Peer) -> None:
        if peer.conflict is not None:
            peer = await self._directory.refresh(peer)
            if peer.conflict is not None:
                raise Conflict(peer.conflict, f"something else is at the address of {peer.name}")
        if self._is_untold_identity(peer):
            await self._directory.announce(peer)
        before = self._keyring.certificates()
        if _unverified(peer) or self._is_untold(peer):
            await self._directory.verify(peer)
        self._asked_peers.add(peer.id)
        # The keys may be replaced while a question is under way: then another question shows the new keys. A peer
        # that polls is handed the question later, under the keys of that moment.
        polls = self._address(peer) is None
        shown = self._keyring.certificates() == before if polls else self._directory.has_shown_keys(peer.id)
        if shown:
            self._untold_keys.discard(peer.id)

    def _is_untold(self, peer: Peer) -> bool:
        """Whether the peer may not know our ledger's present epoch, our present identity or our present keys."""
        return (
            self._epoch_for(peer) != peer.told_epoch
            or peer.id in self._untold_keys
            or self._is_untold_identity(peer)
            or self._is_unasked(peer)
        )

    def _is_unasked(self, peer: Peer) -> bool:
        """Whether a verified peer was not asked since the start.

        Each is asked once, since it may know of more records than our ledger has.
        """
        if peer.id in self._asked_peers or peer.verified_at_ms is None:
            return False
        return peer.keys is not None and peer.keys.has_ledger_ends and self._context.ledger_end() is not None

    def _is_untold_identity(self, peer: Peer) -> bool:
        return bool(self._keyring.former) and peer.told_id != self._keyring.id

    def _forget(self) -> None:
        known = {*self._static_pending, *(peer.id for peer in self._ledger.peers())}
        self._tried = {key: tried for key, tried in self._tried.items() if key in known}


def _unverified(peer: Peer) -> bool:
    """Whether the peer was never verified. A peer that was, and has trust `peer`, was lowered by an operator."""
    return peer.trust is Trust.PEER and peer.verified_at_ms is None


class PeerServices:
    """Must be used on one event loop. `used`: the usage of a running task so far, if this daemon knows it. `draining`:
    whether no new work is taken any more.
    """

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
        self.sweep = DelegationSweep(context, self.requester)
        self.inbox = Inbox(context, self.directory, self.provider, self.requester)
        self.outbox = OutboxSender(context, self.directory, self.inbox)
        self.maintenance = PeerMaintenance(context, self.directory)

    async def run(self, static: Sequence[str]) -> None:
        relay = self.context.settings.relay
        async with asyncio.TaskGroup() as group:
            for run in (self.provider.run, self.sweep.run, self.outbox.run, self.inbox.relay.run):
                group.create_task(run())
            if self.context.shared is not None:
                group.create_task(self._follow_shares())
            self.maintenance.add_static((*static, *((relay,) if relay else ())))
            await self.maintenance.run()

    async def _follow_shares(self) -> None:
        """The peers served here change when another daemon of this instance comes or goes: goes on with new ones."""
        shared, served, looked_s = self.context.shared, frozenset[InstanceId](), -LOOK_AGAIN_S
        assert shared is not None
        loop = asyncio.get_running_loop()
        while True:
            now = frozenset(peer.id for peer in self.context.ledger.peers() if shared.serves(peer.id))
            if now != served or loop.time() - looked_s >= LOOK_AGAIN_S:
                try:
                    await shared.refresh_keys()
                    for resume in (self.outbox.resume, self.provider.resume, self.sweep.resume):
                        await resume()
                    served, looked_s = now, loop.time()
                except Refusal as refusal:
                    log.warning("peers.not_resumed", extra={"code": refusal.code, "reason": refusal.message})
            await asyncio.sleep(SHARES_S)

    async def stop(self) -> None:
        """Before the ledger closes. Work that is under way is found again by the next run."""
        self.inbox.close()
        await self.provider.stop()
        await self.sweep.stop()
        await self.outbox.stop()
        await self.maintenance.stop()
