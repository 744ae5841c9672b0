"""Repair and the retry gate: they end a lease whose holder does not come back.

The system never redelivers unsafe work. A person may requeue it by accepting the risk explicitly; the gate may requeue
only work that the sender declared idempotent under a key, within the bounds of its policy.
"""

from __future__ import annotations

from typing import assert_never

import msgspec

from covenant.ledger.machine.commands import Access, Repair, RetryStale
from covenant.ledger.machine.decisions.context import (
    BulkAuthorization,
    DecisionContext,
    audit_repair,
    authorize,
    known_task,
)
from covenant.ledger.machine.decisions.results import end
from covenant.ledger.machine.entry import Entry
from covenant.ledger.machine.events import TaskRequeued
from covenant.ledger.machine.states import State
from covenant.ledger.machine.view import Archived
from covenant.model.clock_steps import STEADY, Ages
from covenant.model.errors import Conflict
from covenant.model.ids import AgentId, TaskId
from covenant.model.retry_policy import (
    ForceError,
    Posture,
    RepairOutcome,
    Requeue,
    Requeued,
    RetryPolicy,
    RetryReport,
    Skipped,
    SkipReason,
)
from covenant.model.task import Cause, DuplicateSafety, Ending, Lease, error_result

AUTO_REQUEUE_REASON = "stale lease of idempotent work requeued by the retry gate"


def repair(decide: DecisionContext, command: Repair) -> RepairOutcome:
    task_id, wanted = command.task_id, command.command
    entry = known_task(decide, command)
    authorize(decide, command.access)
    state = State.DRAINED if isinstance(entry, Archived) else entry.state
    if isinstance(entry, Archived) or state is not State.LEASED or entry.lease is None:
        raise Conflict("not_leased", f"task {task_id} is not currently leased; it is {state}")
    lease = entry.lease
    if wanted.lease_id not in (None, lease.lease_id):
        raise Conflict(
            "lease_mismatch",
            f"lease mismatch for task {task_id}: expected {wanted.lease_id}, actual {lease.lease_id}; "
            "look again, then repair",
        )
    match wanted:
        case Requeue():
            _requeue(
                decide,
                task_id,
                lease,
                command.by,
                reason=command.reason,
                duplicate_risk=wanted.duplicate_risk,
                action="requeue",
            )
            return RepairOutcome(
                task_id=task_id, action="requeued", state=State.QUEUED.wire_name, attempt=lease.attempt
            )
        case ForceError():
            result = error_result(task_id, wanted.message)
            result = end(
                decide,
                entry,
                result,
                ending=Ending.FAILED,
                cause=Cause.FORCE_ERROR,
                lease_id=lease.lease_id,
                reason=command.reason,
            )
            audit_repair(decide, task_id, lease, command.by, action="force_error", reason=command.reason)
            return RepairOutcome(
                task_id=task_id,
                action="forced_error",
                state=State.SETTLED.wire_name,
                attempt=lease.attempt,
                result=result,
            )
        case _:
            assert_never(wanted)


def _requeue(
    decide: DecisionContext,
    task_id: TaskId,
    lease: Lease,
    by: AgentId,
    *,
    reason: str,
    duplicate_risk: Posture,
    action: str,
) -> None:
    decide.add(TaskRequeued(task_id, lease.lease_id, reason, duplicate_risk, lease.attempt))
    audit_repair(decide, task_id, lease, by, action=action, reason=reason, duplicate_risk=duplicate_risk)


def judge(entry: Entry, policy: RetryPolicy, now_ms: int, ages: Ages = STEADY) -> SkipReason | None:
    """Why the gate skips this task; None if the task may be requeued."""
    if entry.state is not State.LEASED:
        return SkipReason.NOT_IN_FLIGHT
    if entry.lease is None:
        return SkipReason.MISSING_LEASE
    if ages.paused:
        return SkipReason.CLOCK_STEPPED
    if entry.lease.age_ms(now_ms, ages) < policy.min_lease_age_ms:
        return SkipReason.LEASE_TOO_YOUNG
    idempotency = entry.task.idempotency
    if idempotency is None or not idempotency.key.strip():
        return SkipReason.MISSING_IDEMPOTENCY
    if idempotency.duplicate_safety != DuplicateSafety.IDEMPOTENT:
        return SkipReason.UNSAFE_DUPLICATE_SAFETY
    if entry.attempt - entry.undelivered >= policy.max_attempts:
        return SkipReason.MAX_ATTEMPTS_REACHED
    return None


def retry_stale(decide: DecisionContext, command: RetryStale) -> RetryReport:
    policy = command.policy
    gate = BulkAuthorization(decide, command.access, dry=not policy.enabled)
    considered = 0
    eligible: list[Requeued] = []
    skipped: list[Skipped] = []
    for entry in decide.view.leases():
        if considered >= policy.scan_limit:
            break
        considered += 1
        reason = judge(entry, policy, decide.now_ms, decide.ages)
        if reason is None and len(eligible) >= policy.max_requeues:
            reason = SkipReason.LIMIT_REACHED
        if reason is None and not _in_scope(gate, command.access, entry):
            reason = SkipReason.CAPABILITY_SCOPE_MISMATCH
        if reason is None:
            eligible.append(_retry(decide, command, entry))
            reason = None if policy.enabled else SkipReason.DISABLED
        if reason is not None:
            skipped.append(_skip(decide, entry, reason))
    report = RetryReport(
        policy=policy,
        considered=considered,
        requeued=tuple(eligible) if policy.enabled else (),
        skipped=tuple(skipped),
        would_requeue=tuple(eligible) if not policy.enabled else (),
    )
    if command.scheduled:
        decide.audit(command.by, scan_row(report, None))
    return report


def _in_scope(gate: BulkAuthorization, access: Access | None, entry: Entry) -> bool:
    if access is None:
        return True
    lease = entry.lease
    assert lease is not None
    needed = msgspec.structs.replace(
        access,
        peer=entry.task.recipient.pubkey,
        task_id=entry.task.id,
        lease_id=lease.lease_id,
        duplicate_risk=Posture.IDEMPOTENT.value,
    )
    return gate.covers(needed)


def _retry(decide: DecisionContext, command: RetryStale, entry: Entry) -> Requeued:
    lease, idempotency = entry.lease, entry.task.idempotency
    assert lease is not None
    assert idempotency is not None
    if command.policy.enabled:
        _requeue(
            decide,
            entry.task.id,
            lease,
            command.by,
            reason=AUTO_REQUEUE_REASON,
            duplicate_risk=Posture.IDEMPOTENT,
            action="auto_requeue",
        )
    return Requeued(
        task_id=entry.task.id,
        lease_id=lease.lease_id,
        attempt=lease.attempt,
        idempotency_key=idempotency.key,
    )


def _skip(decide: DecisionContext, entry: Entry, reason: SkipReason) -> Skipped:
    lease = entry.lease
    return Skipped(
        task_id=entry.task.id,
        reason=reason,
        attempt=entry.attempt,
        lease_age_ms=lease.age_ms(decide.now_ms, decide.ages) if lease is not None else msgspec.UNSET,
    )


def scan_row(report: RetryReport, error: str | None) -> dict[str, object]:
    """The summary that every scheduled pass leaves in the audit, also when it was refused."""
    by_reason: dict[str, int] = {}
    for skip in report.skipped:
        by_reason[skip.reason] = by_reason.get(skip.reason, 0) + 1
    policy = report.policy
    return {
        "type": "a2a_auto_retry_scheduler_scan",
        "enabled": policy.enabled,
        "considered": report.considered,
        "requeued": len(report.requeued),
        "skipped": len(report.skipped),
        "skipped_by_reason": by_reason,
        "min_lease_age_ms": policy.min_lease_age_ms,
        "max_attempts": policy.max_attempts,
        "max_requeues": policy.max_requeues,
        "scan_limit": policy.scan_limit,
        "error": error,
    }
