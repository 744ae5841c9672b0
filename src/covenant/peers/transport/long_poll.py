"""Long polling, both sides, for peers that have no address of their own.

`PollServer` answers polls with the messages that wait for the caller, sealed to the keys in its poll. A message waits
until a later poll acknowledges it, so a lost answer costs nothing. Messages of one delegation keep their order, and
only one poll of a peer waits at a time: a new poll ends the one before.

`PollClient` polls the peers that the setting `peers.poll` names, and acknowledges what it has taken with its next poll.
A capability query that arrives this way is answered at once, to the peer's address.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from covenant.ledger.machine.peer_commands import LearnPeer, MoveParcels, ReceiveFromPeer
from covenant.model.errors import Invalid, Refusal
from covenant.model.peers.delegation import DelegationKey, DelegationRole, OutboxMove, Peer, ReceivedEnvelope
from covenant.model.peers.instance import InstanceId, Prekey
from covenant.outbound.concurrency import wait_at_most
from covenant.peers.directory.handshake import keys_worth_keeping
from covenant.peers.peer_settings import PeerContext, PeerService
from covenant.peers.transport.peer_client import DELIVERY_S, DeliveryFailure, DeliveryTrouble, EnvelopeSender
from covenant.seal.identity import bundle_holds
from covenant.wire import peers as wire
from covenant.wire.peers import POLL_PATH, RECEIVE_PATH, Poll, Polled

if TYPE_CHECKING:
    from covenant.peers.directory.peer_directory import PeerDirectory
    from covenant.peers.transport.inbox import Inbox

ANSWER_BYTES_MAX: Final = 4 * 1024 * 1024
"""Of all envelopes in an answer, unless the first alone has more."""
ENVELOPE_EXTRA: Final = 4_096
"""About what an envelope has besides its body."""
ASIDE_MIN: Final = 8
"""So many are sealed in a thread."""
ASIDE_BYTES: Final = 64 * 1024


class _Letter(NamedTuple):
    typ: str
    body: bytes
    seq: int | None


class PollServer(PeerService):
    def __init__(self, context: PeerContext, directory: PeerDirectory) -> None:
        super().__init__(context)
        self._directory = directory
        self._waiting: dict[InstanceId, asyncio.Event] = {}
        self._handed: dict[InstanceId, dict[DelegationKey, int]] = {}
        """Of which delegations each peer had something in its last answer, and up to which number."""
        self._closed = False
        context.in_flight.append(self.handed)
        context.ledger.on_peer(self._news)

    async def answer(self, peer: Peer, envelope: ReceivedEnvelope, poll: Poll) -> Polled:
        until = asyncio.get_running_loop().time() + poll.wait_ms / 1000
        prekey = self._prekey(peer, poll)
        await self._ledger.commit(ReceiveFromPeer(envelope=envelope))
        if keys_worth_keeping(peer.keys, poll.keys):
            await self._ledger.commit(LearnPeer(id=peer.id, by=self._us, keys_shown=poll.keys))
        if poll.acks:
            await self._ledger.commit(MoveParcels(moves=_moves(peer.id, poll)))
        return Polled(envelopes=await self._wait(peer.id, poll.max, prekey, until))

    def handed(self, key: DelegationKey) -> int:
        """Up to which number the peer may have what was said of this, and has not said so yet."""
        return self._handed.get(key.peer, {}).get(key, 0)

    def close(self) -> None:
        self._closed = True
        for woken in self._waiting.values():
            woken.set()

    def _news(self, peer: InstanceId) -> None:
        woken = self._waiting.get(peer)
        if woken is not None:
            woken.set()

    def _prekey(self, peer: Peer, poll: Poll) -> Prekey:
        keys, now_ms = poll.keys, self._now_ms()
        # Those that we know were looked at when we learned them, all but the time.
        if keys != peer.keys and not bundle_holds(keys, peer.id, now_ms):
            raise Invalid("bad_keys", "the keys in this poll are not those of its sender, or not valid now")
        prekey = self._directory.prekey_of(keys, poll.hybrid_prekey)
        if prekey is None:
            raise Invalid("bad_keys", "none of the keys in this poll can be used for as long as an envelope lives")
        return prekey

    async def _wait(self, peer: InstanceId, most: int, prekey: Prekey, until: float) -> tuple[msgspec.Raw, ...]:
        loop = asyncio.get_running_loop()
        before = self._waiting.get(peer)
        woken = self._waiting[peer] = asyncio.Event()
        if before is not None:
            before.set()
        try:
            while True:
                woken.clear()
                letters = await self._letters(peer, most)
                if letters:
                    # What was said may not be on disk yet, and must not be heard of before.
                    await self._ledger.durable()
                    return await self._sealed(peer, letters, prekey)
                left_s = until - loop.time()
                if self._closed or left_s <= 0 or self._waiting.get(peer) is not woken:
                    return ()
                await wait_at_most(woken, left_s)
        finally:
            if self._waiting.get(peer) is woken:
                del self._waiting[peer]

    async def _letters(self, peer_id: InstanceId, most: int) -> Sequence[_Letter]:
        peer = self._ledger.peer(peer_id)
        if peer is None or peer.denied:
            return ()
        query, size = self._directory.pending_query(peer), 0
        letters = [] if query is None else [_Letter(wire.type_of(query), wire.encode(query), None)]
        before = self._handed.pop(peer_id, {})
        handed: dict[DelegationKey, int] = {}
        left_out: set[DelegationKey] = set()
        # What was handed out last time and still waits may be what the peer can not take: it holds up nothing else.
        for parcel in sorted(await self._ledger.parcels(peer_id), key=lambda each: each.delegation in before):
            if len(letters) >= most:
                break
            body = bytes(parcel.body)
            takes = len(body) * 4 // 3 + ENVELOPE_EXTRA
            if parcel.delegation in left_out or (letters and size + takes > ANSWER_BYTES_MAX):
                left_out.add(parcel.delegation)
                continue
            size += takes
            letters.append(_Letter(parcel.typ, body, parcel.seq))
            handed[parcel.delegation] = parcel.seq
        if handed:
            self._handed[peer_id] = handed
        return letters

    async def _sealed(self, to: InstanceId, letters: Sequence[_Letter], prekey: Prekey) -> tuple[msgspec.Raw, ...]:
        now_ms, seal, epoch = self._now_ms(), self._keyring.seal, self._epoch_for(self._ledger.peer(to))

        def sealing() -> tuple[msgspec.Raw, ...]:
            return tuple(
                msgspec.Raw(
                    seal(each.body, typ=each.typ, to=to, prekey=prekey, now_ms=now_ms, seq=each.seq, epoch=epoch)
                )
                for each in letters
            )

        if len(letters) < ASIDE_MIN and sum(len(each.body) for each in letters) <= ASIDE_BYTES:
            return sealing()
        return await asyncio.to_thread(sealing)


def _moves(peer: InstanceId, poll: Poll) -> tuple[OutboxMove, ...]:
    """One for each delegation: whoever has this number has all before it."""
    through: dict[DelegationKey, int] = {}
    for ack in poll.acks:
        key = DelegationKey(ack.role, peer, ack.offer_id)
        through[key] = max(ack.seq, through.get(key, 0))
    return tuple(OutboxMove(delegation=key, seq=seq, delivered=True) for key, seq in through.items())


log = logging.getLogger(__name__)

EVERYBODY: Final = "*"

Acks = dict[tuple[DelegationRole, str], int]


class TakenEnvelope(NamedTuple):
    """Of an envelope that we fetched: what is acknowledged with the next poll, and what is to be said at once."""

    ack: wire.Ack | None = None
    reply: bytes | None = None


class PollClient(PeerService):
    def __init__(self, context: PeerContext, sender: EnvelopeSender, inbox: Inbox) -> None:
        super().__init__(context)
        self._sender = sender
        self._inbox = inbox
        self._named = frozenset(context.settings.poll)
        self._fetching: dict[InstanceId, asyncio.Task[None]] = {}
        self._troubles: dict[InstanceId, DeliveryTrouble] = {}
        self._woken = asyncio.Event()

    def news(self) -> None:
        self._woken.set()

    def troubles(self) -> Sequence[DeliveryTrouble]:
        return list(self._troubles.values())

    async def run(self) -> None:
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
        wanted = {peer.id for peer in self._ledger.peers() if self._fetches_from(peer)}
        for peer_id in [each for each, task in self._fetching.items() if each not in wanted or task.done()]:
            self._fetching.pop(peer_id).cancel()
            self._troubles.pop(peer_id, None)
        for peer_id in wanted - self._fetching.keys():
            self._fetching[peer_id] = asyncio.create_task(self._fetch_always(peer_id))

    def _fetches_from(self, peer: Peer) -> bool:
        named = self._named
        return (
            peer.url is not None
            and not peer.denied
            and (EVERYBODY in named or peer.name in named or any(each in named for each in peer.ids))
        )

    async def _fetch_always(self, peer_id: InstanceId) -> None:
        acks: Acks = {}
        attempts = 0
        while (peer := self._ledger.peer(peer_id)) is not None and self._fetches_from(peer):
            try:
                failed = await self._fetch(peer, acks)
            except Exception:
                log.exception("long_poll.fault", extra={"peer": peer_id})
                failed = DeliveryFailure("internal", "internal error; the daemon's log has the trace", whole=True)
            if failed is None:
                attempts = 0
                self._troubles.pop(peer_id, None)
                continue
            attempts += 1
            trouble = self._troubles[peer_id] = self._sender.trouble(peer_id, failed, attempts)
            pause_ms = trouble.due_ms - self._monotonic_ms()
            log.info("long_poll.failed", extra={"peer": peer_id, "reason": str(failed), "again_in_ms": pause_ms})
            await asyncio.sleep(pause_ms / 1000)

    async def _fetch(self, peer: Peer, acks: Acks) -> DeliveryFailure | None:
        """One poll. `acks` are what the peer is told that we have; those that it was told are taken out."""
        told = dict(list(acks.items())[: wire.ACKS_MAX])
        wait_ms = min(self._settings.poll_wait_ms, wire.WAIT_MS_MAX)
        asked = wire.Poll(
            keys=self._keyring.bundle(self._now_ms()),
            hybrid_prekey=self._keyring.hybrid_prekey(self._now_ms()),
            acks=tuple(wire.Ack(role=role, offer_id=offer_id, seq=seq) for (role, offer_id), seq in told.items()),
            wait_ms=wait_ms,
        )
        answer = await self._sender.hand(
            peer, POLL_PATH, wire.encode(asked), typ=wire.POLL, timeout_s=wait_ms / 1000 + DELIVERY_S
        )
        if isinstance(answer, DeliveryFailure):
            return answer
        try:
            envelopes = wire.decode_polled(answer.body).envelopes
        except Invalid:
            return DeliveryFailure("bad_response", "the answer is not one to a poll", whole=True)
        for key, seq in told.items():
            if acks.get(key) == seq:
                del acks[key]
        return await self._take(peer, envelopes, acks)

    async def _take(self, peer: Peer, envelopes: Sequence[bytes | memoryview], acks: Acks) -> DeliveryFailure | None:
        """Each by itself: one that is refused holds up its own delegation, and nothing else."""
        failed: DeliveryFailure | None = None
        for envelope in envelopes:
            try:
                taken = await self._inbox.take(bytes(envelope))
            except Refusal as refusal:
                failed = DeliveryFailure(refusal.code, refusal.message, whole=False)
                continue
            if taken.ack is not None:
                key = (taken.ack.role, taken.ack.offer_id)
                acks[key] = max(taken.ack.seq, acks.get(key, 0))
            if taken.reply is not None:
                answered = await self._sender.post(peer, RECEIVE_PATH, taken.reply)
                failed = answered if isinstance(answered, DeliveryFailure) else failed
        return failed
