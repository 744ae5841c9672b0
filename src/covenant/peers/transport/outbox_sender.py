"""The outbox sender: messages to peers are delivered at least once, and in order within each delegation.

A message is sent only after the peer has acknowledged the one before it, or a relay keeps that one. Deliveries are
recorded soon afterwards; after a crash in between a message is sent again, and the peer recognises it by its number. A
failed delivery is retried with growing pauses, without end: a message leaves the outbox only when the peer acknowledges
it, a newer status replaces it, its offer is withdrawn, or an operator removes the peer. Peers do not wait for each
other, and a delegation that is refused does not hold up another one.

A peer that cannot be reached costs one try at a time. The next try comes sooner when the peer sends a message, has
another address, or gets a new message. Delegations take turns then, since a proxy may refuse the first message alone. A
peer without an address is sent nothing, unless we have a relay: it polls.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import groupby, islice
from typing import Final, NamedTuple

import msgspec

from covenant.ledger.machine.peer_commands import MoveOutbox
from covenant.model.errors import Invalid, Refusal, Unavailable
from covenant.model.ids import PublicKey
from covenant.model.peers.delegation import DelegationKey, OutboxMessage, OutboxMove, Peer
from covenant.model.peers.instance import InstanceId
from covenant.outbound.concurrency import MoveSaver, wait_at_most
from covenant.peers.directory.peer_directory import PeerDirectory
from covenant.peers.peer_settings import PeerContext, PeerService
from covenant.peers.transport.inbox import Inbox
from covenant.peers.transport.long_poll import PollClient, mark_begun
from covenant.peers.transport.peer_client import DeliveryAnswer, DeliveryFailure, DeliveryTrouble, EnvelopeSender
from covenant.seal.envelope import RELAYED_LIFE_MS_MAX, receipt_holds
from covenant.wire.peers import RECEIVE_PATH, decode_received, decode_relayed

log = logging.getLogger(__name__)

TURNS: Final = 5
"""One in this many tries at an unreachable peer is with the delegation that was tried longest ago."""
CONNECT_FAILED: Final = "connect_failed"
STATUS: Final = "delegation_status"
READ_MAX: Final = 64
"""How many delegations are begun before the outbox is read again."""
LOOK_AGAIN_S: Final = 60.0
DEPOSIT_AGAIN_MS: Final = 60_000
RETRY_S: Final = 1.0
"""The pause after the ledger could not be read."""
FAULT: Final = DeliveryFailure("internal", "internal error; the daemon's log has the trace", whole=False)


class Deposit(NamedTuple):
    """A relay keeps the messages of a delegation through this number. The peer may not have fetched them yet."""

    seq: int
    at_ms: int
    due_ms: int
    """By the monotonic clock: from then on the messages are left there again."""


class _PeerDelivery:
    """Delivery to one peer, while messages wait for it."""

    def __init__(self, peer: Peer) -> None:
        self.id = peer.id
        self.woken = asyncio.Event()
        self.busy: dict[DelegationKey, asyncio.Task[None]] = {}
        self.held_back: dict[DelegationKey, DeliveryTrouble] = {}
        self.trouble: DeliveryTrouble | None = None
        """Why nothing gets through to the peer; then it is tried with one message at a time.

        None: it takes messages.
        """
        self.earliest_ms = 0
        """The earliest next try by the monotonic clock, even if the peer sends a message: after the shortest pause
        between tries, and after the pause that the peer asked for.
        """
        self.failed_at = 0.0
        self.succeeded_at = 0.0
        self.last_failures: dict[DelegationKey, float] = {}
        """When each delegation whose messages do not get through was tried last."""
        self.begun: dict[DelegationKey, int] = {}
        """The highest number of each delegation's messages that the peer may have."""
        self.deposits: dict[DelegationKey, Deposit] = {}
        self.heard_at_ms = peer.heard_at_ms
        self.url = peer.url
        self.count = 0
        self.task: asyncio.Task[None] | None = None


class OutboxSender(PeerService):
    def __init__(self, context: PeerContext, directory: PeerDirectory, inbox: Inbox) -> None:
        super().__init__(context)
        self._directory = directory
        self._since_ms = self._now_ms()
        self._sender = EnvelopeSender(context, directory)
        self._poll_client = PollClient(context, self._sender, inbox)
        self._deliveries: dict[InstanceId, _PeerDelivery] = {}
        self._acknowledged: dict[DelegationKey, int] = {}
        """The highest number of each delegation that its peer has acknowledged, until the ledger has it."""
        self._saver: MoveSaver[tuple[DelegationKey, bool], OutboxMove] = MoveSaver(
            lambda moves: self._ledger.commit(MoveOutbox(moves=moves)), self._drop_saved
        )
        """The keys are the delegation, and whether the message was delivered."""
        self._running = False
        self._stop, self._ended = asyncio.Event(), asyncio.Event()
        context.in_flight.append(self.begun)
        context.unreachable.append(self.is_unreachable)
        context.ledger.on_peer(self._on_peer)

    async def run(self) -> None:
        """Runs until stopped or canceled. Begins with the messages that an earlier run left."""
        self._ended.clear()
        self._running = True
        saving = asyncio.create_task(self._saver.run(self._note_unsaved if self._context.shared is not None else None))
        polling = asyncio.create_task(self._poll_client.run())
        stopped = asyncio.create_task(self._stop.wait())
        try:
            with suppress(Unavailable):  # a shared ledger's database is away: the next look finds the messages
                await self.resume()
            await asyncio.wait((saving, polling, stopped), return_when=asyncio.FIRST_COMPLETED)
            if not stopped.done():
                # Deliveries could not be recorded any more, and would be repeated without end.
                reasons = [str(task.exception()) for task in (saving, polling) if task.done()]
                log.error("outbox.stopped", extra={"reason": "; ".join(reasons)})
        finally:
            self._running = False
            stopped.cancel()
            await self._end_deliveries(saving, polling)
            self._stop.clear()
            self._ended.set()

    def _note_unsaved(self, refusal: Refusal) -> None:
        log.warning("outbox.unsaved", extra={"code": refusal.code, "count": len(self._saver.unsaved)})

    async def stop(self) -> None:
        """Interrupts running deliveries. The next run sends them again, whether they arrived or not."""
        self._stop.set()
        if self._running:
            await self._ended.wait()

    async def resume(self) -> None:
        """Begins to deliver to the peers that this daemon serves; other daemons serve the other peers."""
        for known in self._deliveries.values():
            known.woken.set()
        for peer in await self._ledger.addressees():
            self._on_peer(peer)
        self._poll_client.look_again()

    def troubles(self) -> Sequence[DeliveryTrouble]:
        found: list[DeliveryTrouble] = []
        for each in self._deliveries.values():
            found += [each.trouble] if each.trouble is not None else []
            found += each.held_back.values()
        return found + list(self._poll_client.troubles())

    def begun(self, key: DelegationKey) -> int:
        """The highest number of this delegation's messages that was read to be sent: it cannot be replaced any more."""
        delivery = self._deliveries.get(key.peer)
        return max(delivery.begun.get(key, 0) if delivery is not None else 0, self._acknowledged.get(key, 0))

    def is_unreachable(self, peer: InstanceId) -> bool:
        delivery = self._deliveries.get(peer)
        return delivery is not None and delivery.trouble is not None

    async def _end_deliveries(self, *helpers: asyncio.Task[None]) -> None:
        deliveries, self._deliveries = list(self._deliveries.values()), {}
        tasks = [*helpers, *(each.task for each in deliveries if each.task is not None)]
        tasks += [task for each in deliveries for task in each.busy.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        try:
            await self._saver.save()
        except Refusal as refusal:
            self._note_unsaved(refusal)

    # Due messages

    def _on_peer(self, peer_id: InstanceId) -> None:
        """A record about this peer has become durable."""
        if not self._running:
            return
        known = self._deliveries.get(peer_id)
        if known is not None:
            known.woken.set()
            return
        peer = self._reachable(peer_id)
        if peer is not None:
            self._deliveries[peer_id] = begun = _PeerDelivery(peer)
            begun.task = asyncio.create_task(self._serve(begun))

    def _reachable(self, peer_id: InstanceId) -> Peer | None:
        peer = self._ledger.peer(peer_id)
        is_open = peer is not None and self._address(peer) is not None and not peer.denied
        return peer if is_open and self._context.serves(peer_id) else None

    async def _serve(self, delivery: _PeerDelivery) -> None:
        try:
            while True:
                delivery.woken.clear()
                peer = self._reachable(delivery.id)
                waiting = await self._waiting(delivery) if peer is not None else []
                if peer is None or not (waiting or delivery.busy):
                    if delivery.woken.is_set():
                        continue  # a message came while the ledger was read
                    return
                self._bring_forward(delivery, peer, sum(map(len, waiting)))
                # Nobody else begins a delegation that is not under way now, so what was read of it stays true.
                due = self._due(delivery, waiting)
                delivery.begun.update((messages[0].delegation, messages[0].seq) for messages in due)
                # But the messages may not be on disk yet, and must not leave before they are.
                await self._ledger.durable()
                for messages in due:
                    # A peer that takes nothing is tried with one delegation at a time.
                    while len(delivery.busy) >= (1 if delivery.trouble else self._settings.deliveries_per_peer):
                        await asyncio.wait(delivery.busy.values(), return_when=asyncio.FIRST_COMPLETED)
                    if not self._is_due(delivery, messages[0].delegation):
                        break
                    key = messages[0].delegation
                    delivery.busy[key] = asyncio.create_task(self._deliver(delivery, key, messages))
                await self._pause(delivery)
        except Exception:
            log.exception("outbox.fault", extra={"peer": delivery.id})
            asyncio.get_running_loop().call_later(RETRY_S, self._on_peer, delivery.id)
        finally:
            if self._deliveries.get(delivery.id) is delivery:
                del self._deliveries[delivery.id]
            for task in delivery.busy.values():
                task.cancel()

    async def _waiting(self, delivery: _PeerDelivery) -> list[list[OutboxMessage]]:
        found = await self._ledger.peer_outbox(delivery.id)
        pending = (each for each in found if each.seq > self._acknowledged.get(each.delegation, 0))
        return [list(messages) for _, messages in groupby(pending, key=lambda each: each.delegation)]

    def _bring_forward(self, delivery: _PeerDelivery, peer: Peer, count: int) -> None:
        """Brings the next try forward if the peer has sent a message, has a new address, or has more to get."""
        moved = peer.url != delivery.url
        heard = peer.heard_at_ms != delivery.heard_at_ms
        sooner = moved or heard or count > delivery.count
        delivery.url, delivery.heard_at_ms, delivery.count = peer.url, peer.heard_at_ms, count
        if heard:
            # The peer is there. If it does not acknowledge the messages soon, the relay has lost them, or the peer has
            # refused them, as before it knew our new identity.
            for key, deposit in delivery.deposits.items():
                due_ms = min(deposit.due_ms, deposit.at_ms + DEPOSIT_AGAIN_MS)
                delivery.deposits[key] = deposit._replace(due_ms=due_ms)
        trouble = delivery.trouble
        if trouble is not None and sooner:
            # A peer that was heard from may still be unreachable, so the messages that it sends do not
            # each cause a call.
            due_ms = min(trouble.due_ms, self._monotonic_ms() if moved else delivery.earliest_ms)
            next_ms = trouble.next_ms - (trouble.due_ms - due_ms)
            delivery.trouble = trouble._replace(next_ms=next_ms, due_ms=due_ms)

    def _due(self, delivery: _PeerDelivery, waiting: Sequence[list[OutboxMessage]]) -> Sequence[list[OutboxMessage]]:
        keys = {messages[0].delegation for messages in waiting}
        for kept in (delivery.held_back, delivery.last_failures, delivery.begun, delivery.deposits):
            for gone in [key for key in kept if key not in keys]:
                del kept[gone]
        waiting = [left for each in waiting if (left := self._undeposited(delivery, each))]
        if delivery.trouble is not None and _tries_another(delivery.trouble):
            waiting = sorted(waiting, key=lambda messages: delivery.last_failures.get(messages[0].delegation, 0.0))
        return list(islice((each for each in waiting if self._is_due(delivery, each[0].delegation)), READ_MAX))

    def _undeposited(self, delivery: _PeerDelivery, messages: list[OutboxMessage]) -> list[OutboxMessage]:
        """The messages that the relay does not keep. While it keeps one, a status waits here for its successors."""
        deposit = delivery.deposits.get(messages[0].delegation)
        if deposit is None or self._monotonic_ms() >= deposit.due_ms or messages[0].seq > deposit.seq:
            return messages
        left = [each for each in messages if each.seq > deposit.seq]
        return left if any(each.typ != STATUS for each in left) else []

    def _is_due(self, delivery: _PeerDelivery, key: DelegationKey) -> bool:
        held_back = delivery.held_back.get(key)
        return (
            key not in delivery.busy
            and (delivery.trouble is None or (self._is_over(delivery.trouble) and not delivery.busy))
            and (held_back is None or self._is_over(held_back))
        )

    def _is_over(self, trouble: DeliveryTrouble) -> bool:
        return self._monotonic_ms() >= trouble.due_ms

    async def _pause(self, delivery: _PeerDelivery) -> None:
        wakes = [each.due_ms for key, each in delivery.held_back.items() if key not in delivery.busy]
        wakes += [each.due_ms for key, each in delivery.deposits.items() if key not in delivery.busy]
        if delivery.trouble is not None:
            wakes = [delivery.trouble.due_ms]
        wait_s = LOOK_AGAIN_S
        if wakes and not (delivery.trouble is not None and delivery.busy):
            wait_s = min(wait_s, max(0, min(wakes) - self._monotonic_ms()) / 1000)
        await wait_at_most(delivery.woken, wait_s)

    # Delivery

    async def _deliver(self, delivery: _PeerDelivery, key: DelegationKey, messages: Sequence[OutboxMessage]) -> None:
        try:
            for message in messages:
                peer = self._reachable(delivery.id)
                if peer is None or (message.typ == STATUS and message is not messages[0]):
                    # A newer status may have replaced this one while the messages before it were
                    # sent: it is read again.
                    return
                if self._context.shared is not None:
                    marked = await mark_begun(self._ledger, (message,))
                    if not marked:
                        return  # another daemon has withdrawn the message
                    message = msgspec.structs.replace(marked[0], attempts=message.attempts)  # noqa: PLW2901
                began = asyncio.get_running_loop().time()
                is_new = message.made_at_ms >= self._since_ms and self._context.shared is None
                is_first = is_new and message.attempts == 0 and key not in delivery.last_failures
                failed = await self._send(peer, message, is_first=is_first)
                if isinstance(failed, DeliveryFailure):
                    self._fail(delivery, message, failed, began)
                    return
                delivery.trouble = None
                delivery.succeeded_at = asyncio.get_running_loop().time()
                delivery.held_back.pop(key, None)
                delivery.last_failures.pop(key, None)
                if isinstance(failed, Deposit):
                    delivery.deposits[key] = failed
                    continue
                delivery.deposits.pop(key, None)
                self._record(OutboxMove(delegation=key, seq=message.seq, delivered=True))
        except Exception:
            log.exception("outbox.fault", extra={"peer": delivery.id, "offer_id": key.offer_id})
            self._fail(delivery, messages[0], FAULT, 0.0)
        finally:
            del delivery.busy[key]
            delivery.woken.set()

    async def _send(self, peer: Peer, message: OutboxMessage, *, is_first: bool) -> DeliveryFailure | Deposit | None:
        """`is_first`: it was made in this run, and nobody has tried to send it."""
        answer = await self._sender.send(peer, RECEIVE_PATH, bytes(message.body), typ=message.typ, seq=message.seq)
        if isinstance(answer, DeliveryFailure):
            return answer
        if answer.relayed:
            return self._deposited(answer, message)
        try:
            received = decode_received(answer.body)
        except Invalid:
            # Without a valid receipt, the answer is not from the recipient.
            return DeliveryFailure("bad_response", "the answer is not one to an envelope", whole=True)
        # The keys are known, since the envelope was sealed to them.
        keys = (self._ledger.peer(peer.id) or peer).keys
        certificate = None if received.certificate is msgspec.UNSET else received.certificate
        if keys is None or not receipt_holds(
            PublicKey(keys.identity_key), answer.envelope, received.receipt, certificate, now_ms=self._now_ms()
        ):
            return DeliveryFailure(
                "bad_receipt", "the receipt is not signed by the peer; the message is sent again", whole=True
            )
        if received.duplicate and is_first and not answer.repeated:
            # The peer has received this number from us before.
            await self._directory.note_forgotten(peer, said=message.seq)
        return None

    def _deposited(self, answer: DeliveryAnswer, message: OutboxMessage) -> DeliveryFailure | Deposit:
        try:
            kept = decode_relayed(answer.body)
        except Invalid:
            return DeliveryFailure("bad_response", "the answer is not one of a relay", whole=True)
        at_ms = self._monotonic_ms()
        left_ms = min(max(DEPOSIT_AGAIN_MS, kept.until_ms - self._now_ms()), RELAYED_LIFE_MS_MAX)
        return Deposit(message.seq, at_ms, at_ms + left_ms)

    def _fail(self, delivery: _PeerDelivery, message: OutboxMessage, failed: DeliveryFailure, began: float) -> None:
        settings, key = self._settings, message.delegation
        time = asyncio.get_running_loop().time()
        # Other messages got through since this one failed last time, so the fault is not the peer's as a whole.
        alone = delivery.last_failures.get(key, time) < delivery.succeeded_at
        delivery.last_failures[key] = time
        whole = failed.whole and not alone
        before = delivery.trouble if whole else delivery.held_back.get(key)
        # Deliveries that were under way together count as one failure.
        again = before is not None and (not whole or began > delivery.failed_at)
        attempts = (before.attempts if before is not None else 0) + (1 if again or before is None else 0)
        trouble = self._sender.trouble(delivery.id, failed, attempts, None if whole else message.offer_id)
        if whole:
            delivery.trouble = trouble
            delivery.earliest_ms = self._monotonic_ms() + max(settings.retry_first_ms, failed.retry_after_ms)
            delivery.failed_at = time
        else:
            delivery.trouble = None
            delivery.held_back[key] = trouble
        self._record(
            OutboxMove(
                delegation=key,
                seq=message.seq,
                attempts=message.attempts + 1,
                next_ms=trouble.next_ms,
                failure=trouble.failure,
            )
        )
        log.info(
            "outbox.failed",
            extra={
                "peer": delivery.id,
                "typ": message.typ,
                "reason": trouble.failure,
                "again_in_ms": trouble.due_ms - self._monotonic_ms(),
            },
        )

    # Records of deliveries

    def _record(self, move: OutboxMove) -> None:
        key = move.delegation
        if move.delivered:
            self._acknowledged[key] = move.seq
            # A failure before the delivery need not be recorded any more.
            self._saver.unsaved.pop((key, False), None)
        self._saver.keep((key, move.delivered), move)

    def _drop_saved(self, moves: Mapping[tuple[DelegationKey, bool], OutboxMove]) -> None:
        for move in moves.values():
            if move.delivered and self._acknowledged.get(move.delegation) == move.seq:
                del self._acknowledged[move.delegation]


def _tries_another(trouble: DeliveryTrouble) -> bool:
    """Whether it is time to try another delegation first, since one message may cause the failure.

    If the peer is away, no message does.
    """
    return trouble.attempts % TURNS == TURNS - 1 and trouble.code != CONNECT_FAILED
