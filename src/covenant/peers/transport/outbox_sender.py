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
AWAY: Final = "connect_failed"
STATUS: Final = "delegation_status"
READ_MAX: Final = 64
"""How many delegations are begun before the outbox is read again."""
LOOK_AGAIN_S: Final = 60.0
DEPOSIT_AGAIN_MS: Final = 60_000
AGAIN_S: Final = 1.0
"""The pause after the ledger could not be read."""
FAULT: Final = DeliveryFailure("internal", "internal error; the daemon's log has the trace", whole=False)


class Deposit(NamedTuple):
    """A relay keeps the messages of a delegation through this number. The peer may not have fetched them yet."""

    seq: int
    at_ms: int
    due_ms: int
    """By the monotonic clock: from then on the messages are left there again."""


class _Round:
    """Delivery to one peer, while messages wait for it."""

    def __init__(self, peer: Peer) -> None:
        self.id = peer.id
        self.news = asyncio.Event()
        self.busy: dict[DelegationKey, asyncio.Task[None]] = {}
        self.held: dict[DelegationKey, DeliveryTrouble] = {}
        self.trouble: DeliveryTrouble | None = None
        """Why nothing gets through to the peer; then it is tried with one message at a time.

        None: it takes messages.
        """
        self.sooner_ms = 0
        """The earliest next try by the monotonic clock, even if the peer sends a message: after the shortest pause
        between tries, and after the pause that the peer asked for.
        """
        self.failed_at = 0.0
        self.passed_at = 0.0
        self.in_vain: dict[DelegationKey, float] = {}
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
        self._rounds: dict[InstanceId, _Round] = {}
        self._ahead: dict[DelegationKey, int] = {}
        """The highest number of each delegation that its peer has acknowledged, until the ledger has it."""
        self._saver: MoveSaver[tuple[DelegationKey, bool], OutboxMove] = MoveSaver(
            lambda moves: self._ledger.commit(MoveOutbox(moves=moves)), self._forget
        )
        """The keys are the delegation, and whether the message was delivered."""
        self._running = False
        self._stop, self._ended = asyncio.Event(), asyncio.Event()
        context.in_flight.append(self.begun)
        context.unreachable.append(self.is_unreachable)
        context.ledger.on_peer(self._news)

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
            await self._leave(saving, polling)
            self._stop.clear()
            self._ended.set()

    def _note_unsaved(self, refusal: Refusal) -> None:
        log.warning("outbox.unsaved", extra={"code": refusal.code, "count": len(self._saver.waiting)})

    async def stop(self) -> None:
        """Interrupts running deliveries. The next run sends them again, whether they arrived or not."""
        self._stop.set()
        if self._running:
            await self._ended.wait()

    async def resume(self) -> None:
        """Begins to deliver to the peers that this daemon serves; other daemons serve the other peers."""
        for known in self._rounds.values():
            known.news.set()
        for peer in await self._ledger.addressees():
            self._news(peer)
        self._poll_client.look_again()

    def troubles(self) -> Sequence[DeliveryTrouble]:
        found: list[DeliveryTrouble] = []
        for each in self._rounds.values():
            found += [each.trouble] if each.trouble is not None else []
            found += each.held.values()
        return found + list(self._poll_client.troubles())

    def begun(self, key: DelegationKey) -> int:
        """The highest number of this delegation's messages that was read to be sent: it cannot be replaced any more."""
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
            self._note_unsaved(refusal)

    # Due messages

    def _news(self, peer_id: InstanceId) -> None:
        """A record about this peer has become durable."""
        if not self._running:
            return
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
        is_open = peer is not None and self._address(peer) is not None and not peer.denied
        return peer if is_open and self._context.serves(peer_id) else None

    async def _serve(self, round_: _Round) -> None:
        try:
            while True:
                round_.news.clear()
                peer = self._reachable(round_.id)
                waiting = await self._waiting(round_) if peer is not None else []
                if peer is None or not (waiting or round_.busy):
                    if round_.news.is_set():
                        continue  # a message came while the ledger was read
                    return
                self._look_up(round_, peer, sum(map(len, waiting)))
                # Nobody else begins a delegation that is not under way now, so what was read of it stays true.
                due = self._due(round_, waiting)
                round_.begun.update((messages[0].delegation, messages[0].seq) for messages in due)
                # But the messages may not be on disk yet, and must not leave before they are.
                await self._ledger.durable()
                for messages in due:
                    # A peer that takes nothing is tried with one delegation at a time.
                    while len(round_.busy) >= (1 if round_.trouble else self._settings.deliveries_per_peer):
                        await asyncio.wait(round_.busy.values(), return_when=asyncio.FIRST_COMPLETED)
                    if not self._is_due(round_, messages[0].delegation):
                        break
                    key = messages[0].delegation
                    round_.busy[key] = asyncio.create_task(self._bring(round_, key, messages))
                await self._pause(round_)
        except Exception:
            log.exception("outbox.fault", extra={"peer": round_.id})
            asyncio.get_running_loop().call_later(AGAIN_S, self._news, round_.id)
        finally:
            if self._rounds.get(round_.id) is round_:
                del self._rounds[round_.id]
            for task in round_.busy.values():
                task.cancel()

    async def _waiting(self, round_: _Round) -> list[list[OutboxMessage]]:
        found = await self._ledger.peer_outbox(round_.id)
        ahead = self._ahead
        left = (each for each in found if each.seq > ahead.get(each.delegation, 0))
        return [list(messages) for _, messages in groupby(left, key=lambda each: each.delegation)]

    def _look_up(self, round_: _Round, peer: Peer, count: int) -> None:
        """Brings the next try forward if the peer has sent a message, has a new address, or has more to get."""
        moved = peer.url != round_.url
        heard = peer.heard_at_ms != round_.heard_at_ms
        sooner = moved or heard or count > round_.count
        round_.url, round_.heard_at_ms, round_.count = peer.url, peer.heard_at_ms, count
        if heard:
            # The peer is there. If it does not acknowledge the messages soon, the relay has lost them, or the peer has
            # refused them, as before it knew our new identity.
            for key, deposit in round_.deposits.items():
                due_ms = min(deposit.due_ms, deposit.at_ms + DEPOSIT_AGAIN_MS)
                round_.deposits[key] = deposit._replace(due_ms=due_ms)
        trouble = round_.trouble
        if trouble is not None and sooner:
            # A peer that was heard from may still be unreachable, so the messages that it sends do not
            # each cause a call.
            due_ms = min(trouble.due_ms, self._monotonic_ms() if moved else round_.sooner_ms)
            next_ms = trouble.next_ms - (trouble.due_ms - due_ms)
            round_.trouble = trouble._replace(next_ms=next_ms, due_ms=due_ms)

    def _due(self, round_: _Round, waiting: Sequence[list[OutboxMessage]]) -> Sequence[list[OutboxMessage]]:
        keys = {messages[0].delegation for messages in waiting}
        for kept in (round_.held, round_.in_vain, round_.begun, round_.deposits):
            for gone in [key for key in kept if key not in keys]:
                del kept[gone]
        waiting = [left for each in waiting if (left := self._undeposited(round_, each))]
        if round_.trouble is not None and _blames_one(round_.trouble):
            waiting = sorted(waiting, key=lambda messages: round_.in_vain.get(messages[0].delegation, 0.0))
        return list(islice((each for each in waiting if self._is_due(round_, each[0].delegation)), READ_MAX))

    def _undeposited(self, round_: _Round, messages: list[OutboxMessage]) -> list[OutboxMessage]:
        """The messages that the relay does not keep. While it keeps one, a status waits here for its successors."""
        deposit = round_.deposits.get(messages[0].delegation)
        if deposit is None or self._monotonic_ms() >= deposit.due_ms or messages[0].seq > deposit.seq:
            return messages
        left = [each for each in messages if each.seq > deposit.seq]
        return left if any(each.typ != STATUS for each in left) else []

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
        wakes += [each.due_ms for key, each in round_.deposits.items() if key not in round_.busy]
        if round_.trouble is not None:
            wakes = [round_.trouble.due_ms]
        wait_s = LOOK_AGAIN_S
        if wakes and not (round_.trouble is not None and round_.busy):
            wait_s = min(wait_s, max(0, min(wakes) - self._monotonic_ms()) / 1000)
        await wait_at_most(round_.news, wait_s)

    # Delivery

    async def _bring(self, round_: _Round, key: DelegationKey, messages: Sequence[OutboxMessage]) -> None:
        try:
            for message in messages:
                peer = self._reachable(round_.id)
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
                is_first = is_new and message.attempts == 0 and key not in round_.in_vain
                failed = await self._hand(peer, message, is_first=is_first)
                if isinstance(failed, DeliveryFailure):
                    self._fail(round_, message, failed, began)
                    return
                round_.trouble = None
                round_.passed_at = asyncio.get_running_loop().time()
                round_.held.pop(key, None)
                round_.in_vain.pop(key, None)
                if isinstance(failed, Deposit):
                    round_.deposits[key] = failed
                    continue
                round_.deposits.pop(key, None)
                self._keep(OutboxMove(delegation=key, seq=message.seq, delivered=True))
        except Exception:
            log.exception("outbox.fault", extra={"peer": round_.id, "offer_id": key.offer_id})
            self._fail(round_, messages[0], FAULT, 0.0)
        finally:
            del round_.busy[key]
            round_.news.set()

    async def _hand(self, peer: Peer, message: OutboxMessage, *, is_first: bool) -> DeliveryFailure | Deposit | None:
        """`is_first`: it was made in this run, and nobody has tried to send it."""
        answer = await self._sender.hand(peer, RECEIVE_PATH, bytes(message.body), typ=message.typ, seq=message.seq)
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
        if received.duplicate and is_first:
            # The peer has received this number from us before.
            await self._directory.note_forgotten(peer, sent=message.seq)
        return None

    def _deposited(self, answer: DeliveryAnswer, message: OutboxMessage) -> DeliveryFailure | Deposit:
        try:
            kept = decode_relayed(answer.body)
        except Invalid:
            return DeliveryFailure("bad_response", "the answer is not one of a relay", whole=True)
        at_ms = self._monotonic_ms()
        left_ms = min(max(DEPOSIT_AGAIN_MS, kept.until_ms - self._now_ms()), RELAYED_LIFE_MS_MAX)
        return Deposit(message.seq, at_ms, at_ms + left_ms)

    def _fail(self, round_: _Round, message: OutboxMessage, failed: DeliveryFailure, began: float) -> None:
        settings, key = self._settings, message.delegation
        time = asyncio.get_running_loop().time()
        # Other messages got through since this one failed last time, so the fault is not the peer's as a whole.
        alone = round_.in_vain.get(key, time) < round_.passed_at
        round_.in_vain[key] = time
        whole = failed.whole and not alone
        before = round_.trouble if whole else round_.held.get(key)
        # Deliveries that were under way together count as one failure.
        again = before is not None and (not whole or began > round_.failed_at)
        attempts = (before.attempts if before is not None else 0) + (1 if again or before is None else 0)
        trouble = self._sender.trouble(round_.id, failed, attempts, None if whole else message.offer_id)
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
                seq=message.seq,
                attempts=message.attempts + 1,
                next_ms=trouble.next_ms,
                failure=trouble.failure,
            )
        )
        log.info(
            "outbox.failed",
            extra={
                "peer": round_.id,
                "typ": message.typ,
                "reason": trouble.failure,
                "again_in_ms": trouble.due_ms - self._monotonic_ms(),
            },
        )

    # Records of deliveries

    def _keep(self, move: OutboxMove) -> None:
        key = move.delegation
        if move.delivered:
            self._ahead[key] = move.seq
            # A failure before the delivery need not be recorded any more.
            self._saver.waiting.pop((key, False), None)
        self._saver.keep((key, move.delivered), move)

    def _forget(self, moves: Mapping[tuple[DelegationKey, bool], OutboxMove]) -> None:
        for move in moves.values():
            if move.delivered and self._ahead.get(move.delegation) == move.seq:
                del self._ahead[move.delegation]


def _blames_one(trouble: DeliveryTrouble) -> bool:
    """Whether it is time to try another delegation first, since one message may cause the failure.

    If the peer is away, no message does.
    """
    return trouble.attempts % TURNS == TURNS - 1 and trouble.code != AWAY
