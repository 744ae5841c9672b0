"""Peers, their delegations and messages in memory, with an index for each query."""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from covenant.ledger.machine import effects
from covenant.ledger.machine.events import (
    DelegationDropped,
    DelegationPut,
    EnvelopeTaken,
    OutboxDropped,
    OutboxMoved,
    OutboxPut,
    PeerEvent,
    PeerPut,
    PeerRemoved,
    PeerSucceeded,
    TokenRevoked,
)
from covenant.model.ids import TaskId
from covenant.model.peers.delegation import (
    Delegation,
    DelegationKey,
    DelegationRole,
    DelegationState,
    LoggedMessage,
    OutboxMessage,
    Peer,
    ReceivedEnvelope,
)
from covenant.model.peers.instance import InstanceId
from covenant.model.peers.usage_by_day import USAGE_DAYS, USAGE_ROWS_MAX, PeerUsage, UsageKey, usage_change
from covenant.model.tenants import DEFAULT

replace = msgspec.structs.replace

LOG_MAX: Final = 1_000
REVOKED_KEPT_MS: Final = 30 * 24 * 3_600_000
"""A revocation outlives its token by this much: a clock that ran ahead for a while must not revive the token."""


class PeerIndex:
    def __init__(self) -> None:
        self.peers_by_id: dict[InstanceId, Peer] = {}
        """The oldest first."""
        self._peers_by_name: dict[str, Peer] = {}
        self._delegations: OrderedDict[DelegationKey, Delegation] = OrderedDict()
        """Ordered by the last change, newest last."""
        self._live_delegations: dict[tuple[DelegationRole, InstanceId], dict[DelegationKey, None]] = {}
        self._ended_delegations: OrderedDict[DelegationKey, None] = OrderedDict()
        self._lost_delegations: set[DelegationKey] = set()
        self._of_task: dict[TaskId, DelegationKey] = {}
        self._outbox: dict[InstanceId, dict[DelegationKey, dict[int, OutboxMessage]]] = {}
        """By peer and delegation, in the order of their numbers."""
        self._outbox_counts: dict[InstanceId, int] = {}
        self._envelopes: dict[InstanceId, dict[str, ReceivedEnvelope]] = {}
        self._envelope_expiries: list[tuple[int, InstanceId, str]] = []
        """When each received envelope may be forgotten."""
        self.tokens_revoked: dict[str, TokenRevoked] = {}
        self.usage: dict[UsageKey, PeerUsage] = {}
        """The oldest day first."""
        self.messages: deque[LoggedMessage] = deque(maxlen=LOG_MAX)

    def apply_peer(self, event: PeerEvent, ts_ms: int) -> None:
        match event:
            case EnvelopeTaken(envelope, offer_id):
                self._receive_envelope(envelope, offer_id, ts_ms)
            case DelegationPut(delegation):
                change = usage_change(self._delegations.get(delegation.key), delegation, ts_ms)
                if change is not None:
                    self.add_usage(change)
                self.put_delegation(delegation)
            case OutboxPut(message):
                self.put_outbox_message(message)
            case OutboxMoved(move):
                waiting = self._outbox[move.delegation.peer][move.delegation]
                waiting[move.seq] = effects.moved_message(waiting[move.seq], move)
            case OutboxDropped(key, through, sent):
                self._drop_messages(key, through, ts_ms, sent=sent)
            case PeerPut(peer):
                query = effects.query_logged(self.peers_by_id.get(peer.id), peer, ts_ms)
                if query is not None:
                    self.messages.append(query)
                self.put_peer(peer)
            case DelegationDropped(key):
                self._drop_delegation(key)
            case PeerRemoved(peer_id):
                self._remove_peer(peer_id)
            case PeerSucceeded(old, peer):
                self._succeed_peer(old, peer)
            case TokenRevoked():
                self.put_revoked(event, ts_ms)
            case _:
                raise AssertionError(f"{event} is not applied here")

    # Peers

    def put_peer(self, peer: Peer) -> None:
        old = self.peers_by_id.get(peer.id)
        if old is not None:
            self._peers_by_name.pop(old.name, None)
        self.peers_by_id[peer.id] = self._peers_by_name[peer.name] = peer

    def peer(self, peer_id: InstanceId) -> Peer | None:
        return self.peers_by_id.get(peer_id)

    def peer_named(self, name: str) -> Peer | None:
        return self._peers_by_name.get(name)

    def peer_count(self) -> int:
        return len(self.peers_by_id)

    def _remove_peer(self, peer_id: InstanceId) -> None:
        gone = self.peers_by_id.pop(peer_id)
        del self._peers_by_name[gone.name]
        if gone.tenant != DEFAULT:
            # The removal of a tenant must find nothing of it here.
            for key in [key for key in self._delegations if key.peer == peer_id]:
                self._drop_delegation(key)
            self.usage = {key: each for key, each in self.usage.items() if each.peer != peer_id}
        self._outbox.pop(peer_id, None)
        self._outbox_counts.pop(peer_id, None)
        # Its envelopes stay known for as long as they could be replayed: the peer may be added again meanwhile.

    def _succeed_peer(self, old: InstanceId, peer: Peer) -> None:
        before = self.peers_by_id.pop(old)
        self._peers_by_name.pop(before.name, None)
        self.put_peer(peer)
        for delegation in [each for each in self._delegations.values() if each.peer == old]:
            self._drop_delegation(delegation.key)
            self.put_delegation(replace(delegation, peer=peer.id))
        for usage in [each for each in self.usage.values() if each.peer == old]:
            del self.usage[usage.key]
            self.add_usage(replace(usage, peer=peer.id))
        self._outbox_counts.pop(old, None)
        for waiting in self._outbox.pop(old, {}).values():
            for message in waiting.values():
                self.put_outbox_message(replace(message, peer=peer.id))

    # Usage

    def add_usage(self, change: PeerUsage) -> None:
        known = self.usage.get(change.key)
        if known is None:
            over = change.day - USAGE_DAYS
            for key in [key for key in self.usage if key[0] <= over]:
                del self.usage[key]
            if len(self.usage) >= USAGE_ROWS_MAX:
                del self.usage[min(self.usage)]
        self.usage[change.key] = change if known is None else known.plus(change)

    def peer_usage(self, since: int, peer: InstanceId | None) -> Iterator[PeerUsage]:
        found = (each for each in self.usage.values() if each.day >= since and peer in (None, each.peer))
        return iter(sorted(found, key=lambda each: (-each.day, *each.key[1:])))

    # Delegations

    def put_delegation(self, delegation: Delegation) -> None:
        key = delegation.key
        old = self._delegations.get(key)
        if old is not None and delegation.offer is None and not delegation.ended:
            delegation = replace(delegation, offer=old.offer)
        self._delegations[key] = delegation
        self._delegations.move_to_end(key)
        self._of_task[delegation.task_id] = key
        if delegation.state is DelegationState.LOST and key.role is DelegationRole.REQUESTER:
            self._lost_delegations.add(key)
        else:
            self._lost_delegations.discard(key)
        live = self._live_delegations.setdefault((key.role, key.peer), {})
        if not delegation.ended:
            live[key] = None
            return
        live.pop(key, None)
        if not live:
            del self._live_delegations[key.role, key.peer]
        self._ended_delegations[key] = None
        self._ended_delegations.move_to_end(key)

    def _drop_delegation(self, key: DelegationKey) -> None:
        delegation = self._delegations.pop(key)
        if self._of_task.get(delegation.task_id) == key:
            del self._of_task[delegation.task_id]
        self._ended_delegations.pop(key, None)
        self._lost_delegations.discard(key)
        live = self._live_delegations.get((key.role, key.peer))
        if live is not None:
            live.pop(key, None)
            if not live:
                del self._live_delegations[key.role, key.peer]

    def delegation(self, key: DelegationKey) -> Delegation | None:
        return self._delegations.get(key)

    def delegation_of(self, task_id: TaskId) -> Delegation | None:
        key = self._of_task.get(task_id)
        return self._delegations[key] if key is not None else None

    def delegations(self) -> Iterator[Delegation]:
        """Ordered by the last change, newest first."""
        return reversed(self._delegations.values())

    def delegations_in_order(self) -> Iterator[Delegation]:
        return iter(self._delegations.values())

    def delegations_live(self, role: DelegationRole, peer: InstanceId | None = None) -> Sequence[Delegation]:
        found = [
            keys
            for (of_role, of_peer), keys in self._live_delegations.items()
            if of_role is role and peer in (None, of_peer)
        ]
        return [self._delegations[key] for keys in found for key in keys]

    def delegations_live_count(self, peer: InstanceId) -> int:
        return sum(len(self._live_delegations.get((role, peer), ())) for role in DelegationRole)

    def delegation_count(self) -> int:
        """The number of delegations that have not ended."""
        return sum(map(len, self._live_delegations.values()))

    def delegations_lost(self) -> int:
        return len(self._lost_delegations)

    def delegations_ended_count(self) -> int:
        return len(self._ended_delegations)

    def delegation_ended_first(self) -> DelegationKey | None:
        return next(iter(self._ended_delegations), None)

    # Outbox

    def put_outbox_message(self, message: OutboxMessage) -> None:
        waiting = self._outbox.setdefault(message.peer, {}).setdefault(message.delegation, {})
        if message.seq not in waiting:
            self._outbox_counts[message.peer] = self._outbox_counts.get(message.peer, 0) + 1
        waiting[message.seq] = message

    def _waiting(self, key: DelegationKey) -> dict[int, OutboxMessage]:
        return self._outbox.get(key.peer, {}).get(key, {})

    def outbox_message(self, key: DelegationKey, seq: int) -> OutboxMessage | None:
        return self._waiting(key).get(seq)

    def outbox_count(self, peer: InstanceId) -> int:
        return self._outbox_counts.get(peer, 0)

    def outbox_total(self) -> int:
        return sum(self._outbox_counts.values())

    def outbox_first(self, key: DelegationKey) -> OutboxMessage | None:
        return next(iter(self._waiting(key).values()), None)

    def outbox_last(self, key: DelegationKey) -> OutboxMessage | None:
        return next(reversed(self._waiting(key).values()), None)

    def outbox_of(self, peer: InstanceId) -> Iterator[OutboxMessage]:
        """By delegation, each in its order."""
        return (message for waiting in self._outbox.get(peer, {}).values() for message in waiting.values())

    def addressees(self) -> Sequence[InstanceId]:
        return tuple(self._outbox)

    def all_outbox_messages(self) -> Iterator[OutboxMessage]:
        return (message for peer in self._outbox for message in self.outbox_of(peer))

    def _drop_messages(self, key: DelegationKey, through: int, ts_ms: int, *, sent: bool) -> None:
        of_peer = self._outbox[key.peer]
        waiting = of_peer[key]
        for message in [each for each in waiting.values() if each.seq <= through]:
            del waiting[message.seq]
            self._outbox_counts[key.peer] -= 1
            if not sent:
                continue
            self.messages.append(
                LoggedMessage(
                    at_ms=ts_ms,
                    direction="sent",
                    peer=key.peer,
                    typ=message.typ,
                    id=str(message.seq),
                    offer_id=key.offer_id,
                )
            )
        if not waiting:
            del of_peer[key]
            if not of_peer:
                del self._outbox[key.peer], self._outbox_counts[key.peer]

    # Received envelopes

    def _receive_envelope(self, envelope: ReceivedEnvelope, offer_id: str | None, ts_ms: int) -> None:
        self.forget_envelopes(ts_ms)
        self.put_envelope(envelope)
        sender = envelope.sender
        peer = self.peers_by_id.get(sender)
        if peer is not None:
            self.put_peer(effects.last_heard(peer, ts_ms))
        self.messages.extend(effects.envelope_logged(envelope, offer_id, ts_ms))

    def put_envelope(self, envelope: ReceivedEnvelope) -> None:
        self._envelopes.setdefault(envelope.sender, {})[envelope.jti] = envelope
        heapq.heappush(self._envelope_expiries, (envelope.until_ms, envelope.sender, envelope.jti))

    def forget_envelopes(self, now_ms: int) -> None:
        """Drops expired envelopes, which are refused as stale. Time alone decides, so that a replay does the same."""
        while self._envelope_expiries and self._envelope_expiries[0][0] < now_ms:
            _, sender, jti = heapq.heappop(self._envelope_expiries)
            of_sender = self._envelopes[sender]
            del of_sender[jti]
            if not of_sender:
                del self._envelopes[sender]

    def envelope_taken(self, sender: InstanceId, jti: str) -> bool:
        return jti in self._envelopes.get(sender, ())

    def envelope_count(self, sender: InstanceId) -> int:
        return len(self._envelopes.get(sender, ()))

    def all_envelopes(self) -> Iterator[ReceivedEnvelope]:
        return (envelope for of_sender in self._envelopes.values() for envelope in of_sender.values())

    # Tokens

    def put_revoked(self, revoked: TokenRevoked, now_ms: int) -> None:
        over_ms = now_ms - REVOKED_KEPT_MS
        for token_id in [each for each, known in self.tokens_revoked.items() if known.until_ms < over_ms]:
            del self.tokens_revoked[token_id]
        self.tokens_revoked[revoked.token_id] = revoked

    def token_revoked(self, token_id: str) -> bool:
        return token_id in self.tokens_revoked


class PeerReads:
    """Reads of peers, delegations and messages as the ledger's contract has them, from memory."""

    _state: PeerIndex

    def peers(self) -> Sequence[Peer]:
        return tuple(self._state.peers_by_id.values())

    async def delegation(self, key: DelegationKey) -> Delegation | None:
        return self._state.delegation(key)

    async def delegation_of(self, task_id: TaskId) -> Delegation | None:
        return self._state.delegation_of(task_id)

    async def delegations(self) -> Sequence[Delegation]:
        return tuple(self._state.delegations())

    async def delegations_live(self, role: DelegationRole, peer: InstanceId | None = None) -> Sequence[Delegation]:
        return self._state.delegations_live(role, peer)

    async def peer_outbox(self, peer: InstanceId) -> Sequence[OutboxMessage]:
        return tuple(self._state.outbox_of(peer))

    async def addressees(self) -> Sequence[InstanceId]:
        return self._state.addressees()

    async def envelope_taken(self, sender: InstanceId, jti: str) -> bool:
        return self._state.envelope_taken(sender, jti)

    async def peer_usage(self, since: int, peer: InstanceId | None = None) -> Sequence[PeerUsage]:
        return tuple(self._state.peer_usage(since, peer))

    async def message_log(self) -> Sequence[LoggedMessage]:
        return tuple(reversed(self._state.messages))
