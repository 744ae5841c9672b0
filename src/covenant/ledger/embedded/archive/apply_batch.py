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
from typing import Final, NamedTuple

import msgspec

from covenant.ledger.embedded import fault_points
from covenant.ledger.embedded.archive.batch_rows import Batch, Contradiction, Known, context_name, parent_name
from covenant.ledger.embedded.archive.row_updates import Row, Rows, TaskRowUpdate
from covenant.ledger.embedded.archive.sql import statement
from covenant.ledger.embedded.journal.record import encode_line, seq_of
from covenant.ledger.embedded.journal.segments import Lines
from covenant.model.errors import CovenantError

AT_ONCE: Final = (256, 64, 16, 4, 1)
"""How many rows there are to a statement."""
LIVE_MAX: Final = 4_096
"""How many rows are kept at hand; the oldest go first."""

_task_rows: Final = msgspec.json.Decoder(tuple[TaskRowUpdate, ...]).decode
_pairs: Final = msgspec.json.Decoder(tuple[tuple[str, int | None], ...]).decode


class Live:
    """Rows of tasks that are not done with, as the archive has them: what moves next is most often among them.

    For one connection, the only one that writes. What is not here is read.
    """

    def __init__(self) -> None:
        self._rows: dict[str, TaskRowUpdate] = {}

    def known(self, db: sqlite3.Connection, batch: Batch) -> Known:
        held = self._rows
        tasks = {task_id: held[task_id] for task_id in batch.moved if task_id in held}
        missing = [(task_id,) for task_id in batch.moved if task_id not in tasks]
        for found in _ask(db, "known_tasks", missing):
            tasks.update((row.task_id, row) for row in _task_rows(found))
        return Known(tasks, _references(db, batch.contexts, context_name), _references(db, batch.parents, parent_name))

    def keep(self, rows: Iterable[TaskRowUpdate]) -> None:
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
        fault_points.point("archive.apply")
        rows = batch.rows(live.known(db, batch))
        _write(db, rows)
        _write_rows(db, "write_meta", _meta(rows, max(lines.last_seq, archived_seq)))
        fault_points.point("archive.commit")
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


REJECTS_MAX: Final = 10_000
REJECTED_BYTES_MAX: Final = 64 << 20
ERROR_CHARS_MAX: Final = 500

_FAULTS_OF_A_RECORD: Final = (
    Contradiction,
    msgspec.MsgspecError,
    sqlite3.IntegrityError,
    sqlite3.DataError,
    sqlite3.InterfaceError,
    sqlite3.ProgrammingError,
    ArithmeticError,
    LookupError,
    TypeError,
    ValueError,
)


class RejectedRecord(NamedTuple):
    """`line` is the record's, with the events that were not applied."""

    seq: int
    error: str
    line: bytes


class _RejectedLine(msgspec.Struct, frozen=True, gc=False):
    seq: int
    ts_ms: int
    events: list[msgspec.Raw]


_line: Final = msgspec.json.Decoder(_RejectedLine).decode
_encode: Final = msgspec.json.Encoder().encode


def is_fault_of_record(error: Exception) -> bool:
    """Whether the same record would fail in the same way for ever."""
    return isinstance(error, _FAULTS_OF_A_RECORD)


def apply_or_reject(db: sqlite3.Connection, lines: Lines, archived_seq: int, live: Live) -> int:
    """Apply every record that can be applied, and set aside the others; how many those were."""
    try:
        apply_lines(db, lines, archived_seq, live)
    except Exception as error:
        if not is_fault_of_record(error):
            raise
        first, second = _halves(lines, archived_seq)
        if second is None:
            live.forget()
            return _apply_alone(db, first)
        rejected = apply_or_reject(db, first, archived_seq, live)
        return rejected + apply_or_reject(db, second, max(archived_seq, first.last_seq), live)
    return 0


def _halves(lines: Lines, archived_seq: int) -> tuple[Lines, Lines | None]:
    """The records after `archived_seq` as two batches of about the same number; one alone has no second half."""
    each = [line for line in lines.data.splitlines(keepends=True) if seq_of(line) > archived_seq]
    middle = len(each) // 2
    if not middle:
        return Lines(each[0], lines.last_seq, lines.cursor), None
    first, second = each[:middle], each[middle:]
    return (
        Lines(b"".join(first), seq_of(first[-1]), lines.cursor),
        Lines(b"".join(second), lines.last_seq, lines.cursor),
    )


def _apply_alone(db: sqlite3.Connection, lines: Lines) -> int:
    try:
        db.execute("BEGIN IMMEDIATE")
        rejected = apply_events(db, lines.data)
        db.execute("INSERT OR REPLACE INTO meta VALUES ('archived_seq', ?)", (lines.last_seq,))
        db.execute("COMMIT")
    except BaseException:
        with suppress(sqlite3.Error):
            db.execute("ROLLBACK")
        raise
    return rejected


def apply_events(db: sqlite3.Connection, line: bytes) -> int:
    """Apply one record event by event within a transaction, and set aside those that fail; 1 if there are any."""
    record = _line(line)
    seq, ts_ms = record.seq, record.ts_ms
    failed: list[msgspec.Raw] = []
    why: Exception | None = None
    for place, event in enumerate(record.events):
        try:
            apply_within(db, encode_line(seq, ts_ms, seq - 1, _encode([event])), seq, place)
        except Exception as error:
            if not is_fault_of_record(error):
                raise
            failed.append(event)
            why = why or error
    if why is None:
        return 0
    left = encode_line(seq, ts_ms, seq - 1, _encode(failed))
    _check_room(db, len(left), why)
    told = (str(why) or repr(why))[:ERROR_CHARS_MAX]
    db.execute("INSERT OR REPLACE INTO rejects VALUES (?, ?, ?)", (seq, told, left))
    return 1


def _check_room(db: sqlite3.Connection, length: int, error: Exception) -> None:
    held, size = db.execute("SELECT count(*), coalesce(sum(length(line)), 0) FROM rejects").fetchone()
    if held >= REJECTS_MAX or size + length > REJECTED_BYTES_MAX:
        raise CovenantError(f"the archive has set aside {held} records, and takes no more: {error}")


def count_rejects(db: sqlite3.Connection) -> int:
    (held,) = db.execute("SELECT count(*) FROM rejects").fetchone()
    return int(held)


def read_rejects(db: sqlite3.Connection, limit: int) -> list[RejectedRecord]:
    """The oldest first."""
    found = db.execute("SELECT seq, error, line FROM rejects ORDER BY seq LIMIT ?", (limit,))
    return [RejectedRecord(seq, error, bytes(line)) for seq, error, line in found]
