"""Records that the archive cannot take: found within their batch, set aside in the archive's own file, and counted.

A record is rejected when it contradicts what the archive holds, or when its content cannot be decoded or stored. Trying
it again would fail again, and everything behind it would wait for ever. So the batch is halved until the record stands
alone. Those of its events that can be applied are applied, since they may be of other tasks. The others, the error and
the new `archived_seq` are part of the same transaction, and the archive goes on.

A full disk, a locked or a damaged file says nothing about a record. Such an error is raised, and the batch is tried
again as it is. The same holds once there are too many rejects: then it is not the records that are wrong.
"""

from __future__ import annotations

import sqlite3
from contextlib import suppress
from typing import Final, NamedTuple

import msgspec

from covenant.ledger.log.applying import Live, apply_lines, apply_within
from covenant.ledger.log.projection import Contradiction
from covenant.ledger.log.record import encode_line, seq_of
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
    """`line` is the record's, with the events that were not applied."""

    seq: int
    error: str
    line: bytes


class _Line(msgspec.Struct, frozen=True, gc=False):
    seq: int
    ts_ms: int
    events: list[msgspec.Raw]


_line: Final = msgspec.json.Decoder(_Line).decode
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


def read_rejects(db: sqlite3.Connection, limit: int) -> list[Reject]:
    """The oldest first."""
    found = db.execute("SELECT seq, error, line FROM rejects ORDER BY seq LIMIT ?", (limit,))
    return [Reject(seq, error, bytes(line)) for seq, error, line in found]
