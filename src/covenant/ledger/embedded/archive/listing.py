"""Listing an agent's tasks page by page: each page costs what is on it, however many tasks there are.

A page ends at a place in the order, not at a number of rows to skip: the next one begins there at once. It also ends
where it is large: tasks with long stories come a few at a time.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Callable, Iterable
from typing import Any, Final

import msgspec

from covenant.ledger.contract.tasks import Listing, ListQuery
from covenant.ledger.embedded.archive.sql import statement
from covenant.model.errors import InvalidParams
from covenant.model.task import Cause, Ending, Result, Task
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
)


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


def _as_it_is(update: StepContent) -> StepContent:
    return update


_KINDS: Final[dict[str, Callable[[msgspec.Raw], StepContent]]] = {
    "submitted": _decoded(Task, Began),
    "working": lambda _: Started(),
    "status": _decoded(StatusUpdate, _as_it_is),
    "artifact": _decoded(ArtifactUpdate, _as_it_is),
    "message": _decoded(MessageUpdate, _as_it_is),
    "parked": _decoded(StatusUpdate, _as_it_is),
    "continued": _decoded(MessageUpdate, Continued),
    "settled": _decoded(_StoredEnd, lambda end: Ended(end.ending, end.result, end.cause)),
}


class ListedTask(msgspec.Struct, frozen=True, gc=False):
    """A task of a listing, its place in it, and whether there is a next one."""

    updated_at: int
    task_no: int
    next_no: int | None
    steps: tuple[StoredStep, ...]


_decode_rows = msgspec.json.Decoder(tuple[StoredStep, ...]).decode


def decode_steps(stored: bytes) -> tuple[Step, ...]:
    return steps_of(_decode_rows(stored))


def steps_of(rows: Iterable[StoredStep]) -> tuple[Step, ...]:
    return tuple([Step(row.generation, row.ts_ms, _KINDS[row.kind](row.body)) for row in rows])


_PAGE: Final = statement("listing")
_COUNT: Final = statement("listing_count")
_COUNTED: Final = statement("task_counts")
_NUMBERS: Final = statement("context_numbers")
_FILTERS: Final = {
    "sender": "sender_pubkey = :sender",
    "state": "state = :state",
    "moved_since_ms": "updated_at >= :moved_since_ms",
}
_END: Final = (1 << 63) - 1
PAGE_BYTES_MAX: Final = 2 * 1024 * 1024
"""From here on no further task is put on a page. Each has one at least, however large."""

_token = re.compile(r"([0-9a-f]{1,15})-([0-9a-f]{1,16})").fullmatch
_listed = msgspec.json.Decoder(tuple[ListedTask, ...]).decode


def list_tasks(db: sqlite3.Connection, query: ListQuery) -> Listing:
    updated_at, task_no = _place(query.after)
    values: dict[str, Any] = msgspec.structs.asdict(query)
    db.execute("BEGIN")  # one snapshot for the page and the count
    try:
        # One statement for each set of filters, so that each can use the index that fits it.
        chosen = [sql for name, sql in _FILTERS.items() if getattr(query, name) is not None]
        if query.context_id is not None:
            values["own"], values["named"] = db.execute(_NUMBERS, {"context_id": query.context_id}).fetchone()
            chosen.append(_in_context(values))
        filters = " AND ".join(chosen) or "true"
        page = values | {"updated_at": updated_at, "task_no": task_no, "bytes_max": PAGE_BYTES_MAX}
        (found,) = db.execute(_PAGE.format(filters=filters), page).fetchone()
        counted = query.sender is None and query.context_id is None and query.moved_since_ms is None
        (total,) = db.execute(_COUNTED if counted else _COUNT.format(filters=filters), values).fetchone()
    finally:
        db.execute("COMMIT")
    rows = _listed(found)
    end = f"{rows[-1].updated_at:x}-{rows[-1].task_no:x}" if rows and rows[-1].next_no is not None else ""
    return Listing(tasks=tuple(steps_of(row.steps) for row in rows), total=total, next=end)


def _in_context(values: dict[str, Any]) -> str:
    """The filter for a context. Almost all have one number; one that was named before it was a task's id has two."""
    if values["own"] is not None and values["named"] is not None:
        return "context_no IN (:own, :named)"
    return "context_no = coalesce(:own, :named)"


def _place(token: str) -> tuple[int, int]:
    if not token:
        return _END, _END
    found = _token(token)
    if found is None:
        raise InvalidParams("pageToken", "give the nextPageToken of the page before, or none")
    return int(found[1], 16), min(int(found[2], 16), _END)
