"""Fetching what peers have for us, where they cannot reach us: one sealed poll after the other to each.

What was taken in is acknowledged with the next poll; until then the peer hands it out again, and it is known by its
number. A question that comes this way is answered at once, to the peer's own address.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, Protocol

from covenant.ledger.contract import Ledger
from covenant.model.peers.peer_record import Peer
from covenant.model.peers.delegation import DelegationRole
from covenant.model.errors import Invalid, Refusal
from covenant.model.peers.instance import InstanceId
from covenant.peers.delivery import DELIVERY_S, Delivery, Failed
from covenant.peers.keyring import Keyring
from covenant.peers.line import POLL, RECEIVE
from covenant.peers.pace import backoff_ms
from covenant.peers.reception import Taken
from covenant.peers.settings import PeerSettings
from covenant.wire import peers as polling

log = logging.getLogger(__name__)

EVERYBODY: Final = "*"

Acks = dict[tuple[DelegationRole, str], int]


class Taking(Protocol):
    async def take(self, body: bytes) -> Taken: ...


class Trouble(NamedTuple):
    """What does not get through. `offer_id` is None if nothing does.

    `next_ms`: when it is tried again, for people. `due_ms`: the same by the clock that nobody sets, by which we wait.
    """

    peer: InstanceId
    offer_id: str | None
    failure: str
    attempts: int
    next_ms: int
    due_ms: int


class Poller:
    def __init__(
        self,
        ledger: Ledger,
        keyring: Keyring,
        delivery: Delivery,
        reception: Taking,
        settings: PeerSettings,
        *,
        now_ms: Callable[[], int],
        chance: Callable[[], float],
    ) -> None:
        self._ledger = ledger
        self._keyring = keyring
        self._delivery = delivery
        self._reception = reception
        self._settings = settings
        self._now_ms = now_ms
        self._chance = chance
        self._named = frozenset(settings.poll)
        self._fetching: dict[InstanceId, asyncio.Task[None]] = {}
        self._troubles: dict[InstanceId, Trouble] = {}
        self._woken = asyncio.Event()

    def news(self) -> None:
        """Something is known of a peer that was not before."""
        self._woken.set()

    def troubles(self) -> Sequence[Trouble]:
        return list(self._troubles.values())

    async def run(self) -> None:
        """Until canceled."""
        try:
            while True:
                self._woken.clear()
                if self._named:
                    self._settle()
                await self._woken.wait()
        finally:
            tasks = list(self._fetching.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._fetching.clear()
            self._troubles.clear()

    def _settle(self) -> None:
        """One loop for each peer that we fetch from, and none for any other."""
        wanted = {peer.id for peer in self._ledger.peers() if self._fetches_from(peer)}
        for peer_id in [each for each, task in self._fetching.items() if each not in wanted or task.done()]:
            self._fetching.pop(peer_id).cancel()
            self._troubles.pop(peer_id, None)
        for peer_id in wanted - self._fetching.keys():
            self._fetching[peer_id] = asyncio.create_task(self._fetch_always(peer_id))

    def _fetches_from(self, peer: Peer) -> bool:
        named = self._named
        return (
            peer.url is not None and not peer.denied and (EVERYBODY in named or peer.id in named or peer.name in named)
        )

    async def _fetch_always(self, peer_id: InstanceId) -> None:
        acks: Acks = {}
        attempts = 0
        while (peer := self._ledger.peer(peer_id)) is not None and self._fetches_from(peer):
            try:
                failed = await self._fetch(peer, acks)
            except Exception:
                log.exception("polling.fault", extra={"peer": peer_id})
                failed = Failed("internal", "internal error; the daemon's log has the trace", whole=True)
            if failed is None:
                attempts = 0
                self._troubles.pop(peer_id, None)
                continue
            attempts += 1
            settings = self._settings
            pause_ms = backoff_ms(attempts, settings.retry_first_ms, settings.retry_max_ms, self._chance())
            pause_ms = max(pause_ms, failed.retry_after_ms)
            due_ms = self._ledger.clock.monotonic_ms() + pause_ms
            self._troubles[peer_id] = Trouble(peer_id, None, str(failed), attempts, self._now_ms() + pause_ms, due_ms)
            log.info("polling.failed", extra={"peer": peer_id, "reason": str(failed), "again_in_ms": pause_ms})
            await asyncio.sleep(pause_ms / 1000)

    async def _fetch(self, peer: Peer, acks: Acks) -> Failed | None:
        """One poll. `acks` are what the peer is told that we have; those that it was told are taken out."""
        told = dict(list(acks.items())[: polling.ACKS_MAX])
        wait_ms = min(self._settings.poll_wait_ms, polling.WAIT_MS_MAX)
        asked = polling.Poll(
            keys=self._keyring.bundle(self._now_ms()),
            acks=tuple(polling.Ack(role=role, offer_id=offer_id, seq=seq) for (role, offer_id), seq in told.items()),
            wait_ms=wait_ms,
        )
        answer = await self._delivery.hand(
            peer, POLL, polling.encode(asked), typ=polling.POLL, timeout_s=wait_ms / 1000 + DELIVERY_S
        )
        if isinstance(answer, Failed):
            return answer
        try:
            envelopes = polling.decode_polled(answer.body).envelopes
        except Invalid:
            return Failed("bad_response", "the answer is not one to a poll", whole=True)
        for key, seq in told.items():
            if acks.get(key) == seq:
                del acks[key]
        return await self._take(peer, envelopes, acks)

    async def _take(self, peer: Peer, envelopes: Sequence[bytes | memoryview], acks: Acks) -> Failed | None:
        """Each by itself: one that is refused holds up its own delegation, and nothing else."""
        failed: Failed | None = None
        for envelope in envelopes:
            try:
                taken = await self._reception.take(bytes(envelope))
            except Refusal as refusal:
                failed = Failed(refusal.code, refusal.message, whole=False)
                continue
            if taken.ack is not None:
                key = (taken.ack.role, taken.ack.offer_id)
                acks[key] = max(taken.ack.seq, acks.get(key, 0))
            if taken.reply is not None:
                answered = await self._delivery.post(peer, RECEIVE, taken.reply)
                failed = answered if isinstance(answered, Failed) else failed
        return failed
