"""What the operator asks about peers and delegations. Names are in camel case, as the protocol has them."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from covenant.model.delegation import (
    BUDGET_MAX,
    CONTEXT_CHARS_MAX,
    TASK_CHARS_MAX,
    TIMEOUT_MS_MAX,
    Proof,
    Status,
)
from covenant.model.peer import InstanceId, Trust
from covenant.wire.mailbox import Request, Strict

PAGE_MAX = 100

Page = Annotated[int, msgspec.Meta(ge=1, le=PAGE_MAX)]
Offset = Annotated[int, msgspec.Meta(ge=0, le=1_000_000)]
Bound = Annotated[int, msgspec.Meta(ge=0, le=1_000_000)]
Reason = Annotated[str, msgspec.Meta(max_length=500)]
Named = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]


class PeerAsking(Request, frozen=True, kw_only=True, rename="camel"):
    """The root of these."""


class PeerChanging(Strict, frozen=True, kw_only=True, rename="camel"):
    """The root of those that change whom we trust, with what."""

    peer_id: str = ""
    """Its id, its name, or the beginning of its id."""


class ListPeers(PeerAsking, frozen=True, kw_only=True):
    status: Literal["online", "offline", "unknown"] | None = None
    trust_level: Trust | None = None
    limit: Page = 20
    offset: Offset = 0


class AddPeer(Strict, frozen=True, kw_only=True, rename="camel"):
    """By its address, or by its id alone if it cannot be called and will fetch what there is for it."""

    url: Annotated[str, msgspec.Meta(max_length=2_048)] | None = None
    id: Annotated[str, msgspec.Meta(max_length=64)] | None = None
    name: Annotated[str, msgspec.Meta(min_length=1, max_length=64)] | None = None


class PeerRequest(PeerAsking, frozen=True, kw_only=True):
    """`peer_id`: its id, its name, or the beginning of its id."""

    peer_id: str = ""


class ShowPeer(PeerRequest, frozen=True, kw_only=True):
    pass


class RemovePeer(PeerChanging, frozen=True, kw_only=True):
    pass


class TrustPeer(PeerChanging, frozen=True, kw_only=True):
    trust_level: Trust


class WirePeerLimits(msgspec.Struct, frozen=True, gc=False, kw_only=True, rename="camel", omit_defaults=True):
    """What is left out is as the settings say."""

    offers_per_min: Bound | None = None
    concurrent: Bound | None = None
    budget_max: Bound | None = None


class ChangePeer(PeerChanging, frozen=True, kw_only=True):
    """What is left out stays as it is; limits change together. An empty `url`: it cannot be called any more."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=64)] | None = None
    url: Annotated[str, msgspec.Meta(max_length=2_048)] | None = None
    denied: bool | None = None
    limits: WirePeerLimits | None = None


class VerifyPeer(PeerRequest, frozen=True, kw_only=True):
    pass


class SucceedPeer(PeerChanging, frozen=True, kw_only=True):
    new_id: Annotated[str, msgspec.Meta(max_length=64)]


class RevokePeer(PeerChanging, frozen=True, kw_only=True):
    """Every token that was given to it."""


class DiscoverPeers(PeerAsking, frozen=True, kw_only=True):
    timeout_ms: Annotated[int, msgspec.Meta(ge=0, le=30_000)] = 5_000


class ShowCapabilities(PeerAsking, frozen=True, kw_only=True):
    """Of a peer; without one, our own."""

    peer_id: Named | None = None
    fresh: bool = False


class Delegate(Strict, frozen=True, kw_only=True, rename="camel"):
    task: Annotated[str, msgspec.Meta(min_length=1, max_length=TASK_CHARS_MAX)]
    profile: Named | None = None
    peer_id: Named | None = None
    context: Annotated[str, msgspec.Meta(max_length=CONTEXT_CHARS_MAX)] | None = None
    max_token_budget: Annotated[int, msgspec.Meta(ge=1, le=BUDGET_MAX)] | None = None
    timeout: Annotated[int, msgspec.Meta(ge=1, le=TIMEOUT_MS_MAX)] | None = None
    id: Annotated[str, msgspec.Meta(max_length=36)] | None = None
    """Of the task that it becomes here: the same request again under this id is the same delegation."""


class ListDelegations(PeerAsking, frozen=True, kw_only=True):
    status: Status | Literal["lost"] | None = None
    peer_id: Named | None = None
    role: Literal["requester", "provider"] | None = None
    limit: Page = 20
    offset: Offset = 0


class DelegationRequest(PeerAsking, frozen=True, kw_only=True):
    """By the id of its task here, of its offer, or by what its provider calls it."""

    delegation_id: str = ""


class ShowDelegation(DelegationRequest, frozen=True, kw_only=True):
    pass


class CancelDelegation(DelegationRequest, frozen=True, kw_only=True):
    reason: Reason = ""


class OfferAgain(DelegationRequest, frozen=True, kw_only=True):
    pass


class ForceDelegation(DelegationRequest, frozen=True, kw_only=True):
    reason: Reason


class ShowProof(DelegationRequest, frozen=True, kw_only=True):
    pass


class DelegationTree(DelegationRequest, frozen=True, kw_only=True):
    pass


class ListPeerMessages(PeerAsking, frozen=True, kw_only=True):
    peer_id: Named | None = None
    type: Annotated[str, msgspec.Meta(max_length=32)] | None = None
    limit: Page = 20
    offset: Offset = 0


class ShowConfig(PeerAsking, frozen=True, kw_only=True):
    pass


class Waiting(msgspec.Struct, frozen=True, gc=False, rename="camel", omit_defaults=True):
    """What a peer does not have yet, and why."""

    count: int = 0
    failure: str | None = None
    next_ms: int | None = None


class Begun(NamedTuple):
    """`peer` is None where an agent here does it."""

    task_id: str
    peer: InstanceId | None
    profile: str
    duplicate: bool


class Evidence(NamedTuple):
    """What proves a result: all of it as it was sent."""

    offer: Any
    result: Any
    transcript: Any
    proof: Proof | None
