"""The whole ledger, for whoever wires it, and what it counts."""

from __future__ import annotations

from typing import Protocol

import msgspec

from covenant.ledger.contract.identities import AuditLedger, IdentityLedger
from covenant.ledger.contract.peers import PeerLedger
from covenant.ledger.contract.tasks import PushLedger, TaskLedger


class Counts(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """The ledger in numbers, for status and metrics."""

    queued: int
    leased: int
    parked: int
    following: int
    settled: int
    cached: int
    oldest_lease_age_ms: int
    holders_lost: int
    commits: int
    """Records that were written since the ledger was made."""
    failure: str | None
    """Why nothing more can be written, if so."""
    behind: int = 0
    """Records that history does not show yet."""
    history_failure: str | None = None
    """Why history waits, if it does."""
    rejected: int = 0
    """Records that history could not take, and has set aside."""
    pushes: int = 0
    pushes_dead: int = 0
    delegations: int = 0
    """To and from peers, under way."""
    delegations_lost: int = 0
    parcels: int = 0
    """Messages that wait for a peer."""
    clock_steps: int = 0
    """Times that the wall clock was set, as far as this process saw."""
    clock_paused_ms: int = 0
    """How long nothing is done for its age, after such a step; 0: not paused."""
    gauges: dict[str, int] = {}
    """What only this engine has to count."""


class Ledger(TaskLedger, PushLedger, PeerLedger, IdentityLedger, AuditLedger, Protocol):
    async def compact(self) -> int:
        """Merge sealed history into a snapshot; how many events of resolved tasks that dropped."""

    async def maintain(self) -> int | None:
        """Compact if that is worth it; what it dropped, or None if there was nothing to do."""

    async def counts(self) -> Counts: ...
    async def close(self) -> None: ...
