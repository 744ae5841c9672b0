"""Reads of tasks, live and ended, from committed rows. A viewer sees tasks of which it is a party."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from operator import index
from typing import Any, Final, TypeVar

import msgspec

from covenant.ledger.contract.retention import Erased, EraseTasks
from covenant.ledger.contract.tasks import (
    ANY,
    LEASES_SHOWN_MAX,
    PAGE_BYTES_MAX,
    READ_BYTES_MAX,
    TREE_BYTES_MAX,
    TREE_DEPTH_MAX,
    TREE_NODES_MAX,
    LeaseRecord,
    Listing,
    ListQuery,
    Parties,
    Queue,
    QueueEntry,
    QueueQuery,
    TaskDetail,
    TaskRow,
    TaskScope,
    TreeNode,
    TreeRow,
    UpdateRecord,
    build_tree,
    lease_record,
    page_token,
    queue_entry,
    read_page_token,
)
from covenant.ledger.machine.entry import Entry
from covenant.ledger.machine.events import (
    AnyTaskEvent,
    LeaseReleased,
    TaskContinued,
    TaskEvent,
    TaskLeased,
    TaskParked,
    TaskRequeued,
    TaskResumed,
    TaskSettled,
    TaskSuspended,
    TaskUpdated,
    TurnEnded,
)
from covenant.ledger.machine.states import State
from covenant.ledger.postgres.connections import Connections, fetch_rows
from covenant.ledger.postgres.found_rows import TABLES, walks_in_context
from covenant.ledger.postgres.sql import Statement, statements, walked
from covenant.ledger.postgres.stored_task import (
    Row,
    column,
    decode_entry,
    decode_event,
    decode_rest,
    decode_result,
    decode_returned,
    decode_task,
    uncolumn,
)
from covenant.ledger.postgres.tenant_rows import erased_condition
from covenant.ledger.watchers import step_of
from covenant.model.ids import PublicKey, TaskId
from covenant.model.task import DELEGATION, Result, Task
from covenant.model.task_event import Ended, StatusUpdate, Step

T = TypeVar("T")

_fetch = partial(fetch_rows, "history")
_FILTERS: Final = {
    "sender": "sender = :sender",
    "state": "a2a_state = :state",
    "moved_since_ms": "updated_at_ms >= :moved_since_ms",
}
_STATES: Final = {state.wire_name: state.value for state in State}
REMOTE: Final = "covenant.remote"
_LISTED_STATES: Final = (
    "submitted",
    "working",
    "input-required",
    "auth-required",
    "completed",
    "failed",
    "canceled",
    "rejected",
    "",
)
_OUTCOMES: Final[dict[type[TaskEvent], str]] = {
    TaskLeased: "leased",
    LeaseReleased: "released",
    TaskRequeued: "requeued",
    TaskParked: "parked",
    TaskSuspended: "suspended",
    TaskResumed: "resumed",
    TaskContinued: "continued",
    TurnEnded: "continued",
}
_KINDS: Final = {
    "task_sent": "submitted",
    "task_followed": "submitted",
    "task_leased": "working",
    "task_parked": "parked",
    "task_continued": "continued",
    "message_kept": "continued",
    "turn_ended": "message",
    "task_settled": "settled",
    "task_closed": "settled",
}


class TaskReads:
    _connections: Connections
    now_ms: Callable[[], int]

    async def _rows(self, name: str, **values: Any) -> Sequence[Row]:
        return await self._connections.rows("history", name, **values)

    async def _value(self, name: str, **values: Any) -> Any:
        return await self._connections.value("history", name, **values)

    async def _bodies(self, decode: Callable[[str], T], name: str, **values: Any) -> tuple[T, ...]:
        return tuple([decode(row["body"]) for row in await self._rows(name, **values)])

    async def _erase(self, which: EraseTasks) -> Erased:
        """Erases by one statement. The ids stay."""
        query = Statement(statements("history")["erase"].format(condition=erased_condition(which)))
        values = {
            "tenant": which.tenant,
            "parties": which.parties,
            "after": which.after_no,
            "before_ms": which.before_ms,
            "bytes_max": which.bytes_max,
            "count": which.limit,
        }
        (found,) = await self._connections.fetch(query, values)
        more = found["looked"] == which.limit and (found["too_large"] or found["last_ms"] < which.before_ms)
        return Erased(tasks=found["tasks"], bytes=found["bytes"], after_no=found["last_no"] if more else 0, more=more)

    async def entry(self, task_id: TaskId) -> Entry | None:
        found = await self._rows("entry", task_id=task_id)
        if not found:
            return None
        return decode_entry(found[0]).with_body(decode_task(found[0]["task_body"]))

    async def parties(self, task_id: TaskId) -> Parties | None:
        found = await self._value("parties", task_id=task_id)
        if found is None:
            return None
        task = decode_task(found)
        return Parties(sender=task.sender, recipient=task.recipient, tenant=task.tenant)

    async def tenants_of(self, task_ids: Collection[TaskId]) -> Mapping[TaskId, str | None]:
        rows = await self._rows("tenants_of", task_ids=list(task_ids)) if task_ids else ()
        return {TaskId(row["task_id"]): row["tenant"] for row in rows}

    async def _read_steps(self, task_id: TaskId, after: int, limit: int, scope: TaskScope = ANY) -> tuple[Step, ...]:
        rows = await self._rows(
            "steps",
            task_id=task_id,
            after=min(after, (1 << 31) - 1),
            count=limit,
            recipient=scope.recipient,
            sender=scope.sender,
            tenant=scope.tenant,
        )
        return _steps(rows)

    async def queue(self, query: QueueQuery) -> Queue:
        age_ms, within_ms = query.min_lease_age_ms, query.deadline_within_ms
        state, now_ms = query.state_filter, self.now_ms()
        rows = await self._rows(
            "queue",
            viewer=query.viewer,
            count=query.limit,
            state=_STATES.get(state, "") if state is not None else None,
            touched_by=None if age_ms is None else now_ms - age_ms,
            due_by=None if within_ms is None else now_ms + within_ms,
            bytes_max=READ_BYTES_MAX,
        )
        waiting = {"viewer": query.viewer, "count": query.limit, "bytes_max": READ_BYTES_MAX}
        lines = tuple(map(_queue_entry, rows))
        return Queue(lines, await self._bodies(decode_result, "waiting_results", **waiting))

    async def recent_tasks(self, viewer: PublicKey | None, limit: int) -> Sequence[Task]:
        return await self._bodies(decode_task, "recent_tasks", viewer=viewer, count=limit, bytes_max=READ_BYTES_MAX)

    async def recent_results(self, viewer: PublicKey | None, limit: int) -> Sequence[Result]:
        return await self._bodies(decode_result, "recent_results", viewer=viewer, count=limit, bytes_max=READ_BYTES_MAX)

    async def of_tenant(self, tenant: str, limit: int, *, simple: bool = False) -> Sequence[TaskRow]:
        rows = await self._rows("of_tenant", tenant=tenant, count=limit, simple=simple)
        return tuple(map(_task_row, rows))

    async def show(
        self, task_id: TaskId, viewer: PublicKey | None, updates_max: int, after: int | None = None
    ) -> TaskDetail | None:
        async with self._connections.snapshot() as db:
            found = await _fetch(db, "task", task_id=task_id, viewer=viewer)
            if not found:
                return None
            row = found[0]
            until = after + updates_max if after is not None else row["generation"]
            updates = await _fetch(db, "updates", no=row["no"], count=updates_max, after=after or 0, until=until)
            handovers = await _fetch(db, "handovers", no=row["no"])
        rest = decode_rest(row["rest"])
        return TaskDetail(
            task=decode_task(row["task_body"]),
            state=State(row["state"]).wire_name,
            a2a_state=row["a2a_state"],
            attempt=row["attempt"],
            turn=row["turn"],
            generation=row["generation"],
            created_at_ms=row["created_at_ms"],
            updated_at_ms=row["updated_at_ms"],
            leases=_leases(handovers),
            updates=tuple(_update(row) for row in reversed(updates)),
            result=decode_result(row["ended_body"]) if row["ended_body"] is not None else None,
            cause=rest.cause.value if rest.cause is not None else None,
            holder_lost=row["holder_lost"],
        )

    async def tree(self, root: TaskId, viewer: PublicKey | None) -> TreeNode:
        """A task's tree, level by level, within the bounds of depth, number and size."""
        async with self._connections.snapshot() as db:
            rows = list(await _fetch(db, "task", task_id=root, viewer=viewer))
            seen, level = {root, *(row["task_id"] for row in rows)}, [root]
            for _ in range(TREE_DEPTH_MAX):
                left = TREE_NODES_MAX - len(rows)
                if not level or left <= 0:
                    break
                found = await _fetch(db, "children", parents=level, viewer=viewer, count=left)
                new = [row for row in found if row["task_id"] not in seen]
                level = [row["task_id"] for row in new]
                seen.update(level)
                rows += new
            known = list(map(_tree_row, _first_fitting(rows)))
            remote = [row["no"] for row, each in zip(rows, known, strict=False) if each.remote is not None]
            noted = await _fetch(db, "remote_notes", nos=remote) if remote else ()
        notes = {row["no"]: note for row in noted if (note := _remote_note(row["body"])) is not None}
        numbers = {row["task_id"]: row["no"] for row in rows}
        known = [msgspec.structs.replace(each, remote_note=notes.get(numbers[each.task_id])) for each in known]
        tree = build_tree(root, known)
        return msgspec.structs.replace(tree, truncated=True) if len(known) >= TREE_NODES_MAX else tree

    async def listing(self, query: ListQuery) -> Listing:
        page, total, values = listing_statements(query)
        async with self._connections.snapshot() as db:
            rows = await db.fetch(page.text, *page.values(values))
            if query.sender is None and query.context_id is None and query.moved_since_ms is None:
                states = [query.state] if query.state is not None else _LISTED_STATES
                (counted,) = await _fetch(db, "listed_total", lanes=[f"{query.recipient} {each}" for each in states])
                count = counted["total"]
            else:
                count = await db.fetchval(total.text, *total.values(values))
            nos = [row["no"] for row in rows[: query.limit]]
            sizes = {
                row["no"]: row["size"] for row in await _fetch(db, "page_sizes", nos=nos, artifacts=query.artifacts)
            }
            shown = _fitting(nos, sizes)
            stored = await _fetch(db, "page_steps", nos=shown, artifacts=query.artifacts)
        steps: defaultdict[int, list[Row]] = defaultdict(list)
        for row in stored:
            steps[row["no"]].append(row)
        more = len(shown) < len(rows)
        last = rows[len(shown) - 1] if shown else None
        return Listing(
            tasks=tuple(_steps(steps[each]) for each in shown),
            total=count,
            next=page_token(last["updated_at_ms"], last["no"]) if more and last is not None else "",
        )


def listing_statements(query: ListQuery) -> tuple[Statement, Statement, dict[str, Any]]:
    """The statement of a page, that of the number of all its tasks, and their values."""
    updated_at_ms, no = read_page_token(query.after)
    values = msgspec.structs.asdict(query) | {"updated_at_ms": updated_at_ms, "no": no, "count": query.limit + 1}
    values["context"] = context = column(query.context_id) if query.context_id is not None else None
    filters = [sql for name, sql in _FILTERS.items() if getattr(query, name) is not None]
    walks = [
        {"table": table, "filters": " ".join(f"AND {each}" for each in (*filters, walk) if each)}
        for table in TABLES
        for walk in walks_in_context(table, context)
    ]
    page, total = (
        walked("history", "page", "page_walk", walks),
        walked("history", "page_total", "page_total_walk", walks),
    )
    return page, total, values


def _steps(rows: Iterable[Row]) -> tuple[Step, ...]:
    steps = (step_of(decode_event(row["body"]), index(row["ts_ms"])) for row in rows)
    return tuple([step for step in steps if step is not None])


def _fitting(nos: Sequence[int], sizes: dict[int, int]) -> list[int]:
    shown: list[int] = []
    size = 0
    for no in nos:
        if shown and size >= PAGE_BYTES_MAX:
            break
        shown.append(no)
        size += sizes.get(no, 0)
    return shown


def _queue_entry(row: Row) -> QueueEntry:
    entry = decode_entry(row).with_body(decode_task(row["task_body"]))
    return queue_entry(entry, holder_lost=row["rank"] == 0)


def _task_row(row: Row) -> TaskRow:
    result = decode_result(row["ended_body"]) if row["ended_body"] is not None else None
    error = result.error_message if result is not None else None
    return TaskRow(
        task_id=row["task_id"],
        agent_id=row["agent_id"],
        context_id=uncolumn(row["context_id"]),
        origin=row["origin"],
        state=row["a2a_state"],
        created_at_ms=row["created_at_ms"],
        updated_at_ms=row["updated_at_ms"],
        generation=row["generation"],
        error_message=error if isinstance(error, str) else "",
    )


def _leases(rows: Sequence[Row]) -> tuple[LeaseRecord, ...]:
    """The leases of a task, each with its outcome, which follows from the next event."""
    leases: list[LeaseRecord] = []
    turn, is_open = 1, False
    for row in rows:
        event: AnyTaskEvent | None = None
        reason: str | None
        if row["kind"] == "result_returned":
            outcome, reason = "returned", decode_returned(row["body"]).reason
        else:
            event = decode_event(row["body"])
            outcome = "settled" if isinstance(event, TaskSettled) else _OUTCOMES[type(event)]
            reason = getattr(event, "reason", None)
        if is_open:
            leases[-1] = msgspec.structs.replace(leases[-1], ended_at_ms=row["ts_ms"], outcome=outcome, reason=reason)
        is_open = isinstance(event, TaskLeased)
        if isinstance(event, TaskLeased):
            leases.append(lease_record(event.lease, turn))
        elif outcome == "continued":
            turn += 1
    return tuple(leases[-LEASES_SHOWN_MAX:])


def _update(row: Row) -> UpdateRecord:
    event = decode_event(row["body"])
    step = step_of(event, row["ts_ms"])
    assert step is not None
    what: Any = step.what
    tag = str(event.__struct_config__.tag)
    kind = _KINDS.get(tag) or str(what.__struct_config__.tag)
    if type(event) is TaskSuspended and type(what) is StatusUpdate and what.state != "working":
        kind = "parked"
    body: Any = None
    if isinstance(what, Ended):
        body = {"state": what.ending, "result": what.result}
    elif kind == "continued":
        body = what.message
    elif kind not in ("submitted", "working"):
        body = what
    plain = msgspec.json.decode(msgspec.json.encode(body))
    return UpdateRecord(generation=step.generation, kind=kind, ts_ms=step.ts_ms, body=plain)


def _first_fitting(rows: Sequence[Row]) -> list[Row]:
    """The first rows that fit into one answer."""
    size, kept = 0, []
    for row in rows:
        size += len(row["task_body"])
        if size > TREE_BYTES_MAX:
            break
        kept.append(row)
    return kept


def _tree_row(row: Row) -> TreeRow:
    task = decode_task(row["task_body"])
    result = decode_result(row["ended_body"]) if row["ended_body"] is not None else None
    remote: dict[str, Any] | None = None
    if task.origin == DELEGATION:
        if task.target is not None:
            remote = msgspec.to_builtins(task.target)
        else:
            # Earlier versions had the target in the request metadata.
            remote = (task.request_metadata or {}).get(REMOTE)
    metadata = result.metadata if result is not None else None
    return TreeRow(
        task_id=task.id,
        parent=task.parent,
        task=task,
        state=State(row["state"]).wire_name,
        attempt=row["attempt"],
        created_at_ms=row["created_at_ms"],
        updated_at_ms=row["updated_at_ms"],
        result_status=result.status.value if result is not None else None,
        a2a_state=row["a2a_state"],
        holder_lost=row["holder_lost"],
        notes=metadata if isinstance(metadata, dict) else None,
        remote=remote,
        remote_note=None,
    )


def _remote_note(body: str) -> dict[str, Any] | None:
    """The id of the task at the remote agent: noted when it was learned, and again in each turn."""
    event = decode_event(body)
    update = event.update if isinstance(event, TaskUpdated) else None
    note = (update.metadata or {}).get(REMOTE) if isinstance(update, StatusUpdate) else None
    return note if isinstance(note, dict) else None
