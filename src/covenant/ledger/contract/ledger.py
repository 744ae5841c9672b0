"""The whole ledger, for whoever wires it, and what it counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from covenant.ledger.change_log import ChangeLog
from covenant.ledger.contract import Commits
from covenant.ledger.contract.identities import AuditLedger, IdentityLedger
from covenant.ledger.contract.retention import Erased, EraseTasks, SearchedPlace
from covenant.ledger.contract.tasks import PushLedger, TaskLedger
from covenant.model.ids import TaskId
from covenant.model.peers.delegation import (
    Delegation,
    DelegationKey,
    DelegationRole,
    LoggedMessage,
    OutboxMessage,
    Peer,
)
from covenant.model.peers.instance import InstanceId
from covenant.model.peers.usage_by_day import PeerUsage
from covenant.model.task import CacheKey
from covenant.model.tenants import Tenant


class PeerLedger(Commits, Protocol):
    def on_peer(self, callback: Callable[[InstanceId], None]) -> None:
        """Called when something about a peer has become durable: what is known of it, said to it or heard from it.

        For as many listeners as there are.
        """

    def peer(self, peer_id: InstanceId) -> Peer | None: ...
    def peer_named(self, name: str) -> Peer | None: ...
    def peers(self) -> Sequence[Peer]:
        """The oldest first."""

    def token_revoked(self, token_id: str) -> bool: ...
    def tenant(self, name: str) -> Tenant | None: ...
    async def delegation(self, key: DelegationKey) -> Delegation | None: ...
    async def delegation_of(self, task_id: TaskId) -> Delegation | None:
        """The one that a task here stands for, or works on."""

    async def delegations(self) -> Sequence[Delegation]:
        """The one that moved last first; of those that have ended, as many as are kept."""

    async def delegations_live(self, role: DelegationRole, peer: InstanceId | None = None) -> Sequence[Delegation]: ...
    async def parcels(self, peer: InstanceId) -> Sequence[OutboxMessage]:
        """What waits for a peer: by delegation, each in its order."""

    async def addressees(self) -> Sequence[InstanceId]:
        """The peers for whom something waits."""

    async def envelope_taken(self, sender: InstanceId, jti: str) -> bool: ...
    async def peer_usage(self, since: int, peer: InstanceId | None = None) -> Sequence[PeerUsage]:
        """What peers had of us and we of them, from that day on (`day_of`): the newest day first."""

    async def message_log(self) -> Sequence[LoggedMessage]:
        """What went to and fro lately, the newest first."""


class DelegationLedger(TaskLedger, PeerLedger, Protocol):
    """Tasks, and the peers that some of them are done by or for."""


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


class LedgerNode(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """One daemon on this ledger: its last run. Times are by the clock of whatever holds the ledger."""

    node: str
    boot: str
    alive: bool
    started_at_ms: int
    seen_at_ms: int
    """When it was last known to live."""
    leases: int
    """What its agents hold. Of a node that is not alive, these leases have lost their holder."""


class Ledger(DelegationLedger, PushLedger, IdentityLedger, AuditLedger, Protocol):
    @property
    def changes(self) -> ChangeLog:
        """What has changed lately, whoever changed it. For one taker."""

    async def compact(self) -> int:
        """Merge sealed history into a snapshot; how many events of resolved tasks that dropped."""

    async def maintain(self) -> int | None:
        """Compact if that is worth it; what it dropped, or None if there was nothing to do."""

    async def erase_tasks(self, which: EraseTasks) -> Erased:
        """A batch of finished tasks; they are unknown from then on, but for their ids."""

    async def cached_keys(self, parties: Sequence[str]) -> Sequence[CacheKey]:
        """Of the cached results of work that these public keys have sent or done."""

    async def scrub(self, tenant: str, parties: Sequence[str]) -> None:
        """Make what was erased of a removed tenant unreadable: rewrite what may still have its bytes."""

    async def search(self, tenant: str, parties: Sequence[str]) -> Sequence[SearchedPlace]:
        """Look for a tenant's traces in every table and file of the ledger."""

    async def counts(self) -> Counts: ...
    async def nodes(self) -> Sequence[LedgerNode]:
        """The daemons that have served this ledger, by name; one with a ledger of its own is the only one."""

    def leads(self, name: str) -> bool:
        """Whether this node is the one that does what is named so, and that one node alone does.

        Asking is the wish to do it: some node gets it soon, for as long as its run lives.
        """

    async def close(self) -> None: ...


class SharedLedger(Ledger, Protocol):
    """A ledger that several daemons have: also what they need to have in common."""

    async def secret(self, name: str) -> str | None:
        """What a daemon has left under this name for all of them."""

    async def keep_secret(self, name: str, body: str) -> None:
        """Leave it, locked by whoever knows its key; the first one stays."""
