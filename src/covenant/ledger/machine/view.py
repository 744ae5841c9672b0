"""The view: everything that a decision may read. An engine loads what a decision asks for."""

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
    """A finished task that only the archive still has."""

    digest: str
    sender: AgentId
    recipient: AgentId
    leased_to: PublicKey | None
    ending: Ending
    cause: Cause
    result: Result
    task: Task | None = None
    """This and the following fields are for commands that bring the task back."""
    generation: int = 1
    accepted_at_ms: int = 0
    lease: Lease | None = None


class Cached(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """A finished `ok` result that answers the same work again."""

    source_task_id: TaskId
    result: Result
    cached_at_ms: int


class Remembered(msgspec.Struct, frozen=True, gc=False):
    """The tasks or results that a request got under its id, so that the same request gets them again."""

    task_ids: tuple[TaskId, ...]
    lease_ids: tuple[LeaseId, ...] = ()


class Account(msgspec.Struct, gc=False, eq=False):
    """The tasks of an account that have not ended, and their bytes with those of the messages that wait for them."""

    tasks: int = 0
    size: int = 0


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
        """Whether a finished task had this id, of which only the id is left. Checked when a task is sent."""

    def queued(self, recipient: PublicKey | None, count: int) -> Sequence[Entry]:
        """The oldest queued tasks of a recipient; without one, of all recipients in turn."""

    def queued_count(self, recipient: PublicKey) -> int: ...
    def account(self, name: str) -> Account:
        """The live tasks of an account (see `account_of`)."""

    def settled(self, sender: PublicKey | None, count: int) -> Sequence[Entry]:
        """The oldest undrained results of a sender, or of all senders."""

    def settled_count(self, sender: PublicKey) -> int: ...
    def undrained_bytes(self, sender: PublicKey) -> int:
        """The size of the results that wait for a sender."""

    def leases(self) -> Iterable[Entry]:
        """Tasks in flight, longest untouched first."""

    def due(self, now_ms: int, count: int, ages: Ages) -> Sequence[Entry]:
        """Tasks whose deadline, timeout, hold or wait is over: at most one of the tasks that share a cache key."""

    def usage_so_far(self, task_id: TaskId) -> dict[str, Any] | None:
        """A task's usage so far, as its holder in this process reports it, for a result that somebody else sets."""

    def orphans(self, count: int) -> Sequence[Entry]:
        """Delegated tasks that have not ended although their parent has."""

    def forgettable(self, now_ms: int, count: int, ages: Ages) -> Sequence[Entry]:
        """Undrained results that are older than the retention time."""

    def cached(self, key: CacheKey) -> Cached | None: ...
    def cache_overflow(self, now_ms: int, count: int, ages: Ages) -> Sequence[CacheKey]:
        """The oldest cached results above the limits of age, number and size, up to `count`."""

    def leader(self, key: CacheKey) -> TaskId | None: ...
    def followers(self, key: CacheKey) -> Sequence[TaskId]: ...
    def remembered(self, verb: str, holder: PublicKey, request_id: str) -> Remembered | None:
        """`verb` is take or drain: the same id may name one request of each."""

    def grants(self, subject: PublicKey, action: str) -> Sequence[Grant]: ...
    def grant(self, signature_b58: str) -> Grant | None: ...
    def identity(self, token_sha256: str) -> Identity | None: ...
    def identities(self, name: str) -> Sequence[Identity]:
        """Live identities with this display name or public key."""

    def identities_revoked_before(self, before_ms: int) -> int: ...
    def grants_revoked_before(self, before_ms: int) -> int: ...
    def tenant(self, name: str) -> Tenant | None: ...
    def tenant_count(self) -> int: ...
    def agent(self, tenant: str, agent_id: str) -> CatalogueAgent | None:
        """An agent that is stored for the tenant."""

    def agent_count(self, tenant: str) -> int: ...
    def pushes(self, task_id: TaskId) -> Sequence[Push]:
        """The configurations of a task, oldest first."""

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
    def outbox_message(self, key: DelegationKey, seq: int) -> OutboxMessage | None: ...
    def outbox_count(self, peer: InstanceId) -> int: ...
    def outbox_first(self, key: DelegationKey) -> OutboxMessage | None: ...
    def outbox_last(self, key: DelegationKey) -> OutboxMessage | None:
        """The first (`outbox_first`) and last message about a delegation that the peer does not have yet."""

    def envelope_taken(self, sender: InstanceId, jti: str) -> bool: ...
    def envelope_count(self, sender: InstanceId) -> int: ...
    def token_revoked(self, token_id: str) -> bool: ...
    def pushes_idle(self, now_ms: int, count: int, ages: Ages) -> Sequence[Push]:
        """Pushes of ended tasks that were idle too long: all was delivered, or the receiver never came back."""
