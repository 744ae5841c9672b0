"""Applies records to the archive, a batch at a time: one transaction, together with the batch's last seq.

`Batch` computes the rows of its records in Python, because decoding lines there costs a fifth of what it costs in SQL.
A task that begins and ends in one batch is written once, in its final state. Writing is a handful of statements of many
rows each: the driver takes the interpreter's lock again after each statement, which is a wait beside a busy loop. Rows
are handed over in a few sizes only, so that their statements stay prepared.

A task's number is its place. Contexts and parents are unordered texts: an index over them would write a page of its own
for each task. So a reference is a number, too: twice that of the task whose id it is, or twice that of the first task
that named it, plus one. Most tasks are their own context, which needs no look-up.

A record that can never be applied is set aside in `rejects`, event by event, so that it cannot stop later ones.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Final, NamedTuple

import msgspec

from covenant.ledger.embedded import fault_points
from covenant.ledger.embedded.archive.row_updates import (
    DRAINED,
    AuditedRow,
    AuditPurgedRow,
    CountedBy,
    RequestFields,
    ResultReturnedRow,
    Rows,
    TaskEventRow,
    TaskRowUpdate,
    TaskStartRow,
    decode_audit_row,
    decode_lines,
    decode_request,
    text_of,
)
from covenant.ledger.embedded.archive.sql import Row, ask_rows, statement, transaction, write_rows
from covenant.ledger.embedded.archive.task_packs import (
    ROW_BYTES,
    delete_parts,
    kept_sizes,
    pack_finished,
    read_parts,
    unpack_task,
)
from covenant.ledger.embedded.journal.record import encode_line, seq_of
from covenant.ledger.embedded.journal.segments import Lines
from covenant.model.errors import CovenantError

INTEGER_MAX: Final = 2**63 - 1
"""The largest number that a column of SQLite holds."""

PLACES_IN_RECORD: Final = 1 << 20
LIVE_MAX: Final = 4_096
"""The most rows that are kept in memory; the oldest are dropped first."""
_task_rows: Final = msgspec.json.Decoder(tuple[TaskRowUpdate, ...]).decode
_pairs: Final = msgspec.json.Decoder(tuple[tuple[str, int | None], ...]).decode
REJECTS_MAX: Final = 10_000
REJECTED_BYTES_MAX: Final = 64 << 20
ERROR_CHARS_MAX: Final = 500
_encode: Final = msgspec.json.Encoder().encode


class Contradiction(CovenantError):
    """A record that contradicts the rows of the archive."""


def context_name(text: str) -> bytes:
    """The key in `ids` of a context that is not a task's id."""
    return b"@" + text.encode()


def parent_name(text: str) -> bytes:
    return b">" + text.encode()


class KnownRows(NamedTuple):
    """The rows and numbers that the archive already has, of those that a batch asked for."""

    tasks: Mapping[str, TaskRowUpdate]
    contexts: Mapping[str, int]
    parents: Mapping[str, int]


class Batch:
    """Records to apply: first collects the ids to look up, then computes the rows."""

    def __init__(self, data: bytes, after_seq: int, offset: int = 0) -> None:
        self._offset = offset
        self._lines = [line for line in decode_lines(data) if line.seq > after_seq]
        self._begun: dict[str, RequestFields] = {}
        self.moved: dict[str, None] = {}
        """Ids of tasks that were sent in earlier batches."""
        self.contexts: dict[str, None] = {}
        self.parents: dict[str, None] = {}
        """Texts that tasks refer to, which may already have a number."""
        self._returned: dict[str, RequestFields] = {}
        begun, moved = self._begun, self.moved
        for line in self._lines:
            for event in line.events:
                if isinstance(event, ResultReturnedRow):
                    self._returned[event.task_id] = self._begin(event)
                    if event.task_id not in begun:
                        moved[event.task_id] = None
                elif isinstance(event, TaskStartRow):
                    begun[event.task_id] = self._begin(event)
                elif isinstance(event, TaskEventRow) and event.task_id not in begun:
                    moved[event.task_id] = None

    def _begin(self, event: TaskStartRow) -> RequestFields:
        task = decode_request(event.task)
        if task.has_context and task.context_id != event.task_id:
            self.contexts[task.context_id or ""] = None
        if task.parent is not None:
            self.parents[task.parent] = None
        return task

    def rows(self, known: KnownRows) -> Rows:
        rows = Rows()
        before = {task_id: (row.ledger_state, row.state) for task_id, row in known.tasks.items()}
        for line in self._lines:
            rows.place = line.seq * PLACES_IN_RECORD + self._offset
            rows.ts_ms = line.ts_ms
            for event in line.events:
                if isinstance(event, TaskStartRow) and not isinstance(event, ResultReturnedRow):
                    self._add(event, self._begun[event.task_id], rows, known)
                elif isinstance(event, TaskEventRow):
                    row = rows.tasks.get(event.task_id) or self._row_of(event, rows, known)
                    event.apply(row, rows)
                    row.updated_at = line.ts_ms
                elif isinstance(event, AuditedRow):
                    at_ms = decode_audit_row(event.row).timestamp_ms
                    rows.audit.append((event.index, at_ms, event.issuer, event.chain_hash, event.row))
                elif isinstance(event, AuditPurgedRow):
                    rows.purged.append((event.through, event.anchor_hash))
                rows.place += 1
        for row in rows.tasks.values():
            row.state = row.a2a_state_now()
            _count(rows.counts, row, before.get(row.task_id))
        return rows

    def _row_of(self, event: TaskEventRow, rows: Rows, known: KnownRows) -> TaskRowUpdate:
        task_id = event.task_id
        row = known.tasks.get(task_id)
        if row is not None:
            rows.tasks[task_id] = row
        elif isinstance(event, ResultReturnedRow):
            self._add(event, self._returned[task_id], rows, known)
        else:
            raise Contradiction(f"the task {task_id} moved, and was never sent")
        return rows.tasks[task_id]

    def _add(self, event: TaskStartRow, task: RequestFields, rows: Rows, known: KnownRows) -> None:
        task_id = event.task_id
        place, ts_ms = rows.place, rows.ts_ms
        if task_id in rows.ids:
            raise Contradiction(f"the task {task_id} was sent twice")
        rows.ids[task_id] = place
        context_id, display = task.context_id or "", task.recipient.display
        rows.tasks[task_id] = row = TaskRowUpdate(
            task_no=place,
            task_id=task_id,
            tenant_id=task.tenant or "",
            agent_id=display[: max(0, display.find("@"))],
            context_id=context_id,
            context_no=_reference(rows, known.contexts, context_name, context_id) if task.has_context else None,
            parent=task.parent,
            parent_no=None if task.parent is None else _reference(rows, known.parents, parent_name, task.parent),
            created_at=ts_ms,
            updated_at=ts_ms,
            ledger_state=event.state,
            state="",
            digest=event.digest,
            sender_display=task.sender.display,
            sender_pubkey=task.sender.pubkey,
            recipient_display=display,
            recipient_pubkey=task.recipient.pubkey,
            task_kind=task.task_kind,
            deadline_ms=min(task.deadline_ms, INTEGER_MAX) if task.deadline_ms is not None else None,
            origin=task.origin,
            idempotency_key=task.idempotency.key if task.idempotency is not None else None,
            place=place,
        )
        rows.requests.append((place, text_of(event.task)))
        rows.add_update(row, 1, "submitted", None)


def _reference(rows: Rows, known: Mapping[str, int], name_of: Callable[[str], bytes], text: str) -> int:
    """The number of a text that the task being added refers to."""
    number = rows.ids.get(text)
    if number is not None:
        return 2 * number
    return known.get(text) or 2 * rows.names.setdefault(name_of(text), rows.place) + 1


def _count(counts: dict[CountedBy, int], row: TaskRowUpdate, before: tuple[str, str] | None) -> None:
    now = (row.ledger_state, row.state)
    if now != before:
        group = (row.recipient_pubkey, row.recipient_display, row.tenant_id)
        counts[*group, *now] = counts.get((*group, *now), 0) + 1
        if before is not None:
            counts[*group, *before] = counts.get((*group, *before), 0) - 1


class LiveRows:
    """Archived rows of unfinished tasks: the next change is most often among them.

    For the one connection that writes. Missing rows are read.
    """

    def __init__(self) -> None:
        self._rows: dict[str, TaskRowUpdate] = {}

    def known(self, db: sqlite3.Connection, batch: Batch) -> KnownRows:
        held = self._rows
        tasks = {task_id: held[task_id] for task_id in batch.moved if task_id in held}
        missing = [(task_id,) for task_id in batch.moved if task_id not in tasks]
        for found in ask_rows(db, "known_tasks", missing):
            tasks.update((row.task_id, row) for row in _task_rows(found))
        return KnownRows(
            tasks, _references(db, batch.contexts, context_name), _references(db, batch.parents, parent_name)
        )

    def keep(self, rows: Iterable[TaskRowUpdate]) -> None:
        held = self._rows
        for row in rows:
            if row.ledger_state == DRAINED:
                held.pop(row.task_id, None)
            else:
                row.result = None  # a result may be large, and is not written again
                held[row.task_id] = row
        if len(held) > LIVE_MAX:
            for task_id in list(held)[: len(held) - LIVE_MAX]:
                del held[task_id]

    def forget(self) -> None:
        self._rows.clear()


def _references(db: sqlite3.Connection, texts: Iterable[str], name_of: Callable[[str], bytes]) -> dict[str, int]:
    numbers: dict[str, int] = {}
    for found in ask_rows(db, "known_references", [(text, name_of(text)) for text in texts]):
        numbers.update((text, number) for text, number in _pairs(found) if number is not None)
    return numbers


def apply_lines(db: sqlite3.Connection, lines: Lines, archived_seq: int, live: LiveRows | None = None) -> None:
    """Applies records in one transaction. Records up to `archived_seq` are skipped."""
    if seq_of(lines.data[:32]) > archived_seq + 1:
        raise CovenantError(f"record {archived_seq + 1} is missing from the journal's lines")
    batch = Batch(lines.data, archived_seq)
    live = live or LiveRows()
    try:
        with transaction(db):
            fault_points.point("archive.apply")
            rows = _apply(db, batch, live, max(lines.last_seq, archived_seq))
            fault_points.point("archive.commit")
    except BaseException:
        live.forget()
        raise
    live.keep(rows.tasks.values())


def apply_within(db: sqlite3.Connection, data: bytes, last_seq: int, offset: int = 0) -> None:
    """Applies records within an open transaction; all or none. `offset` is the first event's place."""
    db.execute("SAVEPOINT records")
    try:
        _apply(db, Batch(data, 0, offset), LiveRows(), last_seq)
    except BaseException:
        with suppress(sqlite3.Error):
            db.execute("ROLLBACK TO records")
            db.execute("RELEASE records")
        raise
    db.execute("RELEASE records")


def _apply(db: sqlite3.Connection, batch: Batch, live: LiveRows, last_seq: int) -> Rows:
    known = live.known(db, batch)
    for row in known.tasks.values():
        if row.ledger_state == DRAINED:  # a finished task that changes nevertheless
            unpack_task(db, row.task_no)
    rows = batch.rows(known)
    _write(db, rows)
    write_rows(db, "write_meta", _meta(rows, last_seq))
    return rows


def _sizes(rows: Rows, packs: Mapping[int, bytes]) -> list[Row]:
    """The number and bytes of new packs by tenant."""
    sizes: dict[str, tuple[int, int]] = {}
    for row in rows.tasks.values() if packs else ():
        if row.task_no in packs:
            tasks, size = sizes.get(row.tenant_id, (0, 0))
            sizes[row.tenant_id] = (tasks + 1, size + ROW_BYTES + len(packs[row.task_no]))
    return [(tenant, *size) for tenant, size in sizes.items()]


def _pack(db: sqlite3.Connection, rows: Rows) -> list[int]:
    """Packs the tasks that are finished now. Returns those that stay unpacked."""
    earlier = [
        row.task_no for row in rows.tasks.values() if row.ledger_state == DRAINED and row.task_id not in rows.ids
    ]
    stored = read_parts(db, earlier)
    packs, now_packed = pack_finished(rows, {number: stored.get(number) for number in earlier})
    write_rows(db, "write_packs", packs)
    packed = dict(packs)
    write_rows(db, "write_sizes", _sizes(rows, packed))
    delete_parts(db, now_packed)
    return [row.task_no for row in rows.tasks.values() if row.ledger_state == DRAINED and row.task_no not in packed]


def _write(db: sqlite3.Connection, rows: Rows) -> None:
    unpacked = _pack(db, rows)
    write_rows(db, "write_tasks", [msgspec.structs.astuple(row) for row in rows.tasks.values()])
    write_rows(db, "write_requests", rows.requests)
    write_rows(db, "write_updates", rows.updates)
    write_rows(db, "write_handovers", rows.handovers)
    for tenant, size in kept_sizes(db, unpacked).values():
        write_rows(db, "write_sizes", [(tenant, 1, size)])
    write_rows(db, "write_ids", [*sorted(rows.ids.items()), *sorted(rows.names.items())])
    db.execute("INSERT INTO shelving VALUES (?)", (len(rows.ids) + len(rows.names),))
    write_rows(db, "write_counts", [(*key, count) for key, count in rows.counts.items() if count])
    write_rows(db, "write_audit", rows.audit)
    if rows.purged:
        db.execute(statement("purge_audit"), {"through": max(rows.purged)[0]})


def _meta(rows: Rows, last_seq: int) -> list[Row]:
    meta: list[Row] = [("archived_seq", last_seq)]
    if rows.purged:
        index, chain_hash = rows.purged[-1]
        meta += [("audit_anchor_index", index), ("audit_anchor_hash", chain_hash)]
    return meta


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
    """`line` is the record with the events that were not applied."""

    seq: int
    error: str
    line: bytes


class _RejectedLine(msgspec.Struct, frozen=True, gc=False):
    seq: int
    ts_ms: int
    events: list[msgspec.Raw]


_decode_rejected: Final = msgspec.json.Decoder(_RejectedLine).decode


def is_fault_of_record(error: Exception) -> bool:
    """Whether the same record would always fail in the same way."""
    return isinstance(error, _FAULTS_OF_A_RECORD)


def apply_or_reject(db: sqlite3.Connection, lines: Lines, archived_seq: int, live: LiveRows) -> int:
    """Applies every record that can be applied, and sets the others aside. Returns the number of those."""

    def apply(records: Sequence[bytes]) -> None:
        part = Lines(b"".join(records), seq_of(records[-1]), lines.cursor)
        apply_lines(db, part, seq_of(records[0]) - 1, live)

    def apply_alone(record: bytes) -> int:
        with transaction(db):
            rejected = apply_events(db, record)
            db.execute("INSERT OR REPLACE INTO meta VALUES ('archived_seq', ?)", (seq_of(record),))
        return rejected

    try:
        apply_lines(db, lines, archived_seq, live)
    except Exception as error:
        if not is_fault_of_record(error):
            raise
        records = [line for line in lines.data.splitlines(keepends=True) if seq_of(line) > archived_seq]
        return apply_in_halves(records, apply, apply_alone)
    return 0


def apply_in_halves(
    records: Sequence[bytes], apply: Callable[[Sequence[bytes]], None], apply_alone: Callable[[bytes], int]
) -> int:
    """Applies records together; if one of them is at fault, each half by itself. Returns how many are set aside."""
    try:
        apply(records)
    except Exception as error:
        if not is_fault_of_record(error):
            raise
        middle = len(records) // 2
        if not middle:
            return apply_alone(records[0])
        halves = (records[:middle], records[middle:])
        return sum(apply_in_halves(half, apply, apply_alone) for half in halves)
    return 0


def apply_events(db: sqlite3.Connection, line: bytes) -> int:
    """Applies one record event by event in a transaction, and sets failed events aside. Returns 1 if there are any."""
    record = _decode_rejected(line)
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
    rejected = encode_line(seq, ts_ms, seq - 1, _encode(failed))
    _check_room(db, len(rejected), why)
    reason = (str(why) or repr(why))[:ERROR_CHARS_MAX]
    db.execute("INSERT OR REPLACE INTO rejects VALUES (?, ?, ?)", (seq, reason, rejected))
    return 1


def _check_room(db: sqlite3.Connection, length: int, error: Exception) -> None:
    count, size = db.execute("SELECT count(*), coalesce(sum(length(line)), 0) FROM rejects").fetchone()
    if count >= REJECTS_MAX or size + length > REJECTED_BYTES_MAX:
        raise CovenantError(f"the archive has set aside {count} records, and takes no more: {error}")


def count_rejects(db: sqlite3.Connection) -> int:
    (count,) = db.execute("SELECT count(*) FROM rejects").fetchone()
    return int(count)


def read_rejects(db: sqlite3.Connection, limit: int) -> list[RejectedRecord]:
    """The oldest first."""
    found = db.execute("SELECT seq, error, line FROM rejects ORDER BY seq LIMIT ?", (limit,))
    return [RejectedRecord(seq, error, bytes(line)) for seq, error, line in found]
