"""Handing out: what waits for a peer that fetches it, sealed to the keys that it shows as it asks.

What is handed out still waits until the peer acknowledges it with a later poll: an answer that is lost on the way costs
nothing. Of each delegation in its order, each in its turn, and never more than an answer may have. One poll of a peer
waits at a time: with the next one, the one before is answered as it is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, Protocol

import msgspec

from covenant.ledger.contract import Ledger
from covenant.ledger.machine.peer_commands import Hear, LearnPeer, MoveParcels
from covenant.model.peers.peer_record import Peer
from covenant.model.peers.delegation import DelegationKey, ReceivedEnvelope, OutboxMove
from covenant.model.peers.delegation_messages import CapabilityQuery
from covenant.model.errors import Invalid
from covenant.model.ids import AgentId
from covenant.model.peers.instance import InstanceId, KeyBundle, Prekey
from covenant.peers.answering import worth_learning
from covenant.peers.keyring import Keyring
from covenant.seal.identity import bundle_holds, prekey_to_use
from covenant.wire import peers
from covenant.wire.peers import Poll, Polled

ANSWER_BYTES_MAX: Final = 4 * 1024 * 1024
"""Of all envelopes in an answer, unless the first alone has more."""
ENVELOPE_EXTRA: Final = 2_048
"""About what an envelope has besides its body."""
ASIDE_MIN: Final = 8
"""So many are sealed in a thread."""
ASIDE_BYTES: Final = 64 * 1024


class Questions(Protocol):
    def pending_query(self, peer: Peer) -> CapabilityQuery | None:
        """What this peer was asked and has not answered, if it is time to hand it that (again)."""


class _Letter(NamedTuple):
    typ: str
    body: bytes
    seq: int | None


class HandingOut:
    def __init__(
        self,
        ledger: Ledger,
        keyring: Keyring,
        questions: Questions,
        *,
        us: AgentId,
        now_ms: Callable[[], int],
    ) -> None:
        self._ledger = ledger
        self._keyring = keyring
        self._questions = questions
        self._us = us
        self._now_ms = now_ms
        self._waiting: dict[InstanceId, asyncio.Event] = {}
        self._handed: dict[InstanceId, dict[DelegationKey, int]] = {}
        """Of which delegations each peer had something in its last answer, and up to which number."""
        self._closed = False
        ledger.on_peer(self._news)

    async def answer(self, peer: Peer, envelope: ReceivedEnvelope, poll: Poll) -> Polled:
        until = asyncio.get_running_loop().time() + poll.wait_ms / 1000
        prekey = self._prekey(peer, poll.keys)
        await self._ledger.commit(Hear(envelope=envelope))
        await self._learn(peer, poll.keys)
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

    def _prekey(self, peer: Peer, keys: KeyBundle) -> Prekey:
        now_ms = self._now_ms()
        # Those that we know were looked at when we learned them, all but the time.
        if keys != peer.keys and not bundle_holds(keys, peer.id, now_ms):
            raise Invalid("bad_keys", "the keys in this poll are not those of its sender, or not valid now")
        prekey = prekey_to_use(keys.prekeys, now_ms)
        if prekey is None:
            raise Invalid("bad_keys", "none of the keys in this poll can be used for as long as an envelope lives")
        return prekey

    async def _learn(self, peer: Peer, keys: KeyBundle) -> None:
        if worth_learning(peer.keys, keys):
            await self._ledger.commit(LearnPeer(id=peer.id, by=self._us, keys_shown=keys))

    async def _wait(self, peer: InstanceId, most: int, prekey: Prekey, until: float) -> tuple[msgspec.Raw, ...]:
        loop = asyncio.get_running_loop()
        before = self._waiting.get(peer)
        woken = self._waiting[peer] = asyncio.Event()
        if before is not None:
            before.set()
        try:
            while True:
                woken.clear()
                letters = self._letters(peer, most)
                if letters:
                    # What was said may not be on disk yet, and must not be heard of before.
                    await self._ledger.durable()
                    return await self._sealed(peer, letters, prekey)
                left_s = until - loop.time()
                if self._closed or left_s <= 0 or self._waiting.get(peer) is not woken:
                    return ()
                timer = loop.call_later(left_s, woken.set)
                try:
                    await woken.wait()
                finally:
                    timer.cancel()
        finally:
            if self._waiting.get(peer) is woken:
                del self._waiting[peer]

    def _letters(self, peer_id: InstanceId, most: int) -> Sequence[_Letter]:
        peer = self._ledger.peer(peer_id)
        if peer is None or peer.denied:
            return ()
        letters, size = self._question(peer), 0
        before = self._handed.pop(peer_id, {})
        handed: dict[DelegationKey, int] = {}
        left_out: set[DelegationKey] = set()
        # What was handed out last time and still waits may be what the peer can not take: it holds up nothing else.
        for parcel in sorted(self._ledger.parcels(peer_id), key=lambda each: each.delegation in before):
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

    def _question(self, peer: Peer) -> list[_Letter]:
        query = self._questions.pending_query(peer)
        return [] if query is None else [_Letter(peers.type_of(query), peers.encode(query), None)]

    async def _sealed(self, to: InstanceId, letters: Sequence[_Letter], prekey: Prekey) -> tuple[msgspec.Raw, ...]:
        now_ms, seal = self._now_ms(), self._keyring.seal

        def sealing() -> tuple[msgspec.Raw, ...]:
            return tuple(
                msgspec.Raw(seal(each.body, typ=each.typ, to=to, prekey=prekey, now_ms=now_ms, seq=each.seq))
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
