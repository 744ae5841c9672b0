"""Commands about peers, and about messages to and from them."""

from __future__ import annotations

import msgspec

from covenant.ledger.machine.commands import Accept, Command, LeasedTask
from covenant.model.ids import AgentId
from covenant.model.peers.delegation import (
    Challenge,
    Delegation,
    DelegationKey,
    DelegationQuestion,
    IssuedToken,
    OutboxMessage,
    OutboxMove,
    Peer,
    PeerCapabilities,
    PeerLimits,
    ReceivedEnvelope,
)
from covenant.model.peers.delegation_messages import (
    DelegationInput,
    DelegationOffer,
    DelegationResult,
    Proof,
    SubDelegation,
    TokenUsage,
)
from covenant.model.peers.instance import FormerKey, InstanceId, KeyBundle, Trust


class AddPeer(Command[Peer], frozen=True, gc=False, kw_only=True):
    """The peer's `added_at_ms` is the time of this decision. Repeating it changes nothing; a known id with another
    address or name is a conflict: use `ChangePeer`."""

    by: AgentId
    peer: Peer


class PeerCommand(Command[Peer], frozen=True, gc=False, kw_only=True):
    id: InstanceId


class ChangePeer(PeerCommand, frozen=True, gc=False, kw_only=True):
    """A change by an operator. None leaves a field unchanged; an empty `url` removes it.

    `tokenless`: the peer's tokens were revoked, and it gets no new one before `trust` is set again.
    """

    by: AgentId
    name: str | None = None
    url: str | None = None
    trust: Trust | None = None
    denied: bool | None = None
    limits: PeerLimits | None = None
    tokenless: bool | None = None


class RemovePeer(PeerCommand, frozen=True, gc=False, kw_only=True):
    """Removes a peer and the messages that wait for it. The caller must end its live delegations first."""

    by: AgentId


class LearnPeer(PeerCommand, frozen=True, gc=False, kw_only=True):
    """Checked facts that were learned from a peer. None leaves a field unchanged.

    With `verified`, for the first time, a mere peer becomes verified: it has answered `challenge`, which must be the
    last one that it was sent. Nothing else here changes its trust.
    """

    by: AgentId
    keys_shown: KeyBundle | None = None
    challenge: Challenge | None = None
    capabilities: PeerCapabilities | None = None
    verified: bool = False
    conflict: str | None = None
    """Empty: there is no conflict any more."""
    issued: IssuedToken | None = None
    """A token that the peer gets with the answer."""
    epoch: str | msgspec.UnsetType | None = msgspec.UNSET
    told_epoch: str | msgspec.UnsetType | None = msgspec.UNSET
    told_id: str | msgspec.UnsetType | None = msgspec.UNSET
    end: tuple[str | None, int] | msgspec.UnsetType = msgspec.UNSET
    void_before_ms: int | msgspec.UnsetType = msgspec.UNSET
    former: tuple[FormerKey, ...] | msgspec.UnsetType = msgspec.UNSET
    """The peer's former identities, with their revocations since."""


class SucceedPeer(Command[Peer], frozen=True, gc=False, kw_only=True):
    """A peer gets a new identity and keeps everything of the old one. Its old key, or the operator, vouches for it."""

    by: AgentId
    old: InstanceId
    keys_shown: KeyBundle
    vouched: bool
    """The old key vouches. Otherwise the operator does, and the peer must be verified again."""
    former: tuple[FormerKey, ...] = ()
    """The identities between the known one and the new one, the known one first."""


class RevokeToken(Command[bool], frozen=True, gc=False, kw_only=True):
    """Revokes a token that we issued, by the id of a block. The answer is False if it was revoked before."""

    by: AgentId
    token_id: str
    until_ms: int
    """When the token would have expired."""


class PeerMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A message for the other side. The decision gives it a number."""

    typ: str
    body: msgspec.Raw
    latest: bool = False
    """It replaces the last waiting message, if that has the same type and no delivery was tried."""


class DelegationChanges(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Further changes of a delegation. Fields that are not set stay unchanged."""

    delegation_id: str | msgspec.UnsetType = msgspec.UNSET
    budget: int | msgspec.UnsetType = msgspec.UNSET
    timeout_ms: int | msgspec.UnsetType = msgspec.UNSET
    accepted_at_ms: int | msgspec.UnsetType = msgspec.UNSET
    status_interval_ms: int | msgspec.UnsetType = msgspec.UNSET
    offer: DelegationOffer | msgspec.UnsetType = msgspec.UNSET
    offered_in: tuple[str | None, str | None] | msgspec.UnsetType = msgspec.UNSET
    status_seq: int | msgspec.UnsetType = msgspec.UNSET
    usage: TokenUsage | msgspec.UnsetType = msgspec.UNSET
    progress: float | msgspec.UnsetType | None = msgspec.UNSET
    message: str | msgspec.UnsetType | None = msgspec.UNSET
    below: tuple[SubDelegation, ...] | msgspec.UnsetType = msgspec.UNSET
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
    asked: int | msgspec.UnsetType = msgspec.UNSET
    answered: int | msgspec.UnsetType = msgspec.UNSET
    answered_turn: int | msgspec.UnsetType = msgspec.UNSET
    doubted: int | msgspec.UnsetType = msgspec.UNSET
    answer: DelegationInput | msgspec.UnsetType | None = msgspec.UNSET


class DelegationMoved(msgspec.Struct, frozen=True, kw_only=True):
    """The delegation afterwards. `changed`: something new happened."""

    delegation: Delegation
    changed: bool = True


class SendToPeer(Command[DelegationMoved], frozen=True, gc=False, kw_only=True):
    """Our message or finding about a delegation. `transitions` are names from the table, in order; there may be none.

    `begin`: a new delegation, if there is no record of it; its state, numbers and times are decided here.
    """

    key: DelegationKey
    begin: Delegation | None = None
    transitions: tuple[str, ...] = ()
    changes: DelegationChanges = DelegationChanges()
    messages: tuple[PeerMessage, ...] = ()
    by: AgentId | None = None
    """The issuer of the audit row, if there is to be one."""
    replaces: DelegationKey | None = None
    """The ended offer of the same task that this one follows; it is not kept."""
    withdraws: bool = False
    """The offer is withdrawn: `messages` is the cancel, for a peer that may already have the offer."""
    unsent_since_ms: int | None = None
    """An offer that was made since then and never tried reached nobody: it is withdrawn without a message."""
    about: DelegationOffer | None = None
    """The offer that `messages` answer: refused as `offer_changed` if the peer has made the offer anew since."""


class ReceivedFromPeer(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of an envelope. `moved` is None if it was about no known delegation.

    `known`: it brought work that was begun before, and whose delegation is gone. Nothing was begun. `repeated`: a
    message with its number was received before. `leased`: the work that was begun, if it was leased to its starter.
    """

    moved: DelegationMoved | None = None
    leased: LeasedTask | None = None
    known: bool = False
    repeated: bool = False


class ReceiveFromPeer(Command[ReceivedFromPeer], frozen=True, gc=False, kw_only=True):
    """Receives an envelope once (`replayed` otherwise), with all its consequences in the same record.

    Numbered messages are applied in order: a repeated one changes nothing, a gap is `out_of_order`. After a restore on
    either side, the first message that arrives counts as the first, whatever its number. A message about an ended
    delegation changes nothing either. The rest is as in `SendToPeer`.
    """

    envelope: ReceivedEnvelope
    key: DelegationKey | None = None
    begin: Delegation | None = None
    transitions: tuple[str, ...] = ()
    changes: DelegationChanges = DelegationChanges()
    messages: tuple[PeerMessage, ...] = ()
    accept: Accept | None = None
    """The work that a provider begins with it."""
    by: AgentId | None = None


class MoveOutbox(Command[tuple[OutboxMessage, ...]], frozen=True, gc=False, kw_only=True):
    """The outcomes of deliveries. Messages that are gone already are left alone.

    Returns the messages that still wait, as they were.
    """

    moves: tuple[OutboxMove, ...]
