"""The archive's writer: a projection of the durable journal into SQLite, one step behind it.

Promises: only durable records are applied, each once and in order; the rows of a batch and its `archived_seq` are one
transaction, so a crash never leaves half. A record that cannot be applied is set aside (`rejects`), never skipped
silently. A batch that fails for any other reason is tried again until it works; `failure` is the reason. `checkpoint`
returns the seq up to which the archive would survive a power cut: the journal may drop its segments up to there, and no
further.

Commits are not synced one by one (synchronous = NORMAL): a power cut may undo the last ones, whose records are still in
the journal. A checkpoint syncs them.

One thread follows the journal; an `ArchiveWriter` has the file open and does the work: `LocalWriter` in that thread,
`WriterProcess` in a process of its own. `apply_batch` computes the rows of a batch. Everything else here belongs to the
loop.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
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
from covenant.ledger.embedded.archive.apply_batch import count_rejects
from covenant.ledger.embedded.archive.archive_file import ARCHIVE_NAME, archived_seq_of, cannot_open, open_writer
from covenant.ledger.embedded.archive.archive_writer import CLOSE_S_MAX, ArchiveSource, ArchiveWriter, LocalWriter
from covenant.model.errors import Unavailable
from covenant.model.rate_limits import Backoff

# A batch costs the same few calls for one record or a thousand, and a task that begins and ends in it is written once.
# So while nobody waits for the archive, records gather for this long.
GATHER_S: Final = 0.1
RETRIES: Final = Backoff(0.1, 5.0)
PACK_PAUSE_S: Final = 0.02

T = TypeVar("T")


class Archive:
    """Created before the journal is opened, which asks it for `archived_seq`; works from `start` to `close`.

    Without a path it lives in a temporary folder and ends with `close`.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._folder = None if path is not None else Path(tempfile.mkdtemp(prefix="covenant-"))
        self.path: Final = path or _within(self._folder)
        self.failure: str | None = None
        """Why the last batch could not be applied; None if it was."""
        try:
            with closing(open_writer(self.path, lasting=self._folder is None)) as db:
                self.archived_seq = archived_seq_of(db)
                self.rejected = count_rejects(db)
        except sqlite3.Error as error:
            self._remove_folder()
            raise cannot_open(self.path, error) from error
        self._durable_seq = 0
        self.target = self.archived_seq
        """The last record that the source has."""
        self.wake = threading.Event()
        """Set after a change of `target`."""
        self._hurry = threading.Event()
        self._stopping = threading.Event()
        self._stop_at_s = 0.0
        self._checkpoints: deque[asyncio.Future[int]] = deque()
        self._erasures: deque[tuple[EraseTasks | Scrub, asyncio.Future[Erased]]] = deque()
        self.erased_callbacks: list[Callable[[], None]] = []
        self._packed_through: int | None = 0
        """The task up to which those of earlier layouts are packed; None: all are."""
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._canceled = 0
        self._tickets = itertools.count()
        self._thread: threading.Thread | None = None

    def start(
        self,
        source: ArchiveSource,
        on_archived: Callable[[int], None],
        open_for_writing: Callable[[], ArchiveWriter] | None = None,
    ) -> None:
        """Begins to follow the source. `on_archived(seq)` is called on this loop after each batch."""
        assert self._thread is None
        here = partial(LocalWriter, self.path, source, lasting=self._folder is None)
        self._open_for_writing = open_for_writing or here
        self._writer: ArchiveWriter | None = None
        self._on_archived = on_archived
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="archive-writer", daemon=True)
        self._thread.start()

    def notify(self, durable_seq: int) -> None:
        """Notes that the source has records up to this one."""
        self.target = durable_seq
        if not self.wake.is_set():
            self.wake.set()

    async def caught_up(self, seq: int, timeout_s: float) -> None:
        """Returns when record `seq` is in the archive; refuses if that takes too long."""
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
        finally:
            if future.cancelled():
                self._forget_canceled()

    def _forget_canceled(self) -> None:
        """Drops callers that gave up, once they are the majority: while the archive fails, nothing else drops them."""
        self._canceled += 1
        if 2 * self._canceled > len(self._waiting):
            self._waiting = [waiting for waiting in self._waiting if not waiting[2].done()]
            heapq.heapify(self._waiting)
            self._canceled = 0

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
        """Syncs the archive. Returns the seq up to which it is durable, which stays while a reader blocks it."""
        if self._thread is None or self._stopping.is_set():
            return self._durable_seq
        future: asyncio.Future[int] = self._loop.create_future()
        self._checkpoints.append(future)
        self._hurry.set()
        self.wake.set()
        return await future

    async def erase(self, which: EraseTasks | Scrub) -> Erased:
        """Erases one batch, after all records that were notified before."""
        if self._thread is None or self._stopping.is_set():
            raise _closed()
        future: asyncio.Future[Erased] = self._loop.create_future()
        self._erasures.append((which, future))
        self._hurry.set()
        self.wake.set()
        return await future

    async def close(self) -> None:
        """Applies the notified records, if that succeeds soon, and stops. Does not raise."""
        if self._thread is not None:
            self._stop_at_s = monotonic() + CLOSE_S_MAX
            self._stopping.set()
            self._hurry.set()
            self.wake.set()
            await asyncio.to_thread(self._thread.join)
            self._answer_waiting()
        self._remove_folder()

    def _remove_folder(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _answer_waiting(self) -> None:
        """Answers everyone who waits, after the thread has ended."""
        for _, _, future in self._waiting:
            if not future.done():
                future.set_exception(_closed())
        while self._checkpoints:
            _answer(self._checkpoints.popleft(), self._durable_seq)
        while self._erasures:
            _answer(self._erasures.popleft()[1], _closed())

    def _on_batch(self, seq: int) -> None:
        """Runs on the loop, after a batch."""
        while self._waiting and self._waiting[0][0] <= seq:
            future = heapq.heappop(self._waiting)[2]
            if not future.done():
                future.set_result(None)
        self._on_archived(seq)

    # From here on, methods run in the thread.

    def _run(self) -> None:
        with suppress(RuntimeError):  # the loop was closed before the archive
            while True:
                self.wake.wait(None if self._packed_through is None else PACK_PAUSE_S)
                self._hurry.wait(GATHER_S)
                self._hurry.clear()
                self.wake.clear()
                self._follow()
                self._serve_checkpoints()
                self._serve_erasures()
                self._pack_older()
                if self._stopping.is_set():
                    self._follow()  # records that were notified meanwhile
                    break
        self._close_writer()

    def _follow(self) -> None:
        """Applies the records that are notified by now, despite failures, or until it must stop."""
        target, failures = self.target, 0
        while self.archived_seq < target and not self._must_stop():
            try:
                seq = self._apply_next()
            except Exception as error:  # noqa: BLE001  whatever it was, the batch is tried again, and the lag shows
                self.failure = str(error) or repr(error)
                self._serve_checkpoints()
                failures += 1
                if self._stopping.wait(RETRIES.pause(failures)):
                    return
            else:
                self.failure = None
                failures = 0
                self._loop.call_soon_threadsafe(self._on_batch, seq)

    def _must_stop(self) -> bool:
        return self._stopping.is_set() and monotonic() > self._stop_at_s

    def _apply_next(self) -> int:
        try:
            writer = self._opened()
            # Opened after a failure: the failed batch may have been committed, and then there is nothing to apply.
            self.archived_seq, self.rejected = writer.archived_seq, writer.rejected
            if self.archived_seq < self.target:
                self.archived_seq = writer.apply_next()
                self.rejected = writer.rejected
        except BaseException:
            # Without anything kept from before, the next try starts afresh.
            self._close_writer()
            raise
        return self.archived_seq

    def _opened(self) -> ArchiveWriter:
        if self._writer is None:
            self._writer = self._open_for_writing()
        return self._writer

    def _close_writer(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _serve_checkpoints(self) -> None:
        while self._checkpoints:
            future = self._checkpoints.popleft()
            try:
                writer = self._opened()
                if writer.checkpoint():
                    self._durable_seq = writer.archived_seq
            except Exception as error:  # noqa: BLE001  then it did not grow, which is what the caller is told
                self.failure = str(error) or repr(error)
                self._close_writer()
            self._loop.call_soon_threadsafe(_answer, future, self._durable_seq)

    def _serve_erasures(self) -> None:
        while self._erasures and not self._stopping.is_set():
            which, future = self._erasures.popleft()
            self._follow()
            try:
                answer: Erased | Unavailable = self._opened().erase(which)
            except Exception as error:  # noqa: BLE001  nothing is erased, and the caller gets the reason
                self._close_writer()
                answer = Unavailable("archive_unwritable", f"the archive cannot be written: {error}")
            self._loop.call_soon_threadsafe(_answer, future, answer)

    def _pack_older(self) -> None:
        """Packs a batch of older tasks after each batch of records, and one after the other while there are none."""
        if self._packed_through is None or self._stopping.is_set():
            return
        try:
            self._packed_through = self._opened().pack_older(self._packed_through)
        except Exception as error:  # noqa: BLE001  they stay as they are, and the next start goes on
            self.failure = str(error) or repr(error)
            self._close_writer()
            self._packed_through = None


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
