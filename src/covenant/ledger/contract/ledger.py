"""The ledger's contract: what every engine promises, cut at the verbs of the domain.

Promises of every engine:
- `commit` decides a command once and answers when what it decided is durable. An answer, a refusal or a read never
  depends on a fact that is not durable yet.
- Commands are decided one after the other, as if nobody else were there.
- Repeating a command under the same ids gives the same answer.
- A receive or drain without a request id whose caller is cancelled while it waits is given back before the cancel is
  passed on. With a request id it stands: the same request again returns the same.
- After a failed write, `commit` raises `Unavailable` and reads go on.

What `tests/ledger_contract` checks on every engine is this page in full.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import msgspec

from covenant.ledger.clock import Clock
from covenant.ledger.contract.tasks import (
    ANY,
    Listing,
    ListQuery,
    Parties,
    Queue,
    QueueQuery,
    TaskDetail,
    TaskRow,
    TaskScope,
    TreeNode,
    Waiter,
    Watch,
)
from covenant.ledger.machine.commands import Command
from covenant.ledger.machine.entry import Entry
from covenant.ledger.machine.view import Limits
from covenant.model.agent_definition import CatalogueAgent
from covenant.model.audit_chain import AuditReport
from covenant.model.grant import Grant, Identity
from covenant.model.ids import AgentId, PublicKey, TaskId
from covenant.model.peers.delegation import Delegation, DelegationKey, DelegationRole, LoggedMessage, OutboxMessage
from covenant.model.peers.instance import InstanceId
from covenant.model.peers.peer_record import Peer
from covenant.model.push import Push
from covenant.model.result import Result
from covenant.model.task import Task
from covenant.model.task_event import Step
from covenant.model.tenants import Tenant

A = TypeVar("A")


class AuditRecord(msgspec.Struct, frozen=True, gc=False):
    """`row` is the row's exact text."""

    index: int
    timestamp_ms: int
    row: str


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
    last_seq: int
    durable_seq: int
    archived_seq: int
    syncs: int
    failure: str | None
    archive_failure: str | None = None
    """Why the archive waits, if it does."""
    archive_rejected: int = 0
    """Records that the archive could not take, and has set aside."""
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


class Ledger(Protocol):
    @property
    def limits(self) -> Limits: ...
    @property
    def node(self) -> str: ...
    @property
    def boot(self) -> str: ...
    @property
    def clock(self) -> Clock: ...
    def now_ms(self) -> int:
        """The wall clock, for stamps. Waits use `clock.monotonic_ms`, and what acts on ages `clock.ages`."""

    async def commit(self, command: Command[A]) -> A: ...

    def task_waiter(self, recipient: PublicKey | None) -> Waiter:
        """A place among those who wait for tasks of the recipient (or of anyone)."""

    def result_waiter(self, sender: PublicKey | None) -> Waiter:
        """A place among those who wait for results of the sender's tasks (or of anyone's)."""

    async def finished(self, task_id: TaskId, timeout_ms: int) -> bool:
        """Wait until the task is settled."""

    async def orphaned(self, timeout_ms: int) -> bool:
        """Wait until a task may have ended that others were delegated by; `CancelOrphans` ends those."""

    async def entry(self, task_id: TaskId) -> Entry | None:
        """A live task, as it is on disk."""

    def may_know(self, task_id: TaskId) -> bool:
        """Whether there may be such a task, live or finished. A no is certain. Costs a look-up in memory."""

    async def parties(self, task_id: TaskId) -> Parties | None:
        """Whose a task is, live or finished. Costs the same however large the task is."""

    def watch(self, task_id: TaskId) -> Watch:
        """See each step of a task, known or not yet, from now on. For the past, read `steps` after this."""

    async def steps(self, task_id: TaskId, after: int, limit: int, scope: TaskScope = ANY) -> Sequence[Step]:
        """What happened to a task after a generation, oldest first; nothing, if the task is outside the scope."""

    async def listing(self, query: ListQuery) -> Listing: ...
    async def of_tenant(self, tenant: str, limit: int, *, simple: bool = False) -> Sequence[TaskRow]:
        """A tenant's tasks, whoever they are for, the newest first; `simple`: only those of the simple door."""

    def on_lost(
        self, callback: Callable[[TaskId], None], used: Callable[[TaskId], dict[str, Any] | None] | None = None
    ) -> None:
        """Called when a task was settled or requeued, by whomever, and that is durable: a holder in this process stops.

        `used`: asked what such a task has used so far when somebody else ends it, for the result's metadata.
        For one listener.
        """

    def on_push(self, callback: Callable[[TaskId], None]) -> None:
        """Called when something happened to a task with push configurations, or to one of them, and that is durable.

        For one listener.
        """

    def pushes(self, task_id: TaskId) -> Sequence[Push]:
        """A task's push configurations, the oldest first. What waits for `durable` first tells only what is on disk."""

    async def outbox(self) -> Sequence[Push]:
        """All push configurations: those whose last delivery is still to come."""

    def on_peer(self, callback: Callable[[InstanceId], None]) -> None:
        """Called when something about a peer has become durable: what is known of it, said to it or heard from it.

        For as many listeners as there are.
        """

    def peer(self, peer_id: InstanceId) -> Peer | None:
        """A look-up, as is the rest about peers: what waits for `durable` first tells only what is on disk."""

    def peer_named(self, name: str) -> Peer | None: ...
    def peers(self) -> Sequence[Peer]:
        """The oldest first."""

    def delegation(self, key: DelegationKey) -> Delegation | None: ...
    def delegation_of(self, task_id: TaskId) -> Delegation | None:
        """The one that a task here stands for, or works on."""

    def delegations(self) -> Sequence[Delegation]:
        """The one that moved last first; of those that have ended, as many as are kept."""

    def delegations_live(self, role: DelegationRole, peer: InstanceId | None = None) -> Sequence[Delegation]: ...
    def parcels(self, peer: InstanceId) -> Sequence[OutboxMessage]:
        """What waits for a peer: by delegation, each in its order."""

    def addressees(self) -> Sequence[InstanceId]:
        """The peers for whom something waits."""

    def envelope_taken(self, sender: InstanceId, jti: str) -> bool: ...
    def token_revoked(self, token_id: str) -> bool: ...
    def message_log(self) -> Sequence[LoggedMessage]:
        """What went to and fro lately, the newest first."""

    async def queue(self, query: QueueQuery) -> Queue: ...
    async def recent_tasks(self, viewer: PublicKey | None, limit: int) -> Sequence[Task]:
        """Queued tasks, the newest first; takes nothing."""

    async def recent_results(self, viewer: PublicKey | None, limit: int) -> Sequence[Result]:
        """Undrained results, the newest first; takes nothing."""

    async def show(self, task_id: TaskId, viewer: PublicKey | None, updates_max: int) -> TaskDetail | None: ...
    async def tree(self, root: TaskId, viewer: PublicKey | None) -> TreeNode: ...

    def identity(self, token_sha256: str) -> Identity | None:
        """Who holds this token now. Costs a dictionary look-up: every request asks."""

    def enrolled(self, agent: AgentId) -> AgentId | None:
        """The live identity with this display or this key, if there is one; equal to `agent` if both agree."""

    def tenant(self, name: str) -> Tenant | None: ...
    def tenant_of(self, token_sha256: str) -> Tenant | None:
        """Whose token this is now. Costs a dictionary look-up, as does each of these three."""

    def agent(self, tenant: str, agent_id: str) -> CatalogueAgent | None:
        """An agent that is stored for the tenant."""

    def agents(self, tenant: str) -> Sequence[CatalogueAgent]:
        """Those stored for the tenant, the oldest first. What waits for `durable` first tells only what is on disk."""

    async def tenants(self) -> Sequence[Tenant]:
        """The oldest first."""

    async def identities(self) -> Sequence[Identity]: ...
    async def grants(self) -> Sequence[Grant]: ...
    async def audit_recent(
        self, issuer: PublicKey | None, limit: int, since_ms: int | None
    ) -> Sequence[AuditRecord]: ...
    async def audit_before(self, before_ms: int) -> tuple[int, int, str] | None:
        """What a purge would drop: how many rows, through which index, and the chain hash there."""

    async def audit_verify(self) -> AuditReport:
        """Compute the whole chain again."""

    async def audit_verify_new(self) -> AuditReport:
        """Only the rows that no verification has covered yet: what a start does."""

    async def durable(self) -> None:
        """Return when everything decided so far is on disk."""

    async def compact(self) -> int:
        """Merge sealed history into a snapshot; how many events of resolved tasks that dropped."""

    async def counts(self) -> Counts: ...
    async def close(self) -> None: ...
