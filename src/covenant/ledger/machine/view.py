"""The view: all that a decision may read. An engine gives it the entities that the command's keys name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import msgspec

from covenant.ledger.machine.entry import Entry
from covenant.model.agent_definition import CatalogueAgent
from covenant.model.clock_steps import Ages
from covenant.model.grant import AuditHead, Grant, Identity
from covenant.model.ids import AgentId, LeaseId, PublicKey, TaskId
from covenant.model.peers.delegation import Delegation, DelegationKey, OutboxMessage, Peer
from covenant.model.peers.instance import InstanceId
from covenant.model.push import Push
from covenant.model.settings import Limits
from covenant.model.task import CacheKey, Cause, Ending, Lease, Result, Task
from covenant.model.tenants import Tenant


class Archived(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """A finished task that only the archive still knows."""

    digest: str
    sender: AgentId
    recipient: AgentId
    leased_to: PublicKey | None
    ending: Ending
    cause: Cause
    result: Result
    task: Task | None = None
    """This and what follows: for commands that bring the task back."""
    generation: int = 1
    accepted_at_ms: int = 0
    lease: Lease | None = None


class Cached(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """A finished `ok` result, kept to answer the same work again."""

    source_task_id: TaskId
    result: Result
    cached_at_ms: int


class Remembered(msgspec.Struct, frozen=True, gc=False):
    """What a receive or drain with a request id gave out, so that the same request gives it out again."""

    task_ids: tuple[TaskId, ...]
    lease_ids: tuple[LeaseId, ...] = ()


class Account:
    """Tasks of an account that have not ended, and their size with that of the messages that wait for them."""

    __slots__ = ("size", "tasks")

    def __init__(self) -> None:
        self.tasks = 0
        self.size = 0


class View(Protocol):
    @property
    def limits(self) -> Limits: ...
    @property
    def audit_head(self) -> AuditHead: ...

    def entry(self, task_id: TaskId) -> Entry | None: ...
    def task(self, entry: Entry) -> Task | None:
        """The task of an entry with its body, which may be on disk; None if it cannot be read."""

    def archived(self, task_id: TaskId) -> Archived | None: ...
    def is_erased(self, task_id: TaskId) -> bool:
        """Whether a finished task had this id, and only the id is left. Asked for tasks that are sent."""

    def queued(self, recipient: PublicKey | None, count: int) -> Sequence[Entry]:
        """The oldest queued tasks of a recipient; of all recipients in turn, if none is named."""

    def queued_count(self, recipient: PublicKey) -> int: ...
    def account(self, name: str) -> Account:
        """What an account (see `account_of`) has in the ledger."""

    def settled(self, sender: PublicKey | None, count: int) -> Sequence[Entry]:
        """The oldest undrained results of a sender, or of all."""

    def settled_count(self, sender: PublicKey) -> int: ...
    def undrained_bytes(self, sender: PublicKey) -> int:
        """Size of the results that wait for a sender."""

    def leases(self) -> Iterable[Entry]:
        """In-flight tasks, the longest untouched first."""

    def due(self, now_ms: int, count: int, ages: Ages) -> Sequence[Entry]:
        """Tasks whose deadline or timeout has passed."""

    def used(self, task_id: TaskId) -> dict[str, Any] | None:
        """What a task has used so far, as its holder in this process says: metadata for a result by somebody else."""

    def orphans(self, count: int) -> Sequence[Entry]:
        """Delegated tasks that have not ended, although the task that they are part of has."""

    def forgettable(self, now_ms: int, count: int, ages: Ages) -> Sequence[Entry]:
        """Undrained results that are older than the limit of retention."""

    def cached(self, key: CacheKey) -> Cached | None: ...
    def cache_overflow(self, now_ms: int, count: int, ages: Ages) -> Sequence[CacheKey]:
        """The oldest cached results that are over the limits of age, number and size, up to `count`."""

    def leader(self, key: CacheKey) -> TaskId | None: ...
    def followers(self, key: CacheKey) -> Sequence[TaskId]: ...
    def remembered(self, verb: str, holder: PublicKey, request_id: str) -> Remembered | None:
        """`verb` is take or drain: the same id may name one request of each."""

    def grants(self, subject: PublicKey, action: str) -> Sequence[Grant]: ...
    def grant(self, signature_b58: str) -> Grant | None: ...
    def identity(self, token_sha256: str) -> Identity | None: ...
    def identities(self, name: str) -> Sequence[Identity]:
        """Live identities under a display or a key."""

    def identities_revoked_before(self, before_ms: int) -> int: ...
    def grants_revoked_before(self, before_ms: int) -> int: ...
    def tenant(self, name: str) -> Tenant | None: ...
    def tenant_count(self) -> int: ...
    def agent(self, tenant: str, agent_id: str) -> CatalogueAgent | None:
        """A stored one."""

    def agent_count(self, tenant: str) -> int: ...
    def pushes(self, task_id: TaskId) -> Sequence[Push]:
        """The configurations of a task, the oldest first."""

    def push(self, task_id: TaskId, push_id: str) -> Push | None: ...
    def push_count(self) -> int: ...
    def push_count_of(self, tenant: str) -> int: ...
    def peer(self, peer_id: InstanceId) -> Peer | None: ...
    def peer_named(self, name: str) -> Peer | None: ...
    def peer_count(self) -> int: ...
    def delegation(self, key: DelegationKey) -> Delegation | None: ...
    def delegations_live_count(self, peer: InstanceId) -> int: ...
    def delegations_ended_count(self) -> int: ...
    def delegation_ended_first(self) -> DelegationKey | None: ...
    def parcel(self, key: DelegationKey, seq: int) -> OutboxMessage | None: ...
    def parcel_count(self, peer: InstanceId) -> int: ...
    def parcel_first(self, key: DelegationKey) -> OutboxMessage | None: ...
    def parcel_last(self, key: DelegationKey) -> OutboxMessage | None:
        """What was said first, and last, of what the peer does not have yet."""

    def envelope_taken(self, sender: InstanceId, jti: str) -> bool: ...
    def envelope_count(self, sender: InstanceId) -> int: ...
    def token_revoked(self, token_id: str) -> bool: ...
    def pushes_idle(self, now_ms: int, count: int, ages: Ages) -> Sequence[Push]:
        """Those of ended tasks that have waited too long: for nothing, or for a receiver that never came back."""
