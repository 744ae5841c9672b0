"""The journal being written: one writer, and a group commit that lets waiting callers share a sync.

    seq = journal.append(events, now_ms)   decides the order; writes nothing yet
    await journal.wait()                   everything appended so far is durable, or an exception says otherwise

Promises: records reach the disk in the order of their seq, one batch at a time; `durable_seq` only grows, and
only over records that are written and (with durability "fsync") synced; `read` never passes it. After a failed
write or sync the writer is dead until restart: waiting callers get `outcome_unknown`, later appends
`storage_failed`, reads go on.

A batch is written by a thread, or by the loop itself. There is one batch in flight, and the file belongs to the writer
of that batch, so nothing here needs a lock. `MemoryJournal` is the same without a file.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import perf_counter
from typing import Final, Literal

from covenant.ledger.embedded.journal.record import encode_line, line_parts
from covenant.ledger.embedded.journal.recovery import OpenedJournal
from covenant.ledger.embedded.journal.segments import (
    Cursor,
    Lines,
    Segment,
    SegmentReader,
    SegmentWriter,
    cursor_after,
    drop_through,
)
from covenant.model.errors import Unavailable, outcome_unknown, storage_failed

Durability = Literal["fsync", "os"]

SEGMENT_BYTES: Final = 16 << 20
_LINE_BREAK: Final = ord("\n")

# When the loop writes a batch itself. Handing it to the thread and back costs about 90 µs, and beside a busy loop the
# thread also waits for the interpreter's lock after each system call. Measured with syncs of 130 µs, the loop against
# the thread: 1.4 × the throughput for one caller, 1.0 to 1.2 × for 16 to 256, whether or not the loop had other work.
# Above these bounds the loop would block for too long, and the thread takes over. A batch for many callers may take
# longer: each caller adds a quarter of the time for which its own request holds the loop.
INLINE_BATCH_S: Final = 300e-6
INLINE_WAITER_S: Final = 15e-6
INLINE_BATCH_BYTES: Final = 1 << 18

# The thread's times include its waits for the interpreter's lock, so a busy loop looks like a slow disk, and the thread
# would keep the batches for ever. So the loop sometimes tries one itself: after this many of the thread's, twice as
# many after each slow try, and never while batches take so long that callers would notice.
TRY_AFTER_BATCHES: Final = 16
TRY_AFTER_BATCHES_MAX: Final = 4_096
TRY_BATCH_S: Final = 5e-3

# While every turn of the loop brings more callers, the batch waits for them, this many turns at most: a sync of 60
# records takes hardly longer than one of 20. 64 connections got batches of 55 instead of 20, at 7 % less CPU.
GATHER_TURNS: Final = 2

# The batch of a single caller is written inside `wait`, without a turn of the loop. During that time no other caller
# can share the sync; so after this long the loop gets a turn, which shows whether others have come.
ALONE_HOLD_S: Final = 1e-3
ALONE_BATCHES: Final = 4


class _Batch:
    """Records that are written together, and their waiters; barriers also wait for the seal."""

    __slots__ = ("barriers", "records", "seal", "size", "waiters")

    def __init__(self) -> None:
        self.records: list[tuple[int, int, bytes]] = []
        self.size = 0
        # A future for each waiter: cancelling a task cancels what it awaits, and must not reach other waiters.
        self.waiters: list[asyncio.Future[None]] = []
        self.seal = False
        self.barriers: list[asyncio.Future[int]] = []

    def refuse(self) -> None:
        futures: list[asyncio.Future[None] | asyncio.Future[int]] = [*self.waiters, *self.barriers]
        for future in futures:
            if not future.done():
                future.set_exception(outcome_unknown())


def _ignore(_seq: int = 0) -> None:
    """The `on_durable` and `on_failure` of a journal without a follower."""


class Journal:
    """Created on the loop that uses it. `read` and `cursor` are for one other thread, `drop_through` for any.

    Both callbacks run on the loop and must not raise: `on_durable(seq)` after each batch, `on_failure()` when the
    writer fails.
    """

    def __init__(
        self, opened: OpenedJournal, *, durability: Durability = "fsync", segment_bytes: int = SEGMENT_BYTES
    ) -> None:
        self.on_durable: Callable[[int], None] = _ignore
        self.on_failure: Callable[[], None] = _ignore
        self.failure: str | None = None
        self.last_seq = opened.end.seq
        self.durable_seq = opened.end.seq
        self.batches = 0
        self._folder = opened.folder
        self._end = opened.end
        self._syncs = durability == "fsync"
        self._writer = SegmentWriter(opened.folder, opened.end, segment_bytes=segment_bytes, sync=self._syncs)
        self._reader = SegmentReader(opened.folder)
        self._pending = _Batch()
        self._in_flight: _Batch | None = None
        self._scheduled = False
        self._gathered = 0
        self._gather_turns = 0
        self._closed = False
        self._batch_s = TRY_BATCH_S  # how long recent batches took; the first ones go to the thread
        self._thread_batches = 0  # batches handed to the thread since the loop last wrote one
        self._try_after = TRY_AFTER_BATCHES
        self._loop_held_s = 0.0
        self._alone_batches = 0
        self._loop = asyncio.get_running_loop()
        self._queue: queue.SimpleQueue[_Batch | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="journal-writer", daemon=True)
        self._thread.start()

    # For callers, on the loop.

    def append(self, events: bytes, ts_ms: int) -> int:
        """Gives the record its place and returns its seq. `events` is an encoded JSON array, on one line."""
        if self.failure is not None or self._closed:
            raise storage_failed(self.failure or "the journal is closed")
        if _LINE_BREAK in events:
            raise ValueError("a record is one line")
        seq = self.last_seq = self.last_seq + 1
        pending = self._pending
        pending.records.append((seq, ts_ms, events))
        pending.size += len(events)
        if not self._scheduled and self._in_flight is None:
            self._scheduled = True
            self._loop.call_soon(self._turn)
        return seq

    async def wait(self, seq: int | None = None) -> None:
        """Returns when everything appended so far (or up to `seq`) is durable; at once if it is."""
        waiter = self.waiter(seq)
        if waiter is not None:
            await waiter

    def waiter(self, seq: int | None = None) -> asyncio.Future[None] | None:
        """The future that `wait` awaits; None if there is nothing to wait for."""
        target = self.last_seq if seq is None else seq
        if target <= self.durable_seq:
            return None
        if target > self.last_seq:
            raise ValueError(f"record {target} was not appended yet")
        if self._alone_batches and self.failure is None and self._in_flight is None and self._is_alone():
            if self._is_quick():
                self._write_here()
            if target <= self.durable_seq:
                return None
        if self.failure is not None:
            raise outcome_unknown()
        in_flight = self._in_flight
        batch = in_flight if in_flight and in_flight.records and target <= in_flight.records[-1][0] else self._pending
        future: asyncio.Future[None] = self._loop.create_future()
        batch.waiters.append(future)
        return future

    async def rotate(self) -> int:
        """Seals the active segment, if it holds anything; returns the last seq that is in a sealed one."""
        if self.failure is not None or self._closed:
            raise storage_failed(self.failure or "the journal is closed")
        return await self._barrier(seal=True)

    async def close(self) -> None:
        """Syncs everything (also with durability "os"), stops the thread, closes the written file. Does not raise.

        The reader may go on to the end, and closes its own files (`release`).
        """
        if self._closed:
            return
        self._closed = True
        if self.failure is None:
            with suppress(Unavailable):  # `failure` has it, and the waiters got it
                await self._barrier(seal=False)
        self._queue.put(None)
        await asyncio.to_thread(self._thread.join)
        if self.failure is None:
            with suppress(OSError):  # opening recognises the reserved zeros
                self._writer.cut_unused()
        self._writer.close()

    # For the archive and compaction, from their threads.

    @property
    def folder(self) -> Path:
        return self._folder

    @property
    def end(self) -> Cursor:
        """The end of the durable lines."""
        return self._end

    def cursor(self, after_seq: int) -> Cursor:
        """Where to read on after a record; reads one segment. LookupError if the next record was dropped."""
        return cursor_after(self._folder, after_seq)

    def read(self, cursor: Cursor, max_bytes: int) -> Lines:
        """Durable lines from the cursor on: up to `max_bytes`, but at least one if there is one."""
        end = self._end
        if not self._syncs and max(cursor.seq, self._writer.synced_seq) < end.seq:
            self._sync_for_reader(end)
        return self._reader.read(cursor, end, max_bytes)

    def drop_through(self, seq: int) -> list[Segment]:
        """Deletes the sealed segments whose records are all at or below `seq`. Blocks on the disk."""
        return drop_through(self._folder, seq)

    def trim(self, seq: int) -> None:
        """Does nothing: only a journal in memory drops the lines that its reader is done with."""

    def release(self) -> None:
        """Closes the files that `read` keeps open. For the reader's thread: otherwise a read in progress could continue
        with a descriptor that by then is another file's."""
        self._reader.close()

    def _sync_for_reader(self, end: Cursor) -> None:
        # With durability "os" a power cut may undo acknowledged records. Records that are copied elsewhere must not be
        # among them: an archive that is ahead of its journal is damage. So the reader pays for the sync.
        if self.failure is not None:
            raise storage_failed(self.failure)
        try:
            self._reader.sync(end.segment)
        except OSError as error:
            # At once: a second sync could find the pages clean and succeed. The loop tells the waiters.
            self.failure = str(error)
            with suppress(RuntimeError):  # the loop is closed, so there are no waiters
                self._loop.call_soon_threadsafe(self._fail, str(error))
            raise
        self._writer.synced_seq = max(self._writer.synced_seq, end.seq)

    # The group commit, on the loop.

    def _schedule(self) -> None:
        """Schedules a flush one turn later, so that every caller that is ready now has appended by then."""
        if not self._scheduled and self._in_flight is None:
            self._scheduled = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._scheduled = False
        if self._in_flight is not None:
            return
        if self._gathers():
            self._schedule()
        else:
            self._flush()

    def _gathers(self) -> bool:
        """Whether more callers came since the last turn, and may come with the next. A single one is not delayed."""
        count = len(self._pending.waiters)
        more = count > self._gathered and (count > 1 or not self._alone_batches)
        if not more or self._gather_turns >= GATHER_TURNS or self._pending.barriers:
            return False
        self._gathered = count
        self._gather_turns += 1
        return True

    def _flush(self) -> None:
        self._gathered = self._gather_turns = 0
        batch = self._pending
        if not batch.records and not batch.barriers:
            return
        self._alone_batches = self._alone_batches + 1 if len(batch.waiters) <= 1 else 0
        self._loop_held_s = 0.0
        # Without a waiting caller the loop does not sync: a stream's producer goes on appending. (A stream of 100
        # records, one a turn: 1,200 streams/s with the thread, 65 when the loop syncs each turn.)
        if batch.waiters and self._is_quick():
            self._write_here()
        else:
            self._thread_batches += 1
            self._in_flight, self._pending = batch, _Batch()
            self._queue.put(batch)

    def _is_alone(self) -> bool:
        return self._alone_batches >= ALONE_BATCHES and self._loop_held_s < ALONE_HOLD_S

    def _is_quick(self) -> bool:
        pending, batch_s = self._pending, self._batch_s
        return (
            (
                batch_s < INLINE_BATCH_S + INLINE_WAITER_S * len(pending.waiters)
                or (self._thread_batches >= self._try_after and batch_s < TRY_BATCH_S)
            )
            and pending.size < INLINE_BATCH_BYTES
            and not pending.barriers
            and not self._writer.is_full
        )

    def _write_here(self) -> None:
        batch, self._pending = self._pending, _Batch()
        try:
            end, batch_s = self._write(batch)
        except Exception as error:  # noqa: BLE001  whatever it was, what the file holds is unknown
            self._fail(str(error) or repr(error), batch)
        else:
            self._loop_held_s += batch_s
            if self._thread_batches:
                self._record_trial(batch, batch_s)
            self._finish_batch(batch, end, batch_s)

    def _record_trial(self, batch: _Batch, batch_s: float) -> None:
        """Records the time of a batch that the loop wrote as a trial: the time of the disk alone."""
        self._thread_batches = 0
        if batch_s < INLINE_BATCH_S + INLINE_WAITER_S * len(batch.waiters):
            self._batch_s = batch_s
            self._try_after = TRY_AFTER_BATCHES
        else:
            self._try_after = min(2 * self._try_after, TRY_AFTER_BATCHES_MAX)

    def _finish_batch(self, batch: _Batch, end: Cursor, batch_s: float) -> None:
        self._in_flight = None
        if self.failure is not None:
            batch.refuse()
            return
        self._end = end
        self.durable_seq = end.seq
        for waiter in batch.waiters:
            if not waiter.done():
                waiter.set_result(None)
        for barrier in batch.barriers:
            if not barrier.done():
                barrier.set_result(end.segment - 1)
        try:
            if batch.records:
                self.batches += 1
                # Down quickly and up slowly: one stall, or a wait for the interpreter's lock, is not a slow disk.
                self._batch_s += (batch_s - self._batch_s) * (0.25 if batch_s < self._batch_s else 0.125)
                self.on_durable(end.seq)
        finally:
            self._write_pending()

    def _write_pending(self) -> None:
        """Writes records that were appended meanwhile: in the thread at once, or with new ones in the next turn."""
        pending = self._pending
        if not pending.records and not pending.barriers:
            return
        if self._is_quick():
            self._schedule()
        else:
            self._flush()

    def _fail(self, reason: str, batch: _Batch | None = None) -> None:
        self.failure = self.failure or reason
        for refused in (batch, self._in_flight, self._pending):
            if refused is not None:
                refused.refuse()
        self._in_flight, self._pending = None, _Batch()
        self.on_failure()

    def _barrier(self, *, seal: bool) -> asyncio.Future[int]:
        """A future that is done when everything before it is durable (and sealed)."""
        future: asyncio.Future[int] = self._loop.create_future()
        self._pending.barriers.append(future)
        self._pending.seal = self._pending.seal or seal
        self._schedule()
        return future

    # On the thread, or on the loop for a batch that it writes itself.

    def _write(self, batch: _Batch) -> tuple[Cursor, float]:
        writer = self._writer
        begun = perf_counter()
        if batch.records:
            synced = writer.synced_seq
            parts: list[bytes] = []
            for seq, ts_ms, events in batch.records:
                parts += line_parts(seq, ts_ms, synced, events)
            writer.write(b"".join(parts), batch.records[-1][0])
        batch_s = perf_counter() - begun
        if batch.seal:
            writer.seal()
        return writer.end, batch_s

    def _run(self) -> None:
        with suppress(RuntimeError):  # the loop was closed without closing the journal
            while (batch := self._queue.get()) is not None:
                try:
                    end, batch_s = self._write(batch)
                except Exception as error:  # noqa: BLE001  whatever it was, waiting callers must hear of it
                    self._loop.call_soon_threadsafe(self._fail, str(error) or repr(error), batch)
                else:
                    self._loop.call_soon_threadsafe(self._finish_batch, batch, end, batch_s)
            if self.failure is None and self._writer.synced_seq < self._writer.end.seq:
                self._sync_at_close()

    def _sync_at_close(self) -> None:
        try:
            self._writer.sync()
        except OSError as error:
            self._loop.call_soon_threadsafe(self._fail, str(error))


class MemoryJournal:
    """A journal without a file: a record is durable when it is appended, and kept until the reader is done with it."""

    def __init__(self) -> None:
        self.on_durable: Callable[[int], None] = _ignore
        self.on_failure: Callable[[], None] = _ignore
        self.failure: str | None = None
        self.last_seq = 0
        self.durable_seq = 0
        self.batches = 0
        self._loop = asyncio.get_running_loop()
        self._scheduled = False
        self._closed = False
        self._lines: dict[int, bytes] = {}  # by seq; single reads and writes of a dict need no lock
        self._trimmed = 0

    def append(self, events: bytes, ts_ms: int) -> int:
        if self._closed:
            raise storage_failed("the journal is closed")
        if _LINE_BREAK in events:
            raise ValueError("a record is one line")
        seq = self.last_seq + 1
        self._lines[seq] = encode_line(seq, ts_ms, self.last_seq, events)
        self.last_seq = self.durable_seq = seq
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._turn)
        return seq

    def _turn(self) -> None:
        if self._scheduled:
            self._scheduled = False
            self.batches += 1
            self.on_durable(self.durable_seq)

    async def wait(self, seq: int | None = None) -> None:
        self.waiter(seq)

    def waiter(self, seq: int | None = None) -> None:
        if seq is not None and seq > self.last_seq:
            raise ValueError(f"record {seq} was not appended yet")
        self._turn()  # listeners get a record before its waiter does

    async def rotate(self) -> int:
        return self.last_seq

    async def close(self) -> None:
        self._closed = True

    def cursor(self, after_seq: int) -> Cursor:
        if after_seq < self._trimmed:
            raise LookupError(f"the journal no longer holds record {after_seq + 1}")
        return Cursor(after_seq, 1, 0)

    def read(self, cursor: Cursor, max_bytes: int) -> Lines:
        found: list[bytes] = []
        seq, size = cursor.seq, 0
        while (line := self._lines.get(seq + 1)) is not None:
            if found and size + len(line) > max_bytes:
                break
            found.append(line)
            size += len(line)
            seq += 1
        return Lines(b"".join(found), seq, Cursor(seq, 1, 0))

    def drop_through(self, seq: int) -> list[Segment]:
        self.trim(seq)
        return []

    def trim(self, seq: int) -> None:
        """Forgets the lines up to `seq`. For the reader's thread."""
        for number in range(self._trimmed + 1, min(seq, self.last_seq) + 1):
            del self._lines[number]
        self._trimmed = max(self._trimmed, min(seq, self.last_seq))

    def release(self) -> None:
        """Does nothing: there is no file."""
