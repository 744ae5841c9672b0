"""The operator's operations on delegations to and from peers, and on their usage by peer, profile and day."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date, timedelta
from typing import Annotated, Any, Final, Literal

import msgspec

from covenant.doors.operator_api.operation import AnyApiOperation, ApiAnswer, ApiOperation, Services, fill, fit
from covenant.doors.operator_api.peers import Offset, Page, PeerOperations, PeerQuery
from covenant.doors.waits import Pause
from covenant.exchange.access.principals import Principal
from covenant.ledger.contract.tasks import TreeNode
from covenant.model.errors import Invalid
from covenant.model.peers.delegation import Delegation, DelegationRole, Peer
from covenant.model.peers.delegation_messages import DelegationStatus, Proof, TokenUsage
from covenant.model.peers.instance import InstanceId
from covenant.model.peers.usage_by_day import USAGE_DAYS, PeerUsage, day_of
from covenant.wire.mailbox import Whole
from covenant.wire.peers import DelegateRequest, NameOrId

Reason = Annotated[str, msgspec.Meta(max_length=500)]
DELEGATE: Final = "/api/v1/a2a/delegate"
DELEGATIONS: Final = "/api/v1/a2a/delegations"
DELEGATION: Final = "/api/v1/a2a/delegations/{delegation_id}"
USAGE: Final = "/api/v1/a2a/usage"


class ListDelegationsRequest(PeerQuery, frozen=True, kw_only=True):
    status: DelegationStatus | Literal["lost"] | None = None
    peer_id: NameOrId | None = None
    role: Literal["requester", "provider"] | None = None
    limit: Page = 20
    offset: Offset = 0


class DelegationRequest(PeerQuery, frozen=True, kw_only=True):
    """`delegation_id`: the id of the task here, of the offer, or the provider's id of the delegation."""

    delegation_id: str = ""


class ShowDelegationRequest(DelegationRequest, frozen=True, kw_only=True):
    """With `wait_ms`, the answer waits for the outcome; with `since_ms` as well, for any change after that moment."""

    wait_ms: Whole | None = None
    since_ms: Whole | None = None


class CancelDelegationRequest(DelegationRequest, frozen=True, kw_only=True):
    reason: Reason = ""


class ForceDelegationRequest(DelegationRequest, frozen=True, kw_only=True):
    reason: Reason


class DelegationShown(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """`id` is the id of the task here; `delegation_id` is the provider's id."""

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
    question: str | msgspec.UnsetType = msgspec.UNSET
    """What the provider's agent asks, while the task here waits for the answer."""


class DelegatedAnswer(ApiAnswer, frozen=True, kw_only=True, rename="camel", tag="delegated"):
    """`delegation_id` is the id of the task here. `remote` is false if an agent of this instance does it."""

    delegation_id: str
    peer_id: InstanceId | None
    profile: str
    status: DelegationStatus
    remote: bool
    duplicate: bool = False


class DelegationAnswer(ApiAnswer, frozen=True, kw_only=True, rename="camel", tag="delegation"):
    delegation: DelegationShown
    result: str | None = None
    error: str | None = None


class DelegationList(ApiAnswer, frozen=True, kw_only=True, rename="camel", tag="delegations"):
    """Lost delegations first; among the others, the one that changed last comes first."""

    delegations: tuple[DelegationShown, ...]
    total: int


class DelegationTreeAnswer(ApiAnswer, frozen=True, kw_only=True, rename="camel", tag="delegation_tree"):
    tree: TreeNode


class ProofAnswer(ApiAnswer, frozen=True, kw_only=True, rename="camel", tag="delegation_proof"):
    """What `covenant peers verify-proof` needs offline. `transcript` is None if it stayed with the provider."""

    offer: Any
    result: Any
    transcript: Any
    proof: Proof | None


def _delegation(services: Services, delegation: Delegation) -> DelegationShown:
    peer = services.ledger.peer(delegation.peer)
    shown = delegation_shown(delegation, peer.name if peer is not None else delegation.peer)
    if services.peers is not None and delegation.peer == services.peers.id:
        # A local agent does the work.
        return msgspec.structs.replace(shown, remote=False, peer=services.peers.name)
    return shown


def delegation_shown(delegation: Delegation, peer_name: str) -> DelegationShown:
    question = delegation.question
    return fill(
        DelegationShown,
        delegation,
        id=delegation.task_id,
        role=delegation.role.value,
        peer_id=delegation.peer,
        peer=peer_name,
        state=delegation.state.value,
        remote=delegation.role.value == "requester",
        max_token_budget=delegation.budget,
        timeout=delegation.timeout_ms,
        token_usage=delegation.usage,
        retry_after=delegation.retry_after_ms,
        proven=delegation.proof is not None and not delegation.broken,
        question=question.text if question is not None and delegation.status == "running" else msgspec.UNSET,
    )


async def delegate(services: Services, caller: Principal, request: DelegateRequest) -> DelegatedAnswer:
    peers = await services.require_peers(caller, "delegating")
    if request.profile is None and request.peer_id is None:
        raise Invalid("invalid_request", "give profile, peerId, or both")
    begun = await peers.delegate(caller.agent, request)
    return fill(DelegatedAnswer, begun, delegation_id=begun.task_id, peer_id=begun.peer, status="pending")


async def list_delegations(services: Services, caller: Principal, request: ListDelegationsRequest) -> DelegationList:
    peers = await services.require_peers(caller, "listing delegations")
    peer = peers.find(request.peer_id).id if request.peer_id is not None else None
    found = [
        each
        for each in await peers.delegations()
        if peer in (None, each.peer)
        and request.role in (None, each.role.value)
        and request.status in (None, each.status, each.state.value)
    ]
    found.sort(key=lambda each: each.state.value != "lost")
    page = [_delegation(services, each) for each in found[request.offset : request.offset + request.limit]]
    return DelegationList(delegations=fit(page), total=len(found))


async def show_delegation(services: Services, caller: Principal, request: ShowDelegationRequest) -> DelegationAnswer:
    peers = await services.require_peers(caller, "showing a delegation")
    return await _shown(services, peers, request.delegation_id)


async def _shown(services: Services, peers: PeerOperations, delegation_id: str) -> DelegationAnswer:
    delegation, result, error = await peers.delegation(delegation_id)
    return DelegationAnswer(delegation=_delegation(services, delegation), result=result, error=error)


async def show_delegation_waiting(
    services: Services, caller: Principal, request: ShowDelegationRequest, pause: Pause
) -> DelegationAnswer:
    """Answers once the local task has ended, the delegation has changed or its peer has sent a message since
    `since_ms`, or time is up.
    """
    give_up_ms = services.give_up_ms(request.wait_ms)
    peers = await services.require_peers(caller, "showing a delegation")
    task_id = await peers.task_id(request.delegation_id)
    while True:
        # A watch for each turn, opened before the delegation is read, so that no change in between is missed.
        with services.ledger.watch(task_id) as watch:
            answer = await _shown(services, peers, request.delegation_id)
            shown, remaining_ms = answer.delegation, give_up_ms - services.ledger.clock.monotonic_ms()
            changed = request.since_ms is not None and max(shown.moved_at_ms, shown.heard_at_ms) > request.since_ms
            if changed or remaining_ms <= 0 or answer.result is not None or answer.error is not None:
                return answer
            await pause.until(watch.next(remaining_ms / 1000))


async def cancel_delegation(
    services: Services, caller: Principal, request: CancelDelegationRequest
) -> DelegationAnswer:
    peers = await services.require_peers(caller, "canceling a delegation")
    moved = await peers.cancel(caller.agent, request.delegation_id, request.reason)
    return DelegationAnswer(delegation=_delegation(services, moved))


async def offer_again(services: Services, caller: Principal, request: DelegationRequest) -> DelegationAnswer:
    peers = await services.require_peers(caller, "offering a delegation again")
    return DelegationAnswer(
        delegation=_delegation(services, await peers.offer_again(caller.agent, request.delegation_id))
    )


async def force_delegation(services: Services, caller: Principal, request: ForceDelegationRequest) -> DelegationAnswer:
    peers = await services.require_peers(caller, "giving a delegation up")
    if not request.reason.strip():
        raise Invalid("invalid_request", "give a reason: it stays in the audit")
    moved = await peers.force_error(caller.agent, request.delegation_id, request.reason)
    return DelegationAnswer(delegation=_delegation(services, moved))


async def delegation_proof(services: Services, caller: Principal, request: DelegationRequest) -> ProofAnswer:
    peers = await services.require_peers(caller, "showing a proof")
    return fill(ProofAnswer, await peers.evidence(request.delegation_id))


async def delegation_tree(services: Services, caller: Principal, request: DelegationRequest) -> DelegationTreeAnswer:
    peers = await services.require_peers(caller, "showing a tree")
    return DelegationTreeAnswer(tree=await peers.tree(request.delegation_id))


class PeerUsageRequest(PeerQuery, frozen=True, kw_only=True):
    """The usage of one peer or of all, on the last `days` days in UTC."""

    peer_id: NameOrId | None = None
    profile: Annotated[str, msgspec.Meta(max_length=64)] | None = None
    role: DelegationRole | None = None
    days: Annotated[int, msgspec.Meta(ge=1, le=USAGE_DAYS)] = 7
    limit: Annotated[int, msgspec.Meta(ge=1, le=1_000)] = 100
    offset: Offset = 0


class PeerUsageShown(msgspec.Struct, frozen=True, gc=False, kw_only=True, rename="camel"):
    """`role` is our role: as a provider, what the peer used of us. `peer` is null for a peer that was removed."""

    day: str
    role: DelegationRole
    peer_id: InstanceId
    peer: str | None
    profile: str
    offers: int
    accepted: int
    rejected: int
    completed: int
    failed: int
    cancelled: int
    timeout: int
    tokens: int


class PeerQuotaShown(msgspec.Struct, frozen=True, gc=False, kw_only=True, rename="camel", omit_defaults=True):
    """A peer's daily quota, and what it has used today."""

    peer_id: InstanceId
    peer: str
    accepted_today: int
    tokens_today: int
    offers_per_day: int | None = None
    tokens_per_day: int | None = None


class PeerUsageAnswer(ApiAnswer, frozen=True, kw_only=True, rename="camel", tag="peer_usage"):
    usage: tuple[PeerUsageShown, ...]
    total: int
    quotas: tuple[PeerQuotaShown, ...]


async def peer_usage(services: Services, caller: Principal, request: PeerUsageRequest) -> PeerUsageAnswer:
    peers = await services.require_peers(caller, "showing what peers used")
    selected = peers.find(request.peer_id) if request.peer_id is not None else None
    known, today = {each.id: each for each in await peers.peers()}, day_of(services.ledger.now_ms())
    rows = await services.ledger.peer_usage(today - request.days + 1, selected.id if selected is not None else None)
    found = [each for each in rows if request.profile in (None, each.profile) and request.role in (None, each.role)]
    page = found[request.offset : request.offset + request.limit]
    shown = [
        fill(PeerUsageShown, each, day=day_text(each.day), peer_id=each.peer, peer=_name_in(known, each.peer))
        for each in page
    ]
    chosen = known.values() if selected is None else (selected,)
    quotas = [quota for peer in chosen if (quota := _quota_shown(peers, peer, rows, today)) is not None]
    return PeerUsageAnswer(usage=fit(shown), total=len(found), quotas=tuple(quotas))


def day_text(day: int) -> str:
    return (date(1970, 1, 1) + timedelta(days=day)).isoformat()


def _name_in(known: dict[InstanceId, Peer], peer_id: InstanceId) -> str | None:
    peer = known.get(peer_id)
    return peer.name if peer is not None else None


def _quota_shown(peers: PeerOperations, peer: Peer, rows: Sequence[PeerUsage], today: int) -> PeerQuotaShown | None:
    offers, tokens = peers.quota(peer)
    if offers is None and tokens is None:
        return None
    today_usage = [
        each for each in rows if (each.day, each.role, each.peer) == (today, DelegationRole.PROVIDER, peer.id)
    ]
    return PeerQuotaShown(
        peer_id=peer.id,
        peer=peer.name,
        accepted_today=sum(each.accepted for each in today_usage),
        tokens_today=sum(each.tokens for each in today_usage),
        offers_per_day=offers,
        tokens_per_day=tokens,
    )


OPERATIONS: Final[tuple[AnyApiOperation, ...]] = (
    ApiOperation("POST", DELEGATE, delegate, "Delegate a task by a profile's name: here, or to a peer", status=201),
    ApiOperation("GET", DELEGATIONS, list_delegations, "Delegations to and from peers, lost ones first"),
    ApiOperation("GET", DELEGATION, show_delegation, "One delegation", wait=show_delegation_waiting),
    ApiOperation("POST", f"{DELEGATION}/cancel", cancel_delegation, "Cancel a delegation, on both sides"),
    ApiOperation("POST", f"{DELEGATION}/offer-again", offer_again, "Offer a lost delegation again, under the same id"),
    ApiOperation("POST", f"{DELEGATION}/force-error", force_delegation, "Give a lost delegation up"),
    ApiOperation("GET", f"{DELEGATION}/tree", delegation_tree, "A delegation and its sub-delegations"),
    ApiOperation("GET", f"{DELEGATION}/proof", delegation_proof, "All that proves a delegation's result"),
    ApiOperation(
        "GET",
        USAGE,
        peer_usage,
        "The usage of this instance by peers, and of peers by this instance, by profile and day",
    ),
)
