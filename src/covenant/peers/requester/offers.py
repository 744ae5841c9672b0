"""Offers to peers, and checks of what a provider replies.

An offer names the peer, the profile, the limits and a token, and is signed. A task that a peer gave to this instance is
delegated within the terms of that peer: no more tokens, no greater depth. `via` lists all instances that the task is
done for, so that it never goes in a circle.

An accept must be within the offer, a status report and a result within the agreed terms, and a result must be proven.
If a reply is not, the delegation records what was wrong, and the provider is told to stop.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable
from functools import partial
from typing import Any, Final, NamedTuple

import msgspec

from covenant.exchange.delegation import call_id
from covenant.exchange.tasks.builder import text_of
from covenant.ledger.machine.peer_commands import DelegationChanges, ReceiveFromPeer
from covenant.model.content import Content, Text
from covenant.model.errors import Conflict, Forbidden, Invalid, NotFound, Refusal, TooLarge
from covenant.model.ids import PublicKey
from covenant.model.peers.delegation import (
    BUDGET_EXCEEDED,
    CANCELLING,
    OUTCOMES,
    PEER,
    STATUS,
    TERMS,
    Delegation,
    DelegationQuestion,
    DelegationState,
    Peer,
    PeerCapabilities,
)
from covenant.model.peers.delegation_messages import (
    BUDGET_MAX,
    CONTEXT_CHARS_MAX,
    DEPTH_MAX,
    PARTS_MAX,
    TASK_CHARS_MAX,
    TIMEOUT_MS_MAX,
    DelegationAccept,
    DelegationCancel,
    DelegationOffer,
    DelegationOutcome,
    DelegationReject,
    DelegationResult,
    StatusReport,
    TokenUsage,
)
from covenant.model.peers.instance import InstanceId, Trust
from covenant.model.sanitizer import unreserved_parts
from covenant.model.task import Cause, Target, Task
from covenant.model.task_view import TaskState, TaskView
from covenant.peers.directory.instance_keys import InstanceKeys
from covenant.peers.directory.peer_directory import PeerDirectory
from covenant.peers.message_redaction import Redacted, outgoing, redact_aside
from covenant.peers.peer_settings import PeerContext, PeerService
from covenant.peers.requester.placement import has_profile
from covenant.peers.transport.inbox import IncomingMessage
from covenant.seal.proofs import assert_offer, verify_proof
from covenant.seal.tokens import Narrowing, is_token, narrow
from covenant.wire.redaction import SecretFinding

Told = Callable[[tuple[SecretFinding, ...]], None]

TOKEN_MS: Final = 7 * 24 * 3_600_000
"""How long an offer's token may be used: it waits for a peer that is not there. What it was made from ends sooner."""
ANCESTORS_MAX: Final = 64
ATTACHED: Final = "see what is attached"
"""The task of an offer that has no words."""

_replace = msgspec.structs.replace
_TRACEPARENT: Final = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}").fullmatch


class OfferBuilder(PeerService):
    def __init__(self, context: PeerContext, directory: PeerDirectory) -> None:
        super().__init__(context)
        self._directory = directory

    # What to offer

    async def make(self, task: Task, peer: Peer, target: Target, number: int = 1) -> Redacted[DelegationOffer]:
        """`number`: which offer of its task it is. Each has an id of its own: who rejected one may take another."""
        profile = target.profile or ""
        if peer.denied:
            raise Forbidden("denied", f"{peer.name} is denied here; nothing is sent to it")
        peer = await self._verified(peer)
        capabilities = await self._capabilities(peer, profile)
        peer = self._ledger.peer(peer.id) or peer
        origin = await self._origin(task)
        offer = self._bounded(task, profile, origin, capabilities, target.budget)
        if number > 1:
            offer = _replace(offer, offer_id=call_id(task.id, "offer", str(number)))
        entry = await self._ledger.entry(task.id)
        over_ms = entry.times_out_at_ms(self._now_ms(), self._ledger.clock.ages) if entry is not None else None
        deadlines = [each for each in (offer.deadline_ms, over_ms) if each is not None]
        # Nobody here waits for longer: a provider that is away until then does not begin.
        offer = _replace(offer, deadline_ms=min(deadlines, default=None))
        parts = task.parts or (Text(task.intent_text),)
        offer = _worded(offer, parts, target.context)
        cleared = await redact_aside(offer, self._settings.redaction)
        return cleared._replace(message=self._signed(cleared.message, peer, capabilities))

    async def _verified(self, peer: Peer) -> Peer:
        if not peer.trust.covers(Trust.VERIFIED):
            peer = await self._directory.verify(peer)
        if not peer.trust.covers(Trust.VERIFIED) or peer.keys is None:
            raise Forbidden("untrusted", f"{peer.name} has not proven who it is; see `covenant peers verify`")
        return peer

    async def _capabilities(self, peer: Peer, profile: str) -> PeerCapabilities:
        """As it says now; or as it said once, where it cannot be asked: the offer waits for it then."""
        try:
            capabilities = await self._directory.capabilities(peer)
            # What was said to a mere peer has no token; since then it may have verified us.
            if not is_token(capabilities.token) or not has_profile(capabilities, profile):
                capabilities = await self._directory.capabilities(peer, fresh=True)
        except Refusal:
            kept = self._ledger.peer(peer.id)
            if kept is None or kept.capabilities is None or not has_profile(kept.capabilities, profile):
                raise
            return kept.capabilities
        if not has_profile(capabilities, profile):
            names = ", ".join(each.name for each in capabilities.profiles[:20]) or "nothing"
            raise NotFound("no_profile", f"{peer.name} does not offer {profile!r} to us; it offers {names}")
        return capabilities

    async def _origin(self, task: Task) -> dict[str, Any]:
        """What was agreed with the peer that this is done for, if it is done for one."""
        above: Task | None = task
        for _ in range(ANCESTORS_MAX):
            if above is None:
                break
            if above.origin == PEER:
                terms = (above.request_metadata or {}).get(TERMS)
                return terms if isinstance(terms, dict) else {}
            entry = await self._ledger.entry(above.parent) if above.parent is not None else None
            above = entry.task if entry is not None else None
        return {}

    def _bounded(
        self,
        task: Task,
        profile: str,
        origin: dict[str, Any],
        capabilities: PeerCapabilities,
        budget: int | None,
    ) -> DelegationOffer:
        settings = self._settings
        most = next(each.max_token_budget for each in capabilities.profiles if each.name == profile)
        budgets = [budget or settings.budget_default, most, BUDGET_MAX, origin.get("budget")]
        times = [settings.timeout_ms, TIMEOUT_MS_MAX, task.timeout_ms]
        if task.deadline_ms is not None:
            times.append(self._ledger.clock.left_ms(task.deadline_ms))
        left = min(self._context.depth_max - task.depth, settings.depth_max, DEPTH_MAX)
        via = [*origin.get("via", ()), *([origin["peer"]] if "peer" in origin else ())]
        via = list(dict.fromkeys((*via, self._keyring.id)))
        timeout = min(each for each in times if each is not None)
        if timeout <= 0:
            raise Conflict("deadline_exceeded", "the task has no time left for a delegation")
        if left < 0 or len(via) > DEPTH_MAX:
            raise Invalid("depth_exceeded", f"a chain of calls has at most {self._context.depth_max} calls")
        return DelegationOffer(
            offer_id=task.id,
            profile=profile,
            task=ATTACHED,
            max_token_budget=max(1, min(each for each in budgets if each is not None)),
            timeout=timeout,
            depth_remaining=left,
            deadline_ms=task.deadline_ms,
            traceparent=task.traceparent if _TRACEPARENT(task.traceparent or "") else None,
            parent_id=task.parent,
            via=tuple(via),
        )

    def _signed(self, offer: DelegationOffer, peer: Peer, capabilities: PeerCapabilities) -> DelegationOffer:
        assert peer.keys is not None
        token = capabilities.token
        if token is not None:
            further = Narrowing(
                profiles=frozenset({offer.profile}),
                budget=offer.max_token_budget,
                depth=offer.depth_remaining,
                expires_at_ms=self._now_ms() + TOKEN_MS,
                offer_id=offer.offer_id,
            )
            token = narrow(token, PublicKey(peer.keys.identity_key), further, sealed=True)
        return assert_offer(self._keyring.private_key, _replace(offer, token=token), provider=peer.id)


def _worded(offer: DelegationOffer, parts: tuple[Content, ...], context: str | None) -> DelegationOffer:
    """What is asked: the words, and what is more than words."""
    words = text_of(parts)
    more = tuple(part for part in parts if not (type(part) is Text and part == Text(part.text)))
    if len(words) > TASK_CHARS_MAX or len(context or "") > CONTEXT_CHARS_MAX or len(more) > PARTS_MAX:
        raise TooLarge(
            "offer_too_large",
            f"a peer is asked with at most {TASK_CHARS_MAX} characters of task, {CONTEXT_CHARS_MAX} of context and "
            f"{PARTS_MAX} parts",
        )
    return _replace(offer, task=words or ATTACHED, context=context or None, parts=more)


TERMS_EXCEEDED: Final = "terms_exceeded"
PROOF_BROKEN: Final = "proof_broken"
LIGHT_BYTES: Final = 32 * 1024
"""Up to here a proof is checked at once; a larger one in a thread."""

log = logging.getLogger(__name__)


class Why(NamedTuple):
    code: str
    reason: str
    overspent: bool = False


def check_accept(
    incoming: IncomingMessage, delegation: Delegation, accept: DelegationAccept, now_ms: int
) -> ReceiveFromPeer:
    offer = delegation.offer
    over = offer is not None and (accept.max_token_budget > offer.max_token_budget or accept.timeout > offer.timeout)
    changes = DelegationChanges(
        delegation_id=accept.delegation_id,
        budget=min(accept.max_token_budget, delegation.budget),
        timeout_ms=min(accept.timeout, delegation.timeout_ms),
        status_interval_ms=accept.status_interval,
        accepted_at_ms=delegation.accepted_at_ms or now_ms,
    )
    if not over:
        return _hear(incoming, delegation, ("accept",), changes)
    reason = "the provider would take more than was offered"
    return _stop(incoming, delegation, "accept", changes, Why(TERMS_EXCEEDED, reason))


def check_status(incoming: IncomingMessage, delegation: Delegation, report: StatusReport) -> ReceiveFromPeer:
    if report.seq <= delegation.status_seq:
        return _hear(incoming, delegation, ("status",), DelegationChanges())
    changes = DelegationChanges(
        delegation_id=delegation.delegation_id or report.delegation_id,
        status_seq=report.seq,
        usage=_used(delegation, report.token_usage),
        progress=report.progress,
        message=report.message,
        question=_asked(delegation, report),
    )
    if report.token_usage.total <= delegation.budget or delegation.overspent:
        return _hear(incoming, delegation, ("status",), changes)
    reason = f"{report.token_usage.total} tokens were used, and {delegation.budget} were agreed"
    return _stop(incoming, delegation, "status", changes, Why(BUDGET_EXCEEDED, reason, overspent=True))


def _asked(delegation: Delegation, report: StatusReport) -> DelegationQuestion | None:
    """None: nothing is asked, or what was answered already, whose answer is on its way."""
    if report.status != "input_required" or report.question is None or report.question <= delegation.answered:
        return None
    return DelegationQuestion(
        number=report.question, text=report.message or "", parts=tuple(unreserved_parts(report.parts))
    )


async def check_result(
    incoming: IncomingMessage,
    delegation: Delegation,
    result: DelegationResult,
    *,
    us: InstanceKeys,
    task: DelegationOutcome | None,
) -> ReceiveFromPeer:
    """`task`: how its task here has ended; None while that waits for the result."""
    broken = await _broken(delegation, incoming.peer, result, us)
    usage = _used(delegation, result.token_usage)
    overspent = delegation.overspent or usage.total > delegation.budget
    code, reason = result.error_code, result.error
    if overspent:
        code = BUDGET_EXCEEDED
        reason = f"{usage.total} tokens were used, and {delegation.budget} were agreed"
    elif broken:
        code, reason = PROOF_BROKEN, f"its proof does not hold: {', '.join(broken)}"
    elif delegation.code is not None:
        code, reason = delegation.code, delegation.reason
    if broken or overspent:
        log.warning("peer.not_believed", extra={"offer_id": delegation.offer_id, "code": code, "broken": broken})
    changes = DelegationChanges(
        delegation_id=delegation.delegation_id or result.delegation_id,
        usage=usage,
        progress=None,
        message=None,
        question=None,
        code=code,
        reason=reason[:500] if reason is not None else None,
        overspent=overspent,
        broken=broken,
        # A task that has ended here takes nothing any more.
        result=result if task is None else None,
        settled=task is not None,
        proof=result.proof,
    )
    # What was told to stop for its own fault has failed, though it calls itself cancelled.
    at_fault = broken or overspent or (delegation.code is not None and result.status == "cancelled")
    outcome = task or ("failed" if at_fault else result.status)
    return _hear(incoming, delegation, (f"result_{outcome}",), changes)


async def _broken(delegation: Delegation, peer: Peer, result: DelegationResult, us: InstanceKeys) -> tuple[str, ...]:
    """What of it is not as it should be. What it cost is looked at by itself."""
    if result.proof is None:
        return ("missing",)
    check = partial(
        verify_proof,
        result.proof,
        result.transcript,
        offer=delegation.offer,
        result=result,
        provider=peer.signed_as(result.proof.provider),
        requester=InstanceId(result.proof.requester) if result.proof.requester in us.ids else us.id,
    )
    size = sum(len(line.content) for line in result.transcript or ()) + len(result.result or "")
    light = size <= LIGHT_BYTES and not result.parts and not (delegation.offer and delegation.offer.parts)
    report = check() if light else await asyncio.to_thread(check)
    broken = list(report.broken)
    if delegation.delegation_id not in (None, result.delegation_id) or result.profile != delegation.profile:
        broken.append("delegation")
    return tuple(dict.fromkeys(broken))


def _used(delegation: Delegation, said: TokenUsage) -> TokenUsage:
    """What it said to have used once, it has used."""
    return max(said, delegation.usage, key=lambda each: each.total)


def _hear(
    incoming: IncomingMessage,
    delegation: Delegation,
    happenings: tuple[str, ...],
    changes: DelegationChanges,
    message: DelegationCancel | None = None,
) -> ReceiveFromPeer:
    return ReceiveFromPeer(
        envelope=incoming.envelope,
        key=delegation.key,
        happenings=happenings,
        changes=changes,
        said=(outgoing(message),) if message is not None else (),
    )


def check_reject(
    incoming: IncomingMessage, delegation: Delegation, reject: DelegationReject, now_ms: int
) -> ReceiveFromPeer:
    why = DelegationChanges(code=reject.code, reason=reject.reason, retry_after_ms=reject.retry_after)
    deadline_ms = delegation.offer.deadline_ms if delegation.offer is not None else None
    over = reject.code == "expired" and deadline_ms is not None and deadline_ms <= now_ms
    # An offer that came too late has timed out, whoever saw it first.
    happening = "timeout" if over and delegation.state is not CANCELLING else "reject"
    return _hear(incoming, delegation, (happening,), why if delegation.code is None else DelegationChanges())


def _stop(
    incoming: IncomingMessage, delegation: Delegation, heard: str, changes: DelegationChanges, why: Why
) -> ReceiveFromPeer:
    """What was heard is the reason to cancel it."""
    changes = msgspec.structs.replace(changes, code=why.code, reason=why.reason, overspent=why.overspent)
    if delegation.state is CANCELLING:
        return _hear(incoming, delegation, (heard,), changes)
    return _hear(
        incoming, delegation, (heard, "cancel"), changes, cancel_message(delegation, f"{why.code}: {why.reason}")
    )


def cancel_message(delegation: Delegation, reason: str) -> DelegationCancel:
    """As it was meant: what others have written in it is cleared before it leaves (`redact_aside`)."""
    return DelegationCancel(offer_id=delegation.offer_id, delegation_id=delegation.delegation_id, reason=reason)


def task_outcome(view: TaskView) -> DelegationOutcome:
    """How a task has ended, in the words of delegations. A time-out is one by its cause, whoever ended the task."""
    code = view.result.metadata.get("code") if view.result is not None and view.result.metadata else None
    if view.state is TaskState.COMPLETED:
        return "completed"
    if view.state is TaskState.CANCELED:
        return "cancelled"
    return "timeout" if view.cause in (Cause.TIMEOUT, Cause.DEADLINE) or code == "timeout" else "failed"


def settled_as(state: DelegationState, outcome: DelegationOutcome) -> DelegationState:
    """A rejected one stays so where its task has failed by that."""
    return state if STATUS[state] == outcome else OUTCOMES[outcome]
