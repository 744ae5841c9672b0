"""What the operator is told of peers and delegations. Names are in camel case, as the protocol has them."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from covenant.doors.answers import Answer
from covenant.ledger.contract.tasks import TreeNode
from covenant.model.peers.delegation import Delegation, LoggedMessage
from covenant.model.peers.delegation_messages import DelegationStatus, Profile, Proof, TokenUsage
from covenant.model.peers.instance import InstanceId, Trust
from covenant.model.peers.peer_record import Peer
from covenant.wire.operator_requests import PeerLimitsInput, PendingMessages

ONLINE_MS = 90_000
"""Who was heard of since is there."""

Presence = Literal["online", "offline", "unknown"]


class CapabilitiesShown(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """What somebody offers, and how busy they are. `trust_level` is what we are to them."""

    profiles: tuple[Profile, ...]
    versions: tuple[int, ...]
    active_delegations: int
    free_slots: int
    trust_level: Trust
    issued_at_ms: int
    expires_at_ms: int


class PeerShown(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    id: InstanceId
    name: str
    url: str | None
    public_key: str | None
    trust_level: Trust
    denied: bool
    source: str
    status: Presence
    last_seen: int | None
    added_at_ms: int
    verified_at_ms: int | None
    conflict: str | None
    capabilities: tuple[Profile, ...]
    limits: PeerLimitsInput
    waiting: PendingMessages

    @classmethod
    def of(cls, peer: Peer, waiting: PendingMessages, now_ms: int) -> PeerShown:
        return cls(
            id=peer.id,
            name=peer.name,
            url=peer.url,
            public_key=peer.keys.identity_key if peer.keys is not None else None,
            trust_level=peer.trust,
            denied=peer.denied,
            source=peer.source,
            status=_presence(peer, waiting, now_ms),
            last_seen=peer.heard_at_ms or None,
            added_at_ms=peer.added_at_ms,
            verified_at_ms=peer.verified_at_ms,
            conflict=peer.conflict,
            capabilities=peer.capabilities.profiles if peer.capabilities is not None else (),
            limits=PeerLimitsInput(**msgspec.structs.asdict(peer.limits)),
            waiting=waiting,
        )


def _presence(peer: Peer, waiting: PendingMessages, now_ms: int) -> Presence:
    if waiting.failure is not None:
        return "offline"
    heard_ms = max(peer.heard_at_ms, peer.capabilities.issued_at_ms if peer.capabilities is not None else 0)
    return "online" if now_ms - heard_ms <= ONLINE_MS else "unknown"


class DelegationShown(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """`id` is that of the task here; `delegation_id` what its provider calls it."""

    id: str
    offer_id: str
    delegation_id: str | None
    role: str
    peer_id: InstanceId
    peer: str
    profile: str
    status: DelegationStatus
    state: str
    remote: bool
    max_token_budget: int
    timeout: int
    token_usage: TokenUsage
    progress: float | None
    message: str | None
    code: str | None
    reason: str | None
    retry_after: int | None
    overspent: bool
    broken: tuple[str, ...]
    redacted: int
    proven: bool
    made_at_ms: int
    moved_at_ms: int
    heard_at_ms: int

    @classmethod
    def of(cls, delegation: Delegation, name: str) -> DelegationShown:
        return cls(
            id=delegation.task_id,
            offer_id=delegation.offer_id,
            delegation_id=delegation.delegation_id,
            role=delegation.role.value,
            peer_id=delegation.peer,
            peer=name,
            profile=delegation.profile,
            status=delegation.status,
            state=delegation.state.value,
            remote=delegation.role.value == "requester",
            max_token_budget=delegation.budget,
            timeout=delegation.timeout_ms,
            token_usage=delegation.usage,
            progress=delegation.progress,
            message=delegation.message,
            code=delegation.code,
            reason=delegation.reason,
            retry_after=delegation.retry_after_ms,
            overspent=delegation.overspent,
            broken=delegation.broken,
            redacted=delegation.redacted,
            proven=delegation.proof is not None and not delegation.broken,
            made_at_ms=delegation.made_at_ms,
            moved_at_ms=delegation.moved_at_ms,
            heard_at_ms=delegation.heard_at_ms,
        )


class PeerAnswer(Answer, frozen=True, kw_only=True, rename="camel", tag="peer"):
    peer: PeerShown
    note: str | None = None
    """What could not be done besides, and what to do about it."""


class PeerList(Answer, frozen=True, kw_only=True, rename="camel", tag="peers"):
    """`id` and `name` are our own."""

    peers: tuple[PeerShown, ...]
    total: int
    id: InstanceId
    name: str


class PeerRemoved(Answer, frozen=True, kw_only=True, rename="camel", tag="peer_removed"):
    id: InstanceId
    name: str


class TokensRevoked(Answer, frozen=True, kw_only=True, rename="camel", tag="peer_tokens_revoked"):
    id: InstanceId
    revoked: int


class Discovered(Answer, frozen=True, kw_only=True, rename="camel", tag="peers_discovered"):
    """Candidates, and how finding them goes. None of them is a peer by being here."""

    discovered: tuple[Any, ...]
    ways: tuple[Any, ...]


class CapabilitiesAnswer(Answer, frozen=True, kw_only=True, rename="camel", tag="peer_capabilities"):
    """`peer` is None for our own."""

    peer: str | None
    capabilities: CapabilitiesShown


class Delegated(Answer, frozen=True, kw_only=True, rename="camel", tag="delegated"):
    """`delegation_id` is the id of its task here. `remote` is false where an agent here does it."""

    delegation_id: str
    peer_id: InstanceId | None
    profile: str
    status: DelegationStatus
    remote: bool
    duplicate: bool = False


class DelegationAnswer(Answer, frozen=True, kw_only=True, rename="camel", tag="delegation"):
    delegation: DelegationShown
    result: str | None = None
    error: str | None = None


class DelegationList(Answer, frozen=True, kw_only=True, rename="camel", tag="delegations"):
    """Lost ones first, then the one that moved last first."""

    delegations: tuple[DelegationShown, ...]
    total: int


class DelegationTreeAnswer(Answer, frozen=True, kw_only=True, rename="camel", tag="delegation_tree"):
    tree: TreeNode


class ProofAnswer(Answer, frozen=True, kw_only=True, rename="camel", tag="delegation_proof"):
    """All that `covenant peers verify-proof` needs, offline. `transcript` is None where it stayed with the provider."""

    offer: Any
    result: Any
    transcript: Any
    proof: Proof | None


class MessageShown(msgspec.Struct, frozen=True, gc=False, kw_only=True, rename="camel", omit_defaults=True):
    """One line of what went to and fro; never what it said."""

    at_ms: int
    direction: str
    peer: InstanceId
    type: str
    id: str
    offer_id: str | None = None

    @classmethod
    def of(cls, logged: LoggedMessage) -> MessageShown:
        return cls(
            at_ms=logged.at_ms,
            direction=logged.direction,
            peer=logged.peer,
            type=logged.typ,
            id=logged.id,
            offer_id=logged.offer_id,
        )


class PeerMessageList(Answer, frozen=True, kw_only=True, rename="camel", tag="peer_messages"):
    messages: tuple[MessageShown, ...]
    total: int


class ConfigAnswer(Answer, frozen=True, kw_only=True, rename="camel", tag="peer_config"):
    """The settings of `[peers]` as they are in force."""

    id: InstanceId
    name: str
    config: dict[str, Any]
