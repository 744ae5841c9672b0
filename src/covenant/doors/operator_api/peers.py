"""The operator's operations on peers, and on what is delegated to them and by them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal, Protocol

import msgspec

from covenant.doors.operator_api.answers import ApiAnswer
from covenant.doors.operator_api.operation import AnyApiOperation, Services, operation_row
from covenant.doors.operator_api.paging import fit
from covenant.exchange.access.principals import Principal, require_operator
from covenant.ledger.contract.tasks import TreeNode
from covenant.model.errors import Conflict, Invalid
from covenant.model.ids import AgentId
from covenant.model.peers.delegation import Delegation, LoggedMessage
from covenant.model.peers.delegation_messages import Profile
from covenant.model.peers.instance import InstanceId, Trust
from covenant.model.peers.peer_record import Peer, PeerCapabilities, PeerLimits
from covenant.wire import operator_requests as asked
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


class PeerAnswer(ApiAnswer, frozen=True, kw_only=True, rename="camel", tag="peer"):
    peer: PeerShown
    note: str | None = None
    """What could not be done besides, and what to do about it."""


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


class Discovered(ApiAnswer, frozen=True, kw_only=True, rename="camel", tag="peers_discovered"):
    """Candidates, and how finding them goes. None of them is a peer by being here."""

    discovered: tuple[Any, ...]
    ways: tuple[Any, ...]


class CapabilitiesAnswer(ApiAnswer, frozen=True, kw_only=True, rename="camel", tag="peer_capabilities"):
    """`peer` is None for our own."""

    peer: str | None
    capabilities: CapabilitiesShown


class PeerMessageShown(msgspec.Struct, frozen=True, gc=False, kw_only=True, rename="camel", omit_defaults=True):
    """One line of what went to and fro; never what it said."""

    at_ms: int
    direction: str
    peer: InstanceId
    type: str
    id: str
    offer_id: str | None = None

    @classmethod
    def of(cls, logged: LoggedMessage) -> PeerMessageShown:
        return cls(
            at_ms=logged.at_ms,
            direction=logged.direction,
            peer=logged.peer,
            type=logged.typ,
            id=logged.id,
            offer_id=logged.offer_id,
        )


class PeerMessageList(ApiAnswer, frozen=True, kw_only=True, rename="camel", tag="peer_messages"):
    messages: tuple[PeerMessageShown, ...]
    total: int


class ConfigAnswer(ApiAnswer, frozen=True, kw_only=True, rename="camel", tag="peer_config"):
    """The settings of `[peers]` as they are in force."""

    id: InstanceId
    name: str
    config: dict[str, Any]


PEERS: Final = "/api/v1/a2a/peers"
PEER: Final = "/api/v1/a2a/peers/{peer_id}"
DISCOVER: Final = "/api/v1/a2a/discover"
CAPABILITIES: Final = "/api/v1/a2a/capabilities"
MESSAGES: Final = "/api/v1/a2a/messages"
CONFIG: Final = "/api/v1/a2a/config"


class PeerOperations(Protocol):
    """What a daemon with peers can do. `named`: an id, a name, or the beginning of an id."""

    @property
    def id(self) -> InstanceId: ...
    @property
    def name(self) -> str: ...
    def config(self) -> dict[str, Any]: ...

    async def peers(self) -> Sequence[Peer]: ...
    async def waiting(self, peer: InstanceId) -> asked.PendingMessages: ...
    def find(self, named: str) -> Peer: ...
    async def add(
        self, by: AgentId, *, url: str | None, peer_id: str | None, name: str | None
    ) -> tuple[Peer, str | None]:
        """With what could not be done besides, in words."""

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
    async def discover(self, timeout_s: float) -> tuple[Sequence[Any], Sequence[Any]]:
        """Candidates, and the ways they are found by."""

    async def capabilities(self, named: str | None, *, fresh: bool) -> tuple[str | None, PeerCapabilities]: ...
    async def delegate(self, by: AgentId, request: asked.DelegateRequest) -> asked.DelegationBegun: ...
    async def delegations(self) -> Sequence[Delegation]: ...
    async def standing(self, named: str) -> Delegation: ...
    async def outcome(self, delegation: Delegation) -> tuple[str | None, str | None]:
        """What came of it here: the text of the result, or the error."""

    async def cancel(self, by: AgentId, named: str, reason: str) -> Delegation: ...
    async def offer_again(self, by: AgentId, named: str) -> Delegation: ...
    async def force_error(self, by: AgentId, named: str, reason: str) -> Delegation: ...
    async def evidence(self, named: str) -> asked.DelegationEvidence: ...
    async def tree(self, named: str) -> TreeNode: ...
    async def messages(self) -> Sequence[LoggedMessage]: ...


async def require_peers(office: Services, caller: Principal, what: str) -> PeerOperations:
    await require_operator(office.ledger, caller, what)
    if office.peers is None:
        raise Conflict(
            "peers_off",
            "this daemon has no peers; set enabled = true under [peers] in its settings.toml, and restart it",
        )
    return office.peers


async def _shown(office: Services, desk: PeerOperations, peer: Peer) -> PeerShown:
    return PeerShown.of(peer, await desk.waiting(peer.id), office.ledger.now_ms())


async def list_peers(office: Services, caller: Principal, request: asked.ListPeersRequest) -> PeerList:
    desk = await require_peers(office, caller, "listing peers")
    shown = [await _shown(office, desk, peer) for peer in await desk.peers()]
    found = [
        peer
        for peer in shown
        if request.status in (None, peer.status) and request.trust_level in (None, peer.trust_level)
    ]
    page = found[request.offset : request.offset + request.limit]
    return PeerList(peers=fit(page), total=len(found), id=desk.id, name=desk.name)


async def add_peer(office: Services, caller: Principal, request: asked.AddPeerRequest) -> PeerAnswer:
    desk = await require_peers(office, caller, "adding a peer")
    if request.url is None and (request.id is None or request.name is None):
        raise Invalid("invalid_request", "give url; or, for a peer that cannot be called, its id and a name")
    peer, note = await desk.add(caller.agent, url=request.url, peer_id=request.id, name=request.name)
    return PeerAnswer(peer=await _shown(office, desk, peer), note=note)


async def show_peer(office: Services, caller: Principal, request: asked.ShowPeerRequest) -> PeerAnswer:
    desk = await require_peers(office, caller, "showing a peer")
    return PeerAnswer(peer=await _shown(office, desk, desk.find(request.peer_id)))


async def remove_peer(office: Services, caller: Principal, request: asked.RemovePeerRequest) -> PeerRemovedAnswer:
    desk = await require_peers(office, caller, "removing a peer")
    removed = await desk.remove(caller.agent, request.peer_id)
    return PeerRemovedAnswer(id=removed.id, name=removed.name)


async def trust_peer(office: Services, caller: Principal, request: asked.TrustPeerRequest) -> PeerAnswer:
    desk = await require_peers(office, caller, "trusting a peer")
    changed = await desk.change(caller.agent, request.peer_id, trust=request.trust_level)
    return PeerAnswer(peer=await _shown(office, desk, changed))


async def change_peer(office: Services, caller: Principal, request: asked.ChangePeerRequest) -> PeerAnswer:
    desk = await require_peers(office, caller, "changing a peer")
    limits = PeerLimits(**msgspec.structs.asdict(request.limits)) if request.limits is not None else None
    changed = await desk.change(
        caller.agent, request.peer_id, name=request.name, url=request.url, denied=request.denied, limits=limits
    )
    return PeerAnswer(peer=await _shown(office, desk, changed))


async def verify_peer(office: Services, caller: Principal, request: asked.VerifyPeerRequest) -> PeerAnswer:
    desk = await require_peers(office, caller, "verifying a peer")
    return PeerAnswer(peer=await _shown(office, desk, await desk.verify(request.peer_id)))


async def succeed_peer(office: Services, caller: Principal, request: asked.SucceedPeerRequest) -> PeerAnswer:
    desk = await require_peers(office, caller, "vouching for a peer's new identity")
    peer = await desk.succeed(caller.agent, request.peer_id, request.new_id)
    return PeerAnswer(peer=await _shown(office, desk, peer))


async def revoke_peer_tokens(office: Services, caller: Principal, request: asked.RevokePeerRequest) -> TokensRevoked:
    desk = await require_peers(office, caller, "revoking a peer's tokens")
    peer = desk.find(request.peer_id)
    return TokensRevoked(id=peer.id, revoked=await desk.revoke_tokens(caller.agent, peer.id))


async def discover_peers(office: Services, caller: Principal, request: asked.DiscoverPeersRequest) -> Discovered:
    desk = await require_peers(office, caller, "discovering peers")
    found, ways = await desk.discover(request.timeout_ms / 1000)
    return Discovered(discovered=fit(found), ways=tuple(ways))


async def peer_capabilities(
    office: Services, caller: Principal, request: asked.ShowCapabilitiesRequest
) -> CapabilitiesAnswer:
    desk = await require_peers(office, caller, "showing capabilities")
    name, found = await desk.capabilities(request.peer_id, fresh=request.fresh)
    shown = {field: getattr(found, field) for field in CapabilitiesShown.__struct_fields__}
    return CapabilitiesAnswer(peer=name, capabilities=CapabilitiesShown(**shown))


async def list_peer_messages(
    office: Services, caller: Principal, request: asked.ListPeerMessagesRequest
) -> PeerMessageList:
    desk = await require_peers(office, caller, "listing messages")
    peer = desk.find(request.peer_id).id if request.peer_id is not None else None
    found = [each for each in await desk.messages() if peer in (None, each.peer) and request.type in (None, each.typ)]
    page = found[request.offset : request.offset + request.limit]
    return PeerMessageList(messages=tuple(map(PeerMessageShown.of, page)), total=len(found))


async def peer_config(office: Services, caller: Principal, request: asked.ShowConfigRequest) -> ConfigAnswer:  # noqa: ARG001
    desk = await require_peers(office, caller, "showing the settings of peers")
    return ConfigAnswer(id=desk.id, name=desk.name, config=desk.config())


OPERATIONS: Final[tuple[AnyApiOperation, ...]] = (
    operation_row("GET", PEERS, list_peers, "Peers, the oldest first"),
    operation_row("POST", PEERS, add_peer, "Add another instance as a peer", 201),
    operation_row("GET", PEER, show_peer, "One peer"),
    operation_row("PATCH", PEER, change_peer, "Change a peer's name, address or limits; deny it, or not"),
    operation_row("DELETE", PEER, remove_peer, "Remove a peer"),
    operation_row("PUT", f"{PEER}/trust", trust_peer, "Say how far a peer is trusted"),
    operation_row("POST", f"{PEER}/verify", verify_peer, "Challenge a peer to prove its key"),
    operation_row("POST", f"{PEER}/identity", succeed_peer, "Vouch that a peer goes by another id now"),
    operation_row("POST", f"{PEER}/revoke-tokens", revoke_peer_tokens, "Revoke every token that a peer was given"),
    operation_row("POST", DISCOVER, discover_peers, "Look for other instances; none becomes a peer by that"),
    operation_row("GET", CAPABILITIES, peer_capabilities, "What a peer offers, or, without peerId, this instance"),
    operation_row("GET", MESSAGES, list_peer_messages, "What went to and fro lately, the newest first"),
    operation_row("GET", CONFIG, peer_config, "The settings of peers in force"),
)
