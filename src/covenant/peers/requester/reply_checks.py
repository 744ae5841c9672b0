"""Checks of a provider's replies: how each one moves the delegation, and what is sent in return.

An accept must be within the offer, a status report and a result within the agreed terms, and a result must be proven.
If a reply is not, the delegation records what was wrong, and the provider is told to stop.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import Final, NamedTuple

import msgspec

from covenant.ledger.machine.peer_commands import DelegationChanges, ReceiveFromPeer
from covenant.model.peers.delegation import BUDGET_EXCEEDED, CANCELLING, Delegation
from covenant.model.peers.delegation_messages import (
    DelegationAccept,
    DelegationCancel,
    DelegationReject,
    DelegationResult,
    StatusReport,
    TokenUsage,
)
from covenant.model.peers.instance import InstanceId
from covenant.peers.outgoing_messages import outgoing
from covenant.peers.transport.inbox import IncomingMessage
from covenant.seal.proofs import verify_proof

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
    )
    if report.token_usage.total <= delegation.budget or delegation.overspent:
        return _hear(incoming, delegation, ("status",), changes)
    reason = f"{report.token_usage.total} tokens were used, and {delegation.budget} were agreed"
    return _stop(incoming, delegation, "status", changes, Why(BUDGET_EXCEEDED, reason, overspent=True))


async def check_result(
    incoming: IncomingMessage, delegation: Delegation, result: DelegationResult, *, us: InstanceId, wanted: bool
) -> ReceiveFromPeer:
    """`wanted`: its task here still waits for it."""
    broken = await _broken(delegation, result, us)
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
        code=code,
        reason=reason[:500] if reason is not None else None,
        overspent=overspent,
        broken=broken,
        # A task that has ended here takes nothing any more.
        result=result if wanted else None,
        proof=result.proof,
    )
    return _hear(incoming, delegation, (f"result_{result.status}",), changes)


async def _broken(delegation: Delegation, result: DelegationResult, us: InstanceId) -> tuple[str, ...]:
    """What of it is not as it should be. What it cost is looked at by itself."""
    if result.proof is None:
        return ("missing",)
    check = partial(
        verify_proof,
        result.proof,
        result.transcript,
        offer=delegation.offer,
        result=result,
        provider=delegation.peer,
        requester=us,
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


def check_reject(incoming: IncomingMessage, delegation: Delegation, reject: DelegationReject) -> ReceiveFromPeer:
    why = DelegationChanges(code=reject.code, reason=reject.reason, retry_after_ms=reject.retry_after)
    return _hear(incoming, delegation, ("reject",), why if delegation.code is None else DelegationChanges())


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
