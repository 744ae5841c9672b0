"""Opening a home: lock, snapshot, archive, journal, in this order, and a ledger on top.

Opening is bounded by live work: the snapshot holds what is live, the segments after it are few, and the archive is
asked only where it stands. `FileStorage` has segments, snapshots and an archive in a home; `MemoryStorage` has the same
lines and the same archive without a file behind them.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Final

import msgspec

from covenant.ledger.clock import PAUSE_MS, Clock, Uuids
from covenant.ledger.embedded import fault_points
from covenant.ledger.embedded.archive.archive import ARCHIVE_NAME, Archive, ArchiveWriter
from covenant.ledger.embedded.archive.history import History
from covenant.ledger.embedded.archive.seen_filter import SeenIds, save
from covenant.ledger.embedded.archive.writer_process import WriterProcess
from covenant.ledger.embedded.disk import make_private_folder, unusable, unusable_by
from covenant.ledger.embedded.engine import EmbeddedLedger
from covenant.ledger.embedded.journal import snapshot
from covenant.ledger.embedded.journal.compaction import Compacted
from covenant.ledger.embedded.journal.journal import SEGMENT_BYTES, Durability, Journal, MemoryJournal
from covenant.ledger.embedded.journal.record import Record, decode_events
from covenant.ledger.embedded.journal.recovery import HomeLock, OpenedJournal, lock_home, open_journal
from covenant.ledger.embedded.journal.segments import list_segments
from covenant.ledger.embedded.journal.snapshot import EVICT_EVERY, state_at
from covenant.ledger.embedded.state import LedgerState
from covenant.ledger.machine.view import Limits
from covenant.model.errors import Unavailable

SEEN: Final = "seen.bin"
SEEN_PAGE: Final = 1_000
SEALED_SEGMENTS_BEFORE_COMPACTION: Final = 4
COMPACTION_CATCH_UP_S: Final = 60.0


class CompactionFailed(Unavailable):
    """Merging or dropping failed: nothing is lost but disk space, and the next run tries again."""

    def __init__(self, reason: str) -> None:
        super().__init__("compaction_failed", f"{reason}; nothing is lost, and the next compaction tries again")


async def cover(seen: SeenIds, history: History) -> None:
    """Add every finished task that the filter does not cover yet; bounded by what finished since it was saved."""
    while True:
        task_ids, through = await history.finished(seen.covered, SEEN_PAGE)
        if not task_ids:
            return
        seen.cover(task_ids, through)


def follow(
    journal: Journal | MemoryJournal,
    archive: Archive,
    on_archived: Callable[[int], None],
    open_for_writing: Callable[[], ArchiveWriter] | None = None,
) -> None:
    archive.start(journal, on_archived, open_for_writing)
    journal.on_durable = archive.notify
    archive.notify(journal.durable_seq)


class FileStorage:
    """`apart`: the archive is written by a process of its own, which costs its start and spares the loop its work."""

    def __init__(
        self,
        home: Path,
        lock: HomeLock,
        *,
        journal: Journal,
        archive: Archive,
        history: History,
        seen: SeenIds,
        apart: bool = False,
    ) -> None:
        self.journal = journal
        self.archive = archive
        self.history = history
        self.seen = seen
        self._home = home
        self._folder = home / "journal"
        self._lock = lock
        self._apart = apart

    def follow(self, on_archived: Callable[[int], None]) -> None:
        follow(
            self.journal,
            self.archive,
            on_archived,
            partial(WriterProcess, self.archive.path, self.journal) if self._apart else None,
        )

    def state_at(self, seq: int, limits: Limits) -> LedgerState:
        return state_at(self._folder, seq, limits)

    def wants_compaction(self) -> bool:
        found = snapshot.newest(self._folder)
        covered = found[0] if found is not None else 0
        sealed = [segment for segment in list_segments(self._folder)[1:] if segment.first_seq - 1 > covered]
        return len(sealed) >= SEALED_SEGMENTS_BEFORE_COMPACTION

    async def compact(self, state: LedgerState) -> int:
        """Seal, merge in another process, then drop what the snapshot and the archive both hold."""
        sealed_seq = await self.journal.rotate()
        compacted = await self._merge(sealed_seq, state.limits)
        await self.archive.caught_up(compacted.seq, COMPACTION_CATCH_UP_S)
        archived_seq = await self.archive.checkpoint()
        await cover(self.seen, self.history)
        try:
            await asyncio.to_thread(self._drop, compacted.seq, archived_seq, self.seen.encode())
        except OSError as error:
            raise CompactionFailed(f"dropping what the snapshot covers failed: {error}") from error
        return compacted.dropped

    async def _merge(self, through_seq: int, limits: Limits) -> Compacted:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "covenant.ledger.embedded.journal.compaction",
            str(self._folder),
            str(through_seq),
            msgspec.json.encode(limits).decode(),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            output, errors = await process.communicate()
        except asyncio.CancelledError:
            process.kill()
            raise
        if process.returncode != 0:
            last = errors.decode(errors="replace").strip().rpartition("\n")[2]
            raise CompactionFailed(f"merging the journal's segments failed ({process.returncode}): {last}")
        return msgspec.json.decode(output, type=Compacted)

    def _drop(self, snapshot_seq: int, archived_seq: int, seen: bytes) -> None:
        save(self._home / SEEN, seen)
        fault_points.point("compaction.drop")
        self.journal.drop_through(min(snapshot_seq, archived_seq))
        snapshot.drop_older(self._folder, snapshot_seq)

    async def close(self) -> None:
        await self.journal.close()
        await self.archive.close()
        await self.history.close()
        self._lock.close()


class MemoryStorage:
    def __init__(self, journal: MemoryJournal, archive: Archive, history: History, seen: SeenIds) -> None:
        self.journal = journal
        self.archive = archive
        self.history = history
        self.seen = seen

    def follow(self, on_archived: Callable[[int], None]) -> None:
        follow(self.journal, self.archive, on_archived)

    def state_at(self, _seq: int, _limits: Limits) -> LedgerState:
        raise AssertionError("memory does not fail, so there is nothing to go back to")

    def wants_compaction(self) -> bool:
        return False

    async def compact(self, state: LedgerState) -> int:
        await self.archive.caught_up(self.journal.last_seq, COMPACTION_CATCH_UP_S)
        dropped, state.resolved_events = state.resolved_events, 0
        return dropped

    async def close(self) -> None:
        await self.journal.close()
        await self.archive.close()
        await self.history.close()


NODE: Final = "local"
CATCH_UP_S: Final = 600.0
PATIENCE_S: Final = 10.0
"""How long an archive that cannot be written keeps a start waiting."""


async def open_ledger(
    home: Path,
    *,
    clock: Callable[[], int],
    monotonic_ms: Callable[[], int] | None = None,
    clock_pause_ms: int = PAUSE_MS,
    new_id: Callable[[], str] | None = None,
    limits: Limits | None = None,
    durability: Durability = "fsync",
    segment_bytes: int = SEGMENT_BYTES,
    archive_apart: bool = False,
    node: str = NODE,
    boot: str | None = None,
) -> EmbeddedLedger:
    """The ledger kept in `home`, which is made if it is not there.

    `clock` is the wall clock and `monotonic_ms` one that nobody sets, by which steps of the first are noticed. Without
    it the wall clock is believed: right for a clock that a test moves.

    `archive_apart` has the archive written by a process of its own: right for whoever serves many and for long. With
    durability "os" it is not done, since there the archive's reader must sync the journal, and tell it if that fails.

    Raises HomeLocked if another process has it, Damaged if what is on disk contradicts itself, HomeUnusable if a file
    cannot be read or written.
    """
    new_id = new_id or Uuids()
    boot = boot or new_id()
    try:
        await asyncio.to_thread(make_private_folder, home)
        lock = lock_home(home)
    except OSError as error:
        raise unusable_by(error, home) from error
    try:
        state = LedgerState(limits or Limits())
        guarded = Clock(clock, monotonic_ms or clock, pause_ms=clock_pause_ms)
        archive, opened, snapshot_seq, last_record_ms = await asyncio.to_thread(_recover, home, state, clock())
        guarded.opened(last_record_ms)
    except OSError as error:
        lock.close()
        raise unusable_by(error, home / "journal") from error
    except BaseException:
        lock.close()
        raise
    storage = FileStorage(
        home,
        lock,
        journal=Journal(opened, durability=durability, segment_bytes=segment_bytes),
        archive=archive,
        history=History(archive.path, node=node, boot=boot),
        seen=SeenIds.load(home / SEEN) or SeenIds(),
        apart=archive_apart and durability == "fsync",
    )
    ledger = EmbeddedLedger(state, storage, node=node, boot=boot, clock=guarded, new_id=new_id, torn=opened.torn)
    try:
        # What the snapshot left out is known to the archive alone, so that must have it before anybody asks.
        await _catch_up(archive, snapshot_seq)
        await cover(storage.seen, storage.history)
    except BaseException:
        await ledger.close()
        raise
    return ledger


async def _catch_up(archive: Archive, seq: int) -> None:
    """Wait for a long backlog; not for a disk that takes nothing."""
    until_s = monotonic() + CATCH_UP_S
    while True:
        try:
            await archive.caught_up(seq, PATIENCE_S)
        except Unavailable as refusal:
            if archive.failure is not None:
                raise unusable(archive.path, archive.failure, None) from refusal
            if monotonic() > until_s:
                raise
        else:
            return


def _recover(home: Path, state: LedgerState, now_ms: int) -> tuple[Archive, OpenedJournal, int, int]:
    """The last number is when the last record was written, or 0."""
    folder = home / "journal"
    found = snapshot.newest(folder)
    snapshot_seq = snapshot.load(found[1], state) if found is not None else 0
    archive = Archive(home / ARCHIVE_NAME)
    last_record_ms = max((entry.updated_at_ms for entry in state.entries.values()), default=0)

    def replay(record: Record) -> None:
        nonlocal last_record_ms
        last_record_ms = record.ts_ms
        state.apply(decode_events(record.events), record.ts_ms, record.seq)
        if not record.seq % EVICT_EVERY:
            # Memory is for live work, also on the way: what the archive has may go at once.
            state.evict(archive.archived_seq)
            state.unload(archive.archived_seq)

    opened = open_journal(
        folder, snapshot_seq=snapshot_seq, archived_seq=archive.archived_seq, now_ms=now_ms, replay=replay
    )
    return archive, opened, snapshot_seq, last_record_ms


async def memory_ledger(
    *,
    clock: Callable[[], int],
    monotonic_ms: Callable[[], int] | None = None,
    clock_pause_ms: int = PAUSE_MS,
    new_id: Callable[[], str] | None = None,
    limits: Limits | None = None,
    node: str = NODE,
    boot: str | None = None,
) -> EmbeddedLedger:
    """The same without a file: it ends with the process."""
    new_id = new_id or Uuids()
    boot = boot or new_id()
    archive = Archive()
    storage = MemoryStorage(MemoryJournal(), archive, History(archive.path, node=node, boot=boot), SeenIds())
    guarded = Clock(clock, monotonic_ms or clock, pause_ms=clock_pause_ms)
    return EmbeddedLedger(LedgerState(limits or Limits()), storage, node=node, boot=boot, clock=guarded, new_id=new_id)
