"""Finds tasks in the archive: chooses the index that a query walks, and how far.

A filter that has an index is probed first: if it leaves few tasks, they are all read, then filtered further and sorted.
If every filter leaves many, an index in the wanted order is walked, and tasks that the other filters exclude are
skipped, up to a bounded number; then the page ends there, with a cursor.

An identity's tasks are those that it sent and those that it receives: two walks for each of its names, merged.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from covenant.ledger.contract.task_query import (
    EXCERPT_CHARS,
    NAME_CHARS_MAX,
    FoundPage,
    FoundTask,
    Place,
    TaskQuery,
    fold,
    place_after,
)
from covenant.ledger.embedded.archive.apply_batch import context_name, parent_name
from covenant.ledger.embedded.archive.sql import statement, transaction

FEW: Final = 1_000
"""A filter that leaves at most this many tasks is read completely."""
SCAN_MAX: Final = 20_000
"""The most tasks that a walk skips for one page. About 10 ms."""
TEXT_SCAN_MAX: Final = 1_000
"""The same where the intent must be unpacked and read. About 20 ms, in a thread of its own."""
COUNT_MAX: Final = 100_000
"""The most tasks that are counted one by one."""
PREFIX_MIN: Final = 4
"""A shorter beginning of an id leaves too many tasks: it is a filter without an index."""

_ROWS: Final = statement("found_rows")
_PAGE: Final = statement("found_page")
_PROBE: Final = statement("found_probe")
_COUNT: Final = statement("found_count")
_RUNNING: Final = statement("found_running")
_NUMBERS: Final = statement("reference_numbers")
_DETAILS: Final = statement("found_tasks")
_found = msgspec.json.Decoder(tuple[FoundTask, ...]).decode
IDS: Final = "ids"
_BY_ID: Final = "t.task_no IN (SELECT i.task_no FROM ids AS i WHERE i.task_id >= :id_from AND i.task_id < :id_to)"
_EXACT: Final = (
    ("task_kind", "task_kind", "found_by_kind"),
    ("sender", "sender_display", "found_by_sender"),
    ("agent", "recipient_display", "found_by_agent"),
    ("origin", "origin", "found_by_origin"),
)
_OF_TENANT: Final = "tenant_id <> '' AND tenant_id = "
_HAS_TEXT: Final = (
    "has_intent(coalesce((SELECT r.task FROM requests AS r WHERE r.task_no = t.task_no),"
    " (SELECT packed_task(p.pack) FROM packs AS p WHERE p.task_no = t.task_no)), :folded)"
)
_MOMENTS: Final = {"created": "created_at", "moved": "updated_at"}
_NO_FILTER: Final = TaskQuery()
_COUNTED_BY: Final = frozenset({"agent", "tenant", "within", "states", "outcomes"})
_UNCOUNTED: Final = (
    frozenset(TaskQuery.__struct_fields__) - _COUNTED_BY - {"order", "ascending", "limit", "after", "count"}
)


class Filter(NamedTuple):
    """A condition on a row. `index_name`: the index of the matching rows, ordered by creation if `ordered`."""

    sql: str
    columns: tuple[str, ...]
    index_name: str | None = None
    ordered: bool = True

    @property
    def source(self) -> str:
        return "a2a_tasks AS t" if self.index_name in (None, IDS) else f"a2a_tasks AS t INDEXED BY {self.index_name}"

    @property
    def bounds(self) -> str:
        return _BY_ID if self.index_name == IDS else self.sql


class Walk(NamedTuple):
    """The places that a walk found, in order; and where it stopped, if it reached its bound."""

    places: list[tuple[int, int]]
    end: Place | None


def find_tasks(db: sqlite3.Connection, query: TaskQuery, here: Mapping[str, str]) -> FoundPage:
    """`here`: this run, to recognise lost holders."""
    after = place_after(query)
    values: dict[str, Any] = {**msgspec.structs.asdict(query), **here}
    with transaction(db, "BEGIN"):  # one snapshot for the page and the count
        branches = list(_branches(db, query, values))
        places, end = _merged(query, [_walk(db, query, filters, values, after) for filters in branches])
        tasks = _details(db, places, here)
        total, at_least = _total(db, query, branches, values) if query.count else (None, False)
    cursor = end.cursor(query.order) if end is not None else None
    return FoundPage(tasks=tasks, next=cursor, total=total, at_least=at_least)


def _branches(db: sqlite3.Connection, query: TaskQuery, values: dict[str, Any]) -> Iterator[list[Filter]]:
    """The filters of each walk: one walk, or two for each name of an identity."""
    filters = list(_filters(db, query, values))
    if _NONE in filters:
        return
    if query.viewer is None:
        yield filters
        return
    for number, name in enumerate(query.viewer_names):
        values[f"name_{number}"] = name
        yield [
            *filters,
            Filter(f"recipient_display = :name_{number}", ("recipient_display",), "found_by_agent"),
            Filter("recipient_pubkey = :viewer", ("recipient_pubkey",)),
        ]
        yield [
            *filters,
            Filter(f"sender_display = :name_{number}", ("sender_display",), "found_by_sender"),
            Filter("sender_pubkey = :viewer", ("sender_pubkey",)),
            Filter("recipient_pubkey <> :viewer", ("recipient_pubkey",)),
        ]


_NONE: Final = Filter("false", ())


def _filters(db: sqlite3.Connection, query: TaskQuery, values: dict[str, Any]) -> Iterator[Filter]:
    """The filters, usually the most selective first."""
    if query.id is not None:
        values["id_from"], values["id_to"] = query.id, f"{query.id}~"
        index = IDS if len(query.id) >= PREFIX_MIN else None
        yield Filter("task_id >= :id_from AND task_id < :id_to", ("task_id",), index, ordered=False)
    if query.key is not None:
        yield Filter("idempotency_key = :key", ("idempotency_key",), "found_by_key")
    if query.parent is not None:
        numbers = db.execute(_NUMBERS, {"id": query.parent, "name": parent_name(query.parent)}).fetchone()
        yield _referring("parent_no", numbers, "children")
    if query.context is not None:
        numbers = db.execute(_NUMBERS, {"id": query.context, "name": context_name(query.context)}).fetchone()
        yield _referring("context_no", numbers, "listed_by_context")
    yield from _of_state(query)
    for name, column, index in _EXACT:
        if getattr(query, name) is not None:
            yield Filter(f"{column} = :{name}", (column,), index)
    for name in ("tenant", "within"):
        if getattr(query, name) is not None:
            yield Filter(f"{_OF_TENANT}:{name}", ("tenant_id",), "sent_by_tenant")
    if query.since_ms is not None:
        yield Filter("created_at >= :since_ms", ("created_at",))
    if query.until_ms is not None:
        yield Filter("created_at < :until_ms", ("created_at",))
    if query.moved_since_ms is not None:
        yield Filter("updated_at >= :moved_since_ms", ("updated_at",), "found_moved", ordered=False)
    if query.moved_until_ms is not None:
        yield Filter("updated_at < :moved_until_ms", ("updated_at",))
    if query.text is not None:
        values["folded"] = fold(query.text)
        yield Filter(_HAS_TEXT, ("task_no",))


def _referring(column: str, numbers: tuple[int | None, int | None], index: str) -> Filter:
    """A filter by a reference's numbers. Almost all have one; a text named before it became a task's id has two."""
    known = [str(number) for number in numbers if number is not None]
    return Filter(f"{column} IN ({', '.join(known)})", (column,), index, ordered=False) if known else _NONE


def _of_state(query: TaskQuery) -> Iterator[Filter]:
    """Partial indexes cover rare tasks: those that are open, did not succeed, or took a second attempt."""
    if query.attempt_min is not None and query.attempt_min > 1:
        yield Filter("attempt > 1", (), "found_retried")  # alone, so that the index suffices without the rows
    if query.attempt_min is not None and query.attempt_min != 2:
        yield Filter("attempt >= :attempt_min", ("attempt",))
    if query.cause is not None and query.cause != "result":
        yield Filter("cause <> 'result' AND cause = :cause", ("cause",), "found_by_cause")
    elif query.cause is not None:
        yield Filter("cause = :cause", ("cause",))
    if query.states:
        words = tuple(state.wire_name for state in query.states)
        yield _among(query, "ledger_state", words, "resolved", "found_open")
    if query.outcomes:
        words = tuple(outcome.value for outcome in query.outcomes)
        yield _among(query, "ending", words, "completed", "found_unsuccessful")
    if query.interruptions:
        listed = ", ".join(f"'{interruption.value}'" for interruption in query.interruptions)
        yield Filter(f"state IN ({listed})", ("state",))


def _among(query: TaskQuery, column: str, words: tuple[str, ...], usual: str, index: str) -> Filter:
    listed = ", ".join(f"'{word}'" for word in words)
    if usual in words:
        return Filter(f"{column} IN ({listed})", (column,))
    sql, ordered = f"{column} <> '{usual}' AND {column} IN ({listed})", len(words) == 1
    if query.agent is None:
        return Filter(sql, (column,), index, ordered)
    return Filter(f"recipient_display = :agent AND {sql}", (column, "recipient_display"), f"{index}_by_agent", ordered)


def _all(filters: Iterable[Filter]) -> str:
    return " AND ".join(each.sql for each in filters) or "true"


def _columns(filters: Iterable[Filter], *others: str) -> str:
    return ", ".join(sorted({f"t.{name}" for each in filters for name in each.columns}.union(others)))


def _walk(
    db: sqlite3.Connection, query: TaskQuery, filters: Sequence[Filter], values: dict[str, Any], after: Place | None
) -> Walk:
    narrowest, count = _fewest(db, filters, values)
    if narrowest is not None and count <= FEW:
        return _walk_in(db, query, filters, values, after, source=narrowest.source, walked=[narrowest], whole=True)
    source, walked = _in_order(query, filters)
    walk = _walk_in(db, query, filters, values, after, source=source, walked=walked)
    if walk.end is None or query.within is None:
        return walk
    # The tasks of others have used up this walk. A page that is short for this reason would tell the tenant of them.
    own = next(each for each in filters if each.sql == f"{_OF_TENANT}:within")
    probe = _PROBE.format(source=own.source, bounds=own.bounds)
    (size,) = db.execute(probe, {**values, "most": COUNT_MAX + 1}).fetchone()
    if size > COUNT_MAX:
        return walk
    return _walk_in(db, query, filters, values, after, source=own.source, walked=[own])


def _walk_in(
    db: sqlite3.Connection,
    query: TaskQuery,
    filters: Sequence[Filter],
    values: dict[str, Any],
    after: Place | None,
    *,
    source: str,
    walked: Sequence[Filter],
    whole: bool = False,
) -> Walk:
    """Walks the tasks of `source` that pass the filters `walked`: a bounded number, or all of them."""
    moment, direction, sign = _MOMENTS[query.order], *(("ASC", ">") if query.ascending else ("DESC", "<"))
    begin = "true"
    if after is not None:
        values["at_ms"], values["at_no"] = after.ms, after.no
        begin = f"t.{moment} {sign}= :at_ms AND (t.{moment} {sign} :at_ms OR t.task_no {sign} :at_no)"
    bounds = walked[0].bounds if whole else _all(walked)
    rest = [each for each in filters if each not in walked]
    whole = whole or not rest
    scan = TEXT_SCAN_MAX if query.text is not None else SCAN_MAX
    shape = {"source": source, "bounds": bounds, "begin": begin, "moment": moment, "direction": direction}
    rows = _ROWS.format(columns=_columns(rest, "t.task_no", f"t.{moment}"), **shape)
    limits = {"scan": -1 if whole else scan, "skip": 0, "most": query.limit + 1}
    places = db.execute(_PAGE.format(rows=rows, rest=_all(rest), moment=moment), {**values, **limits}).fetchall()
    if whole or len(places) > query.limit:
        return Walk(places, None)
    ends = _ROWS.format(columns=f"t.{moment}, t.task_no", **shape)
    last = db.execute(ends, {**values, "scan": 1, "skip": scan - 1}).fetchone()
    return Walk(places, None if last is None else Place(*last))


def _fewest(db: sqlite3.Connection, filters: Sequence[Filter], values: dict[str, Any]) -> tuple[Filter | None, int]:
    """The indexed filter that leaves the fewest tasks, and their number."""
    found: tuple[Filter | None, int] = (None, FEW + 1)
    times = _all(each for each in filters if each.columns == ("created_at",))
    for each in filters:
        if each.index_name is not None:
            bounds = f"{each.bounds} AND {times}" if each.ordered else each.bounds
            probe = _PROBE.format(source=each.source, bounds=bounds)
            (count,) = db.execute(probe, {**values, "most": FEW + 1}).fetchone()
            if count < found[1]:
                found = (each, count)
    return found


def _in_order(query: TaskQuery, filters: Sequence[Filter]) -> tuple[str, list[Filter]]:
    """The index to walk when no filter leaves few tasks, and the filters that bound the walk."""
    if query.order == "moved":
        return _indexed("found_moved"), [each for each in filters if each.columns == ("updated_at",)]
    times = [each for each in filters if each.columns == ("created_at",)]
    by = next((each for each in filters if each.index_name is not None and each.ordered), None)
    return (_indexed("found_created"), times) if by is None else (by.source, [by, *times])


def _indexed(name: str) -> str:
    return f"a2a_tasks AS t INDEXED BY {name}"


def _merged(query: TaskQuery, walks: Sequence[Walk]) -> tuple[list[int], Place | None]:
    """The numbers of the page's tasks, and where the next page begins. Tasks beyond the stop of a walk are left out."""
    ends = [walk.end for walk in walks if walk.end is not None]
    end = (min if query.ascending else max)(ends) if ends else None
    found = sorted((Place(*place) for walk in walks for place in walk.places), reverse=not query.ascending)
    if end is not None:
        found = [place for place in found if (place <= end if query.ascending else place >= end)]
    if len(found) > query.limit:
        found = found[: query.limit]
        end = found[-1]
    return [place.no for place in found], end


def _details(db: sqlite3.Connection, numbers: Sequence[int], here: Mapping[str, str]) -> tuple[FoundTask, ...]:
    values = {
        "numbers": msgspec.json.encode(numbers).decode(),
        "chars": EXCERPT_CHARS,
        "name_chars": NAME_CHARS_MAX,
        **here,
    }
    (found,) = db.execute(_DETAILS, values).fetchone()
    return _found(found)


def _total(
    db: sqlite3.Connection, query: TaskQuery, branches: Sequence[Sequence[Filter]], values: dict[str, Any]
) -> tuple[int, bool]:
    """The number of tasks, and whether there may be more than were counted."""
    if all(getattr(query, name) == getattr(_NO_FILTER, name) for name in _UNCOUNTED):
        (running,) = db.execute(_RUNNING.format(conditions=_all(_counted(query))), values).fetchone()
        return running, False
    total, at_least = 0, False
    for filters in branches:
        by, _ = _fewest(db, filters, values)
        by = by or next((each for each in filters if each.index_name is not None), _EVERY)
        rest = [each for each in filters if each is not by]
        columns = _columns(rest, "t.task_no")
        count = _COUNT.format(rest=_all(rest), columns=columns, source=by.source, bounds=by.bounds)
        passed, seen = db.execute(count, {**values, "most": COUNT_MAX + 1}).fetchone()
        total, at_least = total + passed, at_least or seen > COUNT_MAX
    return total, at_least


_EVERY: Final = Filter("true", ())


def _counted(query: TaskQuery) -> Iterator[Filter]:
    """The conditions on running totals, which have the recipient, the tenant and both states."""
    if query.agent is not None:
        yield Filter("recipient_display = :agent", ())
    for name in ("tenant", "within"):
        if getattr(query, name) is not None:
            yield Filter(f"{_OF_TENANT}:{name}", ())
    if query.states:
        listed = ", ".join(f"'{state.wire_name}'" for state in query.states)
        yield Filter(f"ledger_state IN ({listed})", ())
    if query.outcomes:
        listed = ", ".join(f"'{outcome.value}'" for outcome in query.outcomes)
        yield Filter(f"ledger_state IN ('result_pending', 'resolved') AND state IN ({listed})", ())
