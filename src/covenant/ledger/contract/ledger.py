"""The whole ledger, for the daemon's wiring, and its counts."""

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
        """Registers a callback for each durable change of a peer, its messages or its delegations.

        There may be any number of listeners.
        """

    def peer(self, peer_id: InstanceId) -> Peer | None: ...
    def peer_named(self, name: str) -> Peer | None: ...
    def peers(self) -> Sequence[Peer]:
        """All peers, oldest first."""

    def token_revoked(self, token_id: str) -> bool: ...
    def tenant(self, name: str) -> Tenant | None: ...
    async def delegation(self, key: DelegationKey) -> Delegation | None: ...
    async def delegation_of(self, task_id: TaskId) -> Delegation | None:
        """The delegation that a local task requested, or whose work it does."""

    async def delegations(self) -> Sequence[Delegation]:
        """Delegations by their last change, newest first; of ended ones, as many as are kept."""

    async def delegations_live(self, role: DelegationRole, peer: InstanceId | None = None) -> Sequence[Delegation]: ...
    async def peer_outbox(self, peer: InstanceId) -> Sequence[OutboxMessage]:
        """The messages that wait for a peer: by delegation, each in order."""

    async def addressees(self) -> Sequence[InstanceId]:
        """The peers that messages wait for."""

    async def envelope_taken(self, sender: InstanceId, jti: str) -> bool: ...
    async def peer_usage(self, since: int, peer: InstanceId | None = None) -> Sequence[PeerUsage]:
        """The usage of peers and by peers from that day on (`day_of`), newest day first."""

    async def message_log(self) -> Sequence[LoggedMessage]:
        """The recent messages to and from peers, newest first."""


class DelegationLedger(TaskLedger, PeerLedger, Protocol):
    """Tasks, and the peers that do some of them or requested them."""


class Counts(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """The ledger's numbers for status and metrics."""

    queued: int
    leased: int
    parked: int
    following: int
    settled: int
    cached: int
    oldest_lease_age_ms: int
    holders_lost: int
    commits: int
    """Records that were written since the ledger was created."""
    failure: str | None
    """Why nothing more can be written; None while writing works."""
    behind: int = 0
    """Records that the history does not show yet."""
    history_failure: str | None = None
    """Why the history has stopped; None while it works."""
    rejected: int = 0
    """Records that the history could not apply, and has set aside."""
    pushes: int = 0
    pushes_dead: int = 0
    delegations: int = 0
    """Live delegations to and from peers."""
    delegations_lost: int = 0
    peer_outbox: int = 0
    """Messages that wait for a peer."""
    clock_steps: int = 0
    """How often the wall clock was set, as far as this process saw."""
    clock_paused_ms: int = 0
    """How long decisions by age stay paused after such a step; 0: not paused."""
    gauges: dict[str, int] = {}
    """Numbers that only this engine has."""


class TenantSize(msgspec.Struct, frozen=True, gc=False):
    """A tenant's tasks in the ledger, as its limits count them."""

    live_tasks: int
    queued_bytes: int
    kept_bytes: int | None
    """The approximate size of its finished tasks; None while the history cannot be read."""


class LedgerNode(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """One daemon on this ledger: its last run. Times are by the clock of the ledger's host."""

    node: str
    boot: str
    alive: bool
    left: bool = False
    """It was stopped in order. A node that is neither alive nor has left is lost."""
    started_at_ms: int
    seen_at_ms: int
    """When the node was last known to be alive."""
    leases: int
    """The leases that its agents hold. If the node is not alive, these leases have lost their holder."""


class Ledger(DelegationLedger, PushLedger, IdentityLedger, AuditLedger, Protocol):
    @property
    def changes(self) -> ChangeLog:
        """The recent changes by any node. For a single consumer."""

    async def compact(self) -> int:
        """Frees the room of tasks that are not live any more. Returns how many events of them were dropped."""

    async def maintain(self) -> int | None:
        """Compacts if it is worthwhile. Returns the same number, or None if there was nothing to do."""

    async def erase_tasks(self, which: EraseTasks) -> Erased:
        """Erases a batch of finished tasks. Afterwards only their ids are known."""

    async def cached_keys(self, parties: Sequence[str]) -> Sequence[CacheKey]:
        """The keys of cached results of work that these public keys have sent or done."""

    async def scrub(self, tenant: str, parties: Sequence[str]) -> None:
        """Makes the erased data of a removed tenant unreadable: rewrites everything that may still hold its bytes."""

    async def search(self, tenant: str, parties: Sequence[str]) -> Sequence[SearchedPlace]:
        """Searches every table and file of the ledger for a tenant's traces."""

    async def counts(self) -> Counts: ...
    async def tenant_sizes(self, tenants: Sequence[str]) -> Sequence[TenantSize]:
        """The sizes in the given order. Bytes of finished tasks may be slightly outdated."""

    async def nodes(self) -> Sequence[LedgerNode]:
        """The daemons that have served this ledger, by name. A ledger of a single daemon lists that one."""

    def living(self) -> int:
        """The number of nodes that serve this ledger now, as far as this node knows."""

    def leads(self, name: str) -> bool:
        """Whether this node does the named work, which only one node does at a time.

        A call also applies for the work: one of the nodes that applied gets it soon, for as long as its run lives.
        """

    def shares(self, work: str, part: str) -> bool:
        """Whether this node does this part of some work, which is divided among all nodes that call this for it.

        No part is done by two nodes at once. When a node comes or goes, its parts move within seconds.
        """

    async def close(self) -> None: ...


class SharedLedger(Ledger, Protocol):
    """A ledger of several daemons, with the secrets and notes that they share."""

    async def secret(self, name: str) -> str | None:
        """The secret that a daemon stored under this name for all daemons."""

    async def notes(self, tenant: str, agent_id: str) -> tuple[int, str | None]:
        """An agent's notes and their version; 0 for an agent that has never written any."""

    async def keep_notes(self, tenant: str, agent_id: str, version: int, body: str) -> bool:
        """Replaces that version. False: another node has written a newer one."""

    async def keep_secret(self, name: str, body: str) -> None:
        """Stores a secret, encrypted by its caller; an existing one stays."""

    async def replace_secret(self, name: str, before: str, body: str) -> bool:
        """Replaces a secret. False: it is not `before` any more, or does not exist.

        Every living node has the new one when this returns: its listeners were called (`on_registers`).
        """

    def replaced_secret(self, name: str) -> str | None:
        """The last replacement of a secret that this node knows of."""

    async def removed_tenants(self, after: int | None) -> tuple[int, Sequence[str]]:
        """The version of the registers, and the tenants that were removed after that version and are not back."""

    def ledger_epoch(self) -> str | None:
        """The ledger's epoch, which a restore begins; None before the first restore."""

    def committed_batches(self) -> int:
        """The number of batches of all nodes, as far as this node knows. After `durable`: all before that call."""
