"""Tasks and push configurations: the structs of their reads, and what every engine promises of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final, Protocol

import msgspec

from covenant.ledger.contract import Commits
from covenant.ledger.contract.identities import LAST
from covenant.ledger.contract.task_query import FoundPage, QueueDepth, TaskCounts, TaskQuery
from covenant.ledger.machine.entry import Entry
from covenant.ledger.machine.states import LEASED
from covenant.ledger.watchers import QueueWaiter, TaskWatch
from covenant.model.errors import InvalidParams
from covenant.model.ids import AgentId, LeaseId, PublicKey, TaskId
from covenant.model.push import Push
from covenant.model.task import Lease, Result, Task
from covenant.model.task_event import Step
from covenant.model.usage import add_usage, read_usage, usage_in

READ_BYTES_MAX: Final = 8 << 20
"""Above this size no further task or result is read for one answer. An answer has at least one, however large."""
PAGE_BYTES_MAX: Final = 2 * 1024 * 1024
"""Beyond this size no further task is put on a page. A page has at least one, however large."""
LEASES_SHOWN_MAX: Final = 1_000
TREE_DEPTH_MAX: Final = 64
TREE_NODES_MAX: Final = 10_000
TREE_BYTES_MAX: Final = 64 << 20
_page_token: Final = re.compile(r"([0-9a-f]{1,15})-([0-9a-f]{1,16})").fullmatch


class QueueEntry(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """A task in the queue as an operator sees it. `attempt` is always set."""

    state: str
    task: Task
    attempt: int
    created_at_ms: int
    lease_id: LeaseId | None = None
    leased_to: AgentId | None = None
    leased_at_ms: int | None = None
    renewed_at_ms: int | None = None
    holder_lost: bool = False


def queue_entry(entry: Entry, *, holder_lost: bool) -> QueueEntry:
    line = QueueEntry(
        state=entry.state.wire_name, task=entry.task, attempt=entry.attempt, created_at_ms=entry.accepted_at_ms
    )
    lease = entry.lease
    if entry.state is not LEASED or lease is None:
        return line
    return msgspec.structs.replace(
        line,
        lease_id=lease.lease_id,
        leased_to=lease.leased_to,
        leased_at_ms=lease.leased_at_ms,
        renewed_at_ms=lease.renewed_at_ms or None,
        holder_lost=holder_lost,
    )


class QueueQuery(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Filters apply before `limit`. `viewer` None sees all tasks."""

    viewer: PublicKey | None = None
    limit: int = 10
    min_lease_age_ms: int | None = None
    deadline_within_ms: int | None = None
    state_filter: str | None = None


class Queue(msgspec.Struct, frozen=True, gc=False):
    """Tasks with a lost holder first, then the longest held leases, then queued tasks, oldest first."""

    tasks: tuple[QueueEntry, ...]
    results: tuple[Result, ...]


class ListQuery(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """The tasks of a tenant's agent, by their last change, newest first. `after` is the end of the last page."""

    recipient: PublicKey
    sender: PublicKey | None = None
    context_id: str | None = None
    state: str | None = None
    """A state of A2A."""
    moved_since_ms: int | None = None
    after: str = ""
    limit: int = 50
    artifacts: bool = False
    """Without it, steps that write to an artifact are left out, and cost nothing."""


class Listing(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """The steps of each task. `next` is opaque, and empty on the last page; `total` counts the matching tasks."""

    tasks: tuple[tuple[Step, ...], ...]
    total: int
    next: str


def page_token(updated_at_ms: int, no: int) -> str:
    """The end of a page of a listing: the time of its last task, and that task's number."""
    return f"{updated_at_ms:x}-{no:x}"


def read_page_token(token: str) -> tuple[int, int]:
    """The time and the number before which the page begins. Raises InvalidParams."""
    if not token:
        return LAST, LAST
    found = _page_token(token)
    if found is None:
        raise InvalidParams("pageToken", "give the nextPageToken of the page before, or none")
    return int(found[1], 16), min(int(found[2], 16), LAST)


class TaskScope(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Restricts which tasks are visible. A task outside it is unknown, and nothing of it is read. None: any party."""

    recipient: PublicKey | None = None
    sender: PublicKey | None = None
    tenant: str | None = None


ANY: Final = TaskScope()


class Parties(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    sender: AgentId
    recipient: AgentId
    tenant: str | None = None


class TaskRow(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """A task in a tenant's list. `state` is a state of A2A."""

    task_id: TaskId
    agent_id: str
    context_id: str
    origin: str
    state: str
    created_at_ms: int
    updated_at_ms: int
    generation: int
    error_message: str


class LeaseRecord(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """One attempt in the history. `outcome` is None while the lease is live."""

    lease_id: LeaseId
    leased_to: AgentId
    leased_at_ms: int
    turn: int
    attempt: int
    ended_at_ms: int | None = None
    outcome: str | None = None
    reason: str | None = None


def lease_record(lease: Lease, turn: int) -> LeaseRecord:
    """The record of a live lease."""
    return LeaseRecord(
        lease_id=lease.lease_id,
        leased_to=lease.leased_to,
        leased_at_ms=lease.leased_at_ms,
        turn=turn,
        attempt=lease.attempt,
    )


class UpdateRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One generation: `kind` is submitted, working, status, artifact, message, parked, continued or settled."""

    generation: int
    kind: str
    ts_ms: int
    body: Any


class TaskDetail(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the ledger knows of one task. `state` is the ledger's state, `a2a_state` that for A2A clients."""

    task: Task
    state: str
    a2a_state: str
    attempt: int
    turn: int
    generation: int
    created_at_ms: int
    updated_at_ms: int
    leases: tuple[LeaseRecord, ...]
    updates: tuple[UpdateRecord, ...]
    result: Result | None
    cause: str | None
    holder_lost: bool


class TreeNode(msgspec.Struct, frozen=True, kw_only=True):
    """A task and its children. `task` is None at the top of a tree whose root was never sent here."""

    task_id: TaskId
    task: Task | None
    state: str | None
    attempt: int = 0
    created_at_ms: int | None = None
    updated_at_ms: int | None = None
    result_status: str | None = None
    a2a_state: str | msgspec.UnsetType = msgspec.UNSET
    """The state for A2A clients."""
    holder_lost: bool | msgspec.UnsetType = msgspec.UNSET
    usage: dict[str, float] | msgspec.UnsetType = msgspec.UNSET
    """The task's own usage, as far as it was reported."""
    usage_total: dict[str, float] | msgspec.UnsetType = msgspec.UNSET
    """The usage of the task and of all tasks below it."""
    remote: bool | msgspec.UnsetType = msgspec.UNSET
    """True for a task that a remote agent does: at `url`, under `remote_task_id` once that is known."""
    url: str | msgspec.UnsetType | None = msgspec.UNSET
    remote_task_id: str | msgspec.UnsetType | None = msgspec.UNSET
    provider: str | msgspec.UnsetType = msgspec.UNSET
    """The id of the peer that does the task; also `profile`, and the status as the protocol names it."""
    profile: str | msgspec.UnsetType = msgspec.UNSET
    status: str | msgspec.UnsetType = msgspec.UNSET
    children: tuple[TreeNode, ...] = ()
    truncated: bool | msgspec.UnsetType = msgspec.UNSET
    """True at the top of a tree that is larger than one answer: some nodes are left out."""
    folded: int | msgspec.UnsetType = msgspec.UNSET
    """For a finished branch whose nodes were not requested: the number of tasks below it."""


class TreeRow(msgspec.Struct, frozen=True, kw_only=True):
    """A task of a tree, before its children are attached."""

    task_id: TaskId
    parent: TaskId | None
    task: Task
    state: str
    attempt: int
    created_at_ms: int
    updated_at_ms: int
    result_status: str | None
    a2a_state: str
    holder_lost: bool
    notes: dict[str, Any] | None
    remote: dict[str, Any] | None
    remote_note: dict[str, Any] | None


def build_tree(root: TaskId, rows: Sequence[TreeRow]) -> TreeNode:
    known: dict[TaskId, TreeRow] = {}
    below: dict[TaskId, list[TreeRow]] = {}
    for row in rows:
        if row.task_id not in known:
            known[row.task_id] = row
            if row.parent is not None and row.task_id != root:
                below.setdefault(row.parent, []).append(row)
    return _node(root, known.get(root), below)


def _node(task_id: TaskId, row: TreeRow | None, below: dict[TaskId, list[TreeRow]]) -> TreeNode:
    children = tuple(_node(child.task_id, child, below) for child in below.get(task_id, ()))
    own, total = _usage(row, children)
    if row is None:
        return TreeNode(task_id=task_id, task=None, state=None, usage_total=total or msgspec.UNSET, children=children)
    remote = row.remote
    return TreeNode(
        task_id=task_id,
        task=row.task,
        state=row.state,
        attempt=row.attempt,
        created_at_ms=row.created_at_ms,
        updated_at_ms=row.updated_at_ms,
        result_status=row.result_status,
        a2a_state=row.a2a_state,
        holder_lost=row.holder_lost or msgspec.UNSET,
        usage=own or msgspec.UNSET,
        usage_total=total or msgspec.UNSET,
        remote=True if remote is not None else msgspec.UNSET,
        url=remote.get("url") if remote is not None else msgspec.UNSET,
        remote_task_id=(row.remote_note or {}).get("task_id") if remote is not None else msgspec.UNSET,
        children=children,
    )


def _usage(row: TreeRow | None, children: Sequence[TreeNode]) -> tuple[dict[str, float], dict[str, float]]:
    """A task's own usage, without the delegations that it reports, and the usage with all tasks below it."""
    notes = (row.notes or {}) if row is not None else {}
    own = usage_in(notes)
    for name, amount in read_usage(notes.get("delegated")).items():
        own[name] = own.get(name, 0) - amount
    own = {name: amount for name, amount in own.items() if amount > 0}
    total = dict(own)
    for child in children:
        add_usage(total, child.usage_total or {})
    return own, total


class PushLedger(Commits, Protocol):
    def on_push(self, callback: Callable[[TaskId, Step | None], None]) -> None:
        """Registers the callback for each durable change of a task with push configurations, or of a configuration.

        The step is None for a change without a step of the task. There is one listener.
        """

    async def pushes(self, task_id: TaskId) -> Sequence[Push]:
        """A task's push configurations, oldest first."""

    async def outbox(self) -> Sequence[Push]:
        """All push configurations."""


class TaskLedger(Commits, Protocol):
    def task_waiter(self, recipient: PublicKey | None) -> QueueWaiter:
        """A place among the waiters for tasks of the recipient (or of anyone)."""

    def result_waiter(self, sender: PublicKey | None) -> QueueWaiter:
        """A place among the waiters for results of the sender's tasks (or of anyone's)."""

    async def finished(self, task_id: TaskId, timeout_ms: int) -> bool:
        """Waits until the task is settled."""

    async def orphaned(self, timeout_ms: int) -> bool:
        """Waits until a task that delegated others may have ended; `CancelOrphans` cancels those."""

    async def overdue(self, timeout_ms: int) -> bool:
        """Waits until a task may be overdue, at most `timeout_ms`. `Sweep` decides whether one is."""

    async def entry(self, task_id: TaskId) -> Entry | None:
        """A live task's durable entry."""

    def may_know(self, task_id: TaskId) -> bool:
        """Whether there may be such a task, live or finished. False is certain. Only reads memory."""

    async def parties(self, task_id: TaskId) -> Parties | None:
        """The parties of a task, live or finished. The cost does not depend on the task's size."""

    async def tenants_of(self, task_ids: Collection[TaskId]) -> Mapping[TaskId, str | None]:
        """The tenants of these tasks, live or finished, read together. Unknown tasks are left out."""

    def watch(self, task_id: TaskId, *, new: bool = False) -> TaskWatch:
        """Watches each step of a task from now on; the task need not exist yet. For the past, read `steps` after this.

        `new`: the id was made just now, so the task has no past.
        """

    async def steps(self, task_id: TaskId, after: int, limit: int, scope: TaskScope = ANY) -> Sequence[Step]:
        """The steps of a task after a generation, oldest first; empty if the task is outside the scope."""

    async def listing(self, query: ListQuery) -> Listing: ...
    async def of_tenant(self, tenant: str, limit: int, *, simple: bool = False) -> Sequence[TaskRow]:
        """A tenant's tasks for any recipient, newest first; `simple`: only those of the simple door."""

    async def find(self, query: TaskQuery) -> FoundPage:
        """A page of the live and finished tasks that match a query."""

    async def count_lanes(self, scope: TaskQuery) -> TaskCounts:
        """The number of tasks, by running totals. Only `viewer` and `within` of the query are used."""

    async def queue_depths(self, count: int) -> Sequence[QueueDepth]:
        """The recipients with the most waiting tasks."""

    def on_erased(self, callback: Callable[[], None]) -> None:
        """Registers a callback for erasures of finished tasks: at once by this process, soon after by another one.

        There may be any number of listeners.
        """

    def on_lost(
        self, callback: Callable[[TaskId], None], used: Callable[[TaskId], dict[str, Any] | None] | None = None
    ) -> None:
        """Registers the callback for each task that was durably requeued, or settled by another than its holder: a
        holder in this process must stop. It need not be called for a holder's own result.

        `used` returns a task's usage so far when somebody else ends it, for the result's metadata. For one listener.
        """

    async def queue(self, query: QueueQuery) -> Queue:
        """Tasks and results, up to READ_BYTES_MAX of each."""

    async def recent_tasks(self, viewer: PublicKey | None, limit: int) -> Sequence[Task]:
        """Queued tasks, newest first, up to READ_BYTES_MAX; takes nothing."""

    async def recent_results(self, viewer: PublicKey | None, limit: int) -> Sequence[Result]:
        """Undrained results, newest first, up to READ_BYTES_MAX; takes nothing."""

    async def show(
        self, task_id: TaskId, viewer: PublicKey | None, updates_max: int, after: int | None = None
    ) -> TaskDetail | None:
        """The task with its newest updates; with `after`, with the first ones after that generation."""

    async def tree(self, root: TaskId, viewer: PublicKey | None) -> TreeNode: ...
