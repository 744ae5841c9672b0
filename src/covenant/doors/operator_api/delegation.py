"""The operator's operations on what is delegated to peers and by them."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec

from covenant.doors.operator_api.operation import AnyApiOperation, ApiAnswer, ApiOperation, Services, fill, fit
from covenant.doors.operator_api.peers import Offset, Page, PeerQuery, require_peers
from covenant.doors.waits import Pause
from covenant.exchange.access.principals import Principal
from covenant.ledger.contract.tasks import TreeNode
from covenant.model.errors import Invalid
from covenant.model.ids import TaskId
from covenant.model.peers.delegation import Delegation
from covenant.model.peers.delegation_messages import DelegationStatus, Proof, TokenUsage
from covenant.model.peers.instance import InstanceId
from covenant.wire.mailbox import Whole
from covenant.wire.peers import DelegateRequest, Named

Reason = Annotated[str, msgspec.Meta(max_length=500)]


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


class ForceDelegationRequest(DelegationRequest, frozen=True, kw_only=True):
    reason: Reason


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


class DelegatedAnswer(ApiAnswer, frozen=True, kw_only=True, rename="camel", tag="delegated"):
    """`delegation_id` is the id of its task here. `remote` is false where an agent here does it."""

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
    """Lost ones first, then the one that moved last first."""

    delegations: tuple[DelegationShown, ...]
    total: int


class DelegationTreeAnswer(ApiAnswer, frozen=True, kw_only=True, rename="camel", tag="delegation_tree"):
    tree: TreeNode


class ProofAnswer(ApiAnswer, frozen=True, kw_only=True, rename="camel", tag="delegation_proof"):
    """All that `covenant peers verify-proof` needs, offline. `transcript` is None where it stayed with the provider."""

    offer: Any
    result: Any
    transcript: Any
    proof: Proof | None


DELEGATE: Final = "/api/v1/a2a/delegate"
DELEGATIONS: Final = "/api/v1/a2a/delegations"
DELEGATION: Final = "/api/v1/a2a/delegations/{delegation_id}"


def _delegation(services: Services, delegation: Delegation) -> DelegationShown:
    peer = services.ledger.peer(delegation.peer)
    shown = delegation_shown(delegation, peer.name if peer is not None else delegation.peer)
    if services.peers is not None and delegation.peer == services.peers.id:
        # An agent here does it.
        return msgspec.structs.replace(shown, remote=False, peer=services.peers.name)
    return shown


def delegation_shown(delegation: Delegation, peer_name: str) -> DelegationShown:
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
    )


async def delegate(services: Services, caller: Principal, request: DelegateRequest) -> DelegatedAnswer:
    peers = await require_peers(services, caller, "delegating")
    if request.profile is None and request.peer_id is None:
        raise Invalid("invalid_request", "give profile, peerId, or both")
    begun = await peers.delegate(caller.agent, request)
    return fill(DelegatedAnswer, begun, delegation_id=begun.task_id, peer_id=begun.peer, status="pending")


async def list_delegations(services: Services, caller: Principal, request: ListDelegationsRequest) -> DelegationList:
    peers = await require_peers(services, caller, "listing delegations")
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
    peers = await require_peers(services, caller, "showing a delegation")
    delegation = await peers.standing(request.delegation_id)
    result, error = await peers.outcome(delegation)
    return DelegationAnswer(delegation=_delegation(services, delegation), result=result, error=error)


async def show_delegation_waiting(
    services: Services, caller: Principal, request: ShowDelegationRequest, pause: Pause
) -> DelegationAnswer:
    """Answer once its task here has ended, or it moved or was heard of since the given moment, or the time is over."""
    give_up_ms = services.give_up_ms(request.wait_ms)
    answer = await show_delegation(services, caller, request)
    while True:
        # Each look has a watch of its own, from before the look: nothing happens unseen in between.
        with services.ledger.watch(TaskId(answer.delegation.id)) as watch:
            answer = await show_delegation(services, caller, request)
            shown, left_ms = answer.delegation, give_up_ms - services.ledger.clock.monotonic_ms()
            happened = request.since_ms is not None and max(shown.moved_at_ms, shown.heard_at_ms) > request.since_ms
            if happened or left_ms <= 0 or answer.result is not None or answer.error is not None:
                return answer
            await pause.until(watch.next(left_ms / 1000))


async def cancel_delegation(
    services: Services, caller: Principal, request: CancelDelegationRequest
) -> DelegationAnswer:
    peers = await require_peers(services, caller, "canceling a delegation")
    moved = await peers.cancel(caller.agent, request.delegation_id, request.reason)
    return DelegationAnswer(delegation=_delegation(services, moved))


async def offer_again(services: Services, caller: Principal, request: DelegationRequest) -> DelegationAnswer:
    peers = await require_peers(services, caller, "offering a delegation again")
    return DelegationAnswer(
        delegation=_delegation(services, await peers.offer_again(caller.agent, request.delegation_id))
    )


async def force_delegation(services: Services, caller: Principal, request: ForceDelegationRequest) -> DelegationAnswer:
    peers = await require_peers(services, caller, "giving a delegation up")
    if not request.reason.strip():
        raise Invalid("invalid_request", "give a reason: it stays in the audit")
    moved = await peers.force_error(caller.agent, request.delegation_id, request.reason)
    return DelegationAnswer(delegation=_delegation(services, moved))


async def delegation_proof(services: Services, caller: Principal, request: DelegationRequest) -> ProofAnswer:
    peers = await require_peers(services, caller, "showing a proof")
    return fill(ProofAnswer, await peers.evidence(request.delegation_id))


async def delegation_tree(services: Services, caller: Principal, request: DelegationRequest) -> DelegationTreeAnswer:
    peers = await require_peers(services, caller, "showing a tree")
    return DelegationTreeAnswer(tree=await peers.tree(request.delegation_id))


OPERATIONS: Final[tuple[AnyApiOperation, ...]] = (
    ApiOperation("POST", DELEGATE, delegate, "Delegate a task by a profile's name: here, or to a peer", status=201),
    ApiOperation("GET", DELEGATIONS, list_delegations, "Delegations to and from peers, lost ones first"),
    ApiOperation("GET", DELEGATION, show_delegation, "One delegation", wait=show_delegation_waiting),
    ApiOperation("POST", f"{DELEGATION}/cancel", cancel_delegation, "Cancel a delegation, on both sides"),
    ApiOperation("POST", f"{DELEGATION}/offer-again", offer_again, "Offer a lost delegation again, under the same id"),
    ApiOperation("POST", f"{DELEGATION}/force-error", force_delegation, "Give a lost delegation up"),
    ApiOperation("GET", f"{DELEGATION}/tree", delegation_tree, "A delegation, and what was delegated for it"),
    ApiOperation("GET", f"{DELEGATION}/proof", delegation_proof, "All that proves a delegation's result"),
)
