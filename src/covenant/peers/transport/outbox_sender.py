"""The outbox sender: messages to peers are delivered at least once, and in order within each delegation.

A message is sent only after the peer has taken the one before it. Deliveries are recorded soon afterwards; after a
crash in between a message is sent again, and the peer recognises it by its number. A failed delivery is retried with
growing pauses, without end: only the peer, or an operator who removes the peer, drops a message. Peers do not wait for
each other, and a delegation that is refused does not hold up another one.

A peer that cannot be reached costs one try at a time. The next one comes at once when the peer is heard from, has
another address, or gets a new message. Delegations take turns then, since a proxy may refuse the first message alone.
A peer without an address is sent nothing: it polls.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from itertools import groupby, islice
from typing import Final

from covenant.ledger.machine.peer_commands import MoveParcels
from covenant.model.errors import Invalid, Refusal
from covenant.model.ids import PublicKey
from covenant.model.peers.delegation import DelegationKey, OutboxMessage, OutboxMove, Peer
from covenant.model.peers.instance import InstanceId
from covenant.outbound.concurrency import MoveSaver, wait_at_most
from covenant.peers.directory.peer_directory import PeerDirectory
from covenant.peers.peer_settings import PeerContext, PeerService
from covenant.peers.transport.inbox import Inbox
from covenant.peers.transport.long_poll import PollClient
from covenant.peers.transport.peer_client import DeliveryFailure, DeliveryTrouble, EnvelopeSender
from covenant.seal.envelope import receipt_holds
from covenant.wire.peers import RECEIVE_PATH, decode_received

log = logging.getLogger(__name__)

TURNS: Final = 5
"""Of so many tries at a peer that takes nothing, one is with what was not tried for longest."""
AWAY: Final = "connect_failed"
STATUS: Final = "delegation_status"
READ_MAX: Final = 64
"""Delegations whose parcels are read together, before anybody looks again."""
LOOK_AGAIN_S: Final = 60.0
FAULT: Final = DeliveryFailure("internal", "internal error; the daemon's log has the trace", whole=False)


class _Round:
    """The way to one peer, while something waits for it."""

    def __init__(self, peer: Peer) -> None:
        self.id = peer.id
        self.news = asyncio.Event()
        self.busy: dict[DelegationKey, asyncio.Task[None]] = {}
        self.held: dict[DelegationKey, DeliveryTrouble] = {}
        self.trouble: DeliveryTrouble | None = None
        """Nothing gets through, and one try at a time finds out when that changes."""
        self.sooner_ms = 0
        """Not before then (by the clock that nobody sets), whatever is heard: the least pause between two tries, and
        what the peer itself asked for."""
        self.failed_at = 0.0
        self.passed_at = 0.0
        self.in_vain: dict[DelegationKey, float] = {}
        """When each that has not come through was tried last."""
        self.begun: dict[DelegationKey, int] = {}
        """Up to which number the peer may have each, by what we know."""
        self.heard_at_ms = peer.heard_at_ms
        self.url = peer.url
        self.count = 0
        self.task: asyncio.Task[None] | None = None


class OutboxSender(PeerService):
    def __init__(self, context: PeerContext, directory: PeerDirectory, inbox: Inbox) -> None:
        super().__init__(context)
        self._sender = EnvelopeSender(context, directory)
        self._poll_client = PollClient(context, self._sender, inbox)
        self._rounds: dict[InstanceId, _Round] = {}
        self._ahead: dict[DelegationKey, int] = {}
        """What peers have taken of each, while the ledger does not know that yet."""
        self._saver: MoveSaver[tuple[DelegationKey, bool], OutboxMove] = MoveSaver(
            lambda moves: self._ledger.commit(MoveParcels(moves=moves)), self._forget
        )
        """By delegation, and whether it was delivered."""
        self._running = False
        self._stop, self._ended = asyncio.Event(), asyncio.Event()
        context.in_flight.append(self.begun)
        context.unreachable.append(self.is_unreachable)
        context.ledger.on_peer(self._news)

    async def run(self) -> None:
        """Until stopped or canceled. Begins with what an earlier run left. A stop may come before the first step."""
        self._ended.clear()
        self._running = True
        saving = asyncio.create_task(self._saver.run())
        polling = asyncio.create_task(self._poll_client.run())
        stopped = asyncio.create_task(self._stop.wait())
        for peer in await self._ledger.addressees():
            self._news(peer)
        try:
            await asyncio.wait((saving, polling, stopped), return_when=asyncio.FIRST_COMPLETED)
            if not stopped.done():
                # What is delivered could not be written down any more: it would all be repeated without end.
                reasons = [str(task.exception()) for task in (saving, polling) if task.done()]
                log.error("outbox.stopped", extra={"reason": "; ".join(reasons)})
        finally:
            self._running = False
            stopped.cancel()
            await self._leave(saving, polling)
            self._stop.clear()
            self._ended.set()

    async def stop(self) -> None:
        """What is under way is broken off: whether it was taken or not, it is sent again by the next run."""
        self._stop.set()
        if self._running:
            await self._ended.wait()

    def troubles(self) -> Sequence[DeliveryTrouble]:
        found: list[DeliveryTrouble] = []
        for each in self._rounds.values():
            found += [each.trouble] if each.trouble is not None else []
            found += each.held.values()
        return found + list(self._poll_client.troubles())

    def begun(self, key: DelegationKey) -> int:
        """Up to which number what was said of this has been read to be sent: nothing can take its place any more."""
        round_ = self._rounds.get(key.peer)
        return max(round_.begun.get(key, 0) if round_ is not None else 0, self._ahead.get(key, 0))

    def is_unreachable(self, peer: InstanceId) -> bool:
        round_ = self._rounds.get(peer)
        return round_ is not None and round_.trouble is not None

    async def _leave(self, *helpers: asyncio.Task[None]) -> None:
        rounds, self._rounds = self._rounds, {}
        tasks = [*helpers, *(each.task for each in rounds.values() if each.task is not None)]
        tasks += [task for each in rounds.values() for task in each.busy.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        try:
            await self._saver.save()
        except Refusal as refusal:
            log.warning("outbox.unsaved", extra={"code": refusal.code, "count": len(self._saver.waiting)})

    # What there is to do

    def _news(self, peer_id: InstanceId) -> None:
        """Something about this peer is durable."""
        if not self._running:
            return
        self._poll_client.news()
        known = self._rounds.get(peer_id)
        if known is not None:
            known.news.set()
            return
        peer = self._reachable(peer_id)
        if peer is not None:
            self._rounds[peer_id] = begun = _Round(peer)
            begun.task = asyncio.create_task(self._serve(begun))

    def _reachable(self, peer_id: InstanceId) -> Peer | None:
        peer = self._ledger.peer(peer_id)
        return peer if peer is not None and peer.url is not None and not peer.denied else None

    async def _serve(self, round_: _Round) -> None:
        try:
            while True:
                round_.news.clear()
                peer = self._reachable(round_.id)
                waiting = await self._waiting(round_) if peer is not None else []
                if peer is None or not (waiting or round_.busy):
                    if round_.news.is_set():
                        continue  # it came while the ledger was asked
                    return
                self._look_up(round_, peer, sum(map(len, waiting)))
                # Whoever is not under way now is begun by nobody else: what was read of it stays true.
                due = self._due(round_, waiting)
                round_.begun.update((parcels[0].delegation, parcels[0].seq) for parcels in due)
                # But it may not be on disk yet, and must not be heard of before.
                await self._ledger.durable()
                for parcels in due:
                    # A peer that takes nothing is tried with one at a time.
                    while len(round_.busy) >= (1 if round_.trouble else self._settings.deliveries_per_peer):
                        await asyncio.wait(round_.busy.values(), return_when=asyncio.FIRST_COMPLETED)
                    if not self._is_due(round_, parcels[0].delegation):
                        break
                    key = parcels[0].delegation
                    round_.busy[key] = asyncio.create_task(self._bring(round_, key, parcels))
                await self._pause(round_)
        except Exception:
            log.exception("outbox.fault", extra={"peer": round_.id})
        finally:
            if self._rounds.get(round_.id) is round_:
                del self._rounds[round_.id]
            for task in round_.busy.values():
                task.cancel()

    async def _waiting(self, round_: _Round) -> list[list[OutboxMessage]]:
        found = await self._ledger.parcels(round_.id)
        ahead = self._ahead
        left = (each for each in found if each.seq > ahead.get(each.delegation, 0))
        return [list(parcels) for _, parcels in groupby(left, key=lambda each: each.delegation)]

    def _look_up(self, round_: _Round, peer: Peer, count: int) -> None:
        """Whether it is worth another try sooner than was meant."""
        moved = peer.url != round_.url
        sooner = moved or peer.heard_at_ms != round_.heard_at_ms or count > round_.count
        round_.url, round_.heard_at_ms, round_.count = peer.url, peer.heard_at_ms, count
        trouble = round_.trouble
        if trouble is not None and sooner:
            # Heard from, but perhaps not to be reached: a peer that talks much must not make us call as often.
            due_ms = min(trouble.due_ms, self._monotonic_ms() if moved else round_.sooner_ms)
            next_ms = trouble.next_ms - (trouble.due_ms - due_ms)
            round_.trouble = trouble._replace(next_ms=next_ms, due_ms=due_ms)

    def _due(self, round_: _Round, waiting: Sequence[list[OutboxMessage]]) -> Sequence[list[OutboxMessage]]:
        keys = {parcels[0].delegation for parcels in waiting}
        for kept in (round_.held, round_.in_vain, round_.begun):
            for gone in [key for key in kept if key not in keys]:
                del kept[gone]
        if round_.trouble is not None and _blames_one(round_.trouble):
            waiting = sorted(waiting, key=lambda parcels: round_.in_vain.get(parcels[0].delegation, 0.0))
        return list(islice((each for each in waiting if self._is_due(round_, each[0].delegation)), READ_MAX))

    def _is_due(self, round_: _Round, key: DelegationKey) -> bool:
        held = round_.held.get(key)
        return (
            key not in round_.busy
            and (round_.trouble is None or (self._is_over(round_.trouble) and not round_.busy))
            and (held is None or self._is_over(held))
        )

    def _is_over(self, trouble: DeliveryTrouble) -> bool:
        return self._monotonic_ms() >= trouble.due_ms

    async def _pause(self, round_: _Round) -> None:
        wakes = [each.due_ms for key, each in round_.held.items() if key not in round_.busy]
        if round_.trouble is not None:
            wakes = [round_.trouble.due_ms]
        wait_s = LOOK_AGAIN_S
        if wakes and not (round_.trouble is not None and round_.busy):
            wait_s = min(wait_s, max(0, min(wakes) - self._monotonic_ms()) / 1000)
        await wait_at_most(round_.news, wait_s)

    # Doing it

    async def _bring(self, round_: _Round, key: DelegationKey, parcels: Sequence[OutboxMessage]) -> None:
        try:
            for parcel in parcels:
                peer = self._reachable(round_.id)
                if peer is None or (parcel.typ == STATUS and parcel is not parcels[0]):
                    # Newer words may have taken its place while those before it were sent: it is read again.
                    return
                began = asyncio.get_running_loop().time()
                failed = await self._hand(peer, parcel)
                if failed is not None:
                    self._fail(round_, parcel, failed, began)
                    return
                round_.trouble = None
                round_.passed_at = asyncio.get_running_loop().time()
                round_.held.pop(key, None)
                round_.in_vain.pop(key, None)
                self._keep(OutboxMove(delegation=key, seq=parcel.seq, delivered=True))
        except Exception:
            log.exception("outbox.fault", extra={"peer": round_.id, "offer_id": key.offer_id})
            self._fail(round_, parcels[0], FAULT, 0.0)
        finally:
            del round_.busy[key]
            round_.news.set()

    async def _hand(self, peer: Peer, parcel: OutboxMessage) -> DeliveryFailure | None:
        answer = await self._sender.hand(peer, RECEIVE_PATH, bytes(parcel.body), typ=parcel.typ, seq=parcel.seq)
        if isinstance(answer, DeliveryFailure):
            return answer
        try:
            received = decode_received(answer.body)
        except Invalid:
            # Somebody answers there, and it is no instance that has taken anything.
            return DeliveryFailure("bad_response", "the answer is not one to an envelope", whole=True)
        # It was sealed to them, so they are known.
        keys = (self._ledger.peer(peer.id) or peer).keys
        if keys is None or not receipt_holds(PublicKey(keys.identity_key), answer.envelope, received.receipt):
            return DeliveryFailure(
                "bad_receipt", "the receipt is not signed by the peer; the message is sent again", whole=True
            )
        return None

    def _fail(self, round_: _Round, parcel: OutboxMessage, failed: DeliveryFailure, began: float) -> None:
        settings, key = self._settings, parcel.delegation
        time = asyncio.get_running_loop().time()
        # What others have come through since it failed last time does not keep them.
        alone = round_.in_vain.get(key, time) < round_.passed_at
        round_.in_vain[key] = time
        whole = failed.whole and not alone
        before = round_.trouble if whole else round_.held.get(key)
        # Those that were under way together have failed together.
        again = before is not None and (not whole or began > round_.failed_at)
        attempts = (before.attempts if before is not None else 0) + (1 if again or before is None else 0)
        trouble = self._sender.trouble(round_.id, failed, attempts, None if whole else parcel.offer_id)
        if whole:
            round_.trouble = trouble
            round_.sooner_ms = self._monotonic_ms() + max(settings.retry_first_ms, failed.retry_after_ms)
            round_.failed_at = time
        else:
            round_.trouble = None
            round_.held[key] = trouble
        self._keep(
            OutboxMove(
                delegation=key,
                seq=parcel.seq,
                attempts=parcel.attempts + 1,
                next_ms=trouble.next_ms,
                failure=trouble.failure,
            )
        )
        log.info(
            "outbox.failed",
            extra={
                "peer": round_.id,
                "typ": parcel.typ,
                "reason": trouble.failure,
                "again_in_ms": trouble.due_ms - self._monotonic_ms(),
            },
        )

    # Keeping what came of it

    def _keep(self, move: OutboxMove) -> None:
        key = move.delegation
        if move.delivered:
            self._ahead[key] = move.seq
            # What failed before it was delivered is gone with it.
            self._saver.waiting.pop((key, False), None)
        self._saver.keep((key, move.delivered), move)

    def _forget(self, moves: Mapping[tuple[DelegationKey, bool], OutboxMove]) -> None:
        for move in moves.values():
            if move.delivered and self._ahead.get(move.delegation) == move.seq:
                del self._ahead[move.delegation]


def _blames_one(trouble: DeliveryTrouble) -> bool:
    """Whether it is time to look if it is the first in order that does not pass. Nobody there is nobody's fault."""
    return trouble.attempts % TURNS == TURNS - 1 and trouble.code != AWAY
