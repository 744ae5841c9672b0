"""Requests of the operator: identities, capabilities, the audit, tenants, agents, push configurations, peers.

The names of fields about peers and delegations are in camel case, as the protocol has them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from covenant.model.peers.delegation_messages import (
    BUDGET_MAX,
    CONTEXT_CHARS_MAX,
    TASK_CHARS_MAX,
    TIMEOUT_MS_MAX,
    DelegationStatus,
    Proof,
)
from covenant.model.peers.instance import InstanceId, Trust
from covenant.model.tenants import DEFAULT, LIMIT_BYTES_MAX, LIMIT_MAX
from covenant.wire.mailbox import Request, StrictRequest, Whole


class EnrollIdentityRequest(StrictRequest, frozen=True, kw_only=True):
    """`pubkey` is minted if left out; `actions` are granted, unscoped, in the same step."""

    display: str
    pubkey: str | None = None
    actions: tuple[str, ...] | None = None


class ListIdentitiesRequest(Request, frozen=True, kw_only=True):
    """`prefix` is of a display, a key or a token."""

    limit: Whole | None = None
    prefix: str | None = None
    status: Literal["live", "revoked"] | None = None


class RevokeIdentityRequest(StrictRequest, frozen=True, kw_only=True):
    """`identity` is a display, a key, or the first characters of a token. The operator's own token needs `force`."""

    identity: str
    force: bool | None = None


class RotateTokenRequest(StrictRequest, frozen=True, kw_only=True):
    """Without `identity`: the caller's own."""

    identity: str | None = None


class PurgeRequest(StrictRequest, frozen=True, kw_only=True):
    before_ms: Whole


class GrantCapabilityRequest(StrictRequest, frozen=True, kw_only=True):
    """Without `to`: to the operator itself."""

    action: str
    to: str | None = None
    scope: dict[str, Any] | None = None
    expires_at: Whole | None = None


class RevokeCapabilityRequest(StrictRequest, frozen=True, kw_only=True):
    signature_b58: str


class RecentAuditRequest(Request, frozen=True, kw_only=True):
    limit: Whole | None = None
    since_ms: Whole | None = None


Bound = Annotated[int, msgspec.Meta(ge=0, le=LIMIT_MAX)]
Bytes = Annotated[int, msgspec.Meta(ge=0, le=LIMIT_BYTES_MAX)]


class TenantLimitsInput(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """0: the daemon's own default."""

    concurrency: Bound = 0
    rate_per_min: Bound = 0
    burst: Bound = 0
    connections: Bound = 0
    streams: Bound = 0
    live_tasks: Bound = 0
    queued_bytes: Bytes = 0


class AddTenantRequest(StrictRequest, frozen=True, kw_only=True):
    name: str
    limits: TenantLimitsInput | None = None


class ListTenantsRequest(Request, frozen=True, kw_only=True):
    pass


class TenantRequest(StrictRequest, frozen=True, kw_only=True):
    name: str = ""


class ChangeTenantRequest(TenantRequest, frozen=True, kw_only=True):
    """What is left out stays as it is; limits change together."""

    disabled: bool | None = None
    limits: TenantLimitsInput | None = None


class RotateTenantRequest(TenantRequest, frozen=True, kw_only=True):
    pass


class ListAgentsRequest(Request, frozen=True, kw_only=True):
    tenant: str = DEFAULT


class AgentRequest(Request, frozen=True, kw_only=True):
    tenant: str = DEFAULT
    agent_id: str = ""


class ShowAgentRequest(AgentRequest, frozen=True, kw_only=True):
    pass


class RemoveAgentRequest(AgentRequest, frozen=True, kw_only=True):
    pass


class AddAgentRequest(StrictRequest, frozen=True, kw_only=True):
    """`agent_def` is the definition. With `replace` it takes the place of the stored one with its id."""

    agent_def: dict[str, Any]
    tenant: str = DEFAULT
    replace: bool | None = None


class ListPushesRequest(Request, frozen=True, kw_only=True):
    """`dead`: only those that were given up."""

    limit: Whole | None = None
    dead: bool | None = None


class RetryPushRequest(Request, frozen=True, kw_only=True):
    task_id: str
    push_id: str


PAGE_MAX = 100

Page = Annotated[int, msgspec.Meta(ge=1, le=PAGE_MAX)]
Offset = Annotated[int, msgspec.Meta(ge=0, le=1_000_000)]
PeerBound = Annotated[int, msgspec.Meta(ge=0, le=1_000_000)]
Reason = Annotated[str, msgspec.Meta(max_length=500)]
Named = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]


class PeerQuery(Request, frozen=True, kw_only=True, rename="camel"):
    """The root of these."""


class PeerChange(StrictRequest, frozen=True, kw_only=True, rename="camel"):
    """The root of those that change whom we trust, with what."""

    peer_id: str = ""
    """Its id, its name, or the beginning of its id."""


class ListPeersRequest(PeerQuery, frozen=True, kw_only=True):
    status: Literal["online", "offline", "unknown"] | None = None
    trust_level: Trust | None = None
    limit: Page = 20
    offset: Offset = 0


class AddPeerRequest(StrictRequest, frozen=True, kw_only=True, rename="camel"):
    """By its address, or by its id alone if it cannot be called and will fetch what there is for it."""

    url: Annotated[str, msgspec.Meta(max_length=2_048)] | None = None
    id: Annotated[str, msgspec.Meta(max_length=64)] | None = None
    name: Annotated[str, msgspec.Meta(min_length=1, max_length=64)] | None = None


class PeerRequest(PeerQuery, frozen=True, kw_only=True):
    """`peer_id`: its id, its name, or the beginning of its id."""

    peer_id: str = ""


class ShowPeerRequest(PeerRequest, frozen=True, kw_only=True):
    pass


class RemovePeerRequest(PeerChange, frozen=True, kw_only=True):
    pass


class TrustPeerRequest(PeerChange, frozen=True, kw_only=True):
    trust_level: Trust


class PeerLimitsInput(msgspec.Struct, frozen=True, gc=False, kw_only=True, rename="camel", omit_defaults=True):
    """What is left out is as the settings say."""

    offers_per_min: PeerBound | None = None
    concurrent: PeerBound | None = None
    budget_max: PeerBound | None = None


class ChangePeerRequest(PeerChange, frozen=True, kw_only=True):
    """What is left out stays as it is; limits change together. An empty `url`: it cannot be called any more."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=64)] | None = None
    url: Annotated[str, msgspec.Meta(max_length=2_048)] | None = None
    denied: bool | None = None
    limits: PeerLimitsInput | None = None


class VerifyPeerRequest(PeerRequest, frozen=True, kw_only=True):
    pass


class SucceedPeerRequest(PeerChange, frozen=True, kw_only=True):
    new_id: Annotated[str, msgspec.Meta(max_length=64)]


class RevokePeerRequest(PeerChange, frozen=True, kw_only=True):
    """Every token that was given to it."""


class DiscoverPeersRequest(PeerQuery, frozen=True, kw_only=True):
    timeout_ms: Annotated[int, msgspec.Meta(ge=0, le=30_000)] = 5_000


class ShowCapabilitiesRequest(PeerQuery, frozen=True, kw_only=True):
    """Of a peer; without one, our own."""

    peer_id: Named | None = None
    fresh: bool = False


class DelegateRequest(StrictRequest, frozen=True, kw_only=True, rename="camel"):
    task: Annotated[str, msgspec.Meta(min_length=1, max_length=TASK_CHARS_MAX)]
    profile: Named | None = None
    peer_id: Named | None = None
    context: Annotated[str, msgspec.Meta(max_length=CONTEXT_CHARS_MAX)] | None = None
    max_token_budget: Annotated[int, msgspec.Meta(ge=1, le=BUDGET_MAX)] | None = None
    timeout: Annotated[int, msgspec.Meta(ge=1, le=TIMEOUT_MS_MAX)] | None = None
    id: Annotated[str, msgspec.Meta(max_length=36)] | None = None
    """Of the task that it becomes here: the same request again under this id is the same delegation."""


class ListDelegationsRequest(PeerQuery, frozen=True, kw_only=True):
    status: DelegationStatus | Literal["lost"] | None = None
    peer_id: Named | None = None
    role: Literal["requester", "provider"] | None = None
    limit: Page = 20
    offset: Offset = 0


class DelegationRequest(PeerQuery, frozen=True, kw_only=True):
    """By the id of its task here, of its offer, or by what its provider calls it."""

    delegation_id: str = ""


class ShowDelegationRequest(DelegationRequest, frozen=True, kw_only=True):
    """With `wait_ms`, the answer waits for the outcome; with `since_ms` too, for whatever happens after that moment."""

    wait_ms: Whole | None = None
    since_ms: Whole | None = None


class CancelDelegationRequest(DelegationRequest, frozen=True, kw_only=True):
    reason: Reason = ""


class OfferAgainRequest(DelegationRequest, frozen=True, kw_only=True):
    pass


class ForceDelegationRequest(DelegationRequest, frozen=True, kw_only=True):
    reason: Reason


class ShowProofRequest(DelegationRequest, frozen=True, kw_only=True):
    pass


class DelegationTreeRequest(DelegationRequest, frozen=True, kw_only=True):
    pass


class ListPeerMessagesRequest(PeerQuery, frozen=True, kw_only=True):
    peer_id: Named | None = None
    type: Annotated[str, msgspec.Meta(max_length=32)] | None = None
    limit: Page = 20
    offset: Offset = 0


class ShowConfigRequest(PeerQuery, frozen=True, kw_only=True):
    pass


class PendingMessages(msgspec.Struct, frozen=True, gc=False, rename="camel", omit_defaults=True):
    """What a peer does not have yet, and why."""

    count: int = 0
    failure: str | None = None
    next_ms: int | None = None


class DelegationBegun(NamedTuple):
    """`peer` is None where an agent here does it."""

    task_id: str
    peer: InstanceId | None
    profile: str
    duplicate: bool


class DelegationEvidence(NamedTuple):
    """What proves a result: all of it as it was sent."""

    offer: Any
    result: Any
    transcript: Any
    proof: Proof | None
