"""Delegations, messages and envelopes in the state of a batch. The peers themselves are in the registers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

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
)
from covenant.ledger.postgres.counters import Counters, count_delegation
from covenant.ledger.postgres.missing_rows import (
    LoadedRows,
    Missing,
    WantDelegation,
    WantEndedFirst,
    WantEnvelope,
    WantEnvelopeCount,
    WantLiveDelegations,
    WantOutbox,
    WantPeer,
)
from covenant.ledger.postgres.registers import Registers
from covenant.ledger.postgres.stored_task import encode_text
from covenant.model.peers.delegation import (
    Delegation,
    DelegationKey,
    LoggedMessage,
    OutboxMessage,
    Peer,
)
from covenant.model.peers.instance import InstanceId
from covenant.model.peers.usage_by_day import COUNTED, USAGE_DAYS, usage_change
from covenant.model.tenants import DEFAULT

replace = msgspec.structs.replace


Write = tuple[str, dict[str, Any]]
"""A statement of `write.sql`, and its values."""


class PeerRows(LoadedRows):
    registers: Registers
    counts: Counters
    base: Counters
    next_place: Callable[[], int]

    def __init__(self) -> None:
        self._delegations: dict[DelegationKey, Delegation | None] = {}
        self._of_peer: dict[InstanceId, None] = {}
        self._outbox: dict[DelegationKey, dict[int, OutboxMessage]] = {}
        self.peer_writes: list[Write] = []
        self.heard: dict[InstanceId, int] = {}

    # Loading

    def load_delegation(self, key: DelegationKey, delegation: Delegation | None) -> None:
        self._delegations[key] = delegation

    def load_peer(self, peer: InstanceId, delegations: Sequence[Delegation], messages: Sequence[OutboxMessage]) -> None:
        self._of_peer[peer] = None
        self._delegations |= {each.key: each for each in delegations}
        for message in messages:
            self._outbox.setdefault(message.delegation, {})[message.seq] = message

    def load_outbox(self, key: DelegationKey, messages: Sequence[OutboxMessage]) -> None:
        self._outbox[key] = {message.seq: message for message in messages}

    # Reads of decisions

    def delegation(self, key: DelegationKey) -> Delegation | None:
        if key not in self._delegations:
            raise Missing(WantDelegation(key))
        return self._delegations[key]

    def delegations_live_count(self, peer: InstanceId) -> int:
        return self.loaded(WantLiveDelegations(peer))

    def delegations_ended_count(self) -> int:
        return self.base.get("delegations_ended") + self.counts.get("delegations_ended")

    def delegation_ended_first(self) -> DelegationKey | None:
        return self.loaded(WantEndedFirst())

    def _waiting(self, key: DelegationKey) -> dict[int, OutboxMessage]:
        if key not in self._outbox:
            raise Missing(WantOutbox(key))
        return self._outbox[key]

    def outbox_message(self, key: DelegationKey, seq: int) -> OutboxMessage | None:
        return self._waiting(key).get(seq)

    def outbox_count(self, peer: InstanceId) -> int:
        return self.base.get("parcels", peer) + self.counts.get("parcels", peer)

    def outbox_first(self, key: DelegationKey) -> OutboxMessage | None:
        return next(iter(self._waiting(key).values()), None)

    def outbox_last(self, key: DelegationKey) -> OutboxMessage | None:
        return next(reversed(self._waiting(key).values()), None)

    def envelope_taken(self, sender: InstanceId, jti: str) -> bool:
        return self.loaded(WantEnvelope(sender, jti))

    def envelope_count(self, sender: InstanceId) -> int:
        return self.loaded(WantEnvelopeCount(sender))

    # Changes

    def check_peer_event(self, event: PeerEvent) -> None:
        """Raises `Missing` for rows that `apply_peer` would need."""
        match event:
            case PeerSucceeded(old) | PeerRemoved(old) if old not in self._of_peer:
                raise Missing(WantPeer(old))
            case DelegationPut(delegation):
                self.delegation(delegation.key)
            case DelegationDropped(key):
                self.delegation(key)
            case OutboxPut(message):
                self._waiting(message.delegation)
            case OutboxMoved(move):
                self._waiting(move.delegation)
            case OutboxDropped(key):
                self._waiting(key)
            case _:
                pass

    def apply_peer(self, event: PeerEvent, ts_ms: int) -> None:
        match event:
            case EnvelopeTaken():
                self._take_envelope(event, ts_ms)
            case DelegationPut(delegation):
                self._count_usage(delegation, ts_ms)
                self._put_delegation(delegation)
            case DelegationDropped(key):
                self._drop_delegation(key)
            case OutboxPut(message):
                self._put_message(message)
            case OutboxMoved(move):
                self._put_message(effects.moved_message(self._outbox[move.delegation][move.seq], move))
            case OutboxDropped(key, through, sent):
                self._drop_messages(key, through, ts_ms, sent=sent)
            case PeerPut(peer):
                question = effects.query_logged(self.registers.peer(peer.id), peer, ts_ms)
                if question is not None:
                    self._log(question)
            case PeerRemoved(peer_id):
                self.peer_writes.append(("parcels_of_peer_gone", {"peer": peer_id}))
                self.counts.count("parcels", peer_id, -self.outbox_count(peer_id))
                self._forget_tenants_peer(peer_id)
            case PeerSucceeded(old, peer):
                self._succeed(old, peer)
            case _:
                pass  # the registers have it

    def _forget_tenants_peer(self, peer_id: InstanceId) -> None:
        """Drops the delegations of a tenant's peer: the tenant's removal must find nothing here."""
        peer = self.registers.peer(peer_id)
        if peer is None or peer.tenant == DEFAULT:
            return
        for key in [key for key, known in self._delegations.items() if key.peer == peer_id and known is not None]:
            self._drop_delegation(key)
        self.peer_writes.append(("usage_of_peer_gone", {"peer": peer_id}))

    def _count_usage(self, delegation: Delegation, ts_ms: int) -> None:
        change = usage_change(self._delegations.get(delegation.key), delegation, ts_ms)
        if change is None:
            return
        if change.offers:
            self.peer_writes.append(("usage_over", {"day": change.day - USAGE_DAYS}))
        of = {"day": change.day, "role": change.role.value, "peer": change.peer, "profile": change.profile}
        self.peer_writes.append(("usage", of | {name: getattr(change, name) for name in COUNTED}))

    def _put_delegation(self, delegation: Delegation) -> None:
        old = self._delegations.get(delegation.key)
        if old is not None and delegation.offer is None and not delegation.ended:
            delegation = replace(delegation, offer=old.offer)
        self._count_delegation(old, delegation)
        self._delegations[delegation.key] = delegation
        self.peer_writes.append(
            (
                "delegations",
                {
                    "role": delegation.role.value,
                    "peer": delegation.peer,
                    "offer_id": delegation.offer_id,
                    "task_id": delegation.task_id,
                    "moved": self.next_place(),
                    "ended": delegation.ended,
                    "body": encode_text(delegation),
                },
            )
        )

    def _drop_delegation(self, key: DelegationKey) -> None:
        self._count_delegation(self._delegations[key], None)
        self._delegations[key] = None
        self.peer_writes.append(("delegation_gone", _key(key)))

    def _count_delegation(self, old: Delegation | None, new: Delegation | None) -> None:
        for delegation, change in ((old, -1), (new, 1)):
            if delegation is not None:
                count_delegation(self.counts, delegation, change)

    def _put_message(self, message: OutboxMessage) -> None:
        waiting = self._outbox.setdefault(message.delegation, {})
        if message.seq not in waiting:
            self.counts.count("parcels", message.peer, 1)
        waiting[message.seq] = message
        values = _key(message.delegation) | {
            "seq": message.seq,
            "made": self.next_place(),
            "body": encode_text(message),
        }
        self.peer_writes.append(("parcel", values))

    def _drop_messages(self, key: DelegationKey, through: int, ts_ms: int, *, sent: bool) -> None:
        waiting = self._outbox[key]
        for message in [each for each in waiting.values() if each.seq <= through]:
            del waiting[message.seq]
            self.counts.count("parcels", key.peer, -1)
            if not sent:
                continue
            self._log(
                LoggedMessage(
                    at_ms=ts_ms,
                    direction="sent",
                    peer=key.peer,
                    typ=message.typ,
                    id=str(message.seq),
                    offer_id=key.offer_id,
                )
            )
        self.peer_writes.append(("parcels_gone", _key(key) | {"through": through}))

    def _take_envelope(self, event: EnvelopeTaken, ts_ms: int) -> None:
        envelope = event.envelope
        self.peer_writes.append(("envelopes_over", {"now_ms": ts_ms}))
        self.peer_writes.append(
            ("envelope", {"sender": envelope.sender, "jti": envelope.jti, "until_ms": envelope.until_ms})
        )
        self.load(WantEnvelope(envelope.sender, envelope.jti), rows=True)
        if self.registers.peer(envelope.sender) is not None:
            self.heard[envelope.sender] = ts_ms
            self.peer_writes.append(("heard", {"peer": envelope.sender, "heard_at_ms": ts_ms}))
        for message in effects.envelope_logged(envelope, event.offer_id, ts_ms):
            self._log(message)

    def _log(self, message: LoggedMessage) -> None:
        self.peer_writes.append(("message", {"place": self.next_place(), "body": encode_text(message)}))

    def _succeed(self, old: InstanceId, peer: Peer) -> None:
        for key in [key for key, known in self._delegations.items() if key.peer == old and known is not None]:
            delegation = self._delegations[key]
            assert delegation is not None
            self._drop_delegation(key)
            self._put_delegation(replace(delegation, peer=peer.id))
        self.peer_writes.append(("usage_succeeded", {"old": old, "new": peer.id}))
        waiting = [message for key, of in self._outbox.items() if key.peer == old for message in of.values()]
        self.peer_writes.append(("parcels_of_peer_gone", {"peer": old}))
        self.counts.count("parcels", old, -len(waiting))
        for key in [key for key in self._outbox if key.peer == old]:
            del self._outbox[key]
        for message in waiting:
            self._put_message(replace(message, peer=peer.id))


def _key(key: DelegationKey) -> dict[str, Any]:
    return {"role": key.role.value, "peer": key.peer, "offer_id": key.offer_id}
