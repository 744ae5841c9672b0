"""The inbox: each sealed envelope is checked, opened, and handled exactly once.

The checks run in this order: size, signature, sender, recipient and time; then replay and the sender's message rate.
Only then is the envelope opened (a large one in a thread) and acted on. Each handler commits one `ReceiveFromPeer`, so
an envelope and its effects are one record. Each refusal is audited; `told` decides what the sender hears of it.

An unverified peer may query capabilities, answer a challenge, poll, and end delegations that it began while it was
trusted. Its offers are rejected with a message of the protocol.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final, NamedTuple, Protocol, TypeVar

import msgspec

from covenant.exchange.access.principals import AuditBudget
from covenant.ledger.machine.identity_commands import WriteAuditRow
from covenant.ledger.machine.peer_commands import LearnPeer, ReceivedFromPeer
from covenant.model.errors import Forbidden, Invalid, OverLimit, Refusal, Unavailable
from covenant.model.peers.delegation import DelegationKey, DelegationRole, Peer, ReceivedEnvelope
from covenant.model.peers.delegation_messages import CapabilityQuery, CapabilityResponse, DelegationMessage
from covenant.model.peers.instance import InstanceId, Trust
from covenant.model.rate_limits import TokenBuckets
from covenant.peers.directory.handshake import envelope_record
from covenant.peers.directory.peer_directory import PeerDirectory
from covenant.peers.peer_settings import PeerContext, PeerService
from covenant.peers.transport.long_poll import PollServer, TakenEnvelope
from covenant.seal.envelope import (
    Checked,
    Code,
    EnvelopeRefused,
    check,
    open_checked,
    receipt,
    replayed,
    told,
)
from covenant.wire import peers as wire

log = logging.getLogger(__name__)

REASON_CHARS_MAX: Final = 300


class RefusalAudit(PeerService):
    """Refused envelopes in the audit: the operator sees what the sender may not hear.

    An unknown address costs one row a window, whatever was wrong; a peer costs one a window for each fault. All unknown
    senders together are limited, too. Each row says how many were left out before it.
    """

    def __init__(self, context: PeerContext) -> None:
        super().__init__(context)
        self._budget = AuditBudget()

    async def note(self, code: str, reason: str, address: str | None, sender: InstanceId | None) -> None:
        """Nothing is raised: whoever is refused is told so even if it cannot be written down."""
        source = (sender, code) if sender is not None else address
        left_out = self._budget.spend(source, self._monotonic_ms(), stranger=sender is None)
        if left_out is None:
            return
        row: dict[str, object] = {
            "type": "envelope_refused",
            "code": code,
            "reason": reason[:REASON_CHARS_MAX],
            "address": address,
            "peer": sender,
            "suppressed_before": left_out,
        }
        try:
            await self._ledger.commit(WriteAuditRow(by=self._us, row=row))
        except Refusal as refusal:
            log.warning("peers.refusal_unnoted", extra={"code": code, "why": refusal.code})


class IncomingMessage(NamedTuple):
    """Whoever takes it commits it with one `ReceiveFromPeer`, together with everything that follows from it."""

    peer: Peer
    envelope: ReceivedEnvelope
    message: DelegationMessage


LARGE_BYTES: Final = 64 * 1024
"""From here on the loop would feel it."""
LARGE_AT_ONCE: Final = 4
TRUSTED_FACTOR: Final = 10

OFFER: Final = "delegation_offer"

T = TypeVar("T")
M = TypeVar("M")


class DelegationHandler(Protocol):
    async def hear(self, incoming: IncomingMessage) -> ReceivedFromPeer: ...


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
        self._refusals = RefusalAudit(context)
        self._poll_server = PollServer(context, directory)
        self._large = asyncio.Semaphore(LARGE_AT_ONCE)

    async def receive(self, body: bytes, address: str | None) -> wire.Received:
        """Answers once it is durable. Raises a `Refusal` that the sender may hear."""
        received = await self._hear(body, address, wire.decode, self._received)
        return msgspec.structs.replace(received, receipt=receipt(self._keyring.identity, body))

    async def poll(self, body: bytes, address: str | None) -> wire.Polled:
        """What waits for the one who asks; the answer may take as long as it is ready to wait."""
        return await self._hear(body, address, _decode_poll, self._poll_server.answer)

    async def take(self, body: bytes) -> TakenEnvelope:
        """An envelope that we fetched ourselves. At our own pace, so no rate is asked for."""
        return await self._hear(body, None, wire.decode, self._took, metered=False)

    async def introduced(self, body: bytes, address: str | None) -> wire.Received:
        """An instance shows who it is now, and who it was. It proves itself, so no envelope is needed."""
        try:
            return await self._directory.hear_introduction(body)
        except Refusal as refusal:
            await self._refusals.note(refusal.code, refusal.message, address, None)
            raise

    async def too_large(self, address: str | None) -> Refusal:
        refused = EnvelopeRefused(Code.TOO_LARGE, "more than an envelope can have")
        await self._refusals.note(refused.code.value, refused.message, address, None)
        return told(refused)

    def close(self) -> None:
        """Answer those who wait, now and from now on: nothing is lost by it."""
        self._poll_server.close()

    async def _hear(
        self,
        body: bytes,
        address: str | None,
        decode: Callable[[str, bytes], M],
        act: Callable[[Peer, ReceivedEnvelope, M], Awaitable[T]],
        *,
        metered: bool = True,
    ) -> T:
        sender: InstanceId | None = None
        try:
            checked = await self._check(body)
            sender = InstanceId(checked.header.sender)
            if metered:
                self._spend(sender)
            message = await self._open(checked, decode)
            # Whom we know may have changed while it was opened.
            peer, header = self._peer(sender), checked.header
            if header.epoch != peer.epoch:
                # Its ledger was restored. The requester goes on with what it may have forgotten.
                log.warning("peer.restored", extra={"peer": peer.id, "epoch": header.epoch})
                peer = await self._ledger.commit(LearnPeer(id=peer.id, by=self._us, epoch=header.epoch))
            return await act(peer, envelope_record(header, self._context.epoch), message)
        except EnvelopeRefused as refused:
            await self._refusals.note(refused.code.value, refused.message, address, refused.sender)
            raise told(refused) from None
        except Unavailable:
            raise
        except Refusal as refusal:
            await self._refusals.note(refusal.code, refusal.message, address, sender)
            raise

    async def _check(self, body: bytes) -> Checked:
        now_ms = self._now_ms()
        checking = partial(check, body, us=self._keyring.id, now_ms=now_ms, known=self._knows)
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

    def _spend(self, sender: InstanceId) -> None:
        per_min = self._settings.messages_per_min
        if self._peer(sender).trust is Trust.TRUSTED:
            per_min *= TRUSTED_FACTOR
        wait_ms = self._rate.take(sender, self._monotonic_ms(), per_min)
        if wait_ms is not None:
            message = f"more than {per_min} messages a minute; slow down"
            raise OverLimit("rate_limited", message, retry_after_ms=wait_ms)

    async def _open(self, checked: Checked, decode: Callable[[str, bytes], M]) -> M:
        prekey, now_ms = self._keyring.prekey(checked.header.kid), self._now_ms()

        def opening() -> M:
            return decode(checked.header.typ, open_checked(checked, prekey, now_ms=now_ms))

        return await self._aside(len(checked.ciphertext), opening)

    async def _aside(self, size: int, work: Callable[[], T]) -> T:
        if size <= LARGE_BYTES:
            return work()
        async with self._large:
            return await asyncio.to_thread(work)

    # Acting on it

    async def _received(self, peer: Peer, envelope: ReceivedEnvelope, message: DelegationMessage) -> wire.Received:
        reply, heard = await self._dispatch(IncomingMessage(peer, envelope, message))
        if reply is not None:
            return wire.Received(status="accepted", envelope=msgspec.Raw(reply))
        known = heard.known or (heard.moved is not None and not heard.moved.changed)
        return wire.Received(status="accepted", duplicate=known)

    async def _took(self, peer: Peer, envelope: ReceivedEnvelope, message: DelegationMessage) -> TakenEnvelope:
        reply, _ = await self._dispatch(IncomingMessage(peer, envelope, message))
        if isinstance(message, CapabilityQuery | CapabilityResponse):
            return TakenEnvelope(reply=reply)
        assert envelope.seq is not None
        said_by = DelegationRole.REQUESTER if envelope.typ in wire.REQUESTER_SENDS else DelegationRole.PROVIDER
        return TakenEnvelope(ack=wire.Ack(role=said_by, offer_id=message.offer_id, seq=envelope.seq))

    async def _dispatch(self, incoming: IncomingMessage) -> tuple[bytes | None, ReceivedFromPeer]:
        peer, envelope, message = incoming
        if isinstance(message, CapabilityQuery | CapabilityResponse):
            if envelope.seq is not None:
                raise Invalid("invalid_seq", "a message that belongs to no delegation has no number")
            if isinstance(message, CapabilityQuery):
                return await self._directory.hear_query(peer, envelope, message), ReceivedFromPeer()
            await self._directory.hear_response(peer, envelope, message)
            return None, ReceivedFromPeer()
        if envelope.seq is None:
            raise Invalid("invalid_seq", "a message about a delegation needs a number, from 1")
        ours = DelegationRole.PROVIDER if envelope.typ in wire.REQUESTER_SENDS else DelegationRole.REQUESTER
        key = DelegationKey(ours, peer.id, message.offer_id)
        await self._check_trust(incoming, key)
        hearing = self._provider if ours is DelegationRole.PROVIDER else self._requester
        try:
            return None, await hearing.hear(incoming)
        except Refusal as refusal:
            if refusal.code != "out_of_order":
                raise
            record = await self._ledger.delegation(key)
            raise wire.OutOfOrder(record.heard + 1 if record is not None else 1) from None

    async def _check_trust(self, incoming: IncomingMessage, key: DelegationKey) -> None:
        """An offer is answered by a message, whoever makes it. Everything else is about one that is known."""
        if incoming.peer.trust is not Trust.PEER or incoming.envelope.typ == OFFER:
            return
        if await self._ledger.delegation(key) is None:
            raise Forbidden(
                "untrusted", "a peer that is not verified may only ask for capabilities; see `covenant peers verify`"
            )


def _decode_poll(typ: str, body: bytes) -> wire.Poll:
    if typ != wire.POLL:
        raise Invalid("type_not_supported", f"a poll is not of type {typ[:64]!r}")
    return wire.decode_poll(body)
