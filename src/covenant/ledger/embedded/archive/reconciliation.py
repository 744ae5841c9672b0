"""Makes an archive agree with its snapshot and journal again, after records were lost or set aside.

The snapshot is the fixed point. The archive's later records are taken back, each task of the snapshot gets the row that
it had then, and the rest of the journal is applied from there on. So no row of a lost record remains to contradict
later ones.

History that only the archive has stays: that of tasks that the journal no longer has. This includes a task that has
ended although the record of its beginning is lost. A task that the snapshot knows to be resolved, and whose end the
archive does not have, ends with a result that says so.

One transaction: a crash leaves the archive as it was. Repeating it changes nothing.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import msgspec

from covenant.ledger.embedded.archive.apply_batch import PLACES_IN_RECORD, apply_events, apply_in_halves, apply_within
from covenant.ledger.embedded.archive.sql import statement, transaction
from covenant.ledger.embedded.archive.task_packs import unpack_task
from covenant.ledger.embedded.journal.record import encode_line, seq_of
from covenant.ledger.embedded.state import LedgerState
from covenant.ledger.machine.entry import Entry
from covenant.ledger.machine.events import TaskSent
from covenant.ledger.machine.states import LEASED
from covenant.model.ids import TaskId

BATCH_BYTES: Final = 1 << 20
INSERTED_PLACE: Final = PLACES_IN_RECORD // 2
"""Tasks that the archive does not know get places after those of the snapshot's last record."""

_FREE_PLACE: Final = """
    UPDATE bounds SET free_place = min(
        free_place,
        coalesce((SELECT min(settled_place) FROM a2a_tasks WHERE settled_place >= :first), free_place),
        coalesce((SELECT min(settled_place) FROM aged_out WHERE settled_place >= :first), free_place)
    )
"""
"""Moves `free_place` below the places that this or an earlier reconciliation gave to tasks whose end was lost."""
_encode: Final = msgspec.json.Encoder().encode


class ExpectedArchive(NamedTuple):
    """The state that an archive must agree with.

    `before` is the state of the snapshot at record `snapshot_seq`, `after` the state at the end of the journal, with
    every task that ended since. `earlier` are the good records up to the snapshot that the archive lacks, `later` those
    after it; both are whole lines, in order. `last_seq` is the archive's final seq.
    """

    snapshot_seq: int
    before: LedgerState
    after: LedgerState
    earlier: Iterable[bytes]
    later: Iterable[bytes]
    last_seq: int


def reconcile(db: sqlite3.Connection, expected: ExpectedArchive) -> int:
    """Rewrites rows that disagree. Returns how many records still could not be applied. `db` is the writer's."""
    with transaction(db):
        rejected = _apply(db, expected.earlier)
        _prepare(db, expected)
        _run(db, "reconcile_removal")
        _restore(db, expected)
        db.execute(_FREE_PLACE, {"first": expected.snapshot_seq * PLACES_IN_RECORD + INSERTED_PLACE})
        _run(db, "reconcile_ended")
        db.execute("DELETE FROM rejects WHERE seq > ?", (expected.snapshot_seq,))
        rejected += _apply(db, expected.later)
        _anchor(db, expected.after)
        _run(db, "reconcile_rest")
        db.execute("INSERT OR REPLACE INTO meta VALUES ('archived_seq', ?)", (expected.last_seq,))
    return rejected


def _prepare(db: sqlite3.Connection, expected: ExpectedArchive) -> None:
    after_place = _after_place(expected)
    db.execute("CREATE TEMP TABLE bounds (after_place INTEGER, free_place INTEGER, audit_index INTEGER)")
    db.execute("INSERT INTO bounds VALUES (?, ?, ?)", (after_place, after_place, expected.after.audit_head.index))
    db.execute("CREATE TEMP TABLE known (task_id TEXT PRIMARY KEY, in_snapshot INTEGER NOT NULL) WITHOUT ROWID")
    before = expected.before.entries
    known = {task_id: task_id in before for task_id in (*expected.after.entries, *before)}
    db.executemany("INSERT INTO known VALUES (?, ?)", known.items())
    for task_id in before:
        task_no = _number_of(db, task_id)
        if task_no is not None:
            unpack_task(db, task_no)


def _after_place(expected: ExpectedArchive) -> int:
    return (expected.snapshot_seq + 1) * PLACES_IN_RECORD


def _run(db: sqlite3.Connection, name: str) -> None:
    """Runs each statement of a file. (`executescript` would end the transaction.)"""
    text = ""
    for line in statement(name).splitlines(keepends=True):
        text += line
        if sqlite3.complete_statement(text):
            db.execute(text)
            text = ""


def _restore(db: sqlite3.Connection, expected: ExpectedArchive) -> None:
    """Gives every task of the snapshot its row of that time, whatever happened to it since."""
    after_place = _after_place(expected)
    inserted = expected.snapshot_seq * PLACES_IN_RECORD + INSERTED_PLACE
    for number, (task_id, entry) in enumerate(expected.before.entries.items(), 1):
        task_no = _number_of(db, task_id)
        if task_no is None:
            # A new place: an earlier reconciliation may have used some numbers.
            (newest,) = db.execute("SELECT max(task_no) FROM a2a_tasks WHERE task_no < ?", (after_place,)).fetchone()
            task_no = max(inserted, (newest or 0) + 1)
            _insert(db, task_no, entry)
        db.execute("DELETE FROM handovers WHERE task_no = ? AND place >= ?", (task_no, after_place))
        _insert_lease(db, task_no, entry, after_place - 2)
        places = {"after_place": after_place, "lost_place": after_place - number}
        db.execute(statement("reconcile_live"), {**_columns(entry), "task_no": task_no, **places})


def _number_of(db: sqlite3.Connection, task_id: TaskId) -> int | None:
    found = db.execute(
        "SELECT t.task_no FROM a2a_tasks AS t WHERE t.task_no = (SELECT i.task_no FROM ids AS i WHERE i.task_id = ?)",
        (task_id,),
    ).fetchone()
    return None if found is None else int(found[0])


def _insert(db: sqlite3.Connection, task_no: int, entry: Entry) -> None:
    """Inserts a task as if its beginning had been applied at this place. `_columns` sets its later state."""
    seq, offset = divmod(task_no, PLACES_IN_RECORD)
    events = _encode([TaskSent(entry.task.id, entry.task, entry.digest)])
    apply_within(db, encode_line(seq, entry.accepted_at_ms, seq - 1, events), seq, offset)


def _insert_lease(db: sqlite3.Connection, task_no: int, entry: Entry, place: int) -> None:
    """Inserts the live lease of a task whose record never reached the archive."""
    lease = entry.lease
    if lease is None or entry.state is not LEASED:
        return
    found = db.execute(
        "SELECT 1 FROM handovers WHERE task_no = ? AND event = 'leased' AND json_extract(lease, '$.lease_id') = ?",
        (task_no, lease.lease_id),
    ).fetchone()
    if found is None:
        row = (task_no, place, lease.leased_at_ms, _encode(lease).decode())
        db.execute("INSERT OR REPLACE INTO handovers VALUES (?, ?, 'leased', ?, ?, NULL)", row)


def _columns(entry: Entry) -> Mapping[str, Any]:
    lease = entry.lease
    holder = lease.leased_to if lease is not None else None
    return {
        "task_id": entry.task.id,
        "updated_at": entry.updated_at_ms,
        "ledger_state": entry.state.wire_name,
        "state": entry.a2a_state,
        "generation": entry.generation,
        "turn": entry.turn,
        "attempt": entry.attempt,
        "interrupted": int(entry.interrupted),
        "interruption": entry.interruption,
        "lease_id": lease.lease_id if lease is not None else None,
        "leased_to_display": holder.display if holder is not None else None,
        "leased_to_pubkey": holder.pubkey if holder is not None else None,
        "leased_at_ms": lease.leased_at_ms if lease is not None else None,
        "renewed_at_ms": lease.renewed_at_ms if lease is not None else None,
        "node": lease.node if lease is not None else None,
        "boot": lease.boot if lease is not None else None,
        "ending": entry.ending,
        "cause": entry.cause,
        "result": _encode(entry.result).decode() if entry.result is not None else None,
    }


def _anchor(db: sqlite3.Connection, after: LedgerState) -> None:
    """Restores the state's own anchor if the record of a purge is lost, so that the anchor is after the head."""
    (index,) = db.execute("SELECT value FROM meta WHERE key = 'audit_anchor_index'").fetchone()
    if index > after.audit_head.index:
        anchor = after.audit_anchor
        rows = (("audit_anchor_index", anchor.index), ("audit_anchor_hash", anchor.chain_hash))
        db.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", rows)


def _apply(db: sqlite3.Connection, lines: Iterable[bytes]) -> int:
    def apply(records: Sequence[bytes]) -> None:
        apply_within(db, b"".join(records), seq_of(records[-1]))

    return sum(apply_in_halves(batch, apply, partial(apply_events, db)) for batch in _batches(lines))


def _batches(lines: Iterable[bytes]) -> Iterator[list[bytes]]:
    batch: list[bytes] = []
    size = 0
    for line in lines:
        batch.append(line)
        size += len(line)
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
