"""The archive's file: its layouts, how it is opened, copied and checked, and how finished tasks are erased from it.

Erasing looks at a bounded number of tasks of one tenant, oldest first, in one transaction: never on the hot path, and a
crash leaves all of a batch or nothing. Of an erased task only the id stays, so that nobody sends a task under it again:
`aged_out` has these ids in the order in which the tasks ended, for the filter. Freed pages are given back to the file
system a few at a time, if the file was made for that. Finished tasks that an earlier version left unpacked are packed.
"""

from __future__ import annotations

import errno
import os
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Final, NamedTuple

from covenant.ledger.contract.retention import Erased, EraseTasks, Scrub
from covenant.ledger.embedded import fault_points
from covenant.ledger.embedded.archive.apply_batch import PLACES_IN_RECORD, context_name, parent_name
from covenant.ledger.embedded.archive.row_updates import CountedBy
from covenant.ledger.embedded.archive.sql import statement, transaction, write_rows
from covenant.ledger.embedded.archive.task_packs import (
    ROW_BYTES,
    define_functions,
    delete_parts,
    error_of,
    kept_sizes,
    pack,
    read_parts,
)
from covenant.ledger.embedded.disk import open_owned, sync_dir, unusable
from covenant.model.errors import CovenantError, Damaged

ARCHIVE_NAME: Final = "archive.db"
SCHEMA_VERSION: Final = 10
_FROM_9: Final = ("sizes_schema",)
_FROM_8: Final = ("from_layout_8", *_FROM_9)
_INDEXES: Final = ("tasks_indexes", "listing_indexes", "counts_schema", "search_indexes", *_FROM_9)
_ROWS_5: Final = ("from_layout_5_rows",)
_FROM_3: Final = ("packs_schema", "erasure_schema", "from_before_rows", *_ROWS_5, *_INDEXES)
_FROM_2: Final = ("ids_schema", "from_layout_2_ids", *_FROM_3)
_FROM_7: Final = ("from_layout_7", "counts_schema")
_FROM_5: Final = ("erasure_schema", "from_layout_5", *_ROWS_5, "listing_indexes", "search_indexes", *_FROM_7, *_FROM_9)
LAYOUTS: Final[dict[int, tuple[str, ...]]] = {
    0: ("schema", "tasks_schema", "ids_schema", "packs_schema", "erasure_schema", *_INDEXES),
    **dict.fromkeys((1, 2), ("from_before", "tasks_schema", *_FROM_2)),
    3: ("from_before", "tasks_schema", *_FROM_3),
    4: ("packs_schema", *_FROM_5),
    5: _FROM_5,
    6: ("erasure_schema", "from_layout_6", *_FROM_7, *_FROM_8),
    7: (*_FROM_7, *_FROM_8),
    8: _FROM_8,
    9: _FROM_9,
    SCHEMA_VERSION: (),
}
"""Scripts that migrate each layout to the present one; 0 is a new file. Rows stay: the journal may not have them."""
DISK_ERRORS: Final = {
    sqlite3.SQLITE_FULL: errno.ENOSPC,
    sqlite3.SQLITE_IOERR: errno.EIO,
    sqlite3.SQLITE_CANTOPEN: errno.EACCES,
    sqlite3.SQLITE_READONLY: errno.EACCES,
    sqlite3.SQLITE_PERM: errno.EACCES,
    sqlite3.SQLITE_BUSY: errno.EBUSY,
}
"""Errors that say nothing about the archive's content, each with a matching system error number."""
SQLITE_OLDEST: Final = (3, 34, 0)
"""Needed for generated columns, UPDATE … FROM, iif and JSON."""

SEQ_MAX: Final = (1 << 62) // PLACES_IN_RECORD
"""The numbers of places end soon after this record. No journal gets so far."""
CACHE_KIB: Final = 32 << 10
PAGE_BYTES: Final = 8_192
"""The page size of a new file; an older one keeps its own. 4 KiB cost a seventh more CPU a task, 16 KiB the same."""
WAL_BYTES: Final = 16 << 20
BUSY_S: Final = 10.0
PAGES_GIVEN_BACK_MAX: Final = 512
"""The most pages at once: 4 MiB take a few milliseconds."""
PACKED_AT_ONCE_MAX: Final = 200
END: Final = (1 << 63) - 1

_ERASABLE: Final = statement("erasable")
_UNPACKED: Final = statement("unpacked")


def open_writer(path: Path, *, lasting: bool) -> sqlite3.Connection:
    """Opens the writer's connection, to a file that has the schema."""
    if sqlite3.sqlite_version_info < SQLITE_OLDEST:
        oldest = ".".join(map(str, SQLITE_OLDEST))
        raise CovenantError(f"this Python has SQLite {sqlite3.sqlite_version}; {oldest} or newer is needed")
    new = not path.exists()
    if new:
        os.close(open_owned(path, os.O_CREAT | os.O_WRONLY))
    db = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
    try:
        _prepare(db, path, lasting=lasting)
    except BaseException:
        db.close()
        raise
    if new and lasting:
        sync_dir(path.parent)
    return db


def _prepare(db: sqlite3.Connection, path: Path, *, lasting: bool) -> None:
    db.execute(f"PRAGMA page_size = {PAGE_BYTES}")
    db.execute("PRAGMA auto_vacuum = INCREMENTAL")
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA synchronous = " + ("NORMAL" if lasting else "OFF"))
    db.execute("PRAGMA temp_store = MEMORY")
    db.execute("PRAGMA secure_delete = OFF")
    db.execute(f"PRAGMA cache_size = -{CACHE_KIB}")
    (page_bytes,) = db.execute("PRAGMA page_size").fetchone()
    db.execute(f"PRAGMA wal_autocheckpoint = {WAL_BYTES // page_bytes}")
    db.execute(f"PRAGMA journal_size_limit = {4 * WAL_BYTES}")
    define_functions(db)
    (version,) = db.execute("PRAGMA user_version").fetchone()
    missing = LAYOUTS.get(version)
    if missing:
        made = "\n".join(map(statement, missing))
        db.executescript(f"BEGIN;\n{made}\nPRAGMA user_version = {SCHEMA_VERSION};\nCOMMIT;")
    elif missing is None:
        raise Damaged(str(path), 0, f"the archive has layout {version}, and this program knows {SCHEMA_VERSION}")
    db.executescript(statement("rejects_schema"))
    db.executescript(statement("shelving"))


def cannot_open(path: Path, error: sqlite3.Error) -> CovenantError:
    """The error for an archive that SQLite refuses: a full or read-only disk is no damage."""
    number = DISK_ERRORS.get(getattr(error, "sqlite_errorcode", 0) & 0xFF)
    if number is not None:
        return unusable(path, str(error), number)
    return Damaged(str(path), 0, f"the archive cannot be opened: {error}")


def copy_database(source: Path, target: Path) -> None:
    """Copies the file as it is at one moment, while others write to it. The copy is synced, and for its owner alone."""
    os.close(open_owned(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
    with (
        closing(sqlite3.connect(source, timeout=BUSY_S)) as read,
        closing(sqlite3.connect(target, isolation_level=None)) as written,
    ):
        read.backup(written)
        written.execute("PRAGMA journal_mode = DELETE")
    sync_dir(target.parent)


def archived_seq_of(db: sqlite3.Connection) -> int:
    """The archive's seq. Raises sqlite3.DatabaseError, as for other damage, if it is missing or invalid."""
    row = db.execute("SELECT value FROM meta WHERE key = 'archived_seq'").fetchone()
    if row is None or not isinstance(row[0], int) or not 0 <= row[0] <= SEQ_MAX:
        problem = "is missing" if row is None else f"is no record's number: {row[0]!r}"
        raise sqlite3.DatabaseError(f"archived_seq {problem}")
    return row[0]


def missing_parts(db: sqlite3.Connection) -> list[str]:
    """The tables, views, indexes and columns of the present layout that `db` lacks."""
    with closing(sqlite3.connect(":memory:")) as whole:
        whole.executescript("\n".join(map(statement, LAYOUTS[0])))
        expected, found = _parts(whole), _parts(db)
    return [part for part in expected if part not in found]


def _parts(db: sqlite3.Connection) -> list[str]:
    columns = """
        SELECT s.type || ' ' || s.name AS part, c.name AS of_it
        FROM sqlite_schema AS s LEFT JOIN pragma_table_xinfo(s.name) AS c ON s.type <> 'index'
        WHERE s.type IN ('table', 'view', 'index')
        ORDER BY s.type DESC, s.name, c.cid
    """
    parts = dict[str, None]()
    for part, column in db.execute(columns):
        parts[part] = None
        if column is not None:
            parts[f"column {column} of {part}"] = None
    return list(parts)


class _ErasableTask(NamedTuple):
    task_no: int
    created_at: int
    updated_at: int
    ledger_state: str
    task_id: str
    settled_place: int | None
    state: str
    recipient_pubkey: str
    recipient_display: str
    sender_pubkey: str
    context_id: str
    context_no: int | None
    parent: str | None
    parent_no: int | None
    bytes: int | None


def erase_batch(db: sqlite3.Connection, which: EraseTasks | Scrub) -> Erased:
    """Erases a batch in one transaction, then gives some pages back to the file system."""
    if isinstance(which, Scrub):
        _scrub(db, which)
        return Erased(tasks=0, bytes=0)
    with transaction(db):
        fault_points.point("archive.erase")
        erased = _erase(db, which)
        fault_points.point("archive.erase_commit")
    give_back_pages(db)
    return erased


def give_back_pages(db: sqlite3.Connection) -> None:
    # Each step gives back one page. For a statement whose rows have no columns, `execute` takes only one step.
    db.executescript(f"PRAGMA incremental_vacuum({PAGES_GIVEN_BACK_MAX})")


def _erase(db: sqlite3.Connection, which: EraseTasks) -> Erased:
    stored = db.execute("SELECT bytes FROM stored_sizes WHERE tenant_id = ?", (which.tenant,)).fetchone()
    excess = max(0, (stored[0] if stored is not None else 0) - which.bytes_max) if which.bytes_max else 0
    values = {
        "tenant": which.tenant,
        "after_ms": which.after_ms,
        "after_no": which.after_no,
        "until_ms": END if excess else which.before_ms,
        "limit": which.limit,
    }
    examined = [_ErasableTask(*row) for row in db.execute(_ERASABLE, values)]
    chosen: list[_ErasableTask] = []
    for found in examined:
        if found.ledger_state != "resolved":
            continue
        if found.updated_at >= which.before_ms and excess <= 0:
            continue
        if which.parties and not {found.sender_pubkey, found.recipient_pubkey}.intersection(which.parties):
            continue
        chosen.append(found)
        excess -= found.bytes or 0
    freed = _delete(db, which.tenant, chosen, wholly=which.wholly)
    last = examined[-1] if len(examined) == which.limit else None
    return Erased(
        tasks=len(chosen),
        bytes=freed,
        after_ms=last.created_at if last is not None else 0,
        after_no=last.task_no if last is not None else 0,
        more=last is not None and (excess > 0 or last.created_at < which.before_ms),
    )


def _delete(db: sqlite3.Connection, tenant: str, chosen: list[_ErasableTask], *, wholly: bool) -> int:
    numbers = [found.task_no for found in chosen]
    db.executemany("DELETE FROM packs WHERE task_no = ?", [(number,) for number in numbers])
    delete_parts(db, numbers)
    db.executemany("DELETE FROM a2a_tasks WHERE task_no = ?", [(number,) for number in numbers])
    if wholly:
        for found in chosen:
            _delete_name(db, found.task_id)
    else:
        write_rows(db, "write_aged_out", [(found.settled_place, found.task_id) for found in chosen])
    counts: dict[CountedBy, int] = {}
    for found in chosen:
        key = (found.recipient_pubkey, found.recipient_display, tenant, found.ledger_state, found.state)
        counts[key] = counts.get(key, 0) - 1
    write_rows(db, "write_counts", [(*key, count) for key, count in counts.items()])
    _delete_names(db, chosen)
    freed = sum(found.bytes or 0 for found in chosen)
    if chosen:
        write_rows(db, "write_sizes", [(tenant, -len(chosen), -freed)])
    return freed


def _delete_names(db: sqlite3.Connection, chosen: list[_ErasableTask]) -> None:
    """Deletes the names of contexts and parents that no task refers to any more: senders chose these texts."""
    contexts = {found.context_no: context_name(found.context_id) for found in chosen}
    parents = {found.parent_no: parent_name(found.parent or "") for found in chosen}
    for names, reference in (
        (contexts, "SELECT 1 FROM a2a_tasks WHERE context_no = ?"),
        (parents, "SELECT 1 FROM a2a_tasks WHERE parent_no = ?"),
    ):
        for number, name in names.items():
            if number is None or not number % 2 or db.execute(reference, (number,)).fetchone() is not None:
                continue
            _delete_name(db, name)


def _delete_name(db: sqlite3.Connection, name: str | bytes) -> None:
    for table, shelf in (("ids_new", "new"), ("ids_recent", "recent"), ("ids_old", None)):
        gone = db.execute(f"DELETE FROM {table} WHERE task_id = ?", (name,)).rowcount  # noqa: S608  (ours)
        if gone and shelf is not None:
            db.execute("UPDATE shelves SET held = held - 1 WHERE shelf = ?", (shelf,))


def _scrub(db: sqlite3.Connection, which: Scrub) -> None:
    """Drops the counts of erased tasks, then rewrites the whole file: no free page or WAL keeps old bytes."""
    db.execute("DELETE FROM stored_sizes WHERE tenant_id = ?", (which.tenant,))
    db.execute("DELETE FROM task_counts WHERE tenant_id = ?", (which.tenant,))
    db.executemany(
        "DELETE FROM task_counts WHERE recipient_pubkey = ? AND tasks = 0", [(key,) for key in which.parties]
    )
    for shelf in ("new", "recent"):
        db.execute("UPDATE shelves SET emptied = '', emptying = '' WHERE shelf = ?", (shelf,))
    fault_points.point("archive.scrub")
    db.execute("VACUUM")
    fault_points.point("archive.scrub_truncate")
    busy, _, _ = db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    if busy:
        raise sqlite3.OperationalError("a reader has the archive open; the removal continues in a moment")


def pack_batch(db: sqlite3.Connection, after_no: int) -> int | None:
    """Packs some finished tasks. Returns the last number that was examined, or None if there are no more."""
    with transaction(db):
        found = db.execute(_UNPACKED, {"after": after_no, "limit": PACKED_AT_ONCE_MAX}).fetchall()
        tenants = dict(found)
        packs: list[tuple[int, bytes]] = []
        sizes: dict[str, int] = {}
        before = kept_sizes(db, tenants)
        for number, parts in read_parts(db, tenants).items():
            data = pack(parts)
            if data is None or parts.result is None:
                continue
            packs.append((number, data))
            db.execute("UPDATE a2a_tasks SET result = ? WHERE task_no = ?", (error_of(parts.result), number))
            tenant, size = before[number]
            sizes[tenant] = sizes.get(tenant, 0) + ROW_BYTES + len(data) - size
        write_rows(db, "write_packs", packs)
        delete_parts(db, [number for number, _ in packs])
        write_rows(db, "write_sizes", [(tenant, 0, size) for tenant, size in sizes.items()])
        fault_points.point("archive.pack_commit")
    give_back_pages(db)
    return found[-1][0] if len(found) == PACKED_AT_ONCE_MAX else None
