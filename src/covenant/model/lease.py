"""The lease: one attempt at a turn of a task. It never expires by itself."""

from __future__ import annotations

import msgspec

from covenant.model.ages import STEADY, Ages
from covenant.model.ids import AgentId, LeaseId


class Lease(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    lease_id: LeaseId
    leased_to: AgentId
    leased_at_ms: int
    attempt: int
    renewed_at_ms: int = 0
    node: str | None = None
    """Where the holder runs, if it said so: a daemon names itself for the agents inside it."""
    boot: str | None = None
    """Which run of that node: a lease of an earlier run has lost its holder."""

    def age_ms(self, now_ms: int, ages: Ages = STEADY) -> int:
        """Since it was given or renewed, whichever is shorter ago."""
        age_ms = ages.age_ms(self.leased_at_ms, now_ms)
        return min(age_ms, ages.age_ms(self.renewed_at_ms, now_ms)) if self.renewed_at_ms else age_ms
