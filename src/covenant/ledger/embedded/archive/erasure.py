"""Erasing finished tasks from the archive, and packing those that an earlier version left unpacked.

A batch looks at a bounded number of tasks of one tenant, the oldest first, and is one transaction of the archive's
writer: never on the hot path, and a crash leaves all of a batch or nothing. Of an erased task only the id stays, so
that nobody sends a task under it again: `aged_out` has these ids in the order in which the tasks ended, for the filter.

What is freed is given back to the file system a few pages at a time, where the file was made for that.
"""

from __future__ import annotations

import sqlite3
from contextlib import suppress
from typing import Final, NamedTuple

from covenant.ledger.contract.retention import Erased, EraseTasks, Scrub
from covenant.ledger.embedded import fault_points
from covenant.ledger.embedded.archive.apply_batch import context_name, parent_name
from covenant.ledger.embedded.archive.row_updates import CountedBy
from covenant.ledger.embedded.archive.sql import statement, write_rows
from covenant.ledger.embedded.archive.task_packs import ROW_BYTES, delete_parts, error_of, pack, read_parts

PAGES_GIVEN_BACK_MAX: Final = 512
"""At once: 4 MiB take a few milliseconds."""
PACKED_AT_ONCE_MAX: Final = 200
END: Final = (1 << 63) - 1

_ERASABLE: Final = statement("erasable")
_UNPACKED: Final = statement("unpacked")


class _Found(NamedTuple):
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
    """One transaction, then some pages for the file system."""
    if isinstance(which, Scrub):
        _scrub(db, which)
        return Erased(tasks=0, bytes=0)
    try:
        db.execute("BEGIN IMMEDIATE")
        fault_points.point("archive.erase")
        erased = _erase(db, which)
        fault_points.point("archive.erase_commit")
        db.execute("COMMIT")
    except BaseException:
        with suppress(sqlite3.Error):
            db.execute("ROLLBACK")
        raise
    give_back_pages(db)
    return erased


def give_back_pages(db: sqlite3.Connection) -> None:
    # Each step gives back one page. Of a statement whose rows have no columns, `execute` takes one step alone.
    db.executescript(f"PRAGMA incremental_vacuum({PAGES_GIVEN_BACK_MAX})")


def _erase(db: sqlite3.Connection, which: EraseTasks) -> Erased:
    held = db.execute("SELECT bytes FROM stored_sizes WHERE tenant_id = ?", (which.tenant,)).fetchone()
    excess = max(0, (held[0] if held is not None else 0) - which.bytes_max) if which.bytes_max else 0
    values = {
        "tenant": which.tenant,
        "after_ms": which.after_ms,
        "after_no": which.after_no,
        "until_ms": END if excess else which.before_ms,
        "limit": which.limit,
    }
    looked = [_Found(*row) for row in db.execute(_ERASABLE, values)]
    chosen: list[_Found] = []
    for found in looked:
        if found.ledger_state != "resolved":
            continue
        if found.updated_at >= which.before_ms and excess <= 0:
            continue
        if which.parties and not {found.sender_pubkey, found.recipient_pubkey}.intersection(which.parties):
            continue
        chosen.append(found)
        excess -= ROW_BYTES + (found.bytes or 0)
    freed = _delete(db, which.tenant, chosen, wholly=which.wholly)
    last = looked[-1] if len(looked) == which.limit else None
    return Erased(
        tasks=len(chosen),
        bytes=freed,
        after_ms=last.created_at if last is not None else 0,
        after_no=last.task_no if last is not None else 0,
        more=last is not None and (excess > 0 or last.created_at < which.before_ms),
    )


def _delete(db: sqlite3.Connection, tenant: str, chosen: list[_Found], *, wholly: bool) -> int:
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
    packed = [ROW_BYTES + found.bytes for found in chosen if found.bytes is not None]
    if packed:
        write_rows(db, "write_sizes", [(tenant, -len(packed), -sum(packed))])
    return sum(ROW_BYTES + (found.bytes or 0) for found in chosen)


def _delete_names(db: sqlite3.Connection, chosen: list[_Found]) -> None:
    """The names of contexts and parents that no task refers to any more: they are words of those who sent the tasks."""
    contexts = {found.context_no: context_name(found.context_id) for found in chosen}
    parents = {found.parent_no: parent_name(found.parent or "") for found in chosen}
    for names, used in (
        (contexts, "SELECT 1 FROM a2a_tasks WHERE context_no = ?"),
        (parents, "SELECT 1 FROM a2a_tasks WHERE parent_no = ?"),
    ):
        for number, name in names.items():
            if number is None or not number % 2 or db.execute(used, (number,)).fetchone() is not None:
                continue
            _delete_name(db, name)


def _delete_name(db: sqlite3.Connection, name: str | bytes) -> None:
    for table, shelf in (("ids_new", "new"), ("ids_recent", "recent"), ("ids_old", None)):
        gone = db.execute(f"DELETE FROM {table} WHERE task_id = ?", (name,)).rowcount  # noqa: S608  (ours)
        if gone and shelf is not None:
            db.execute("UPDATE shelves SET held = held - 1 WHERE shelf = ?", (shelf,))


def _scrub(db: sqlite3.Connection, which: Scrub) -> None:
    """Drop the counts of tasks that are erased, then write the whole file anew: no free page or WAL has old bytes."""
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
        raise sqlite3.OperationalError("somebody reads the archive; the removal goes on in a moment")


def pack_batch(db: sqlite3.Connection, after_no: int) -> int | None:
    """Pack some finished tasks that are not; the number of the last one looked at, or None if there are no more."""
    try:
        db.execute("BEGIN IMMEDIATE")
        found = db.execute(_UNPACKED, {"after": after_no, "limit": PACKED_AT_ONCE_MAX}).fetchall()
        tenants = dict(found)
        packs: list[tuple[int, bytes]] = []
        sizes: dict[str, tuple[int, int]] = {}
        for number, parts in read_parts(db, tenants).items():
            data = pack(parts)
            if data is None or parts.result is None:
                continue
            packs.append((number, data))
            db.execute("UPDATE a2a_tasks SET result = ? WHERE task_no = ?", (error_of(parts.result), number))
            tasks, size = sizes.get(tenants[number], (0, 0))
            sizes[tenants[number]] = (tasks + 1, size + ROW_BYTES + len(data))
        write_rows(db, "write_packs", packs)
        delete_parts(db, [number for number, _ in packs])
        write_rows(db, "write_sizes", [(tenant, *size) for tenant, size in sizes.items()])
        fault_points.point("archive.pack_commit")
        db.execute("COMMIT")
    except BaseException:
        with suppress(sqlite3.Error):
            db.execute("ROLLBACK")
        raise
    give_back_pages(db)
    return found[-1][0] if len(found) == PACKED_AT_ONCE_MAX else None
