"""The archive's writer: a projection of the durable journal into SQLite, one step behind it.

Promises: only durable records are applied, each once and in order; the rows of a batch and its `archived_seq` are one
transaction, so a crash leaves neither half. A record that cannot be applied is set aside (`rejects`), never skipped in
silence. A batch that fails for any other reason is tried again until it works; `failure` says why it waits.
`checkpoint` answers with the seq up to which the archive would survive a power cut: the journal may drop its segments
up to there, and no further.

Commits are not synced one by one (synchronous = NORMAL): a power cut may take the last ones back, and then the
records behind them are still in the journal. A checkpoint syncs them.

One thread follows the journal; an `ArchiveWriter` has the file open and does the work: `LocalWriter` in that thread,
`WriterProcess` in a process of its own. What a batch comes to is in `apply_batch`. Everything else here belongs to
the loop.
"""

from __future__ import annotations

import asyncio
import errno
import heapq
import itertools
import os
import shutil
import sqlite3
import tempfile
import threading
from collections import deque
from collections.abc import Callable
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Final, TypeVar

from covenant.ledger.contract.retention import Erased, EraseTasks, Scrub
from covenant.ledger.embedded.archive.apply_batch import PLACES_IN_RECORD, Live, apply_or_reject, count_rejects
from covenant.ledger.embedded.archive.erasure import erase_batch, pack_batch
from covenant.ledger.embedded.archive.sql import statement
from covenant.ledger.embedded.archive.task_packs import define_functions
from covenant.ledger.embedded.archive.writer_roles import ArchiveSource, ArchiveWriter
from covenant.ledger.embedded.disk import open_owned, sync_dir, unusable
from covenant.ledger.embedded.journal.segments import Cursor
from covenant.model.errors import CovenantError, Damaged, Unavailable

ARCHIVE_NAME: Final = "archive.db"
SCHEMA_VERSION: Final = 9
_INDEXES: Final = ("tasks_indexes", "listing_indexes", "counts_schema", "search_indexes")
_ROWS_5: Final = ("from_layout_5_rows",)
_FROM_3: Final = ("packs_schema", "erasure_schema", "from_before_rows", *_ROWS_5, *_INDEXES)
_FROM_2: Final = ("ids_schema", "from_layout_2_ids", *_FROM_3)
_FROM_7: Final = ("from_layout_7", "counts_schema")
_FROM_5: Final = ("erasure_schema", "from_layout_5", *_ROWS_5, "listing_indexes", "search_indexes", *_FROM_7)
LAYOUTS: Final[dict[int, tuple[str, ...]]] = {
    0: ("schema", "tasks_schema", "ids_schema", "packs_schema", "erasure_schema", *_INDEXES),
    **dict.fromkeys((1, 2), ("from_before", "tasks_schema", *_FROM_2)),
    3: ("from_before", "tasks_schema", *_FROM_3),
    4: ("packs_schema", *_FROM_5),
    5: _FROM_5,
    6: ("erasure_schema", "from_layout_6", *_FROM_7, "from_layout_8"),
    7: (*_FROM_7, "from_layout_8"),
    8: ("from_layout_8",),
    SCHEMA_VERSION: (),
}
"""What brings an archive of each layout up to this one; 0 is a new file. Rows stay: the journal may not have them."""
OF_THE_DISK: Final = {
    sqlite3.SQLITE_FULL: errno.ENOSPC,
    sqlite3.SQLITE_IOERR: errno.EIO,
    sqlite3.SQLITE_CANTOPEN: errno.EACCES,
    sqlite3.SQLITE_READONLY: errno.EACCES,
    sqlite3.SQLITE_PERM: errno.EACCES,
    sqlite3.SQLITE_BUSY: errno.EBUSY,
}
"""Errors that say nothing about what the archive holds, each with the system's number for the like."""
SQLITE_OLDEST: Final = (3, 34, 0)
"""Generated columns, UPDATE … FROM, iif, JSON."""

SEQ_MAX: Final = (1 << 62) // PLACES_IN_RECORD
"""The numbers of places end soon after this record. No journal comes so far."""
BATCH_BYTES: Final = 1 << 20
CACHE_KIB: Final = 32 << 10
PAGE_BYTES: Final = 8_192
"""Of a new file; an older one keeps its own. With 4 KiB a task cost a seventh more CPU, with 16 KiB as much."""
WAL_BYTES: Final = 16 << 20
BUSY_S: Final = 10.0

# A batch costs the same few calls whether it holds one record or a thousand, and a task that begins and ends in it is
# written once. So while nobody waits for the archive, records gather for this long.
GATHER_S: Final = 0.1
RETRY_S_MIN: Final = 0.1
RETRY_S_MAX: Final = 5.0
CLOSE_S_MAX: Final = 10.0
PACK_PAUSE_S: Final = 0.02

T = TypeVar("T")


class LocalWriter:
    """The writer in the thread that calls it."""

    def __init__(self, path: Path, source: ArchiveSource, *, lasting: bool) -> None:
        self._db = open_writer(path, lasting=lasting)
        self._folder = path.parent if lasting else None
        self._source = source
        self._cursor: Cursor | None = None
        self._live = Live()
        self.archived_seq = archived_seq_of(self._db)
        self.rejected = count_rejects(self._db)

    def apply_next(self) -> int:
        if self._cursor is None:
            self._cursor = self._source.cursor(self.archived_seq)
        lines = self._source.read(self._cursor, BATCH_BYTES)
        if not lines.data:
            raise CovenantError(f"record {self.archived_seq + 1} is durable, but the journal does not have it")
        self.rejected += apply_or_reject(self._db, lines, self.archived_seq, self._live)
        self._cursor = lines.cursor
        self.archived_seq = lines.last_seq
        self._source.trim(lines.last_seq)
        return lines.last_seq

    def checkpoint(self) -> bool:
        busy, _, _ = self._db.execute("PRAGMA wal_checkpoint(FULL)").fetchone()
        if self._folder is not None:
            sync_dir(self._folder)
        return not busy

    def erase(self, which: EraseTasks | Scrub) -> Erased:
        return erase_batch(self._db, which)

    def pack_older(self, after_no: int) -> int | None:
        return pack_batch(self._db, after_no)

    def close(self) -> None:
        self._db.close()
        self._source.release()


class Archive:
    """Made before the journal is opened, which asks it for `archived_seq`; works from `start` to `close`.

    Without a path it lives in a temporary folder and ends with `close`.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._folder = None if path is not None else Path(tempfile.mkdtemp(prefix="covenant-"))
        self.path: Final = path or _within(self._folder)
        self.failure: str | None = None
        """Why the last batch could not be applied; None when all is well."""
        try:
            with closing(open_writer(self.path, lasting=self._folder is None)) as db:
                self.archived_seq = archived_seq_of(db)
                self.rejected = count_rejects(db)
        except sqlite3.Error as error:
            self._remove_folder()
            raise cannot_open(self.path, error) from error
        self._durable_seq = 0
        self._target = self.archived_seq
        self._wake = threading.Event()
        self._hurry = threading.Event()
        self._stopping = threading.Event()
        self._stop_at_s = 0.0
        self._checkpoints: deque[asyncio.Future[int]] = deque()
        self._erasures: deque[tuple[EraseTasks | Scrub, asyncio.Future[Erased]]] = deque()
        self.erased_callbacks: list[Callable[[], None]] = []
        self._packed_through: int | None = 0
        """Up to which task those of earlier layouts are packed; None: all are."""
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._tickets = itertools.count()
        self._thread: threading.Thread | None = None

    def start(
        self,
        source: ArchiveSource,
        on_archived: Callable[[int], None],
        open_for_writing: Callable[[], ArchiveWriter] | None = None,
    ) -> None:
        """Begin to follow the source. `on_archived(seq)` is called on this loop after each batch."""
        assert self._thread is None
        here = partial(LocalWriter, self.path, source, lasting=self._folder is None)
        self._open_for_writing = open_for_writing or here
        self._writer: ArchiveWriter | None = None
        self._on_archived = on_archived
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="archive-writer", daemon=True)
        self._thread.start()

    def notify(self, durable_seq: int) -> None:
        """The source has records through this one. Cheap: it is called after every batch of the journal."""
        self._target = durable_seq
        if not self._wake.is_set():
            self._wake.set()

    async def caught_up(self, seq: int, timeout_s: float) -> None:
        """Return when record `seq` is in the archive; refuse when that takes too long."""
        if seq <= self.archived_seq:
            return
        future: asyncio.Future[None] = self._loop.create_future()
        heapq.heappush(self._waiting, (seq, next(self._tickets), future))
        self._hurry.set()
        try:
            async with asyncio.timeout(timeout_s):
                await future
        except TimeoutError:
            why = f": {self.failure}" if self.failure else ""
            behind = seq - self.archived_seq
            raise Unavailable(
                "history_lagging", f"history is {behind} records behind{why}; ask again", retry_after_ms=1_000
            ) from None

    async def reachable(self, seq: int, timeout_s: float) -> bool:
        """Whether record `seq` is in the archive, or soon is. At once False while the archive cannot be written."""
        if seq <= self.archived_seq:
            return True
        if self.failure is not None:
            return False
        try:
            await self.caught_up(seq, timeout_s)
        except Unavailable:
            return False
        return True

    async def checkpoint(self) -> int:
        """Sync the archive; the seq through which it is durable now. Does not grow while something holds it up."""
        if self._thread is None or self._stopping.is_set():
            return self._durable_seq
        future: asyncio.Future[int] = self._loop.create_future()
        self._checkpoints.append(future)
        self._hurry.set()
        self._wake.set()
        return await future

    async def erase(self, which: EraseTasks | Scrub) -> Erased:
        """One batch, after what is applied already."""
        if self._thread is None or self._stopping.is_set():
            raise _closed()
        future: asyncio.Future[Erased] = self._loop.create_future()
        self._erasures.append((which, future))
        self._hurry.set()
        self._wake.set()
        return await future

    async def close(self) -> None:
        """Apply what was notified, if that works and is soon done, and stop. Does not raise."""
        if self._thread is not None:
            self._stop_at_s = monotonic() + CLOSE_S_MAX
            self._stopping.set()
            self._hurry.set()
            self._wake.set()
            await asyncio.to_thread(self._thread.join)
            self._dismiss()
        self._remove_folder()

    def _remove_folder(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _dismiss(self) -> None:
        """Nobody waits for a thread that has ended."""
        for _, _, future in self._waiting:
            if not future.done():
                future.set_exception(_closed())
        while self._checkpoints:
            _answer(self._checkpoints.popleft(), self._durable_seq)
        while self._erasures:
            _answer(self._erasures.popleft()[1], _closed())

    def _landed(self, seq: int) -> None:
        """On the loop, after a batch."""
        while self._waiting and self._waiting[0][0] <= seq:
            future = heapq.heappop(self._waiting)[2]
            if not future.done():
                future.set_result(None)
        self._on_archived(seq)

    # From here on, the thread.

    def _run(self) -> None:
        with suppress(RuntimeError):  # the loop was closed without closing the archive, and nobody listens
            while True:
                self._wake.wait(None if self._packed_through is None else PACK_PAUSE_S)
                self._hurry.wait(GATHER_S)
                self._hurry.clear()
                self._wake.clear()
                self._follow()
                self._serve_checkpoints()
                self._serve_erasures()
                self._pack_older()
                if self._stopping.is_set():
                    self._follow()  # what was notified meanwhile
                    break
        self._let_go()

    def _follow(self) -> None:
        """Apply what was notified by now, through failures, or until told to stop."""
        target, retry_s = self._target, RETRY_S_MIN
        while self.archived_seq < target and not self._must_stop():
            try:
                seq = self._apply_next()
            except Exception as error:  # noqa: BLE001  whatever it was, the batch is tried again, and the lag shows
                self.failure = str(error) or repr(error)
                self._serve_checkpoints()
                if self._stopping.wait(retry_s):
                    return
                retry_s = min(2 * retry_s, RETRY_S_MAX)
            else:
                self.failure = None
                retry_s = RETRY_S_MIN
                self._loop.call_soon_threadsafe(self._landed, seq)

    def _must_stop(self) -> bool:
        return self._stopping.is_set() and monotonic() > self._stop_at_s

    def _apply_next(self) -> int:
        try:
            writer = self._opened()
            # Opened after a failure: what failed may have worked all the same, and then there is nothing to apply.
            self.archived_seq, self.rejected = writer.archived_seq, writer.rejected
            if self.archived_seq < self._target:
                self.archived_seq = writer.apply_next()
                self.rejected = writer.rejected
        except BaseException:
            # With nothing kept from before it, the next try is as good as the first.
            self._let_go()
            raise
        return self.archived_seq

    def _opened(self) -> ArchiveWriter:
        if self._writer is None:
            self._writer = self._open_for_writing()
        return self._writer

    def _let_go(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _serve_checkpoints(self) -> None:
        while self._checkpoints:
            future = self._checkpoints.popleft()
            try:
                self._checkpoint()
            except Exception as error:  # noqa: BLE001  then it did not grow, which is what the caller is told
                self.failure = str(error) or repr(error)
                self._let_go()
            self._loop.call_soon_threadsafe(_answer, future, self._durable_seq)

    def _serve_erasures(self) -> None:
        while self._erasures and not self._stopping.is_set():
            which, future = self._erasures.popleft()
            try:
                answer: Erased | Unavailable = self._opened().erase(which)
            except Exception as error:  # noqa: BLE001  nothing is erased, and whoever asked is told why
                self._let_go()
                answer = Unavailable("archive_unwritable", f"the archive cannot be written: {error}")
            self._loop.call_soon_threadsafe(_answer, future, answer)

    def _pack_older(self) -> None:
        """A batch after each of records, and one after the other while there are none."""
        if self._packed_through is None or self._stopping.is_set():
            return
        try:
            self._packed_through = self._opened().pack_older(self._packed_through)
        except Exception as error:  # noqa: BLE001  they stay as they are, and the next start goes on
            self.failure = str(error) or repr(error)
            self._let_go()
            self._packed_through = None

    def _checkpoint(self) -> None:
        writer = self._opened()
        if writer.checkpoint():
            self._durable_seq = writer.archived_seq


def _answer(future: asyncio.Future[T], answer: T | Unavailable) -> None:
    if future.done():
        return
    if isinstance(answer, Unavailable):
        future.set_exception(answer)
    else:
        future.set_result(answer)


def _closed() -> Unavailable:
    return Unavailable("history_lagging", "the archive is closed")


def _within(folder: Path | None) -> Path:
    assert folder is not None
    return folder / ARCHIVE_NAME


def open_writer(path: Path, *, lasting: bool) -> sqlite3.Connection:
    """The writer's connection, to a file that has the schema."""
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
        raise _unknown_layout(path, version)
    db.executescript(statement("rejects_schema"))
    db.executescript(statement("shelving"))


def archived_through(path: Path) -> int:
    """Where the archive at `path` stands, whatever its layout; it is left as it is. Raises Damaged."""
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=rw", timeout=BUSY_S, uri=True)) as db:
            (version,) = db.execute("PRAGMA user_version").fetchone()
            if version in LAYOUTS:
                return archived_seq_of(db) if version else 0
    except sqlite3.Error as error:
        raise cannot_open(path, error) from error
    raise _unknown_layout(path, version)


def _unknown_layout(path: Path, version: int) -> Damaged:
    return Damaged(str(path), 0, f"the archive has layout {version}, and this program knows {SCHEMA_VERSION}")


def cannot_open(path: Path, error: sqlite3.Error) -> CovenantError:
    """What to tell of an archive that SQLite refuses: a disk that is full or read-only is no damage."""
    number = OF_THE_DISK.get(getattr(error, "sqlite_errorcode", 0) & 0xFF)
    if number is not None:
        return unusable(path, str(error), number)
    return Damaged(str(path), 0, f"the archive cannot be opened: {error}")


def copy_database(source: Path, target: Path) -> None:
    """A whole copy, as the file is at one moment, while others write to it. Synced; for its owner alone."""
    os.close(open_owned(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
    with (
        closing(sqlite3.connect(source, timeout=BUSY_S)) as read,
        closing(sqlite3.connect(target, isolation_level=None)) as written,
    ):
        read.backup(written)
        written.execute("PRAGMA journal_mode = DELETE")
    sync_dir(target.parent)


def archived_seq_of(db: sqlite3.Connection) -> int:
    """Raises sqlite3.DatabaseError, as for any other damage, if the archive does not say where it stands."""
    row = db.execute("SELECT value FROM meta WHERE key = 'archived_seq'").fetchone()
    if row is None or not isinstance(row[0], int) or not 0 <= row[0] <= SEQ_MAX:
        told = "is missing" if row is None else f"is no record's number: {row[0]!r}"
        raise sqlite3.DatabaseError(f"archived_seq {told}")
    return row[0]


def missing_parts(db: sqlite3.Connection) -> list[str]:
    """The tables, views, indexes and columns that an archive of this layout has, and that `db` lacks."""
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
