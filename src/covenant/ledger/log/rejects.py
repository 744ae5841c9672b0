"""Records that the archive cannot take: found within their batch, set aside in the archive's own file, and counted.

A record is rejected when it contradicts what the archive holds, or when its content cannot be decoded or stored. Trying
it again would fail again, and everything behind it would wait for ever. So the batch is halved until the record stands
alone. The record's line, the error and the new `archived_seq` are then one transaction, and the archive goes on.

A full disk, a locked or a damaged file says nothing about a record. Such an error is raised, and the batch is tried
again as it is. The same holds once there are too many rejects: then it is not the records that are wrong.
"""

from __future__ import annotations

import sqlite3
from contextlib import suppress
from typing import Final, NamedTuple

import msgspec

from covenant.ledger.log.applying import Live, apply_lines
from covenant.ledger.log.projection import Contradiction
from covenant.ledger.log.record import seq_of
from covenant.ledger.log.segments import Lines
from covenant.model.errors import CovenantError

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


class Reject(NamedTuple):
    seq: int
    error: str
    line: bytes


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
            _reject(db, first, error)
            return 1
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


def _reject(db: sqlite3.Connection, lines: Lines, error: Exception) -> None:
    try:
        db.execute("BEGIN IMMEDIATE")
        _check_room(db, len(lines.data), error)
        insert(db, lines.last_seq, error, lines.data)
        db.execute("INSERT OR REPLACE INTO meta VALUES ('archived_seq', ?)", (lines.last_seq,))
        db.execute("COMMIT")
    except BaseException:
        with suppress(sqlite3.Error):
            db.execute("ROLLBACK")
        raise


def insert(db: sqlite3.Connection, seq: int, error: Exception, line: bytes) -> None:
    told = (str(error) or repr(error))[:ERROR_CHARS_MAX]
    db.execute("INSERT OR REPLACE INTO rejects VALUES (?, ?, ?)", (seq, told, line))


def _check_room(db: sqlite3.Connection, length: int, error: Exception) -> None:
    held, size = db.execute("SELECT count(*), coalesce(sum(length(line)), 0) FROM rejects").fetchone()
    if held >= REJECTS_MAX or size + length > REJECTED_BYTES_MAX:
        raise CovenantError(f"the archive has set aside {held} records, and takes no more: {error}")


def count_rejects(db: sqlite3.Connection) -> int:
    (held,) = db.execute("SELECT count(*) FROM rejects").fetchone()
    return int(held)


def read_rejects(db: sqlite3.Connection, limit: int) -> list[Reject]:
    """The oldest first."""
    found = db.execute("SELECT seq, error, line FROM rejects ORDER BY seq LIMIT ?", (limit,))
    return [Reject(seq, error, bytes(line)) for seq, error, line in found]
