"""Repair of a lease whose holder does not come back: an operator's requests, and the policy for automatic retries."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Final

import msgspec

from covenant.model.ids import LeaseId, TaskId
from covenant.model.rate_limits import Backoff
from covenant.model.task import Result

ATTEMPTS_MAX: Final = 100
PAUSE_S_MAX: Final = 10 * 366 * 86_400
FACTOR_MAX: Final = 100


class Posture(enum.StrEnum):
    """Why work may be requeued although it may then be done twice."""

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
    """How often an agent's failed turn is begun again without an operator, and after which pauses."""

    attempts: int = 3
    backoff: Backoff = Backoff(1.0, 300.0, jitter=0.2)
    """Pauses are in seconds."""

    def pause_s(self, attempt: int, chance: float) -> float | None:
        """The pause in seconds between this failed attempt and the next one; None: there is no next one."""
        return self.backoff.pause(attempt, chance) if attempt < self.attempts else None


def check_attempts(policy: AttemptPolicy, retry_on: Sequence[object], *, idempotent: bool) -> None:
    """Raises ValueError or TypeError for attempts that make no sense, such as a pause below 0 seconds."""
    backoff = policy.backoff
    if not 1 <= policy.attempts <= ATTEMPTS_MAX:
        raise ValueError(f"attempts must be from 1 to {ATTEMPTS_MAX}")
    if retry_on and not idempotent:
        raise ValueError("retry_on needs idempotent=True: a failed turn may have effects; or use turn.retry()")
    if not all(isinstance(kind, type) and issubclass(kind, Exception) for kind in retry_on):
        raise TypeError("retry_on must have classes of exceptions, such as ConnectionError")
    if not (backoff.first >= 0 and backoff.longest >= 0):
        raise ValueError("backoff: the first and the longest pause must be at least 0 seconds")
    if not 0 <= backoff.jitter <= 1:
        raise ValueError(f"backoff: jitter must be from 0 to 1, not {backoff.jitter}")
    if not 1 <= backoff.factor <= FACTOR_MAX:
        raise ValueError(f"backoff: factor must be from 1 to {FACTOR_MAX}, not {backoff.factor}")
    if backoff.longest * (1 + backoff.jitter) > PAUSE_S_MAX:
        raise ValueError("backoff: the longest pause, with its jitter, must be at most ten years")


class SkipReason(enum.StrEnum):
    DISABLED = "disabled"
    NOT_IN_FLIGHT = "not_in_flight"
    MISSING_LEASE = "missing_lease"
    CLOCK_STEPPED = "clock_stepped"
    """The wall clock was set just now, so the age of the lease is unknown. The next pass after the pause decides."""
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
    """`would_requeue`: tasks that an enabled pass would have requeued; `requeued`: those that this pass did."""

    policy: RetryPolicy
    considered: int
    requeued: tuple[Requeued, ...] = ()
    skipped: tuple[Skipped, ...] = ()
    would_requeue: tuple[Requeued, ...] = ()
