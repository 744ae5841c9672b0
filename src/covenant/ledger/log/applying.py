"""Taking records into the archive, a batch at a time: one transaction, with the seq that it comes to.

What a batch comes to is worked out in Python (`projection`), because decoding lines there costs a fifth of what it
costs in SQL; writing it is a handful of statements of many rows each. Many rows, because the driver takes the
interpreter's lock again after each statement, and beside a busy loop that is a wait. Rows are handed over in a few
sizes only, so that their statements stay prepared.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from itertools import chain
from typing import Final

import msgspec

from covenant.ledger.log import faults
from covenant.ledger.log.moves import Row, Rows, TaskRow
from covenant.ledger.log.projection import Batch, Known, context_name, parent_name
from covenant.ledger.log.record import seq_of
from covenant.ledger.log.segments import Lines
from covenant.ledger.log.sql import statement
from covenant.model.errors import CovenantError

AT_ONCE: Final = (256, 64, 16, 4, 1)
"""How many rows there are to a statement."""
LIVE_MAX: Final = 4_096
"""How many rows are kept at hand; the oldest go first."""

_task_rows: Final = msgspec.json.Decoder(tuple[TaskRow, ...]).decode
_pairs: Final = msgspec.json.Decoder(tuple[tuple[str, int | None], ...]).decode


class Live:
    """Rows of tasks that are not done with, as the archive has them: what moves next is most often among them.

    For one connection, the only one that writes. What is not here is read.
    """

    def __init__(self) -> None:
        self._rows: dict[str, TaskRow] = {}

    def known(self, db: sqlite3.Connection, batch: Batch) -> Known:
        held = self._rows
        tasks = {task_id: held[task_id] for task_id in batch.moved if task_id in held}
        missing = [(task_id,) for task_id in batch.moved if task_id not in tasks]
        for found in _ask(db, "known_tasks", missing):
            tasks.update((row.task_id, row) for row in _task_rows(found))
        return Known(tasks, _references(db, batch.contexts, context_name), _references(db, batch.parents, parent_name))

    def keep(self, rows: Iterable[TaskRow]) -> None:
        """As they were written."""
        held = self._rows
        for row in rows:
            if row.ledger_state == "resolved":
                held.pop(row.task_id, None)
            else:
                row.result = None  # it may be large, and is not written again
                held[row.task_id] = row
        if len(held) > LIVE_MAX:
            for task_id in list(held)[: len(held) - LIVE_MAX]:
                del held[task_id]

    def forget(self) -> None:
        self._rows.clear()


def _references(db: sqlite3.Connection, texts: Iterable[str], named: Callable[[str], bytes]) -> dict[str, int]:
    numbers: dict[str, int] = {}
    for found in _ask(db, "known_references", [(text, named(text)) for text in texts]):
        numbers.update((text, number) for text, number in _pairs(found) if number is not None)
    return numbers


def apply_lines(db: sqlite3.Connection, lines: Lines, archived_seq: int, live: Live | None = None) -> None:
    """One transaction. Records up to `archived_seq` are passed over."""
    if seq_of(lines.data[:32]) > archived_seq + 1:
        raise CovenantError(f"record {archived_seq + 1} is missing from what the journal gave")
    batch = Batch(lines.data, archived_seq)
    live = live or Live()
    try:
        db.execute("BEGIN IMMEDIATE")
        faults.point("archive.apply")
        rows = batch.rows(live.known(db, batch))
        _write(db, rows)
        _write_rows(db, "write_meta", _meta(rows, max(lines.last_seq, archived_seq)))
        faults.point("archive.commit")
        db.execute("COMMIT")
    except BaseException:
        live.forget()
        with suppress(sqlite3.Error):
            db.execute("ROLLBACK")
        raise
    live.keep(rows.tasks.values())


def apply_within(db: sqlite3.Connection, data: bytes, last_seq: int, offset: int = 0) -> None:
    """The same for whoever has a transaction open already; whole or not at all. `offset` is the first event's place."""
    db.execute("SAVEPOINT records")
    try:
        batch = Batch(data, 0, offset)
        rows = batch.rows(Live().known(db, batch))
        _write(db, rows)
        _write_rows(db, "write_meta", _meta(rows, last_seq))
    except BaseException:
        with suppress(sqlite3.Error):
            db.execute("ROLLBACK TO records")
            db.execute("RELEASE records")
        raise
    db.execute("RELEASE records")


def _write(db: sqlite3.Connection, rows: Rows) -> None:
    _write_rows(db, "write_tasks", [msgspec.structs.astuple(row) for row in rows.tasks.values()])
    _write_rows(db, "write_requests", rows.requests)
    _write_rows(db, "write_updates", rows.updates)
    _write_rows(db, "write_handovers", rows.handovers)
    _write_rows(db, "write_ids", [*sorted(rows.ids.items()), *sorted(rows.names.items())])
    db.execute("INSERT INTO shelving VALUES (?)", (len(rows.ids) + len(rows.names),))
    _write_rows(db, "write_counts", [(*key, count) for key, count in rows.counts.items() if count])
    _write_rows(db, "write_audit", rows.audit)
    if rows.purged:
        db.execute(statement("purge_audit"), {"through": max(rows.purged)[0]})


def _meta(rows: Rows, last_seq: int) -> list[Row]:
    meta: list[Row] = [("archived_seq", last_seq)]
    if rows.purged:
        index, chain_hash = rows.purged[-1]
        meta += [("audit_anchor_index", index), ("audit_anchor_hash", chain_hash)]
    return meta


def _write_rows(db: sqlite3.Connection, name: str, rows: Sequence[Row]) -> None:
    for part in _parts(rows):
        db.execute(of_rows(name, len(part), len(part[0])), list(chain.from_iterable(part)))


def _ask(db: sqlite3.Connection, name: str, rows: Sequence[Row]) -> Iterator[str]:
    for part in _parts(rows):
        (found,) = db.execute(of_rows(name, len(part), len(part[0])), list(chain.from_iterable(part))).fetchone()
        yield found


def _parts(rows: Sequence[Row]) -> Iterator[Sequence[Row]]:
    begin = 0
    for size in AT_ONCE:
        while len(rows) - begin >= size:
            yield rows[begin : begin + size]
            begin += size


@cache
def of_rows(name: str, rows: int, columns: int) -> str:
    """One text for each, so that the driver finds the statement that it has prepared for it."""
    row = f"({', '.join('?' * columns)})"
    return statement(name).format(rows=", ".join([row] * rows))
