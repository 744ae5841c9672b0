"""Commands about peers, and about what is said to them and heard from them."""

from __future__ import annotations

import msgspec

from covenant.ledger.machine.commands import AUDIT, Accept, Command, Key
from covenant.model.ids import AgentId
from covenant.model.peers.delegation import (
    Challenge,
    Delegation,
    DelegationKey,
    DelegationQuestion,
    IssuedToken,
    OutboxMove,
    Peer,
    PeerCapabilities,
    PeerLimits,
    ReceivedEnvelope,
)
from covenant.model.peers.delegation_messages import DelegationInput, DelegationResult, Proof, TokenUsage
from covenant.model.peers.instance import FormerKey, InstanceId, KeyBundle, Trust
from covenant.model.tenants import DEFAULT

PEERS: Key = ("peers",)
"""How many there are, and what they are called."""
ENDED: Key = ("delegations",)
"""How many that have ended are kept."""


class AddPeer(Command[Peer], frozen=True, gc=False, kw_only=True):
    """`added_at_ms` is when this is decided. The same again changes nothing; an id that is there with another address
    or name is a conflict, and `ChangePeer` is for that."""

    by: AgentId
    peer: Peer

    def keys(self) -> tuple[Key, ...]:
        tenant = self.peer.tenant
        return PEERS, *peer_keys(self.peer.id), *((("tenant", tenant),) if tenant != DEFAULT else ())


class PeerCommand(Command[Peer], frozen=True, gc=False, kw_only=True):
    id: InstanceId

    def keys(self) -> tuple[Key, ...]:
        return PEERS, *peer_keys(self.id)


class ChangePeer(PeerCommand, frozen=True, gc=False, kw_only=True):
    """By an operator. None leaves a thing as it is; an empty `url` is none.

    `tokenless`: its tokens were revoked, and it gets no other one before `trust` is said again.
    """

    by: AgentId
    name: str | None = None
    url: str | None = None
    trust: Trust | None = None
    denied: bool | None = None
    limits: PeerLimits | None = None
    tokenless: bool | None = None


class RemovePeer(PeerCommand, frozen=True, gc=False, kw_only=True):
    """With what waits for it. Its delegations that have not ended are the caller's to end first."""

    by: AgentId


class LearnPeer(PeerCommand, frozen=True, gc=False, kw_only=True):
    """What was learned of a peer by talking to it, and checked. None leaves a thing as it is.

    With `verified`, the first time, a mere peer is verified from here on: it has answered `challenge`, which must be
    the one that it was last sent. No trust is ever lost or gained by anything else here.
    """

    by: AgentId
    keys_shown: KeyBundle | None = None
    challenge: Challenge | None = None
    capabilities: PeerCapabilities | None = None
    verified: bool = False
    conflict: str | None = None
    """Empty: there is none any more."""
    issued: IssuedToken | None = None
    """A token that it is given with this."""
    epoch: str | msgspec.UnsetType | None = msgspec.UNSET
    told_epoch: str | msgspec.UnsetType | None = msgspec.UNSET
    told_id: str | msgspec.UnsetType | None = msgspec.UNSET
    end: tuple[str | None, int] | msgspec.UnsetType = msgspec.UNSET
    former: tuple[FormerKey, ...] | msgspec.UnsetType = msgspec.UNSET
    """The identities that it had, with what was heard of them since."""


class SucceedPeer(Command[Peer], frozen=True, gc=False, kw_only=True):
    """A peer goes by a new identity, with all that the old one had. Its old key has said so, or the operator has."""

    by: AgentId
    old: InstanceId
    keys_shown: KeyBundle
    vouched: bool
    """By the old key. Otherwise the operator says so, and it is a mere peer until it is verified again."""
    former: tuple[FormerKey, ...] = ()
    """The identities between the one that we know and the new one, the known one first."""

    def keys(self) -> tuple[Key, ...]:
        return PEERS, *peer_keys(self.old), *peer_keys(InstanceId(self.keys_shown.id))


class RevokeToken(Command[bool], frozen=True, gc=False, kw_only=True):
    """Of a token that we issued, by the id of a block. Whether it was not revoked before."""

    by: AgentId
    token_id: str
    until_ms: int
    """When it would have expired by itself."""

    def keys(self) -> tuple[Key, ...]:
        return ("token", self.token_id), AUDIT


class PeerMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A message for the other side. Numbered when it is decided."""

    typ: str
    body: msgspec.Raw
    latest: bool = False
    """It takes the place of the last one that waits, if that is of its type and nobody has tried to deliver it."""


class DelegationChanges(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What else is known of a delegation from here on. What is not set stays as it is."""

    delegation_id: str | msgspec.UnsetType = msgspec.UNSET
    budget: int | msgspec.UnsetType = msgspec.UNSET
    timeout_ms: int | msgspec.UnsetType = msgspec.UNSET
    accepted_at_ms: int | msgspec.UnsetType = msgspec.UNSET
    status_interval_ms: int | msgspec.UnsetType = msgspec.UNSET
    offered_in: tuple[str | None, str | None] | msgspec.UnsetType = msgspec.UNSET
    status_seq: int | msgspec.UnsetType = msgspec.UNSET
    usage: TokenUsage | msgspec.UnsetType = msgspec.UNSET
    progress: float | msgspec.UnsetType | None = msgspec.UNSET
    message: str | msgspec.UnsetType | None = msgspec.UNSET
    code: str | msgspec.UnsetType | None = msgspec.UNSET
    reason: str | msgspec.UnsetType | None = msgspec.UNSET
    retry_after_ms: int | msgspec.UnsetType | None = msgspec.UNSET
    overspent: bool | msgspec.UnsetType = msgspec.UNSET
    broken: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET
    redacted: int | msgspec.UnsetType = msgspec.UNSET
    result: DelegationResult | msgspec.UnsetType | None = msgspec.UNSET
    settled: bool | msgspec.UnsetType = msgspec.UNSET
    proof: Proof | msgspec.UnsetType | None = msgspec.UNSET
    question: DelegationQuestion | msgspec.UnsetType | None = msgspec.UNSET
    answered: int | msgspec.UnsetType = msgspec.UNSET
    answered_turn: int | msgspec.UnsetType = msgspec.UNSET
    answer: DelegationInput | msgspec.UnsetType | None = msgspec.UNSET


class DelegationMoved(msgspec.Struct, frozen=True, kw_only=True):
    """Where a delegation stands afterwards. `changed`: something happened that was not known before."""

    delegation: Delegation
    changed: bool = True


class SendToPeer(Command[DelegationMoved], frozen=True, gc=False, kw_only=True):
    """We say, or find, something of a delegation. `happenings` are moves of the table, in order; there may be none.

    `begin`: how it begins, if there is no record of it; its state, numbers and times are decided here.
    """

    key: DelegationKey
    begin: Delegation | None = None
    happenings: tuple[str, ...] = ()
    changes: DelegationChanges = DelegationChanges()
    said: tuple[PeerMessage, ...] = ()
    by: AgentId | None = None
    """Who is in the audit for it, if it is to be there."""
    replaces: DelegationKey | None = None
    """The offer of the same task that this one comes after: it has ended, and is not kept."""
    withdraws: bool = False
    """Its offer is not to be sent any more: `said` is the cancel, for a peer that may have the offer already."""
    unsent_since_ms: int | None = None
    """An offer that was made since then, and was not tried, was sent to nobody: it is withdrawn without a word."""

    def keys(self) -> tuple[Key, ...]:
        before = self.replaces
        of_before = (*peer_keys(before.peer), *delegation_keys(before)) if before is not None else ()
        return *peer_keys(self.key.peer), *delegation_keys(self.key), *of_before


class ReceivedFromPeer(msgspec.Struct, frozen=True, kw_only=True):
    """What became of an envelope. `moved` is None if it was of no delegation that is known here.

    `known`: it brought work that was begun before, of which no delegation is left. Nothing was begun.
    """

    moved: DelegationMoved | None = None
    known: bool = False


class ReceiveFromPeer(Command[ReceivedFromPeer], frozen=True, gc=False, kw_only=True):
    """An envelope is taken in, once (`replayed` otherwise), with all that follows from it in the same record.

    What is numbered is taken in order: what was heard before changes nothing, what leaves a gap is `out_of_order`.
    After a restore on either side the first that is heard is the first, whatever its number. What can not happen to a
    delegation any more, because it has ended, changes nothing either. The rest is as in `SendToPeer`.
    """

    envelope: ReceivedEnvelope
    key: DelegationKey | None = None
    begin: Delegation | None = None
    happenings: tuple[str, ...] = ()
    changes: DelegationChanges = DelegationChanges()
    said: tuple[PeerMessage, ...] = ()
    accept: Accept | None = None
    """The work that a provider begins with it."""
    by: AgentId | None = None

    def keys(self) -> tuple[Key, ...]:
        sender = self.envelope.sender
        of_task = self.accept.keys() if self.accept is not None else ()
        of_delegation = delegation_keys(self.key) if self.key is not None else ()
        return ("envelopes", sender), *peer_keys(sender), *of_delegation, *of_task


class MoveParcels(Command[None], frozen=True, gc=False, kw_only=True):
    """What deliveries came to. Those that are gone already are left alone."""

    moves: tuple[OutboxMove, ...]

    def keys(self) -> tuple[Key, ...]:
        return tuple(
            key for move in self.moves for key in (*peer_keys(move.delegation.peer), *delegation_keys(move.delegation))
        )


def peer_keys(peer: InstanceId) -> tuple[Key, ...]:
    """A peer stands for its delegations too, as far as they are counted, removed or renamed with it."""
    return ("peer", peer), AUDIT


def delegation_keys(key: DelegationKey) -> tuple[Key, ...]:
    return ("delegation", key.role.value, key.peer, key.offer_id), ENDED, AUDIT
