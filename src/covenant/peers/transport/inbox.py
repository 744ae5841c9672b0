"""The inbox: each sealed envelope is checked, opened, and handled exactly once.

The checks run in this order: size, signature, sender, recipient and time; then replay and the sender's message rate.
Only then is the envelope opened (a large one in a thread) and acted on. The handler of a delegation message commits one
`ReceiveFromPeer`, so the envelope and its effects are one record. Each refusal is audited; `peer_refusal` is the answer
for the sender.

An unverified peer may query capabilities, answer a challenge, poll, and send messages about delegations that began
while it was verified. Its offers are rejected with a message of the protocol.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Final, NamedTuple, Protocol, TypeVar

import msgspec

from covenant.exchange.access.principals import AuditBudget
from covenant.ledger.machine.peer_commands import LearnPeer, MoveOutbox, ReceivedFromPeer, ReceiveFromPeer
from covenant.model.errors import Conflict, Forbidden, Invalid, OverLimit, Refusal, Unavailable
from covenant.model.peers.delegation import DelegationKey, DelegationRole, Peer, ReceivedEnvelope
from covenant.model.peers.delegation_messages import (
    CapabilityQuery,
    CapabilityResponse,
    DelegationCancel,
    DelegationMessage,
)
from covenant.model.peers.instance import InstanceId, Trust
from covenant.model.rate_limits import MINUTE_MS, SlidingWindow, TokenBuckets
from covenant.peers.directory.peer_directory import PeerDirectory
from covenant.peers.peer_settings import PeerContext, PeerService
from covenant.peers.transport.long_poll import PollServer, TakenEnvelope, acknowledged
from covenant.peers.transport.relay import Relay
from covenant.seal.envelope import (
    RELAYED_LIFE_MS_MAX,
    Checked,
    Code,
    EnvelopeRefused,
    check,
    envelope_record,
    open_checked,
    peer_refusal,
    receipt,
    replayed,
)
from covenant.seal.identity import ENVELOPE_LIFE_MS_MAX
from covenant.wire import peers as wire

log = logging.getLogger(__name__)

REASON_CHARS_MAX: Final = 300
LARGE_BYTES: Final = 64 * 1024
"""A larger envelope is checked and opened in a thread."""
LARGE_AT_ONCE: Final = 4
TRUSTED_FACTOR: Final = 10
LOOK_UPS_PER_MIN: Final = 6
"""How often we look up one unknown sender at our relay in a minute. One that writes much uses up nobody else's."""
ALL_LOOK_UPS_PER_MIN: Final = 120
"""How often we look up unknown senders in a minute: a relay could make up as many as it likes."""
OFFER: Final = "delegation_offer"
CANCEL: Final = "delegation_cancel"
T = TypeVar("T")
M = TypeVar("M")


class IncomingMessage(NamedTuple):
    """A message and its envelope.

    The handler commits both, and all that follows from them, with one `ReceiveFromPeer`.
    """

    peer: Peer
    envelope: ReceivedEnvelope
    message: DelegationMessage
    key: DelegationKey


Message = DelegationMessage | wire.DeliveryAcks
_OF_NO_DELEGATION: Final = (wire.DeliveryAcks, CapabilityQuery, CapabilityResponse)


class DelegationHandler(Protocol):
    async def receive(self, incoming: IncomingMessage) -> ReceivedFromPeer: ...


class Inbox(PeerService):
    def __init__(
        self,
        context: PeerContext,
        directory: PeerDirectory,
        provider: DelegationHandler,
        requester: DelegationHandler,
    ) -> None:
        super().__init__(context)
        self._directory = directory
        self._provider = provider
        self._requester = requester
        self._rate = TokenBuckets()
        self._audit_budget = AuditBudget()
        self.relay = Relay(context)
        self._poll_server = PollServer(context, directory, self.relay)
        self._large = asyncio.Semaphore(LARGE_AT_ONCE)
        self._look_ups = SlidingWindow(LOOK_UPS_PER_MIN, MINUTE_MS)
        self._all_look_ups = SlidingWindow(ALL_LOOK_UPS_PER_MIN, MINUTE_MS)

    async def receive(self, body: bytes, address: str | None) -> wire.Received:
        """Processes an envelope; answers once that is durable. Raises a `Refusal` that the sender may see."""
        received, certified = await self._receive(body, address, _decode_message, self._handle_posted)
        sender = self._keyring.sender(certified=certified, now_ms=self._now_ms())
        certificate = sender.certificate or msgspec.UNSET
        return msgspec.structs.replace(received, receipt=receipt(sender, body), certificate=certificate)

    async def poll(self, body: bytes, address: str | None) -> wire.Polled:
        """Answers a poll with the messages that wait for the sender. Waits for one as long as the poll asks for."""
        return (await self._receive(body, address, _decode_poll, self._poll_server.answer))[0]

    async def receive_fetched(self, body: bytes, *, relayed: bool = False) -> TakenEnvelope:
        """Processes an envelope that we fetched ourselves. We chose the pace, so no rate limit applies."""
        life_ms_max = RELAYED_LIFE_MS_MAX if relayed else ENVELOPE_LIFE_MS_MAX
        answered = await self._receive(
            body, None, _decode_message, self._handle_fetched, metered=False, life_ms_max=life_ms_max
        )
        return answered[0]

    async def note_withdrawn(self, bodies: Sequence[bytes]) -> None:
        """Notes which of these offers from the relay are canceled by a later envelope: such an offer is not begun."""
        withdrawn = self._context.withdrawn
        withdrawn.clear()
        for body in bodies if len(bodies) > 1 else ():
            with suppress(EnvelopeRefused, Refusal):  # `receive_fetched` refuses the envelope later
                checked = await self._check(body, RELAYED_LIFE_MS_MAX)
                if checked.header.typ == CANCEL:
                    message = await self._open(checked, _decode_message)
                    assert isinstance(message, DelegationCancel)
                    sender = InstanceId(checked.header.sender)
                    withdrawn.add(DelegationKey(DelegationRole.PROVIDER, sender, message.offer_id))

    async def follow_sender(self, body: bytes) -> bool:
        """Whether the unknown sender of this envelope at the relay is a peer under a new identity."""
        senders: list[InstanceId] = []

        def known(sender: InstanceId) -> bool:
            """`check` asks only about a sender whose signature is valid."""
            senders.append(sender)
            return False

        with suppress(EnvelopeRefused):
            check(body, us=self._keyring.id, now_ms=self._now_ms(), known=known)
        if not senders or self._ledger.peer(senders[0]) is not None:
            return False
        now_ms = self._monotonic_ms()
        if self._look_ups.take(senders[0], now_ms) is not None or self._all_look_ups.take("", now_ms) is not None:
            return False
        try:
            return await self._directory.follow_at_relay(senders[0])
        except Refusal:
            return False

    async def deposit(self, body: bytes, address: str | None, recipient: str) -> wire.Relayed:
        """Keeps an envelope for another instance, which fetches it here. Answers once it is on disk."""
        sender: InstanceId | None = None
        try:
            header = await self._aside(len(body), partial(self.relay.check, body, recipient))
            sender = InstanceId(header.sender)
            self._check_rate(sender)
            until_ms, duplicate = await self.relay.keep(body, header)
        except EnvelopeRefused as refused:
            await self._note_refused(refused, address, refused.sender)
            raise peer_refusal(refused) from None
        except Refusal as refusal:
            await self._note_refused(refusal, address, sender)
            raise
        return wire.Relayed(status="relayed", until_ms=until_ms, duplicate=duplicate)

    async def receive_introduction(self, body: bytes, address: str | None) -> wire.Received:
        """An instance shows its present and former identities. The proofs are in it, so it needs no envelope."""
        try:
            return await self._directory.receive_introduction(body)
        except Refusal as refusal:
            await self._note_refused(refusal, address)
            raise

    async def introduction_of(self, recipient: str) -> bytes:
        """The introduction of an instance that fetches its envelopes here, as it came."""
        return await self.relay.introduction(recipient)

    async def refuse_too_large(self, address: str | None) -> Refusal:
        refused = EnvelopeRefused(Code.TOO_LARGE, "more than an envelope can have")
        await self._note_refused(refused, address)
        return peer_refusal(refused)

    def close(self) -> None:
        """Ends all polls that wait, and every later one at once. Their messages stay in the outbox."""
        self._poll_server.close()

    async def _receive(
        self,
        body: bytes,
        address: str | None,
        decode: Callable[[str, bytes], M],
        act: Callable[[Peer, ReceivedEnvelope, M], Awaitable[T]],
        *,
        metered: bool = True,
        life_ms_max: int = ENVELOPE_LIFE_MS_MAX,
    ) -> tuple[T, bool]:
        """The result of `act`, and whether the sender knows certificates."""
        sender: InstanceId | None = None
        try:
            checked = await self._check(body, life_ms_max)
            sender = InstanceId(checked.header.sender)
            if metered:
                self._check_rate(sender)
            message = await self._open(checked, decode)
            # The peer may have been removed or denied while the envelope was opened.
            peer, header = self._peer(sender), checked.header
            if header.epoch != peer.epoch:
                # The peer's ledger was restored. The sweep repeats messages that it may have lost.
                log.warning("peer.restored", extra={"peer": peer.id, "epoch": header.epoch})
                peer = await self._ledger.commit(LearnPeer(id=peer.id, by=self._us, epoch=header.epoch))
            if header.cert is not None and header.cert.void_before_ms > peer.void_before_ms:
                log.warning("peer.keys_void", extra={"peer": peer.id, "before_ms": header.cert.void_before_ms})
                void_before_ms = header.cert.void_before_ms
                peer = await self._ledger.commit(LearnPeer(id=peer.id, by=self._us, void_before_ms=void_before_ms))
            try:
                acted = await act(peer, envelope_record(header, self._context.ledger_epoch), message)
            except Conflict as conflict:
                if conflict.code == "out_of_order" and metered:
                    # It goes on after numbers that we signed for. What we fetch ourselves may have got lost at a relay.
                    await self._directory.note_forgotten(peer, heard=header.seq)
                raise
            return acted, header.cert is not None
        except EnvelopeRefused as refused:
            await self._note_refused(refused, address, refused.sender)
            raise peer_refusal(refused) from None
        except Unavailable:
            raise
        except Refusal as refusal:
            await self._note_refused(refusal, address, sender)
            raise

    async def _check(self, body: bytes, life_ms_max: int) -> Checked:
        now_ms = self._now_ms()
        checking = partial(
            check,
            body,
            us=self._keyring.id,
            now_ms=now_ms,
            known=self._knows,
            void_before_ms=lambda sender: self._peer(sender).void_before_ms,
            life_ms_max=life_ms_max,
        )
        checked = await self._aside(len(body), checking)
        header = checked.header
        if await self._ledger.envelope_taken(InstanceId(header.sender), header.jti):
            raise replayed(header)
        return checked

    def _knows(self, sender: InstanceId) -> bool:
        peer = self._ledger.peer(sender)
        return peer is not None and not peer.denied

    def _peer(self, sender: InstanceId) -> Peer:
        peer = self._ledger.peer(sender)
        if peer is None or peer.denied:
            raise EnvelopeRefused(Code.UNKNOWN_SENDER, f"{sender} is not a peer")
        return peer

    def _check_rate(self, sender: InstanceId) -> None:
        per_min = self._settings.messages_per_min
        if self._peer(sender).trust is Trust.TRUSTED:
            per_min *= TRUSTED_FACTOR
        wait_ms = self._rate.take(sender, self._monotonic_ms(), per_min)
        if wait_ms is not None:
            message = f"more than {per_min} messages a minute; slow down"
            raise OverLimit("rate_limited", message, retry_after_ms=wait_ms)

    async def _open(self, checked: Checked, decode: Callable[[str, bytes], M]) -> M:
        now_ms, prekey = self._now_ms(), await self._own_prekey(checked.header.kid)

        def opening() -> M:
            return decode(checked.header.typ, open_checked(checked, prekey, now_ms=now_ms))

        return await self._aside(len(checked.ciphertext), opening)

    async def _note_refused(
        self, refused: EnvelopeRefused | Refusal, address: str | None, sender: InstanceId | None = None
    ) -> None:
        """Writes a refused envelope to the audit: the operator sees the reason, which the sender may not learn.

        An unknown address causes one row a window, for all faults; a peer causes one for each fault. All unknown
        senders together are limited, too. Each row says how many were left out before it. Raises nothing: the sender
        gets its refusal even if the audit cannot be written.
        """
        code = str(refused.code)
        source = (sender, code) if sender is not None else address
        left_out = self._audit_budget.spend(source, self._monotonic_ms(), stranger=sender is None)
        if left_out is None:
            return
        reason, kind = refused.message[:REASON_CHARS_MAX], "envelope_refused"
        try:
            await self._audit(kind, code=code, reason=reason, address=address, peer=sender, suppressed_before=left_out)
        except Refusal as refusal:
            log.warning("peers.refusal_not_audited", extra={"code": code, "why": refusal.code})

    async def _aside(self, size: int, work: Callable[[], T]) -> T:
        if size <= LARGE_BYTES:
            return work()
        async with self._large:
            return await asyncio.to_thread(work)

    # Effects of an envelope

    async def _handle_posted(self, peer: Peer, envelope: ReceivedEnvelope, message: Message) -> wire.Received:
        reply, received = await self._dispatch(peer, envelope, message)
        if reply is not None:
            return wire.Received(status="accepted", envelope=msgspec.Raw(reply))
        return wire.Received(status="accepted", duplicate=received.known or received.repeated)

    async def _handle_fetched(self, peer: Peer, envelope: ReceivedEnvelope, message: Message) -> TakenEnvelope:
        reply, _ = await self._dispatch(peer, envelope, message)
        if isinstance(message, _OF_NO_DELEGATION):
            return TakenEnvelope(peer.id, reply=reply)
        assert envelope.seq is not None
        sender_role = DelegationRole.REQUESTER if envelope.typ in wire.REQUESTER_SENDS else DelegationRole.PROVIDER
        return TakenEnvelope(peer.id, ack=wire.Ack(role=sender_role, offer_id=message.offer_id, seq=envelope.seq))

    async def _dispatch(
        self, peer: Peer, envelope: ReceivedEnvelope, message: Message
    ) -> tuple[bytes | None, ReceivedFromPeer]:
        if isinstance(message, _OF_NO_DELEGATION):
            if envelope.seq is not None:
                raise Invalid("invalid_seq", "a message that belongs to no delegation has no number")
            reply = None
            if isinstance(message, wire.DeliveryAcks):
                await self._ledger.commit(ReceiveFromPeer(envelope=envelope))
                await self._ledger.commit(MoveOutbox(moves=acknowledged(peer.id, message.acks)))
            elif isinstance(message, CapabilityQuery):
                reply = await self._directory.receive_query(peer, envelope, message)
            else:
                await self._directory.receive_response(peer, envelope, message)
            return reply, ReceivedFromPeer()
        if envelope.seq is None:
            raise Invalid("invalid_seq", "a message about a delegation needs a number, from 1")
        ours = DelegationRole.PROVIDER if envelope.typ in wire.REQUESTER_SENDS else DelegationRole.REQUESTER
        incoming = IncomingMessage(peer, envelope, message, DelegationKey(ours, peer.id, message.offer_id))
        await self._check_trust(incoming)
        handler = self._provider if ours is DelegationRole.PROVIDER else self._requester
        try:
            return None, await handler.receive(incoming)
        except Refusal as refusal:
            if refusal.code != "out_of_order":
                raise
            record = await self._ledger.delegation(incoming.key)
            raise wire.OutOfOrder(record.received_seq + 1 if record is not None else 1) from None

    async def _check_trust(self, incoming: IncomingMessage) -> None:
        """An unverified peer may send offers, which a message rejects, and messages about known delegations."""
        if incoming.peer.trust is not Trust.PEER or incoming.envelope.typ == OFFER:
            return
        if await self._ledger.delegation(incoming.key) is None:
            raise Forbidden(
                "untrusted", "a peer that is not verified may only ask for capabilities; see `covenant peers verify`"
            )


def _decode_message(typ: str, body: bytes) -> Message:
    return wire.decode_acks(body) if typ == wire.ACKS else wire.decode(typ, body)


def _decode_poll(typ: str, body: bytes) -> wire.Poll:
    if typ != wire.POLL:
        raise Invalid("type_not_supported", f"a poll is not of type {typ[:64]!r}")
    return wire.decode_poll(body)
