"""Long polling, both sides, for peers that have no address of their own.

`PollServer` answers polls with the messages that wait for the caller, sealed to the keys in its poll. A message waits
until a later poll acknowledges it, so a lost answer costs nothing. Messages of one delegation keep their order, and
only one poll of a peer waits at a time: a new poll ends the one before.

`PollClient` polls our relay, and the peers that the setting `peers.poll` names. It acknowledges the processed messages
of a peer with its next poll, and those that came through the relay in an envelope to their sender. A capability query
that arrives this way is answered at once, to the peer's address.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from covenant.ledger.machine.peer_commands import LearnPeer, MoveOutbox, ReceiveFromPeer
from covenant.model.errors import Invalid, Refusal, Unavailable
from covenant.model.peers.delegation import (
    DelegationKey,
    DelegationRole,
    OutboxMessage,
    OutboxMove,
    Peer,
    ReceivedEnvelope,
)
from covenant.model.peers.instance import InstanceId, Prekey
from covenant.outbound.concurrency import wait_at_most
from covenant.peers.directory.handshake import keys_worth_keeping
from covenant.peers.peer_settings import EVERYBODY, PeerContext, PeerService, is_named
from covenant.peers.transport.peer_client import DELIVERY_S, DeliveryFailure, DeliveryTrouble, EnvelopeSender
from covenant.peers.transport.relay import ANSWER_BYTES_MAX, Relay
from covenant.seal.identity import bundle_holds
from covenant.wire import peers as wire
from covenant.wire.peers import POLL_PATH, RECEIVE_PATH, Poll, Polled

if TYPE_CHECKING:
    from covenant.ledger.contract.ledger import DelegationLedger
    from covenant.peers.directory.peer_directory import PeerDirectory
    from covenant.peers.transport.inbox import Inbox

ENVELOPE_EXTRA: Final = 4_096
"""About the size of an envelope without its body."""
ASIDE_MIN: Final = 8
"""This many envelopes or more are sealed in a thread."""
ASIDE_BYTES: Final = 64 * 1024
log = logging.getLogger(__name__)


class _PollMessage(NamedTuple):
    typ: str
    body: bytes
    seq: int | None


class PollServer(PeerService):
    def __init__(self, context: PeerContext, directory: PeerDirectory, relay: Relay) -> None:
        super().__init__(context)
        self._directory = directory
        self._relay = relay
        relay.on_envelope = self._wake
        self._waiting: dict[InstanceId, asyncio.Event] = {}
        self._handed_out: dict[InstanceId, dict[DelegationKey, int]] = {}
        """For each peer, the delegations with messages in its last answer, and the highest number of each."""
        self._closed = False
        context.in_flight.append(self.handed_out_through)
        context.ledger.on_peer(self._wake)

    async def answer(self, peer: Peer, envelope: ReceivedEnvelope, poll: Poll) -> Polled:
        until = asyncio.get_running_loop().time() + poll.wait_ms / 1000
        prekey = self._prekey(peer, poll)
        await self._ledger.commit(ReceiveFromPeer(envelope=envelope))
        if keys_worth_keeping(peer.keys, poll.keys):
            await self._ledger.commit(LearnPeer(id=peer.id, by=self._us, keys_shown=poll.keys))
        if poll.acks:
            await self._ledger.commit(MoveOutbox(moves=acknowledged(peer.id, poll.acks)))
        if poll.relay is not None:
            shown = poll.relay.introduction.keys
            if shown != poll.keys and not bundle_holds(shown, peer.id, self._now_ms()):
                raise Invalid("bad_keys", "the keys in this introduction are not those of its sender, or not valid now")
            await self._relay.receive_fetch(peer, wire.encode(poll.relay.introduction), poll.relay.taken)
        return await self._wait(peer.id, poll, prekey, until)

    def handed_out_through(self, key: DelegationKey) -> int:
        """The highest number of this delegation's messages that the peer may have and has not acknowledged."""
        return self._handed_out.get(key.peer, {}).get(key, 0)

    def close(self) -> None:
        self._closed = True
        for woken in self._waiting.values():
            woken.set()

    def _wake(self, peer: InstanceId) -> None:
        woken = self._waiting.get(peer)
        if woken is not None:
            woken.set()

    def _prekey(self, peer: Peer, poll: Poll) -> Prekey:
        keys, now_ms = poll.keys, self._now_ms()
        # Keys that we know were checked when we learned them. `prekey_of` checks the time.
        if keys != peer.keys and not bundle_holds(keys, peer.id, now_ms):
            raise Invalid("bad_keys", "the keys in this poll are not those of its sender, or not valid now")
        prekey = self._directory.prekey_of(keys, poll.hybrid_prekey)
        if prekey is None:
            raise Invalid("bad_keys", "none of the keys in this poll can be used for as long as an envelope lives")
        return prekey

    async def _wait(self, peer: InstanceId, poll: Poll, prekey: Prekey, until: float) -> Polled:
        loop = asyncio.get_running_loop()
        before = self._waiting.get(peer)
        woken = self._waiting[peer] = asyncio.Event()
        if before is not None:
            before.set()
        try:
            while True:
                woken.clear()
                handed_out = await self._poll_messages(peer, poll.max)
                relayed = await self._relay.waiting(peer, poll.max) if poll.relay is not None else ()
                if handed_out or relayed:
                    # The messages may not be on disk yet, and must not leave before they are.
                    await self._ledger.durable()
                    sealed = await self._sealed(peer, handed_out, prekey)
                    return Polled(envelopes=sealed, relayed=tuple(relayed))
                left_s = until - loop.time()
                if self._closed or left_s <= 0 or self._waiting.get(peer) is not woken:
                    return Polled(envelopes=())
                await wait_at_most(woken, left_s)
        finally:
            if self._waiting.get(peer) is woken:
                del self._waiting[peer]

    async def _poll_messages(self, peer_id: InstanceId, most: int) -> Sequence[_PollMessage]:
        peer = self._ledger.peer(peer_id)
        if peer is None or peer.denied:
            return ()
        query = self._directory.pending_query(peer)
        handed_out = [] if query is None else [_PollMessage(wire.type_of(query), wire.encode(query), None)]
        before = self._handed_out.pop(peer_id, {})
        messages = await self._fitting(peer_id, most - len(handed_out), before)
        if self._context.shared is not None:
            messages = await mark_begun(self._ledger, messages)
        if messages:
            self._handed_out[peer_id] = {message.delegation: message.seq for message in messages}
        return handed_out + [_PollMessage(message.typ, bytes(message.body), message.seq) for message in messages]

    async def _fitting(
        self, peer_id: InstanceId, most: int, before: Mapping[DelegationKey, int]
    ) -> Sequence[OutboxMessage]:
        """The messages for this peer that fit into one answer. `before`: those in the last answer."""
        fitting: list[OutboxMessage] = []
        size, left_out = 0, set[DelegationKey]()
        # A message that was in the last answer and still waits may be one that the peer refuses. It goes
        # last, so that it holds up no other delegation.
        for message in sorted(await self._ledger.peer_outbox(peer_id), key=lambda each: each.delegation in before):
            if len(fitting) >= most:
                break
            takes = len(bytes(message.body)) * 4 // 3 + ENVELOPE_EXTRA
            if message.delegation in left_out or (fitting and size + takes > ANSWER_BYTES_MAX):
                left_out.add(message.delegation)
                continue
            size += takes
            fitting.append(message)
        return fitting

    async def _sealed(
        self, to: InstanceId, handed_out: Sequence[_PollMessage], prekey: Prekey
    ) -> tuple[msgspec.Raw, ...]:
        peer = self._ledger.peer(to)
        if peer is None:  # it was removed just now
            return ()
        seal = self._sealer(peer, prekey)

        def sealing() -> tuple[msgspec.Raw, ...]:
            return tuple(msgspec.Raw(seal(each.body, typ=each.typ, seq=each.seq)) for each in handed_out)

        if len(handed_out) < ASIDE_MIN and sum(len(each.body) for each in handed_out) <= ASIDE_BYTES:
            return sealing()
        return await asyncio.to_thread(sealing)


async def mark_begun(ledger: DelegationLedger, messages: Sequence[OutboxMessage]) -> tuple[OutboxMessage, ...]:
    """Marks messages as begun. Returns those that are still in the outbox, as they are now: these may be sent.

    No daemon of this instance withdraws or replaces a message that is begun. A message that was replaced before is sent
    in its new form.
    """
    moves = [
        OutboxMove(delegation=each.delegation, seq=each.seq, attempts=max(1, each.attempts), failure=each.failure)
        for each in messages
    ]
    return await ledger.commit(MoveOutbox(moves=tuple(moves))) if moves else ()


def acknowledged(peer: InstanceId, acks: Sequence[wire.Ack]) -> tuple[OutboxMove, ...]:
    """One move for each delegation: a peer that has this number has all numbers before it."""
    through: dict[DelegationKey, int] = {}
    for ack in acks:
        key = DelegationKey(ack.role, peer, ack.offer_id)
        through[key] = max(ack.seq, through.get(key, 0))
    return tuple(OutboxMove(delegation=key, seq=seq, delivered=True) for key, seq in through.items())


Acks = dict[tuple[DelegationRole, str], wire.Ack]
"""The last acknowledgement of each delegation that the other side does not have yet."""


def _note_ack(acks: Acks, ack: wire.Ack) -> None:
    key = (ack.role, ack.offer_id)
    acks[key] = max(ack, acks.get(key, ack), key=lambda each: each.seq)


def _first(acks: Acks) -> tuple[wire.Ack, ...]:
    """As many as fit into one message."""
    return tuple(islice(acks.values(), wire.ACKS_MAX))


def _drop(acks: Acks, sent: Sequence[wire.Ack]) -> None:
    """Forgets acknowledgements that arrived, but no later ones."""
    for ack in sent:
        if acks.get((ack.role, ack.offer_id)) == ack:
            del acks[ack.role, ack.offer_id]


class TakenEnvelope(NamedTuple):
    """An envelope that we fetched. `ack` goes with the next poll; `reply` is sent at once."""

    sender: InstanceId
    ack: wire.Ack | None = None
    reply: bytes | None = None


class PollClient(PeerService):
    def __init__(self, context: PeerContext, sender: EnvelopeSender, inbox: Inbox) -> None:
        super().__init__(context)
        self._sender = sender
        self._inbox = inbox
        self._named = frozenset(context.settings.poll)
        self._tasks: dict[InstanceId, asyncio.Task[None]] = {}
        self._troubles: dict[InstanceId, DeliveryTrouble] = {}
        self._relay_acks: dict[InstanceId, Acks] = {}
        """Acknowledgements for messages from the relay, by sender, that were not sent yet."""
        self._woken = asyncio.Event()
        self._polls = bool(self._named) or self._relay_root is not None
        if self._polls:
            context.ledger.on_peer(lambda _: self.look_again())

    def look_again(self) -> None:
        """Called when the peers to poll may have changed."""
        self._woken.set()

    def troubles(self) -> Sequence[DeliveryTrouble]:
        return list(self._troubles.values())

    async def run(self) -> None:
        try:
            while True:
                self._woken.clear()
                if self._polls:
                    self._update_tasks()
                await self._woken.wait()
        finally:
            tasks = list(self._tasks.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._tasks.clear()
            self._troubles.clear()

    def _update_tasks(self) -> None:
        wanted = {peer.id for peer in self._ledger.peers() if self._fetches_from(peer)}
        for peer_id in [each for each, task in self._tasks.items() if each not in wanted or task.done()]:
            self._tasks.pop(peer_id).cancel()
            self._troubles.pop(peer_id, None)
        for peer_id in wanted - self._tasks.keys():
            self._tasks[peer_id] = asyncio.create_task(self._poll_forever(peer_id))

    def _fetches_from(self, peer: Peer) -> bool:
        return (
            peer.url is not None
            and not peer.denied
            and self._context.serves(peer.id)
            and (peer.url == self._relay_root or EVERYBODY in self._named or is_named(peer, self._named))
        )

    async def _poll_forever(self, peer_id: InstanceId) -> None:
        acks: Acks = {}
        taken: list[str] = []
        attempts = 0
        loop = asyncio.get_running_loop()
        while (peer := self._ledger.peer(peer_id)) is not None and self._fetches_from(peer):
            began = loop.time()
            try:
                outcome = await self._poll_once(peer, acks, taken)
            except Exception:
                log.exception("long_poll.fault", extra={"peer": peer_id})
                outcome = DeliveryFailure("internal", "internal error; the daemon's log has the trace", whole=True)
            if isinstance(outcome, int):
                attempts = 0
                self._troubles.pop(peer_id, None)
                if outcome == 0:  # the peer may have answered at once, although it was asked to wait
                    await asyncio.sleep(self._settings.retry_first_ms / 1000 - (loop.time() - began))
                continue
            attempts += 1
            trouble = self._troubles[peer_id] = self._sender.trouble(peer_id, outcome, attempts)
            pause_ms = trouble.due_ms - self._monotonic_ms()
            log.info("long_poll.failed", extra={"peer": peer_id, "reason": str(outcome), "again_in_ms": pause_ms})
            await asyncio.sleep(pause_ms / 1000)

    async def _poll_once(self, peer: Peer, acks: Acks, taken: list[str]) -> DeliveryFailure | int:
        """One poll. It sends `acks` and, to a relay, `taken`; those that arrived are removed from both.

        Returns how many envelopes came.
        """
        sent_acks, sent_taken = _first(acks), tuple(taken[: wire.ACKS_MAX])
        wait_ms = min(self._settings.poll_wait_ms, wire.WAIT_MS_MAX)
        ours = self._keyring.introduction(self._now_ms())
        poll = wire.Poll(
            keys=ours.keys,
            hybrid_prekey=ours.hybrid_prekey,
            acks=sent_acks,
            wait_ms=wait_ms,
            relay=wire.RelayFetch(introduction=ours, taken=sent_taken) if peer.url == self._relay_root else None,
        )
        answer = await self._sender.send(
            peer, POLL_PATH, wire.encode(poll), typ=wire.POLL, timeout_s=wait_ms / 1000 + DELIVERY_S
        )
        if isinstance(answer, DeliveryFailure):
            return answer
        try:
            polled = wire.decode_polled(answer.body)
        except Invalid:
            return DeliveryFailure("bad_response", "the answer is not one to a poll", whole=True)
        _drop(acks, sent_acks)
        del taken[: len(sent_taken)]
        failed = await self._process(peer, polled.envelopes, acks)
        relayed = await self._process_relayed(polled.relayed, taken)
        return failed or len(polled.envelopes) + relayed

    async def _process_relayed(self, relayed: Sequence[wire.RelayedEnvelope], taken: list[str]) -> int:
        """Processes the envelopes of other senders from the relay. Returns how many were accepted.

        A refused one is dropped: its sender still has the message.
        """
        count, replies = 0, list[tuple[InstanceId, bytes]]()
        await self._inbox.note_withdrawn([bytes(each.envelope) for each in relayed])
        for each in relayed:
            envelope = bytes(each.envelope)
            try:
                fetched = await self._inbox.receive_fetched(envelope, relayed=True)
            except Unavailable:
                continue  # the relay hands it out again
            except Refusal as refusal:
                if await self._inbox.follow_sender(envelope):
                    continue  # the relay hands it out again, and then its sender is known
                log.info("relay.refused", extra={"code": refusal.code, "reason": refusal.message})
            else:
                count += 1
                if fetched.ack is not None:
                    _note_ack(self._relay_acks.setdefault(fetched.sender, {}), fetched.ack)
                if fetched.reply is not None:
                    replies.append((fetched.sender, fetched.reply))
            taken.append(each.id)
        known = ((self._ledger.peer(sender), reply) for sender, reply in replies)
        posts = [self._sender.post(peer, RECEIVE_PATH, reply) for peer, reply in known if peer is not None]
        await asyncio.gather(*posts, *(self._acknowledge(sender) for sender in tuple(self._relay_acks)))
        return count

    async def _acknowledge(self, sender: InstanceId) -> None:
        """Acknowledgements that do not get through are sent after the next fetch."""
        peer, acks = self._ledger.peer(sender), _first(self._relay_acks[sender])
        if peer is not None and acks:
            body = wire.encode(wire.DeliveryAcks(acks=acks))
            if isinstance(await self._sender.send(peer, RECEIVE_PATH, body, typ=wire.ACKS), DeliveryFailure):
                return
        _drop(self._relay_acks[sender], acks)
        if peer is None or not self._relay_acks[sender]:
            self._relay_acks.pop(sender, None)

    async def _process(self, peer: Peer, envelopes: Sequence[bytes | memoryview], acks: Acks) -> DeliveryFailure | None:
        """Processes each envelope separately: a refused one holds up its own delegation and no other."""
        failed: DeliveryFailure | None = None
        for envelope in envelopes:
            try:
                fetched = await self._inbox.receive_fetched(bytes(envelope))
            except Refusal as refusal:
                failed = DeliveryFailure(refusal.code, refusal.message, whole=False)
                continue
            if fetched.ack is not None:
                _note_ack(acks, fetched.ack)
            if fetched.reply is not None:
                answered = await self._sender.post(peer, RECEIVE_PATH, fetched.reply)
                failed = answered if isinstance(answered, DeliveryFailure) else failed
        return failed
