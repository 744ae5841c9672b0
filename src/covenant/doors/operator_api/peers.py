"""The operator's operations on peers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal, Protocol

import msgspec

from covenant.doors.operator_api.operation import AnyApiOperation, ApiAnswer, ApiOperation, Services, fill, fit
from covenant.exchange.access.principals import Principal
from covenant.ledger.contract.tasks import TreeNode
from covenant.model.errors import Invalid
from covenant.model.ids import AgentId, TaskId
from covenant.model.peers.delegation import (
    Delegation,
    DelegationBegun,
    DelegationEvidence,
    DelegationView,
    LoggedMessage,
    Peer,
    PeerCapabilities,
    PeerLimits,
    PendingMessages,
)
from covenant.model.peers.delegation_messages import Profile
from covenant.model.peers.instance import InstanceId, KeyCertificate, KeyPurpose, Trust
from covenant.model.tenants import DEFAULT
from covenant.seal.identity import fingerprint_of
from covenant.wire.mailbox import EmptyRequest, Request, StrictRequest
from covenant.wire.peers import DelegateRequest, NameOrId

PAGE_MAX = 100

Presence = Literal["online", "offline", "unknown"]
Page = Annotated[int, msgspec.Meta(ge=1, le=PAGE_MAX)]
Offset = Annotated[int, msgspec.Meta(ge=0, le=1_000_000)]
PeerBound = Offset
DayBound = Annotated[int, msgspec.Meta(ge=0, le=1_000_000_000_000)]
ONLINE_MS = 90_000
"""A peer that has sent a message within this time counts as online."""
PEERS: Final = "/api/v1/a2a/peers"
PEER: Final = "/api/v1/a2a/peers/{peer_id}"
DISCOVER: Final = "/api/v1/a2a/discover"
ROTATE_KEYS: Final = "/api/v1/a2a/rotate-keys"
CAPABILITIES: Final = "/api/v1/a2a/capabilities"
MESSAGES: Final = "/api/v1/a2a/messages"
CONFIG: Final = "/api/v1/a2a/config"


class PeerQuery(Request, frozen=True, kw_only=True, rename="camel"):
    """The base of requests that read."""


class PeerChange(StrictRequest, frozen=True, kw_only=True, rename="camel"):
    """The base of requests that change a peer."""

    peer_id: str = ""
    """The peer's id, its name, or the beginning of its id."""


class ListPeersRequest(PeerQuery, frozen=True, kw_only=True):
    status: Presence | None = None
    trust_level: Trust | None = None
    limit: Page = 20
    offset: Offset = 0


class AddPeerRequest(StrictRequest, frozen=True, kw_only=True, rename="camel"):
    """Adds a peer by its address, or by its id alone if it has no address and polls."""

    url: Annotated[str, msgspec.Meta(max_length=2_048)] | None = None
    id: Annotated[str, msgspec.Meta(max_length=64)] | None = None
    name: Annotated[str, msgspec.Meta(min_length=1, max_length=64)] | None = None
    tenant: Annotated[str, msgspec.Meta(min_length=1, max_length=64)] = DEFAULT


class PeerRequest(PeerQuery, frozen=True, kw_only=True):
    """`peer_id`: its id, its name, or the beginning of its id."""

    peer_id: str = ""


class TrustPeerRequest(PeerChange, frozen=True, kw_only=True):
    trust_level: Trust


class PeerLimitsInput(msgspec.Struct, frozen=True, gc=False, kw_only=True, rename="camel", omit_defaults=True):
    """A limit that is left out is that of the settings."""

    offers_per_min: PeerBound | None = None
    concurrent: PeerBound | None = None
    budget_max: PeerBound | None = None
    offers_per_day: DayBound | None = None
    tokens_per_day: DayBound | None = None


class ChangePeerRequest(PeerChange, frozen=True, kw_only=True):
    """A field that is left out stays as it is; limits change together.

    An empty `url`: the peer has no address any more.
    """

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=64)] | None = None
    url: Annotated[str, msgspec.Meta(max_length=2_048)] | None = None
    denied: bool | None = None
    limits: PeerLimitsInput | None = None


class SucceedPeerRequest(PeerChange, frozen=True, kw_only=True):
    new_id: Annotated[str, msgspec.Meta(max_length=64)]


class RotateKeysRequest(StrictRequest, frozen=True, kw_only=True):
    compromised: bool = False


class DiscoverPeersRequest(PeerQuery, frozen=True, kw_only=True):
    timeout_ms: Annotated[int, msgspec.Meta(ge=0, le=30_000)] = 5_000


class ShowCapabilitiesRequest(PeerQuery, frozen=True, kw_only=True):
    """The capabilities of a peer; without `peer_id`, our own."""

    peer_id: NameOrId | None = None
    fresh: bool = False


class ListPeerMessagesRequest(PeerQuery, frozen=True, kw_only=True):
    peer_id: NameOrId | None = None
    type: Annotated[str, msgspec.Meta(max_length=32)] | None = None
    limit: Page = 20
    offset: Offset = 0


class CapabilitiesShown(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The agents that an instance offers, and how busy it is. `trust_level` is its trust in us."""

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
    fingerprint: str
    """The fingerprint of its key, for people to compare; it follows from the id."""
    trust_level: Trust
    tenant: str
    denied: bool
    source: str
    status: Presence
    last_seen: int | None
    added_at_ms: int
    verified_at_ms: int | None
    conflict: str | None
    former_ids: tuple[str, ...]
    """The peer's former ids, the newest last."""
    capabilities: tuple[Profile, ...]
    limits: PeerLimitsInput
    waiting: PendingMessages


def peer_shown(peer: Peer, waiting: PendingMessages, now_ms: int) -> PeerShown:
    return fill(
        PeerShown,
        peer,
        public_key=peer.keys.identity_key if peer.keys is not None else None,
        fingerprint=fingerprint_of(peer.id),
        trust_level=peer.trust,
        status=_presence(peer, waiting, now_ms),
        last_seen=peer.heard_at_ms or None,
        capabilities=peer.capabilities.profiles if peer.capabilities is not None else (),
        limits=fill(PeerLimitsInput, peer.limits),
        waiting=waiting,
        former_ids=peer.ids[1:],
    )


def _presence(peer: Peer, waiting: PendingMessages, now_ms: int) -> Presence:
    if waiting.failure is not None:
        return "offline"
    heard_ms = max(peer.heard_at_ms, peer.capabilities.issued_at_ms if peer.capabilities is not None else 0)
    return "online" if now_ms - heard_ms <= ONLINE_MS else "unknown"


class PeerAnswer(ApiAnswer, frozen=True, kw_only=True, rename="camel", tag="peer"):
    peer: PeerShown
    note: str | None = None
    """What could not be done yet, and what to do about it."""


class PeerList(ApiAnswer, frozen=True, kw_only=True, rename="camel", tag="peers"):
    """`id` and `name` are our own."""

    peers: tuple[PeerShown, ...]
    total: int
    id: InstanceId
    name: str


class PeerRemovedAnswer(ApiAnswer, frozen=True, kw_only=True, rename="camel", tag="peer_removed"):
    id: InstanceId
    name: str


class TokensRevoked(ApiAnswer, frozen=True, kw_only=True, rename="camel", tag="peer_tokens_revoked"):
    id: InstanceId
    revoked: int


class CertifiedKey(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    purpose: KeyPurpose
    key: str
    not_after_ms: int


class PurposeKeysAnswer(ApiAnswer, frozen=True, kw_only=True, rename="camel", tag="purpose_keys_rotated"):
    id: InstanceId
    keys: tuple[CertifiedKey, ...]
    compromised: bool


class Discovered(ApiAnswer, frozen=True, kw_only=True, rename="camel", tag="peers_discovered"):
    """Candidates, and the state of each method of discovery. A candidate is not a peer."""

    discovered: tuple[Any, ...]
    ways: tuple[Any, ...]


class CapabilitiesAnswer(ApiAnswer, frozen=True, kw_only=True, rename="camel", tag="peer_capabilities"):
    """`peer` is None for our own."""

    peer: str | None
    capabilities: CapabilitiesShown


class PeerMessageShown(msgspec.Struct, frozen=True, gc=False, kw_only=True, rename="camel", omit_defaults=True):
    """One message that was sent or received, without its content."""

    at_ms: int
    direction: str
    peer: InstanceId
    type: str
    id: str
    offer_id: str | None = None


class PeerMessageList(ApiAnswer, frozen=True, kw_only=True, rename="camel", tag="peer_messages"):
    messages: tuple[PeerMessageShown, ...]
    total: int


class ConfigAnswer(ApiAnswer, frozen=True, kw_only=True, rename="camel", tag="peer_config"):
    """The settings of `[peers]` as they are in force."""

    id: InstanceId
    name: str
    config: dict[str, Any]


class PeerOperations(Protocol):
    """The operations of a daemon with peers. `named`: an id, a name, or the beginning of an id."""

    @property
    def id(self) -> InstanceId: ...
    @property
    def name(self) -> str: ...
    @property
    def config(self) -> dict[str, Any]: ...

    async def peers(self) -> Sequence[Peer]: ...
    async def waiting(self, peer: InstanceId) -> PendingMessages: ...
    def find(self, named: str) -> Peer: ...
    async def add(
        self, by: AgentId, *, url: str | None, peer_id: str | None, name: str | None, tenant: str = DEFAULT
    ) -> tuple[Peer, str | None]:
        """Returns the peer, and what could not be done yet."""

    async def remove(self, by: AgentId, named: str) -> Peer: ...
    async def change(
        self,
        by: AgentId,
        named: str,
        *,
        name: str | None = None,
        url: str | None = None,
        trust: Trust | None = None,
        denied: bool | None = None,
        limits: PeerLimits | None = None,
    ) -> Peer: ...
    async def verify(self, named: str) -> Peer: ...
    async def succeed(self, by: AgentId, named: str, new_id: str) -> Peer: ...
    async def revoke_tokens(self, by: AgentId, named: str) -> int: ...
    async def rotate_keys(self, by: AgentId, *, compromised: bool) -> tuple[KeyCertificate, ...]: ...
    async def discover(self, timeout_s: float) -> tuple[Sequence[Any], Sequence[Any]]:
        """Candidates, and the methods of discovery."""

    async def capabilities(self, named: str | None, *, fresh: bool) -> tuple[str | None, PeerCapabilities]: ...
    async def delegate(self, by: AgentId, asked: DelegateRequest) -> DelegationBegun: ...
    async def delegations(self) -> Sequence[Delegation]: ...
    async def delegation(self, named: str) -> DelegationView: ...
    async def task_id(self, named: str) -> TaskId: ...
    async def cancel(self, by: AgentId, named: str, reason: str) -> Delegation: ...
    async def offer_again(self, by: AgentId, named: str) -> Delegation: ...
    async def force_error(self, by: AgentId, named: str, reason: str) -> Delegation: ...
    async def evidence(self, named: str) -> DelegationEvidence: ...
    async def tree(self, named: str) -> TreeNode: ...
    async def messages(self) -> Sequence[LoggedMessage]: ...
    def quota(self, peer: Peer) -> tuple[int | None, int | None]:
        """The most offers and tokens of a peer in a day; None: no limit."""


async def _shown(services: Services, peers: PeerOperations, peer: Peer) -> PeerShown:
    return peer_shown(peer, await peers.waiting(peer.id), services.ledger.now_ms())


async def list_peers(services: Services, caller: Principal, request: ListPeersRequest) -> PeerList:
    peers = await services.require_peers(caller, "listing peers")
    shown = [await _shown(services, peers, peer) for peer in await peers.peers()]
    found = [
        peer
        for peer in shown
        if request.status in (None, peer.status) and request.trust_level in (None, peer.trust_level)
    ]
    page = found[request.offset : request.offset + request.limit]
    return PeerList(peers=fit(page), total=len(found), id=peers.id, name=peers.name)


async def add_peer(services: Services, caller: Principal, request: AddPeerRequest) -> PeerAnswer:
    peers = await services.require_peers(caller, "adding a peer")
    if request.url is None and (request.id is None or request.name is None):
        raise Invalid("invalid_request", "give url; or, for a peer that cannot be called, its id and a name")
    peer, note = await peers.add(
        caller.agent, url=request.url, peer_id=request.id, name=request.name, tenant=request.tenant
    )
    return PeerAnswer(peer=await _shown(services, peers, peer), note=note)


async def show_peer(services: Services, caller: Principal, request: PeerRequest) -> PeerAnswer:
    peers = await services.require_peers(caller, "showing a peer")
    return PeerAnswer(peer=await _shown(services, peers, peers.find(request.peer_id)))


async def remove_peer(services: Services, caller: Principal, request: PeerChange) -> PeerRemovedAnswer:
    peers = await services.require_peers(caller, "removing a peer")
    removed = await peers.remove(caller.agent, request.peer_id)
    return fill(PeerRemovedAnswer, removed)


async def trust_peer(services: Services, caller: Principal, request: TrustPeerRequest) -> PeerAnswer:
    peers = await services.require_peers(caller, "trusting a peer")
    changed = await peers.change(caller.agent, request.peer_id, trust=request.trust_level)
    return PeerAnswer(peer=await _shown(services, peers, changed))


async def change_peer(services: Services, caller: Principal, request: ChangePeerRequest) -> PeerAnswer:
    peers = await services.require_peers(caller, "changing a peer")
    limits = fill(PeerLimits, request.limits) if request.limits is not None else None
    changed = await peers.change(
        caller.agent,
        request.peer_id,
        name=request.name,
        url=request.url,
        denied=request.denied,
        limits=limits,
    )
    return PeerAnswer(peer=await _shown(services, peers, changed))


async def verify_peer(services: Services, caller: Principal, request: PeerRequest) -> PeerAnswer:
    peers = await services.require_peers(caller, "verifying a peer")
    return PeerAnswer(peer=await _shown(services, peers, await peers.verify(request.peer_id)))


async def succeed_peer(services: Services, caller: Principal, request: SucceedPeerRequest) -> PeerAnswer:
    peers = await services.require_peers(caller, "vouching for a peer's new identity")
    peer = await peers.succeed(caller.agent, request.peer_id, request.new_id)
    return PeerAnswer(peer=await _shown(services, peers, peer))


async def revoke_peer_tokens(services: Services, caller: Principal, request: PeerChange) -> TokensRevoked:
    peers = await services.require_peers(caller, "revoking a peer's tokens")
    peer = peers.find(request.peer_id)
    return TokensRevoked(id=peer.id, revoked=await peers.revoke_tokens(caller.agent, peer.id))


async def rotate_purpose_keys(services: Services, caller: Principal, request: RotateKeysRequest) -> PurposeKeysAnswer:
    peers = await services.require_peers(caller, "replacing the keys of this instance")
    certificates = await peers.rotate_keys(caller.agent, compromised=request.compromised)
    keys = tuple(
        CertifiedKey(purpose=each.purpose, key=each.key, not_after_ms=each.not_after_ms) for each in certificates
    )
    return PurposeKeysAnswer(id=peers.id, keys=keys, compromised=request.compromised)


async def discover_peers(services: Services, caller: Principal, request: DiscoverPeersRequest) -> Discovered:
    peers = await services.require_peers(caller, "discovering peers")
    found, ways = await peers.discover(request.timeout_ms / 1000)
    return Discovered(discovered=fit(found), ways=tuple(ways))


async def peer_capabilities(
    services: Services, caller: Principal, request: ShowCapabilitiesRequest
) -> CapabilitiesAnswer:
    peers = await services.require_peers(caller, "showing capabilities")
    name, found = await peers.capabilities(request.peer_id, fresh=request.fresh)
    return CapabilitiesAnswer(peer=name, capabilities=fill(CapabilitiesShown, found))


async def list_peer_messages(
    services: Services, caller: Principal, request: ListPeerMessagesRequest
) -> PeerMessageList:
    peers = await services.require_peers(caller, "listing messages")
    peer = peers.find(request.peer_id).id if request.peer_id is not None else None
    found = [each for each in await peers.messages() if peer in (None, each.peer) and request.type in (None, each.typ)]
    page = found[request.offset : request.offset + request.limit]
    shown = tuple(fill(PeerMessageShown, each, type=each.typ) for each in page)
    return PeerMessageList(messages=shown, total=len(found))


async def peer_config(services: Services, caller: Principal, _: EmptyRequest) -> ConfigAnswer:
    peers = await services.require_peers(caller, "showing the settings of peers")
    return ConfigAnswer(id=peers.id, name=peers.name, config=peers.config)


OPERATIONS: Final[tuple[AnyApiOperation, ...]] = (
    ApiOperation("GET", PEERS, list_peers, "Peers, the oldest first"),
    ApiOperation("POST", PEERS, add_peer, "Add another instance as a peer", status=201),
    ApiOperation("GET", PEER, show_peer, "One peer"),
    ApiOperation("PATCH", PEER, change_peer, "Change a peer's name, address or limits; deny it, or not"),
    ApiOperation("DELETE", PEER, remove_peer, "Remove a peer"),
    ApiOperation("PUT", f"{PEER}/trust", trust_peer, "Say how far a peer is trusted"),
    ApiOperation("POST", f"{PEER}/verify", verify_peer, "Challenge a peer to prove its key"),
    ApiOperation("POST", f"{PEER}/identity", succeed_peer, "Vouch that a peer goes by another id now"),
    ApiOperation("POST", f"{PEER}/revoke-tokens", revoke_peer_tokens, "Revoke every token that a peer was given"),
    ApiOperation("POST", ROTATE_KEYS, rotate_purpose_keys, "Make new keys for envelopes, proofs and tokens"),
    ApiOperation("POST", DISCOVER, discover_peers, "Look for other instances; none becomes a peer by that"),
    ApiOperation(
        "GET", CAPABILITIES, peer_capabilities, "The profiles that a peer offers, or, without peerId, this instance"
    ),
    ApiOperation("GET", MESSAGES, list_peer_messages, "Recent messages to and from peers, the newest first"),
    ApiOperation("GET", CONFIG, peer_config, "The settings of peers in force"),
)
