"""Repair: what an operator may do to a lease whose holder does not come back, and the gate that may do it for them."""

from __future__ import annotations

import enum

import msgspec

from covenant.model.ids import LeaseId, TaskId
from covenant.model.rate_limits import Backoff
from covenant.model.task import Result


class Posture(enum.StrEnum):
    """What a requeue claims about running the work again."""

    IDEMPOTENT = "idempotent"
    OPERATOR_ACCEPTED = "operator_accepted"


class Requeue(msgspec.Struct, frozen=True, gc=False, tag_field="action", tag="requeue"):
    duplicate_risk: Posture
    lease_id: LeaseId | None = None


class ForceError(msgspec.Struct, frozen=True, gc=False, tag_field="action", tag="force_error"):
    message: str
    lease_id: LeaseId | None = None


RepairCommand = Requeue | ForceError


class RepairRequest(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    task_id: TaskId
    command: RepairCommand
    reason: str


class RepairOutcome(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    task_id: TaskId
    action: str
    state: str
    attempt: int
    result: Result | msgspec.UnsetType = msgspec.UNSET


class RetryPolicy(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    enabled: bool = False
    min_lease_age_ms: int = 300_000
    max_attempts: int = 3
    max_requeues: int = 1
    scan_limit: int = 100


class AttemptPolicy(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """How often a turn of an agent is begun again by itself after it failed, and after which pauses."""

    attempts: int = 3
    backoff: Backoff = Backoff(1.0, 300.0, jitter=0.2)
    """In seconds."""

    def pause_s(self, attempt: int, chance: float) -> float | None:
        """Between this attempt, which failed, and the next one; None: there is none."""
        return self.backoff.pause(attempt, chance) if attempt < self.attempts else None


class SkipReason(enum.StrEnum):
    DISABLED = "disabled"
    NOT_IN_FLIGHT = "not_in_flight"
    MISSING_LEASE = "missing_lease"
    CLOCK_STEPPED = "clock_stepped"
    """The wall clock was set just now, so nobody knows how old the lease is: ask again when the pause is over."""
    LEASE_TOO_YOUNG = "lease_too_young"
    MISSING_IDEMPOTENCY = "missing_idempotency"
    UNSAFE_DUPLICATE_SAFETY = "unsafe_duplicate_safety"
    MAX_ATTEMPTS_REACHED = "max_attempts_reached"
    LIMIT_REACHED = "limit_reached"
    CAPABILITY_SCOPE_MISMATCH = "capability_scope_mismatch"


class Requeued(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    task_id: TaskId
    lease_id: LeaseId
    attempt: int
    idempotency_key: str


class Skipped(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    task_id: TaskId
    reason: SkipReason
    attempt: int
    lease_age_ms: int | msgspec.UnsetType = msgspec.UNSET


class RetryReport(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """`would_requeue` is what an enabled pass would have done; `requeued` is what this one did."""

    policy: RetryPolicy
    considered: int
    requeued: tuple[Requeued, ...] = ()
    skipped: tuple[Skipped, ...] = ()
    would_requeue: tuple[Requeued, ...] = ()
