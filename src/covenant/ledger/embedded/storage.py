"""What an engine keeps its facts in: on disk, or in memory for tests and try-outs.

The two differ in what survives and in nothing else: `FileStorage` has segments, snapshots and an archive in a home;
`MemoryStorage` has the same lines and the same archive without a file behind them.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final, Protocol

import msgspec

from covenant.ledger.embedded import fault_points
from covenant.ledger.embedded.archive.archive import Archive, ArchiveWriter
from covenant.ledger.embedded.archive.history import History
from covenant.ledger.embedded.archive.seen_filter import SeenIds, save
from covenant.ledger.embedded.archive.writer_process import WriterProcess
from covenant.ledger.embedded.journal import snapshot
from covenant.ledger.embedded.journal.compaction import Compacted
from covenant.ledger.embedded.journal.journal import Journal, MemoryJournal
from covenant.ledger.embedded.journal.recovery import HomeLock
from covenant.ledger.embedded.journal.segments import list_segments
from covenant.ledger.embedded.journal.snapshot import state_at
from covenant.ledger.embedded.state import LedgerState
from covenant.ledger.machine.view import Limits
from covenant.model.errors import Unavailable

SEEN: Final = "seen.bin"
SEEN_PAGE: Final = 1_000
SEALED_SEGMENTS_BEFORE_COMPACTION: Final = 4
CATCH_UP_S: Final = 60.0


class CompactionFailed(Unavailable):
    """Merging or dropping failed: nothing is lost but disk space, and the next run tries again."""

    def __init__(self, reason: str) -> None:
        super().__init__("compaction_failed", f"{reason}; nothing is lost, and the next compaction tries again")


class Storage(Protocol):
    @property
    def journal(self) -> Journal | MemoryJournal: ...
    @property
    def archive(self) -> Archive: ...
    @property
    def history(self) -> History: ...
    @property
    def seen(self) -> SeenIds: ...

    def follow(self, on_archived: Callable[[int], None]) -> None:
        """Begin to archive what becomes durable; `on_archived(seq)` is called on the loop after each batch."""

    def state_at(self, seq: int, limits: Limits, /) -> LedgerState:
        """The state as it is on disk, read back. Blocks."""

    def wants_compaction(self) -> bool: ...
    async def compact(self, state: LedgerState) -> int: ...
    async def close(self) -> None: ...


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
        await self.archive.caught_up(compacted.seq, CATCH_UP_S)
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
        await self.archive.caught_up(self.journal.last_seq, CATCH_UP_S)
        dropped, state.resolved_events = state.resolved_events, 0
        return dropped

    async def close(self) -> None:
        await self.journal.close()
        await self.archive.close()
        await self.history.close()
