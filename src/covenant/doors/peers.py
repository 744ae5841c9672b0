"""The operator's operations on peers, and on what is delegated to them and by them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol, get_type_hints

import msgspec

from covenant.doors.operation import AnyOperation, Office, Operation
from covenant.doors.pages import fit
from covenant.doors.peer_answers import (
    CapabilitiesAnswer,
    CapabilitiesShown,
    ConfigAnswer,
    Delegated,
    DelegationAnswer,
    DelegationList,
    DelegationShown,
    DelegationTreeAnswer,
    Discovered,
    MessageShown,
    PeerAnswer,
    PeerList,
    PeerMessageList,
    PeerRemoved,
    PeerShown,
    ProofAnswer,
    TokensRevoked,
)
from covenant.exchange.access.principals import Principal, require_operator
from covenant.ledger.contract.tasks import TreeNode
from covenant.model.errors import Conflict, Invalid
from covenant.model.ids import AgentId
from covenant.model.peers.delegation import Delegation, LoggedMessage
from covenant.model.peers.instance import InstanceId, Trust
from covenant.model.peers.peer_record import Peer, PeerCapabilities, PeerLimits
from covenant.wire import operator_requests as asked

PEERS: Final = "/api/v1/a2a/peers"
PEER: Final = "/api/v1/a2a/peers/{peer_id}"
DISCOVER: Final = "/api/v1/a2a/discover"
CAPABILITIES: Final = "/api/v1/a2a/capabilities"
DELEGATE: Final = "/api/v1/a2a/delegate"
MESSAGES: Final = "/api/v1/a2a/messages"
CONFIG: Final = "/api/v1/a2a/config"
DELEGATIONS: Final = "/api/v1/a2a/delegations"
DELEGATION: Final = "/api/v1/a2a/delegations/{delegation_id}"


class PeerDesk(Protocol):
    """What a daemon with peers can do. `named`: an id, a name, or the beginning of an id."""

    @property
    def id(self) -> InstanceId: ...
    @property
    def name(self) -> str: ...
    def config(self) -> dict[str, Any]: ...

    async def peers(self) -> Sequence[Peer]: ...
    def waiting(self, peer: InstanceId) -> asked.PendingMessages: ...
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


async def _desk(office: Office, caller: Principal, what: str) -> PeerDesk:
    await require_operator(office.ledger, caller, what)
    if office.peers is None:
        raise Conflict(
            "peers_off",
            "this daemon has no peers; set enabled = true under [peers] in its settings.toml, and restart it",
        )
    return office.peers


def _shown(office: Office, desk: PeerDesk, peer: Peer) -> PeerShown:
    return PeerShown.of(peer, desk.waiting(peer.id), office.ledger.now_ms())


def _delegation(office: Office, delegation: Delegation) -> DelegationShown:
    peer = office.ledger.peer(delegation.peer)
    return DelegationShown.of(delegation, peer.name if peer is not None else delegation.peer)


async def list_peers(office: Office, caller: Principal, request: asked.ListPeersRequest) -> PeerList:
    desk = await _desk(office, caller, "listing peers")
    shown = [_shown(office, desk, peer) for peer in await desk.peers()]
    found = [
        peer
        for peer in shown
        if request.status in (None, peer.status) and request.trust_level in (None, peer.trust_level)
    ]
    page = found[request.offset : request.offset + request.limit]
    return PeerList(peers=fit(page), total=len(found), id=desk.id, name=desk.name)


async def add_peer(office: Office, caller: Principal, request: asked.AddPeerRequest) -> PeerAnswer:
    desk = await _desk(office, caller, "adding a peer")
    if request.url is None and (request.id is None or request.name is None):
        raise Invalid("invalid_request", "give url; or, for a peer that cannot be called, its id and a name")
    peer, note = await desk.add(caller.agent, url=request.url, peer_id=request.id, name=request.name)
    return PeerAnswer(peer=_shown(office, desk, peer), note=note)


async def show_peer(office: Office, caller: Principal, request: asked.ShowPeerRequest) -> PeerAnswer:
    desk = await _desk(office, caller, "showing a peer")
    return PeerAnswer(peer=_shown(office, desk, desk.find(request.peer_id)))


async def remove_peer(office: Office, caller: Principal, request: asked.RemovePeerRequest) -> PeerRemoved:
    desk = await _desk(office, caller, "removing a peer")
    removed = await desk.remove(caller.agent, request.peer_id)
    return PeerRemoved(id=removed.id, name=removed.name)


async def trust_peer(office: Office, caller: Principal, request: asked.TrustPeerRequest) -> PeerAnswer:
    desk = await _desk(office, caller, "trusting a peer")
    changed = await desk.change(caller.agent, request.peer_id, trust=request.trust_level)
    return PeerAnswer(peer=_shown(office, desk, changed))


async def change_peer(office: Office, caller: Principal, request: asked.ChangePeerRequest) -> PeerAnswer:
    desk = await _desk(office, caller, "changing a peer")
    limits = PeerLimits(**msgspec.structs.asdict(request.limits)) if request.limits is not None else None
    changed = await desk.change(
        caller.agent, request.peer_id, name=request.name, url=request.url, denied=request.denied, limits=limits
    )
    return PeerAnswer(peer=_shown(office, desk, changed))


async def verify_peer(office: Office, caller: Principal, request: asked.VerifyPeerRequest) -> PeerAnswer:
    desk = await _desk(office, caller, "verifying a peer")
    return PeerAnswer(peer=_shown(office, desk, await desk.verify(request.peer_id)))


async def succeed_peer(office: Office, caller: Principal, request: asked.SucceedPeerRequest) -> PeerAnswer:
    desk = await _desk(office, caller, "vouching for a peer's new identity")
    peer = await desk.succeed(caller.agent, request.peer_id, request.new_id)
    return PeerAnswer(peer=_shown(office, desk, peer))


async def revoke_peer_tokens(office: Office, caller: Principal, request: asked.RevokePeerRequest) -> TokensRevoked:
    desk = await _desk(office, caller, "revoking a peer's tokens")
    peer = desk.find(request.peer_id)
    return TokensRevoked(id=peer.id, revoked=await desk.revoke_tokens(caller.agent, peer.id))


async def discover_peers(office: Office, caller: Principal, request: asked.DiscoverPeersRequest) -> Discovered:
    desk = await _desk(office, caller, "discovering peers")
    found, ways = await desk.discover(request.timeout_ms / 1000)
    return Discovered(discovered=fit(found), ways=tuple(ways))


async def peer_capabilities(
    office: Office, caller: Principal, request: asked.ShowCapabilitiesRequest
) -> CapabilitiesAnswer:
    desk = await _desk(office, caller, "showing capabilities")
    name, found = await desk.capabilities(request.peer_id, fresh=request.fresh)
    shown = {field: getattr(found, field) for field in CapabilitiesShown.__struct_fields__}
    return CapabilitiesAnswer(peer=name, capabilities=CapabilitiesShown(**shown))


async def delegate(office: Office, caller: Principal, request: asked.DelegateRequest) -> Delegated:
    desk = await _desk(office, caller, "delegating")
    if request.profile is None and request.peer_id is None:
        raise Invalid("invalid_request", "give profile, peerId, or both")
    begun = await desk.delegate(caller.agent, request)
    return Delegated(
        delegation_id=begun.task_id,
        peer_id=begun.peer,
        profile=begun.profile,
        status="pending",
        remote=begun.peer is not None,
        duplicate=begun.duplicate,
    )


async def list_delegations(office: Office, caller: Principal, request: asked.ListDelegationsRequest) -> DelegationList:
    desk = await _desk(office, caller, "listing delegations")
    peer = desk.find(request.peer_id).id if request.peer_id is not None else None
    found = [
        each
        for each in await desk.delegations()
        if peer in (None, each.peer)
        and request.role in (None, each.role.value)
        and request.status in (None, each.status, each.state.value)
    ]
    found.sort(key=lambda each: each.state.value != "lost")
    page = [_delegation(office, each) for each in found[request.offset : request.offset + request.limit]]
    return DelegationList(delegations=fit(page), total=len(found))


async def show_delegation(office: Office, caller: Principal, request: asked.ShowDelegationRequest) -> DelegationAnswer:
    desk = await _desk(office, caller, "showing a delegation")
    delegation = await desk.standing(request.delegation_id)
    result, error = await desk.outcome(delegation)
    return DelegationAnswer(delegation=_delegation(office, delegation), result=result, error=error)


async def cancel_delegation(
    office: Office, caller: Principal, request: asked.CancelDelegationRequest
) -> DelegationAnswer:
    desk = await _desk(office, caller, "canceling a delegation")
    moved = await desk.cancel(caller.agent, request.delegation_id, request.reason)
    return DelegationAnswer(delegation=_delegation(office, moved))


async def offer_again(office: Office, caller: Principal, request: asked.OfferAgainRequest) -> DelegationAnswer:
    desk = await _desk(office, caller, "offering a delegation again")
    return DelegationAnswer(delegation=_delegation(office, await desk.offer_again(caller.agent, request.delegation_id)))


async def force_delegation(
    office: Office, caller: Principal, request: asked.ForceDelegationRequest
) -> DelegationAnswer:
    desk = await _desk(office, caller, "giving a delegation up")
    if not request.reason.strip():
        raise Invalid("invalid_request", "give a reason: it stays in the audit")
    moved = await desk.force_error(caller.agent, request.delegation_id, request.reason)
    return DelegationAnswer(delegation=_delegation(office, moved))


async def delegation_proof(office: Office, caller: Principal, request: asked.ShowProofRequest) -> ProofAnswer:
    desk = await _desk(office, caller, "showing a proof")
    evidence = await desk.evidence(request.delegation_id)
    return ProofAnswer(**evidence._asdict())


async def delegation_tree(
    office: Office, caller: Principal, request: asked.DelegationTreeRequest
) -> DelegationTreeAnswer:
    desk = await _desk(office, caller, "showing a tree")
    return DelegationTreeAnswer(tree=await desk.tree(request.delegation_id))


async def list_peer_messages(
    office: Office, caller: Principal, request: asked.ListPeerMessagesRequest
) -> PeerMessageList:
    desk = await _desk(office, caller, "listing messages")
    peer = desk.find(request.peer_id).id if request.peer_id is not None else None
    found = [each for each in await desk.messages() if peer in (None, each.peer) and request.type in (None, each.typ)]
    page = found[request.offset : request.offset + request.limit]
    return PeerMessageList(messages=tuple(map(MessageShown.of, page)), total=len(found))


async def peer_config(office: Office, caller: Principal, request: asked.ShowConfigRequest) -> ConfigAnswer:  # noqa: ARG001
    desk = await _desk(office, caller, "showing the settings of peers")
    return ConfigAnswer(id=desk.id, name=desk.name, config=desk.config())


def _row(method: str, path: str, run: Callable[..., Any], summary: str, status: int = 200) -> AnyOperation:
    """Named after what runs it, which also says what is asked and answered."""
    types = get_type_hints(run)
    return Operation(
        kind=run.__name__,
        method=method,
        path=path,
        request=types["request"],
        answer=types["return"],
        run=run,
        summary=summary,
        status=status,
    )


OPERATIONS: Final[tuple[AnyOperation, ...]] = (
    _row("GET", PEERS, list_peers, "Peers, the oldest first"),
    _row("POST", PEERS, add_peer, "Add another instance as a peer", 201),
    _row("GET", PEER, show_peer, "One peer"),
    _row("PATCH", PEER, change_peer, "Change a peer's name, address or limits; deny it, or not"),
    _row("DELETE", PEER, remove_peer, "Remove a peer"),
    _row("PUT", f"{PEER}/trust", trust_peer, "Say how far a peer is trusted"),
    _row("POST", f"{PEER}/verify", verify_peer, "Challenge a peer to prove its key"),
    _row("POST", f"{PEER}/identity", succeed_peer, "Vouch that a peer goes by another id now"),
    _row("POST", f"{PEER}/revoke-tokens", revoke_peer_tokens, "Revoke every token that a peer was given"),
    _row("POST", DISCOVER, discover_peers, "Look for other instances; none becomes a peer by that"),
    _row("GET", CAPABILITIES, peer_capabilities, "What a peer offers, or, without peerId, this instance"),
    _row("POST", DELEGATE, delegate, "Delegate a task by a profile's name: here, or to a peer", 201),
    _row("GET", DELEGATIONS, list_delegations, "Delegations to and from peers, lost ones first"),
    _row("GET", DELEGATION, show_delegation, "One delegation"),
    _row("POST", f"{DELEGATION}/cancel", cancel_delegation, "Cancel a delegation, on both sides"),
    _row("POST", f"{DELEGATION}/offer-again", offer_again, "Offer a lost delegation again, under the same id"),
    _row("POST", f"{DELEGATION}/force-error", force_delegation, "Give a lost delegation up"),
    _row("GET", f"{DELEGATION}/tree", delegation_tree, "A delegation, and what was delegated for it"),
    _row("GET", f"{DELEGATION}/proof", delegation_proof, "All that proves a delegation's result"),
    _row("GET", MESSAGES, list_peer_messages, "What went to and fro lately, the newest first"),
    _row("GET", CONFIG, peer_config, "The settings of peers in force"),
)
