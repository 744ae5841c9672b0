"""Offers to peers, and checks of a provider's replies.

An offer names the peer, the profile, the limits and a token, and is signed. A task that a peer gave to this instance is
delegated within the terms of that peer: no more tokens, no greater depth. `via` lists all instances that the task is
done for, so that it never goes in a circle.

An accept must be within the offer, a status report and a result within the agreed terms, and a result must be proven.
If a reply is not, the delegation records what was wrong. An accept or a report then cancels it, and a result fails it.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import msgspec

from covenant.exchange.tasks.builder import text_of
from covenant.ledger.machine.peer_commands import DelegationChanges, ReceiveFromPeer
from covenant.model.content import Content, Text
from covenant.model.errors import Conflict, Forbidden, Invalid, NotFound, Refusal, TooLarge
from covenant.model.ids import PublicKey, derived_task_id
from covenant.model.peers.delegation import (
    BUDGET_EXCEEDED,
    CANCELLING,
    PEER,
    TERMS,
    Delegation,
    DelegationQuestion,
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
from covenant.model.peers.instance import InstanceId, KeyPurpose, Trust
from covenant.model.sanitizer import unreserved_parts
from covenant.model.task import Target, Task
from covenant.peers.directory.instance_keys import InstanceKeys
from covenant.peers.directory.peer_directory import PeerDirectory
from covenant.peers.message_redaction import Redacted, outgoing, redact_aside
from covenant.peers.peer_settings import PeerContext, PeerService
from covenant.peers.transport.inbox import IncomingMessage
from covenant.seal.proofs import assert_offer, verify_proof
from covenant.seal.tokens import Narrowing, is_token, narrow
from covenant.wire.redaction import SecretFinding

OnFindings = Callable[[tuple[SecretFinding, ...]], None]
"""Called with the secrets that were found in an offer."""

TOKEN_MS: Final = 7 * 24 * 3_600_000
"""How long an offer's token may be used: long enough for an offer that waits for an unreachable peer."""
ANCESTORS_MAX: Final = 64
ATTACHED: Final = "see what is attached"
"""The text of an offer whose task has no text."""

_replace = msgspec.structs.replace
_TRACEPARENT: Final = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}").fullmatch
TERMS_EXCEEDED: Final = "terms_exceeded"
PROOF_BROKEN: Final = "proof_broken"
LIGHT_BYTES: Final = 32 * 1024
"""A proof over more bytes than this is checked in a thread."""
log = logging.getLogger(__name__)


class OfferBuilder(PeerService):
    def __init__(self, context: PeerContext, directory: PeerDirectory) -> None:
        super().__init__(context)
        self._directory = directory

    async def make(self, task: Task, peer: Peer, target: Target, number: int = 1) -> Redacted[DelegationOffer]:
        """`number` counts the offers of one task.

        Each has an id of its own, so that a peer that rejected one may accept the next.
        """
        profile = target.profile or ""
        if peer.denied:
            raise Forbidden("denied", f"{peer.name} is denied here; nothing is sent to it")
        peer = await self._verified(peer)
        capabilities = await self._capabilities(peer, profile)
        peer = self._ledger.peer(peer.id) or peer
        origin = await self._origin(task)
        offer = self._bounded(task, profile, origin, capabilities, target.budget)
        if number > 1:
            offer = _replace(offer, offer_id=derived_task_id(task.id, "offer", str(number)))
        entry = await self._ledger.entry(task.id)
        task_ends_ms = entry.times_out_at_ms(self._now_ms(), self._ledger.clock.ages) if entry is not None else None
        deadlines = [each for each in (offer.deadline_ms, task_ends_ms) if each is not None]
        # Nobody here waits after the deadline, so a provider that sees the offer later must not begin.
        offer = _replace(offer, deadline_ms=min(deadlines, default=None))
        parts = task.parts or (Text(task.intent_text),)
        offer = _with_texts(offer, parts, target.context)
        cleared = await redact_aside(offer, self._settings.redaction)
        return cleared._replace(message=self._with_assertion(cleared.message, peer, capabilities))

    async def _verified(self, peer: Peer) -> Peer:
        if not peer.trust.covers(Trust.VERIFIED):
            peer = await self._directory.verify(peer)
        if not peer.trust.covers(Trust.VERIFIED) or peer.keys is None:
            raise Forbidden("untrusted", f"{peer.name} has not proven its identity; run `covenant peers verify`")
        return peer

    async def _capabilities(self, peer: Peer, profile: str) -> PeerCapabilities:
        """The peer's capabilities as it says now.

        If it cannot be asked, as it said last: the offer then waits for it.
        """
        try:
            capabilities = await self._directory.capabilities(peer)
            # An answer to an unverified peer has no token; the peer may have verified us since.
            if not is_token(capabilities.token) or not capabilities.offers(profile):
                capabilities = await self._directory.capabilities(peer, fresh=True)
        except Refusal:
            kept = self._ledger.peer(peer.id)
            if kept is None or kept.capabilities is None or not kept.capabilities.offers(profile):
                raise
            return kept.capabilities
        if not capabilities.offers(profile):
            names = ", ".join(each.name for each in capabilities.profiles[:20]) or "nothing"
            raise NotFound("no_profile", f"{peer.name} does not offer {profile!r} to us; it offers {names}")
        return capabilities

    async def _origin(self, task: Task) -> dict[str, Any]:
        """The terms agreed with the peer that this task is done for; empty if it is not done for a peer."""
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

    def _with_assertion(self, offer: DelegationOffer, peer: Peer, capabilities: PeerCapabilities) -> DelegationOffer:
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
        key = self._keyring.signing(KeyPurpose.PROOFS, peer.keys, self._now_ms())
        return assert_offer(key, _replace(offer, token=token), provider=peer.id)


def _with_texts(offer: DelegationOffer, parts: tuple[Content, ...], context: str | None) -> DelegationOffer:
    """The offer with the task's text and context, and with the parts that are more than plain text."""
    words = text_of(parts)
    more = tuple(part for part in parts if not (type(part) is Text and part == Text(part.text)))
    if len(words) > TASK_CHARS_MAX or len(context or "") > CONTEXT_CHARS_MAX or len(more) > PARTS_MAX:
        raise TooLarge(
            "offer_too_large",
            f"an offer has at most {TASK_CHARS_MAX} characters of task, {CONTEXT_CHARS_MAX} of context and "
            f"{PARTS_MAX} parts",
        )
    return _replace(offer, task=words or ATTACHED, context=context or None, parts=more)


def check_accept(
    incoming: IncomingMessage, delegation: Delegation, accept: DelegationAccept, now_ms: int, *, restored: bool
) -> ReceiveFromPeer:
    """`restored`: whether our ledger was ever restored."""
    offer = delegation.offer
    over = offer is not None and (accept.max_token_budget > offer.max_token_budget or accept.timeout > offer.timeout)
    if over and restored and not delegation.accepted_at_ms:
        # The provider accepts an offer that our ledger has lost. It accepts the present offer when it gets it.
        return ReceiveFromPeer(envelope=incoming.envelope, key=delegation.key)
    changes = DelegationChanges(
        delegation_id=accept.delegation_id,
        budget=min(accept.max_token_budget, delegation.budget),
        timeout_ms=min(accept.timeout, delegation.timeout_ms),
        status_interval_ms=accept.status_interval,
        accepted_at_ms=delegation.accepted_at_ms or now_ms,
        status_seq=delegation.status_seq,
    )
    if not over:
        return _command(incoming, delegation, ("accept",), changes)
    reason = "the provider would take more than was offered"
    changes = _replace(changes, code=TERMS_EXCEEDED, reason=reason)
    return _stop(incoming, delegation, "accept", changes)


def check_status(incoming: IncomingMessage, delegation: Delegation, report: StatusReport) -> ReceiveFromPeer:
    if report.seq <= delegation.status_seq:
        return _command(incoming, delegation, ("status",), DelegationChanges())
    changes = DelegationChanges(
        delegation_id=delegation.delegation_id or report.delegation_id,
        status_seq=report.seq,
        usage=_larger_usage(delegation, report.token_usage),
        progress=report.progress,
        message=None if _repeats(delegation, report) else report.message,
        below=report.sub_delegations or (),
        question=_question_in(delegation, report),
    )
    if report.token_usage.total <= delegation.budget or delegation.overspent:
        return _command(incoming, delegation, ("status",), changes)
    reason = f"{report.token_usage.total} tokens were used, and {delegation.budget} were agreed"
    changes = _replace(changes, code=BUDGET_EXCEEDED, reason=reason, overspent=True)
    return _stop(incoming, delegation, "status", changes)


def _question_in(delegation: Delegation, report: StatusReport) -> DelegationQuestion | None:
    """None if the provider asks nothing, or still repeats the question whose answer is on its way.

    Question numbers grow, so an earlier number comes from a provider whose ledger was restored: it is asked again.
    """
    if report.status != "input_required" or report.question is None or _repeats(delegation, report):
        return None
    return DelegationQuestion(
        number=report.question, text=report.message or "", parts=tuple(unreserved_parts(report.parts))
    )


def _repeats(delegation: Delegation, report: StatusReport) -> bool:
    """Whether the provider repeats the question whose answer is on its way."""
    return report.status == "input_required" and report.question == delegation.answered


async def check_result(
    incoming: IncomingMessage,
    delegation: Delegation,
    result: DelegationResult,
    *,
    us: InstanceKeys,
    task: DelegationOutcome | None,
    restored: bool,
) -> ReceiveFromPeer:
    """`task`: how the task here has ended; None while the task waits for the result.

    `restored`: whether our ledger was ever restored.
    """
    broken = await _broken(delegation, incoming.peer, result, us)
    if restored and broken == ("offer",):
        # The provider answers an offer that our ledger has lost. It answers the present offer when it gets it.
        return ReceiveFromPeer(envelope=incoming.envelope, key=delegation.key)
    usage = _larger_usage(delegation, result.token_usage)
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
        log.warning("peer.result_refused", extra={"offer_id": delegation.offer_id, "code": code, "broken": broken})
    changes = DelegationChanges(
        delegation_id=delegation.delegation_id or result.delegation_id,
        usage=usage,
        progress=None,
        message=None,
        below=(),
        question=None,
        code=code,
        reason=reason[:500] if reason is not None else None,
        overspent=overspent,
        broken=broken,
        # A task that has ended here does not take the result.
        result=result if task is None else None,
        settled=task is not None,
        proof=result.proof,
    )
    # Work that we canceled for breaking the terms has failed, though the provider calls it cancelled.
    at_fault = broken or overspent or (delegation.code is not None and result.status == "cancelled")
    outcome = task or ("failed" if at_fault else result.status)
    return _command(incoming, delegation, (f"result_{outcome}",), changes)


async def _broken(delegation: Delegation, peer: Peer, result: DelegationResult, us: InstanceKeys) -> tuple[str, ...]:
    """The invalid parts of the proof. `check_result` checks the tokens used."""
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


def _larger_usage(delegation: Delegation, reported: TokenUsage) -> TokenUsage:
    """Usage never falls: tokens that a provider once reported stay counted."""
    return max(reported, delegation.usage, key=lambda each: each.total)


def _command(
    incoming: IncomingMessage,
    delegation: Delegation,
    transitions: tuple[str, ...],
    changes: DelegationChanges,
    message: DelegationCancel | None = None,
) -> ReceiveFromPeer:
    return ReceiveFromPeer(
        envelope=incoming.envelope,
        key=delegation.key,
        transitions=transitions,
        changes=changes,
        messages=(outgoing(message),) if message is not None else (),
    )


def check_reject(
    incoming: IncomingMessage, delegation: Delegation, reject: DelegationReject, now_ms: int
) -> ReceiveFromPeer:
    why = DelegationChanges(code=reject.code, reason=reject.reason, retry_after_ms=reject.retry_after)
    deadline_ms = delegation.offer.deadline_ms if delegation.offer is not None else None
    over = reject.code == "expired" and deadline_ms is not None and deadline_ms <= now_ms
    # An expired offer counts as timed out, whichever side noticed first.
    transition = "timeout" if over and delegation.state is not CANCELLING else "reject"
    return _command(incoming, delegation, (transition,), why if delegation.code is None else DelegationChanges())


def _stop(
    incoming: IncomingMessage, delegation: Delegation, transition: str, changes: DelegationChanges
) -> ReceiveFromPeer:
    """The provider broke the terms: cancels the delegation, for the code and the reason in `changes`."""
    if delegation.state is CANCELLING:
        return _command(incoming, delegation, (transition,), changes)
    cancel = cancel_message(delegation, f"{changes.code}: {changes.reason}")
    return _command(incoming, delegation, (transition, "cancel"), changes, cancel)


def cancel_message(delegation: Delegation, reason: str) -> DelegationCancel:
    """The cancel, with its reason as given; `redact_aside` removes secrets before it is sent."""
    return DelegationCancel(offer_id=delegation.offer_id, delegation_id=delegation.delegation_id, reason=reason)
