"""Finds tasks by filters, in an order. Each filter has an index but that of a text, which is searched in a bounded
number of tasks.

The columns of a row have everything that a page shows. No task is read for it, however large it is.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from itertools import product
from string import ascii_lowercase, ascii_uppercase
from typing import Any, Final, TypeAlias

import asyncpg
import msgspec

from covenant.ledger.contract.task_query import (
    AGENTS_COUNTED_MAX,
    AgentLanes,
    FoundPage,
    FoundTask,
    LaneCounts,
    Place,
    TaskCounts,
    TaskQuery,
    fold,
    place_after,
    state_word,
)
from covenant.ledger.machine.states import LEASED, State
from covenant.ledger.postgres.connections import Connections
from covenant.ledger.postgres.sql import Statement, statement, walked
from covenant.ledger.postgres.stored_task import Row, column, decode_rest, uncolumn
from covenant.model.task import Cause, Ending

TEXT_PART: Final = 100
TEXT_SCAN_MAX: Final = 1_000
"""The most tasks that are searched for a text, for one page."""
TEXT_BYTES_MAX: Final = 32 << 20
"""The most bytes of tasks that are searched for a text, for one page."""
COUNT_MAX: Final = 100_000
"""The most tasks that are counted one by one, where there is no running total."""
PREFIX_MIN: Final = 4
"""A shorter prefix of an id matches too many tasks to be looked up first: it is a condition of each walk."""
PREFIX_TASKS_MAX: Final = 1_000
"""A prefix of an id that at most this many tasks have is replaced by their numbers."""

Database: TypeAlias = "asyncpg.Connection[Any]"

_TEXTS: Final = ("context", "task_kind", "key")
"""Filters by texts that a sender chooses freely: a NUL in them is escaped. No other filtered column holds a NUL."""
_CONDITIONS: Final = {
    "within": "tenant = :within",
    "tenant": "tenant = :tenant",
    "origin": "origin = :origin",
    "parent": "parent = :parent",
    "agent": "recipient_display = :agent",
    "sender": "sender_display = :sender",
    "task_kind": "left(task_kind, 200) = left(:task_kind, 200) AND task_kind = :task_kind",
    "key": "left(idempotency_key, 200) = left(:key, 200) AND idempotency_key = :key",
    "since_ms": "created_at_ms >= :since_ms",
    "until_ms": "created_at_ms < :until_ms",
    "moved_since_ms": "updated_at_ms >= :moved_since_ms",
    "moved_until_ms": "updated_at_ms < :moved_until_ms",
}
_LIVE: Final = "live"
_ENDED: Final = "tasks"
TABLES: Final = (_LIVE, _ENDED)
_IN_CONTEXT: Final = {
    _LIVE: ("context_id = :context",),
    _ENDED: (
        (
            "context_id <> '' AND context_id <> task_id AND left(context_id, 200) = left(:context, 200) "
            "AND context_id = :context"
        ),
        "context_id = task_id AND task_id = :context AND no = (SELECT i.no FROM ids AS i WHERE i.task_id = :context)",
    ),
}
"""The tasks of a context. An ended task whose context has the id of the task is found by that id."""
_NO_FILTER: Final = TaskQuery()
_PAGED_BY: Final = frozenset({"order", "ascending", "limit", "after", "count"})
_UNCOUNTED: Final = frozenset(TaskQuery.__struct_fields__) - {"agent", "tenant", "within", "states"} - _PAGED_BY
_LANES: Final = {State.DRAINED: ("failed", "done")}


def walks_in_context(table: str, context: str | None) -> tuple[str, ...]:
    """The conditions of the walks that together find the tasks of a context in a table, each task once."""
    if context is None:
        return ("",)
    return ("false",) if "\x00" in context or not context else _IN_CONTEXT[table]


async def find_tasks(connections: Connections, query: TaskQuery, totals: Totals) -> FoundPage:
    """`totals`: the number of tasks in each lane (see `lane_of`)."""
    has_total = query.count and all(getattr(query, name) == getattr(_NO_FILTER, name) for name in _UNCOUNTED)
    total, at_least = (running_total(await totals(), query), False) if has_total else (None, False)
    async with connections.snapshot() as db:
        search = await _search(db, query)
        tasks, end = await _page(db, search)
        if query.count and not has_total:
            total, at_least = await _total(db, search)
    cursor = end.cursor(query.order) if end is not None else None
    return FoundPage(tasks=tuple(tasks), next=cursor, total=total, at_least=at_least)


Totals = Callable[[], Awaitable[Sequence[tuple[str, int]]]]


def running_total(totals: Iterable[tuple[str, int]], query: TaskQuery) -> int:
    words = {word for state in query.states or State for word in _LANES.get(state, (state.wire_name,))}
    total = 0
    for lane, count in totals:
        tenant, display, _, word = lane.split(" ")
        filters = ((query.tenant, tenant), (query.within, tenant), (query.agent, display))
        if word in words and all(wanted in (None, value) for wanted, value in filters):
            total += count
    return total


class Search:
    """The statements of a query, and their values."""

    def __init__(self, query: TaskQuery, numbers: list[int] | None = None) -> None:
        """`numbers`: the tasks whose ids have the prefix of the query, if they are few."""
        self.query = query
        self.values: dict[str, Any] = msgspec.structs.asdict(query) | {"numbers": numbers}
        for name in _TEXTS:
            if (text := self.values[name]) is not None:
                self.values[name] = column(text)
        self._moment = "created_at_ms" if query.order == "created" else "updated_at_ms"
        self._by_id = ["no = ANY(:numbers::bigint[])"] if numbers is not None else []
        if query.id is not None and numbers is None:
            self._by_id = ["starts_with(task_id, :id)"]
        self._branches = [""]
        if query.viewer is not None:
            self._branches = list(self._of_viewer(query.viewer_names))

    def _of_viewer(self, names: Sequence[str]) -> Iterator[str]:
        """The filters of an identity's tasks: those that it receives or sent, under each of its names."""
        for number, name in enumerate(names):
            self.values[f"name_{number}"] = name
            yield f"recipient_display = :name_{number} AND recipient = :viewer"
            yield f"sender_display = :name_{number} AND sender = :viewer AND recipient <> :viewer"

    def page(self, at: Place | None, count: int) -> tuple[Statement, dict[str, Any]]:
        """The statement for the numbers of tasks after a place, in order, without the filter for the text."""
        direction, sign = ("ASC", ">") if self.query.ascending else ("DESC", "<")
        values, begin = self.values | {"count": count}, ""
        if at is not None:
            values["at_ms"], values["at_no"] = at.ms, at.no
            begin = f"({self._moment}, no) {sign} (:at_ms, :at_no)"
        return walked("found", "page", "walk", self._walks(begin), moment=self._moment, direction=direction), values

    def total(self, most: int) -> tuple[Statement, dict[str, Any]]:
        return walked("found", "total", "counted", self._walks("")), self.values | {"count": most}

    def _walks(self, begin: str) -> Iterator[dict[str, str]]:
        for table in TABLES:
            for branch, context in product(self._branches, walks_in_context(table, self.values["context"])):
                conditions = [each for each in (*self._conditions(table), branch, context, begin) if each]
                yield {"table": table, "conditions": " AND ".join(conditions) or "true"}

    def _conditions(self, table: str) -> Iterator[str]:
        query, values = self.query, self.values
        yield from self._by_id
        for name, sql in _CONDITIONS.items():
            value = values[name]
            if value is not None:
                yield "false" if isinstance(value, str) and "\x00" in value else sql
        if query.attempt_min is not None:
            yield "attempt > 1 AND attempt >= :attempt_min" if query.attempt_min > 1 else "attempt >= :attempt_min"
        if query.cause is not None:
            unusual = [] if query.cause == Cause.RESULT else ["cause <> 'result'"]
            yield " AND ".join([*unusual, "cause = :cause" if "\x00" not in query.cause else "false"])
        if query.states and table == _LIVE:
            yield _among("state", [state.value for state in query.states])
        elif query.states and State.DRAINED not in query.states:
            yield "false"
        if query.outcomes:
            unusual = [] if Ending.COMPLETED in query.outcomes else ["a2a_state <> 'completed'"]
            yield " AND ".join([*unusual, _among("a2a_state", [outcome.value for outcome in query.outcomes])])
        if query.interruptions:
            yield _among("a2a_state", [interruption.value for interruption in query.interruptions])


def _among(column_name: str, words: Sequence[str]) -> str:
    """A condition on a column with our own words. A single word keeps the order of an index."""
    if len(words) == 1:
        return f"{column_name} = '{words[0]}'"
    listed = ", ".join(f"'{word}'" for word in words)
    return f"{column_name} IN ({listed})"


async def _search(db: Database, query: TaskQuery) -> Search:
    if query.id is None or len(query.id) < PREFIX_MIN:
        return Search(query)
    by_prefix = statement("found", "with_prefix")
    values = {"id_from": query.id, "id_to": f"{query.id}~", "count": PREFIX_TASKS_MAX + 1}
    numbers = [row["no"] for row in await _fetch(db, by_prefix, values)]
    return Search(query, numbers if len(numbers) <= PREFIX_TASKS_MAX else None)


async def _fetch(db: Database, query: Statement, values: dict[str, Any]) -> list[Row]:
    return list(await db.fetch(query.text, *query.values(values)))


async def _page(db: Database, search: Search) -> tuple[list[FoundTask], Place | None]:
    query = search.query
    found: list[Place] = []
    if query.text is None:
        places, end = await _places(db, search, place_after(query), query.limit + 1), None
        found = [place for place, _ in places]
    else:
        found, end = await _with_text(db, search, place_after(query), query.limit + 1)
    if len(found) > query.limit:
        found = found[: query.limit]
        end = found[-1]
    rows = await _fetch(db, statement("found", "rows"), {"nos": [place.no for place in found]})
    by_no = {row["no"]: row for row in rows}
    return [_found_task(by_no[place.no]) for place in found], end


async def _places(db: Database, search: Search, at: Place | None, count: int) -> list[tuple[Place, int]]:
    """The places of tasks, and the size of each."""
    return [(Place(row["moment"], row["no"]), row["size"]) for row in await _fetch(db, *search.page(at, count))]


async def _with_text(db: Database, search: Search, at: Place | None, count: int) -> tuple[list[Place], Place | None]:
    """The tasks of a walk whose intent has the text; and where the walk stopped, if it reached its bound."""
    found: list[Place] = []
    seen = size = 0
    while len(found) < count:
        if seen >= TEXT_SCAN_MAX or size >= TEXT_BYTES_MAX:
            return found, at
        walked = await _places(db, search, at, TEXT_PART)
        part: list[Place] = []
        for place, place_bytes in walked:
            if part and size + place_bytes > TEXT_BYTES_MAX:
                break
            part.append(place)
            size += place_bytes
        hits = await _numbers_with_text(db, search.query, [place.no for place in part])
        found += [place for place in part if place.no in hits]
        seen += len(part)
        if len(walked) < TEXT_PART and len(part) == len(walked):
            return found, None
        at = part[-1]
    return found, None


async def _numbers_with_text(db: Database, query: TaskQuery, numbers: list[int]) -> set[int]:
    assert query.text is not None
    values = {"nos": numbers, "upper": ascii_uppercase, "lower": ascii_lowercase, "folded": column(fold(query.text))}
    rows = await _fetch(db, statement("found", "with_text"), values)
    return {row["no"] for row in rows}


async def _total(db: Database, search: Search) -> tuple[int, bool]:
    """The number of tasks, and whether there may be more than were counted."""
    if search.query.text is not None:
        found, end = await _with_text(db, search, None, COUNT_MAX)
        return len(found), end is not None
    (row,) = await _fetch(db, *search.total(COUNT_MAX + 1))
    count: int = row["count"]
    return min(count, COUNT_MAX), count > COUNT_MAX


def _found_task(row: Row) -> FoundTask:
    state, rest = State(row["state"]), decode_rest(row["rest"])
    held = rest.lease if state is LEASED else None
    return FoundTask(
        task_id=row["task_id"],
        parent=row["parent"],
        context_id=uncolumn(row["context_id"]) or None,
        tenant=row["tenant"],
        agent=row["recipient_display"],
        sender=row["sender_display"],
        task_kind=uncolumn(row["task_kind"]) if row["task_kind"] is not None else None,
        key=uncolumn(row["idempotency_key"]) if row["idempotency_key"] is not None else None,
        origin=row["origin"],
        state=state_word(state),
        a2a_state=row["a2a_state"],
        attempt=row["attempt"],
        created_at_ms=row["created_at_ms"],
        updated_at_ms=row["updated_at_ms"],
        deadline_ms=row["deadline_ms"] if row["late_deadline_ms"] is None else int(row["late_deadline_ms"]),
        outcome=rest.ending,
        cause=row["cause"],
        lease_id=held.lease_id if held is not None else None,
        leased_to=held.leased_to.display if held is not None else None,
        leased_at_ms=held.leased_at_ms if held is not None else None,
        holder_lost=bool(row["holder_lost"]),
        intent=uncolumn(row["intent"]),
        error_message=uncolumn(row["error_message"]) or None,
        remote=row["remote"],
    )


def count_lanes(totals: Iterable[tuple[str, int]], scope: TaskQuery) -> TaskCounts:
    """The counts from the running totals: lanes (see `lane_of`), and the number of tasks in each."""
    agents: dict[tuple[str, str | None], dict[str, int]] = {}
    for lane, count in totals:
        tenant, display, pubkey, word = lane.split(" ")
        if scope.within not in (None, tenant) or scope.viewer not in (None, pubkey):
            continue
        lanes = agents.setdefault((display, tenant or None), {})
        lanes[word] = lanes.get(word, 0) + count
    by_agent = [AgentLanes(agent=agent, tenant=tenant, **lanes) for (agent, tenant), lanes in agents.items()]
    by_agent.sort(key=_by_work)
    sums = {name: sum(getattr(each, name) for each in by_agent) for name in LaneCounts.__struct_fields__}
    return TaskCounts(lanes=LaneCounts(**sums), by_agent=tuple(by_agent[:AGENTS_COUNTED_MAX]))


def _by_work(lanes: AgentLanes) -> tuple[int, int, str, str]:
    return (
        -(lanes.queued + lanes.in_flight + lanes.parked + lanes.following),
        -(lanes.failed + lanes.done + lanes.result_pending),
        lanes.agent,
        lanes.tenant or "",
    )
