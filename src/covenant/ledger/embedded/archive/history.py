"""Reads of the past from the archive, in two threads of their own, never on the loop.

A caller first waits until the archive has caught up (`Archive.caught_up`); each answer comes from one snapshot of it.
Every limit applies after every filter. A viewer sees tasks of which it is sender, recipient or holder; None sees all. A
page of a list ends at a place in the order, not after a number of rows, so the next one begins there at once; a page
also ends when it is large.
"""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, Generic, NamedTuple, TypeVar

import msgspec

from covenant.ledger.contract.identities import LAST, AuditRecord
from covenant.ledger.contract.task_query import AGENTS_COUNTED_MAX, FoundPage, TaskCounts, TaskQuery
from covenant.ledger.contract.tasks import (
    ANY,
    LEASES_SHOWN_MAX,
    PAGE_BYTES_MAX,
    READ_BYTES_MAX,
    TREE_BYTES_MAX,
    TREE_DEPTH_MAX,
    TREE_NODES_MAX,
    Listing,
    ListQuery,
    Parties,
    Queue,
    QueueQuery,
    TaskDetail,
    TaskRow,
    TaskScope,
    TreeNode,
    TreeRow,
    build_tree,
    page_token,
    read_page_token,
)
from covenant.ledger.embedded.archive.apply_batch import context_name
from covenant.ledger.embedded.archive.row_updates import FOLLOWING, LEASED, PARKED, QUEUED
from covenant.ledger.embedded.archive.sql import statement, transaction
from covenant.ledger.embedded.archive.task_finder import find_tasks
from covenant.ledger.embedded.archive.task_packs import define_functions
from covenant.ledger.machine.view import Archived
from covenant.model.errors import Unavailable
from covenant.model.grant import AuditHead, AuditReport, AuditVerification, StoredRow
from covenant.model.ids import PublicKey, TaskId
from covenant.model.task import SIMPLE, Cause, Ending, Result, Task
from covenant.model.task_event import (
    ArtifactUpdate,
    Began,
    Continued,
    Ended,
    MessageUpdate,
    Started,
    StatusUpdate,
    Step,
    StepContent,
    StepUpdate,
)

PAGE_ROWS: Final = 1_000
T = TypeVar("T")
READERS: Final = 2
BUSY_S: Final = 10.0
# A role is the column that is compared with the viewer; each has its own index.
_ANYONE: Final = ("true",)
_ROLES: Final = ("recipient_pubkey = :viewer", "sender_pubkey = :viewer", "leased_to_pubkey = :viewer")
_LOST: Final = "iif(interrupted OR boot <> :boot, 0, 1)"
_STATES: Final = (
    {"state": LEASED, "rank": _LOST, "key": "touched_at_ms", "order": "rank, key, task_no"},
    {"state": QUEUED, "rank": "2", "key": "place", "order": "place"},
    {"state": PARKED, "rank": "3", "key": "place", "order": "place"},
    {"state": FOLLOWING, "rank": "3", "key": "place", "order": "place"},
)
READ: Final = {"bytes_max": READ_BYTES_MAX}
_PAGE: Final = statement("listing")
_COUNT: Final = statement("listing_count")
_COUNTED: Final = statement("task_counts")
_NUMBERS: Final = statement("reference_numbers")
_FILTERS: Final = {
    "sender": "sender_pubkey = :sender",
    "state": "state = :state",
    "moved_since_ms": "updated_at >= :moved_since_ms",
}


class _Read(NamedTuple, Generic[T]):
    """A statement, and the decoder of its answer."""

    sql: str
    decode: Callable[[bytes], T]


def _read(sql: str, kind: type[T]) -> _Read[T]:
    return _Read(sql, msgspec.json.Decoder(kind).decode)


class AuditMarks(msgspec.Struct, frozen=True, gc=False):
    """`anchor` is where a purge cut the chain, `verified` the end of the verified part; `first` the lowest index."""

    anchor: AuditHead
    verified: AuditHead
    first: int


def _queue_sql(roles: Sequence[str]) -> str:
    part = statement("queue_part")
    parts = [part.format(role=role, **state) for state in _STATES for role in roles]
    return statement("queue").format(parts="UNION\n".join(parts), sender=_sender(roles))


def _recent_tasks_sql(roles: Sequence[str]) -> str:
    part = statement("recent_tasks_part")
    return statement("recent_tasks").format(parts="UNION\n".join(part.format(role=role) for role in roles))


def _sender(roles: Sequence[str]) -> str:
    """Only the sender sees results."""
    return "true" if roles is _ANYONE else "sender_pubkey = :viewer"


_BY_VIEWER: Final = ((False, _ANYONE), (True, _ROLES))
QUEUE: Final = {viewed: _read(_queue_sql(roles), Queue) for viewed, roles in _BY_VIEWER}
"""By whether there is a viewer, as are the following ones."""
RECENT_TASKS: Final = {viewed: _read(_recent_tasks_sql(roles), tuple[Task, ...]) for viewed, roles in _BY_VIEWER}
RECENT_RESULTS: Final = {
    viewed: _read(statement("recent_results").format(sender=_sender(roles)), tuple[Result, ...])
    for viewed, roles in _BY_VIEWER
}
OF_TENANT: Final = {
    simple: _read(
        statement("of_tenant").format(filters=f"origin = '{SIMPLE}'" if simple else "true"), tuple[TaskRow, ...]
    )
    for simple in (False, True)
}
AUDIT_RECENT: Final = {
    issued: _read(statement("audit_recent").format(issuer=issuer), tuple[AuditRecord, ...])
    for issued, issuer in ((False, "true"), (True, "issuer = :issuer"))
}
SHOW: Final = _read(statement("show"), TaskDetail)
TASK: Final = _read(statement("task"), Task)
LOOKUP: Final = _read(statement("lookup"), Archived)
LOOKUP_WHOLE: Final = _read(statement("lookup_whole"), Archived)
PARTIES: Final = _read(statement("parties"), Parties)
TREE: Final = _read(statement("tree"), tuple[TreeRow, ...])
LANE_COUNTS: Final = _read(statement("lane_counts"), TaskCounts)
KEPT_BYTES: Final = _read("SELECT json_group_object(tenant_id, bytes) FROM stored_sizes", dict[str, int])
FINISHED: Final = _read(statement("finished"), tuple[tuple[TaskId, ...], int])
AGED_OUT: Final = _read(statement("aged_out"), bool)
AUDIT_BEFORE: Final = _read(statement("audit_before"), tuple[int, int | None, str | None])
AUDIT_PAGE: Final = _read(statement("audit_page"), tuple[StoredRow, ...])
AUDIT_MARKS: Final = _read(statement("audit_marks"), AuditMarks)


class History:
    """Reads of the archive at `path`, which must exist. Methods run on the loop; `close` ends the threads."""

    def __init__(self, path: Path, *, boot: str) -> None:
        self._path = path
        self._here = {"boot": boot}
        self._pool = ThreadPoolExecutor(READERS, thread_name_prefix="archive-reader")
        self._local = threading.local()
        self._opened: list[sqlite3.Connection] = []

    async def queue(self, query: QueueQuery, now_ms: int) -> Queue:
        age_ms, within_ms = query.min_lease_age_ms, query.deadline_within_ms
        return await self._ask(
            QUEUE[query.viewer is not None],
            viewer=query.viewer,
            limit=query.limit,
            state_filter=query.state_filter,
            touched_by=None if age_ms is None else now_ms - age_ms,
            due_by=None if within_ms is None else now_ms + within_ms,
            **READ,
            **self._here,
        )

    async def recent_tasks(self, viewer: PublicKey | None, limit: int) -> Sequence[Task]:
        return await self._ask(RECENT_TASKS[viewer is not None], viewer=viewer, limit=limit, **READ)

    async def recent_results(self, viewer: PublicKey | None, limit: int) -> Sequence[Result]:
        return await self._ask(RECENT_RESULTS[viewer is not None], viewer=viewer, limit=limit, **READ)

    async def show(
        self, task_id: TaskId, viewer: PublicKey | None, updates_max: int, after: int | None = None
    ) -> TaskDetail | None:
        """A task's details; None if the task is unknown, or the viewer may not see it."""
        return await self._find(
            SHOW,
            task_id=task_id,
            viewer=viewer,
            updates_max=updates_max,
            after=after or 0,
            until=after + updates_max if after is not None else None,
            leases_max=LEASES_SHOWN_MAX,
            **self._here,
        )

    async def lookup(
        self, task_id: TaskId, viewer: PublicKey | None = None, recipient: PublicKey | None = None
    ) -> Archived | None:
        """The task, if it is finished, the viewer may see it, and it is this recipient's."""
        return await self._find(LOOKUP, task_id=task_id, viewer=viewer, recipient=recipient)

    async def lookup_whole(self, task_id: TaskId) -> Archived | None:
        """A finished task, with the task itself."""
        return await self._find(LOOKUP_WHOLE, task_id=task_id)

    async def task(self, task_id: TaskId) -> Task | None:
        """The task as it was sent."""
        return await self._find(TASK, task_id=task_id)

    async def aged_out(self, task_id: TaskId) -> bool:
        """Whether a task with this id was erased."""
        return await self._find(AGED_OUT, task_id=task_id) is not None

    async def parties(self, task_id: TaskId) -> Parties | None:
        return await self._find(PARTIES, task_id=task_id)

    async def steps(self, task_id: TaskId, after_generation: int, limit: int, scope: TaskScope = ANY) -> Sequence[Step]:
        return await self._ask(
            STEPS,
            task_id=task_id,
            after=after_generation,
            limit=limit,
            recipient=scope.recipient,
            sender=scope.sender,
            tenant=scope.tenant,
        )

    async def listing(self, query: ListQuery) -> Listing:
        return await self._run(lambda db: list_tasks(db, query))

    async def of_tenant(self, tenant: str, limit: int, *, simple: bool) -> Sequence[TaskRow]:
        return await self._ask(OF_TENANT[simple], tenant=tenant, limit=limit)

    async def count_lanes(self, scope: TaskQuery) -> TaskCounts:
        return await self._ask(
            LANE_COUNTS,
            within=scope.within,
            viewer=scope.viewer,
            limit=AGENTS_COUNTED_MAX,
        )

    async def kept_bytes(self) -> dict[str, int]:
        """The approximate size of finished tasks by tenant."""
        return await self._ask(KEPT_BYTES)

    async def find(self, query: TaskQuery) -> FoundPage:
        return await self._run(lambda db: find_tasks(db, query, self._here))

    async def tree(self, root: TaskId, viewer: PublicKey | None) -> TreeNode:
        """A task's tree, level by level, within the bounds of depth, number and size."""
        rows = await self._ask(
            TREE,
            root=root,
            viewer=viewer,
            depth_max=TREE_DEPTH_MAX,
            nodes_max=TREE_NODES_MAX,
            bytes_max=TREE_BYTES_MAX,
            **self._here,
        )
        tree = build_tree(root, rows)
        return msgspec.structs.replace(tree, truncated=True) if len(rows) >= TREE_NODES_MAX else tree

    async def finished(self, after_place: int, limit: int) -> tuple[Sequence[TaskId], int]:
        """Ids of tasks that ended after a place, in that order, and the place to go on from."""
        return await self._ask(FINISHED, after=after_place, limit=limit)

    async def audit_recent(
        self, issuer: PublicKey | None, limit: int, since_ms: int | None, before_ms: int = LAST, below: int = LAST
    ) -> Sequence[AuditRecord]:
        read = AUDIT_RECENT[issuer is not None]
        span = {"since_ms": since_ms or 0, "before_ms": before_ms, "below": below}
        return await self._ask(read, issuer=issuer, limit=limit, **span)

    async def audit_before(self, before_ms: int) -> tuple[int, int, str] | None:
        count, through, chain_hash = await self._ask(AUDIT_BEFORE, before_ms=before_ms)
        return (count, through, chain_hash) if through is not None and chain_hash is not None else None

    async def audit_verify(self, head: AuditHead) -> AuditReport:
        """Verifies the whole chain, from its anchor to `head`, which the ledger knows from elsewhere."""
        return await self._run(lambda db: _verify(db, head, whole=True))

    async def audit_verify_new(self, head: AuditHead) -> AuditReport:
        """Verifies only the rows that no earlier verification has covered. Valid rows are not looked at again."""
        return await self._run(lambda db: _verify(db, head, whole=False))

    async def close(self) -> None:
        await asyncio.to_thread(self._pool.shutdown)
        for db in self._opened:
            db.close()

    async def _ask(self, read: _Read[T], **values: Any) -> T:
        return await self._run(lambda db: read.decode(_one(db, read.sql, values) or b"[]"))

    async def _find(self, read: _Read[T], **values: Any) -> T | None:
        def find(db: sqlite3.Connection) -> T | None:
            found = _one(db, read.sql, values)
            return None if found is None else read.decode(found)

        return await self._run(find)

    async def _run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._work, work)

    def _work(self, work: Callable[[sqlite3.Connection], T]) -> T:
        try:
            return work(self._connection())
        except sqlite3.Error as error:
            raise Unavailable("archive_unreadable", f"history cannot be read: {error}") from error

    def _connection(self) -> sqlite3.Connection:
        db: sqlite3.Connection | None = getattr(self._local, "db", None)
        if db is None:
            uri = f"{self._path.absolute().as_uri()}?mode=rw"
            db = sqlite3.connect(uri, timeout=BUSY_S, isolation_level=None, check_same_thread=False, uri=True)
            db.text_factory = bytes
            define_functions(db)
            db.execute("PRAGMA query_only = true")
            self._local.db = db
            self._opened.append(db)
        return db


def _one(db: sqlite3.Connection, sql: str, values: dict[str, Any]) -> bytes | None:
    row: tuple[bytes] | None = db.execute(sql, values).fetchone()
    return None if row is None else row[0]


def _verify(db: sqlite3.Connection, head: AuditHead, *, whole: bool) -> AuditReport:
    with transaction(db, "BEGIN"):  # a purge between two pages would look like a cut
        marks = AUDIT_MARKS.decode(_one(db, AUDIT_MARKS.sql, {}) or b"")
        start = marks.anchor if whole or marks.verified.index < marks.anchor.index else marks.verified
        verification = AuditVerification(start, head)
        if 0 < marks.first <= marks.anchor.index:
            verification.add_finding(f"row {marks.first} is before the anchor at {marks.anchor.index}")
        after = start.index
        while rows := AUDIT_PAGE.decode(_one(db, AUDIT_PAGE.sql, {"after": after, "limit": PAGE_ROWS}) or b"[]"):
            verification.add_rows(rows)
            after = rows[-1].index
        report = verification.report()
    if report.valid:
        _mark_verified(db, head)
    return report


def _mark_verified(db: sqlite3.Connection, head: AuditHead) -> None:
    """Marks rows as verified, the only write of a reader: it waits for the writer's batch, if there is one."""
    db.execute("PRAGMA query_only = false")
    try:
        db.execute(
            "UPDATE meta SET value = iif(key = 'audit_verified_index', ?, ?)"
            " WHERE key IN ('audit_verified_index', 'audit_verified_hash')",
            (head.index, head.chain_hash),
        )
    finally:
        db.execute("PRAGMA query_only = true")


class StoredStep(msgspec.Struct, frozen=True, gc=False):
    generation: int
    kind: str
    ts_ms: int
    body: msgspec.Raw


class _StoredEnd(msgspec.Struct, frozen=True, gc=False):
    ending: Ending
    result: Result
    cause: Cause


def _decoded(kind: type[Any], made: Callable[[Any], StepContent]) -> Callable[[msgspec.Raw], StepContent]:
    decode = msgspec.json.Decoder(kind).decode
    return lambda body: made(decode(body))


def _unchanged(update: StepContent) -> StepContent:
    return update


_KINDS: Final[dict[str, Callable[[msgspec.Raw], StepContent]]] = {
    "submitted": _decoded(Task, Began),
    "working": lambda _: Started(),
    "status": _decoded(StatusUpdate, _unchanged),
    "artifact": _decoded(ArtifactUpdate, _unchanged),
    "message": _decoded(MessageUpdate, _unchanged),
    "step": _decoded(StepUpdate, _unchanged),
    "parked": _decoded(StatusUpdate, _unchanged),
    "continued": _decoded(MessageUpdate, Continued),
    "settled": _decoded(_StoredEnd, lambda end: Ended(end.ending, end.result, end.cause)),
}


class ListedTask(msgspec.Struct, frozen=True, gc=False):
    """A task of a listing, its place, and whether there is a next one."""

    updated_at: int
    task_no: int
    next_no: int | None
    steps: tuple[StoredStep, ...]


_decode_rows = msgspec.json.Decoder(tuple[StoredStep, ...]).decode


def steps_of(rows: Iterable[StoredStep]) -> tuple[Step, ...]:
    return tuple([Step(row.generation, row.ts_ms, _KINDS[row.kind](row.body)) for row in rows])


STEPS: Final = _Read(statement("steps"), lambda stored: steps_of(_decode_rows(stored)))
_listed = msgspec.json.Decoder(tuple[ListedTask, ...]).decode


def list_tasks(db: sqlite3.Connection, query: ListQuery) -> Listing:
    updated_at, task_no = read_page_token(query.after)
    values: dict[str, Any] = msgspec.structs.asdict(query)
    with transaction(db, "BEGIN"):  # one snapshot for the page and the count
        # One statement for each set of filters, so that each can use the fitting index.
        chosen = [sql for name, sql in _FILTERS.items() if getattr(query, name) is not None]
        if query.context_id is not None:
            reference = {"id": query.context_id, "name": context_name(query.context_id)}
            values["own"], values["named"] = db.execute(_NUMBERS, reference).fetchone()
            chosen.append(_in_context(values))
        filters = " AND ".join(chosen) or "true"
        page = values | {"updated_at": updated_at, "task_no": task_no, "bytes_max": PAGE_BYTES_MAX}
        (found,) = db.execute(_PAGE.format(filters=filters), page).fetchone()
        counted = query.sender is None and query.context_id is None and query.moved_since_ms is None
        (total,) = db.execute(_COUNTED if counted else _COUNT.format(filters=filters), values).fetchone()
    rows = _listed(found)
    end = page_token(rows[-1].updated_at, rows[-1].task_no) if rows and rows[-1].next_no is not None else ""
    return Listing(tasks=tuple(steps_of(row.steps) for row in rows), total=total, next=end)


def _in_context(values: dict[str, Any]) -> str:
    """The filter for a context. Almost all have one number; one that was named before it became a task's id has two."""
    if values["own"] is not None and values["named"] is not None:
        return "context_no IN (:own, :named)"
    return "context_no = coalesce(:own, :named)"
