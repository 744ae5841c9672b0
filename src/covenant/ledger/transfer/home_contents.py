"""The contents of a home: read from its snapshot, its archive and its blobs, and written as a new one.

The caller has the home's lock. A home that is read was compacted and closed: its archive has every record of the
journal.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from pathlib import Path
from typing import Final

import msgspec

from covenant.ledger.contract.blobs import CHUNK_BYTES
from covenant.ledger.embedded.archive.apply_batch import PLACES_IN_RECORD, apply_within
from covenant.ledger.embedded.archive.archive_file import ARCHIVE_NAME, archived_seq_of, open_writer
from covenant.ledger.embedded.archive.reconciliation import ExpectedArchive, reconcile
from covenant.ledger.embedded.archive.row_updates import TaskRowUpdate
from covenant.ledger.embedded.archive.sql import write_rows
from covenant.ledger.embedded.archive.task_packs import TaskParts, unpack
from covenant.ledger.embedded.blob_folder import BYTES, FOLDER_NAME, INCOMING
from covenant.ledger.embedded.disk import make_owned_folder, open_owned, replace_private, sync_dir
from covenant.ledger.embedded.journal import snapshot
from covenant.ledger.embedded.journal.segments import create_segment
from covenant.ledger.embedded.state import LedgerState
from covenant.ledger.transfer.contents import AgentNotes, AuditChain, AuditLine, Contents, MovedBlob
from covenant.ledger.transfer.task_record import TaskFacts, TaskRecord, journal_lines, make_events
from covenant.model.errors import CovenantError
from covenant.model.grant import GENESIS, link
from covenant.model.ids import TaskId
from covenant.model.settings import Limits
from covenant.model.task import Task

BATCH_BYTES: Final = 1 << 20
PAGE_ROWS: Final = 200
CHAIN: Final = "home"
NOTES_NAME: Final = "memory"
"""The folder of agents' notes."""
_COLUMNS: Final = ", ".join(TaskRowUpdate.__struct_fields__)
_TASKS: Final = f"SELECT {_COLUMNS} FROM a2a_tasks WHERE task_no > ? ORDER BY task_no LIMIT ?"  # noqa: S608  our own
_PACKED: Final = "SELECT pack FROM packs WHERE task_no = ?"
_REQUEST: Final = "SELECT task FROM requests WHERE task_no = ?"
_UPDATES: Final = "SELECT generation, kind, ts_ms, body FROM updates WHERE task_no = ? ORDER BY generation"
_HANDOVERS: Final = "SELECT place, event, ts_ms, lease, reason FROM handovers WHERE task_no = ? ORDER BY place"
_task: Final = msgspec.json.Decoder(Task).decode
_QUEUED_AT: Final = "UPDATE a2a_tasks SET place = ? WHERE task_no = ?"
_SETTLED_AT: Final = "UPDATE a2a_tasks SET settled_place = ? WHERE task_no = ?"
_NUMBER: Final = "SELECT i.task_no FROM ids AS i WHERE i.task_id = ?"


class HomeContents(Contents):
    def __init__(self, home: Path, limits: Limits) -> None:
        self._home = home
        self._limits = limits
        self._db = sqlite3.connect(f"{(home / ARCHIVE_NAME).absolute().as_uri()}?mode=rw", uri=True)
        self._db.execute("PRAGMA query_only = true")
        self.end, self.state = self._read_state()

    def _read_state(self) -> tuple[int, LedgerState]:
        state = LedgerState(self._limits)
        found = snapshot.newest(self._home / "journal")
        seq = snapshot.load(found[1], state) if found is not None else 0
        if archived_seq_of(self._db) != seq or any(snapshot.records(self._home / "journal", seq, seq + 1)):
            raise CovenantError(f"something was written to {self._home} meanwhile; begin the move again")
        return seq, state

    async def tasks(self) -> AsyncIterator[TaskRecord]:
        after = -1
        while True:
            rows = [TaskRowUpdate(*row) for row in self._db.execute(_TASKS, (after, PAGE_ROWS))]
            for row in rows:
                yield self._record(row)
            if not rows:
                return
            after = rows[-1].task_no

    def _record(self, row: TaskRowUpdate) -> TaskRecord:
        parts = self._parts(row)
        facts = TaskFacts(
            task_id=row.task_id,
            created_at_ms=row.created_at,
            updated_at_ms=row.updated_at,
            ledger_state=row.ledger_state,
            a2a_state=row.state,
            digest=row.digest,
            generation=row.generation,
            turn=row.turn,
            attempt=row.attempt,
            ending=row.ending,
            cause=row.cause,
        )
        return TaskRecord(facts, parts, make_events(facts, parts, self._leader(TaskId(row.task_id))))

    def _leader(self, task_id: TaskId) -> str | None:
        entry = self.state.entries.get(task_id)
        key = entry.cache_key if entry is not None else None
        return self.state.leaders.get(key) if key is not None and task_id in self.state.groups.get(key, ()) else None

    def _parts(self, row: TaskRowUpdate) -> TaskParts:
        number = (row.task_no,)
        packed = self._db.execute(_PACKED, number).fetchone()
        if packed is not None:
            parts = unpack(row.task_no, packed[0])
            parts.task_no = 0
            return parts
        request = self._db.execute(_REQUEST, number).fetchone()
        return TaskParts(
            0,
            request[0] if request is not None else None,
            row.result,
            list(self._db.execute(_UPDATES, number)),
            list(self._db.execute(_HANDOVERS, number)),
        )

    async def erased_ids(self) -> AsyncIterator[str]:
        query = (
            "SELECT i.task_id FROM ids AS i WHERE typeof(i.task_id) = 'text' "
            "AND NOT EXISTS (SELECT 1 FROM a2a_tasks AS t WHERE t.task_no = i.task_no) ORDER BY 1"
        )
        for (task_id,) in self._db.execute(query):
            yield task_id

    async def chains(self) -> list[AuditChain]:
        head = self.state.audit_head
        return [AuditChain(CHAIN, head, self.state.audit_anchor)] if head.index else []

    async def audit(self) -> AsyncIterator[AuditLine]:
        for row in self._db.execute("SELECT idx, ts_ms, issuer, chain_hash, row FROM audit ORDER BY idx"):
            yield AuditLine(CHAIN, *row)

    async def notes(self) -> AsyncIterator[AgentNotes]:
        for path in sorted((self._home / NOTES_NAME).glob("*/*.json")):
            yield AgentNotes(path.parent.name, path.stem, path.read_text(encoding="utf-8"))

    async def blobs(self) -> AsyncIterator[MovedBlob]:
        for place in _blob_places(self._home / FOLDER_NAME):
            size, stored_at_ms = _stat(place / BYTES)
            references = tuple((each.name, _stat(each)[1]) for each in sorted(place.iterdir()) if each.name != BYTES)
            yield MovedBlob(place.parent.parent.name, place.name, size, stored_at_ms, references, key=str(place))

    async def blob_bytes(self, blob: MovedBlob) -> AsyncIterator[bytes]:
        with (Path(blob.key) / BYTES).open("rb") as file:
            while data := file.read(CHUNK_BYTES):
                yield data

    def close(self) -> None:
        self._db.close()


def _read_body(db: sqlite3.Connection, task_id: TaskId) -> Task:
    (number,) = db.execute(_NUMBER, (task_id,)).fetchone()
    (text,) = db.execute(_REQUEST, (number,)).fetchone()
    return _task(text)


def _blob_places(folder: Path) -> Iterator[Path]:
    if folder.is_dir():
        for space in sorted(each for each in folder.iterdir() if each.name != INCOMING):
            for part in sorted(space.iterdir()):
                yield from sorted(each for each in part.iterdir() if (each / BYTES).is_file())


def _stat(path: Path) -> tuple[int, int]:
    found = path.stat(follow_symlinks=False)
    return found.st_size, found.st_mtime_ns // 1_000_000


async def write_home(folder: Path, contents: Contents) -> None:
    """Creates the ledger of a home in an empty folder. All of it is durable when this returns."""
    make_owned_folder(folder / "journal")
    with closing(open_writer(folder / ARCHIVE_NAME, lasting=True)) as db:
        seq = await _write_archive(db, contents)
        state = contents.state
        reconcile(db, ExpectedArchive(seq, state, state, (), (), seq))
        await _order_lanes(db, state, seq)
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        snapshot.write(folder / "journal", seq, state, lambda task_id: _read_body(db, task_id))
    os.close(create_segment(folder / "journal", seq + 1))
    await _write_notes(folder / NOTES_NAME, contents)
    await _write_blobs(folder / FOLDER_NAME, contents)
    sync_dir(folder)


async def _write_archive(db: sqlite3.Connection, contents: Contents) -> int:
    """Writes the archive. Returns the number of its last record, which is no less than that of the source."""
    erased = [task_id async for task_id in contents.erased_ids()]
    seq = max(1 + len(erased) // PLACES_IN_RECORD, contents.end)
    db.execute("BEGIN IMMEDIATE")
    db.executemany("INSERT INTO ids_old VALUES (?, ?)", [(each, at) for at, each in enumerate(erased, 1)])
    db.executemany("INSERT INTO aged_out VALUES (?, ?)", enumerate(erased, 1))
    await _write_audit(db, contents)
    db.execute("COMMIT")
    batch: list[bytes] = []
    size = 0
    async for record in contents.tasks():
        lines = list(journal_lines(record, seq))
        batch += lines
        seq += len(lines)
        size += sum(map(len, lines))
        if size >= BATCH_BYTES:
            _apply(db, batch, seq)
            batch, size = [], 0
    _apply(db, batch, seq)
    return seq


async def _write_audit(db: sqlite3.Connection, contents: Contents) -> None:
    """A single chain stays as it is. Several are joined into one, in the order in which their rows were written."""
    chains = await contents.chains()
    head = chains[0].anchor if len(chains) == 1 else GENESIS
    marks = (("audit_anchor_index", head.index), ("audit_anchor_hash", head.chain_hash))
    contents.state.audit_anchor = head
    async for line in contents.audit():
        head = link(head, line.row)
        write_rows(db, "write_audit", [(head.index, line.ts_ms, line.issuer, head.chain_hash, line.row)])
    contents.state.audit_head = head
    db.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", marks)


def _apply(db: sqlite3.Connection, lines: list[bytes], last_seq: int) -> None:
    db.execute("BEGIN IMMEDIATE")
    try:
        apply_within(db, b"".join(lines), last_seq)
        db.execute("COMMIT")
    except BaseException:
        db.execute("ROLLBACK")
        raise


async def _order_lanes(db: sqlite3.Connection, state: LedgerState, seq: int) -> None:
    """Gives each live task its place among the others: after every place in its history."""
    first = (seq - 1) * PLACES_IN_RECORD + PLACES_IN_RECORD // 2
    for at, task_id in enumerate((*state.queue, *state.results), first):
        (number,) = db.execute(_NUMBER, (task_id,)).fetchone()
        db.execute(_SETTLED_AT if state.entries[task_id].finished else _QUEUED_AT, (at, number))


async def _write_notes(folder: Path, contents: Contents) -> None:
    make_owned_folder(folder)
    async for noted in contents.notes():
        make_owned_folder(folder / noted.tenant, exist_ok=True)
        replace_private(folder / noted.tenant / f"{noted.agent_id}.json", noted.body.encode())
    sync_dir(folder)


async def _write_blobs(folder: Path, contents: Contents) -> None:
    make_owned_folder(folder)
    async for blob in contents.blobs():
        place = folder
        for name in (blob.space, blob.sha256[:2], blob.sha256):
            place = place / name
            make_owned_folder(place, exist_ok=True)
        with open(place / BYTES, "xb", opener=open_owned) as file:  # noqa: ASYNC230  nobody else waits in this program
            async for data in contents.blob_bytes(blob):
                file.write(data)
            file.flush()
            os.fsync(file.fileno())
        for task_id, at_ms in blob.references:
            os.close(open_owned(place / task_id, os.O_CREAT | os.O_WRONLY | os.O_EXCL))
            os.utime(place / task_id, ns=(at_ms * 1_000_000,) * 2)
        os.utime(place / BYTES, ns=(blob.stored_at_ms * 1_000_000,) * 2)
        for path in (place, place.parent, place.parent.parent, folder):
            sync_dir(path)
