"""Opening a home: lock, snapshot, archive, journal, in this order, and a ledger on top.

Opening is bounded by live work: the snapshot holds live tasks, the segments after it are few, and of the archive only
its seq is read. `FileStorage` has segments, snapshots and an archive in a home; `MemoryStorage` has the same lines and
the same archive without files.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Final, NamedTuple

import msgspec

from covenant.ledger.clock import PAUSE_MS, Clock, uuid_source
from covenant.ledger.contract.retention import SearchedPlace
from covenant.ledger.embedded import fault_points
from covenant.ledger.embedded.archive.archive import Archive
from covenant.ledger.embedded.archive.archive_file import ARCHIVE_NAME, copy_database
from covenant.ledger.embedded.archive.archive_writer import WriterProcess
from covenant.ledger.embedded.archive.history import History
from covenant.ledger.embedded.archive.seen_filter import SeenIds
from covenant.ledger.embedded.byte_search import run_module, search_in_process
from covenant.ledger.embedded.disk import make_owned_folder, make_private_folder, replace_private, unusable, unusable_by
from covenant.ledger.embedded.engine import EmbeddedLedger
from covenant.ledger.embedded.journal import snapshot
from covenant.ledger.embedded.journal.journal import SEGMENT_BYTES, Durability, Journal, MemoryJournal
from covenant.ledger.embedded.journal.record import Record
from covenant.ledger.embedded.journal.recovery import HomeLock, OpenedJournal, lock_home, open_journal
from covenant.ledger.embedded.journal.segments import create_segment, list_segments
from covenant.ledger.embedded.journal.shipped_segments import ShippedSegments
from covenant.ledger.embedded.journal.snapshot import EVICT_EVERY, Replayed, read_events, records, state_at
from covenant.ledger.embedded.moved_mark import check_mark
from covenant.ledger.embedded.state import LedgerState
from covenant.ledger.machine.entry import Entry
from covenant.ledger.machine.event_codec import decode_events
from covenant.ledger.machine.events import TaskFollowed, TaskSent
from covenant.model.clock_steps import STEADY, Ages
from covenant.model.errors import HomeUnusable, Unavailable
from covenant.model.ids import TaskId
from covenant.model.settings import Limits
from covenant.model.task import Task

log = logging.getLogger(__name__)

CLOCK_NAME: Final = "clock.json"
"""The steps of the wall clock that a process saw, for the next one. A backup does not have it."""
NICE: Final = 10
"""Compaction yields to requests: nobody waits for it."""
SEEN: Final = "seen.bin"
RESTORING_NAME: Final = "restoring"
"""A folder in a home whose restore has not finished."""
SEEN_PAGE: Final = 1_000
SEALED_SEGMENTS_BEFORE_COMPACTION: Final = 4
COMPACTION_CATCH_UP_S: Final = 60.0
NODE: Final = "local"
CATCH_UP_S: Final = 600.0
UNWRITABLE_WAIT_S: Final = 10.0
"""How long an archive that cannot be written delays a start."""


class Compacted(msgspec.Struct, frozen=True, gc=False):
    """`dropped` counts the events of resolved tasks, which the snapshot no longer holds."""

    seq: int
    dropped: int


class _BodyPlace(NamedTuple):
    """The place of a large body: a line of a segment, or of the snapshot before."""

    path: Path
    offset: int
    length: int


class _BodyPlaces:
    """The places of bodies that are too large for memory, so that the new snapshot has them too."""

    def __init__(self, state: LedgerState, old: Path | None) -> None:
        self._state = state
        self._old = old
        self._places: dict[TaskId, _BodyPlace] = {}

    def of_snapshot(self, entry: Entry, offset: int, length: int) -> None:
        assert self._old is not None
        # Called before the state has the entry; an entry of an old version has no size of its own.
        if length >= self._state.limits.body_bytes_on_disk:
            self._places[entry.task.id] = _BodyPlace(self._old, offset, length)

    def of_record(self, record: Replayed) -> None:
        if record.length < self._state.limits.body_bytes_on_disk:
            return
        for event in record.events:
            if isinstance(event, TaskSent | TaskFollowed):
                self._places[event.task_id] = _BodyPlace(record.path, record.offset, record.length)

    def forget(self, task_ids: Iterable[TaskId]) -> None:
        for task_id in task_ids:
            self._places.pop(task_id, None)

    def read(self, task_id: TaskId) -> Task:
        place = self._places[task_id]
        if place.path == self._old:
            return snapshot.read_entry(*place).task
        for event in read_events(*place):
            if isinstance(event, TaskSent | TaskFollowed) and event.task_id == task_id:
                return event.task
        raise AssertionError(f"the body of task {task_id} is not at its place")


def compact(folder: Path, through_seq: int, limits: Limits) -> Compacted:
    state = LedgerState(limits)
    found = snapshot.newest(folder)
    bodies = _BodyPlaces(state, None if found is None else found[1])
    seq = 0 if found is None else snapshot.load(found[1], state, bodies.of_snapshot)
    if seq >= through_seq:
        return Compacted(seq, 0)
    for record in records(folder, seq, through_seq):
        state.apply(record.events, record.ts_ms, record.seq)
        bodies.of_record(record)
        if not record.seq % EVICT_EVERY:
            bodies.forget(state.evict(record.seq))
    state.evict(through_seq)
    snapshot.write(folder, through_seq, state, bodies.read)
    return Compacted(through_seq, state.resolved_events)


def main(arguments: list[str]) -> int:
    os.nice(NICE)
    folder, through_seq, limits = arguments
    compacted = compact(Path(folder), int(through_seq), msgspec.json.decode(limits, type=Limits))
    sys.stdout.write(msgspec.json.encode(compacted).decode() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))


class CompactionFailed(Unavailable):
    """Merging or dropping failed: it costs only disk space, and the next run tries again."""

    def __init__(self, reason: str) -> None:
        super().__init__("compaction_failed", f"{reason}; nothing is lost, and the next compaction tries again")


async def cover(seen: SeenIds, history: History) -> None:
    """Adds every finished task that the filter lacks; bounded by those that finished since it was saved."""
    while True:
        task_ids, through = await history.finished(seen.covered, SEEN_PAGE)
        if not task_ids:
            return
        seen.cover(task_ids, through)


class FileStorage:
    """`archive_process`: another process writes the archive, which costs its start and spares the loop its work."""

    def __init__(
        self,
        home: Path,
        lock: HomeLock,
        *,
        journal: Journal,
        archive: Archive,
        history: History,
        seen: SeenIds,
        archive_process: bool = False,
        shipped: ShippedSegments | None = None,
    ) -> None:
        self.journal = journal
        self.archive = archive
        self.history = history
        self.seen = seen
        self._home = home
        self._folder = home / "journal"
        self._lock = lock
        self._archive_process = archive_process
        self._shipped = shipped

    def follow(self, on_archived: Callable[[int], None]) -> None:
        writer = partial(WriterProcess, self.archive.path, self.journal) if self._archive_process else None
        self.archive.start(self.journal, on_archived, writer)
        self.archive.notify(self.journal.durable_seq)

    def state_at(self, seq: int, limits: Limits) -> LedgerState:
        return state_at(self._folder, seq, limits)

    def wants_compaction(self) -> bool:
        found = snapshot.newest(self._folder)
        covered = found[0] if found is not None else 0
        sealed = [segment for segment in list_segments(self._folder)[1:] if segment.first_seq - 1 > covered]
        return len(sealed) >= SEALED_SEGMENTS_BEFORE_COMPACTION

    async def compact(self, state: LedgerState) -> int:
        """Seals, merges in another process, then drops the records that both the snapshot and the archive hold."""
        sealed_seq = await self.journal.rotate()
        compacted = await self._merge(sealed_seq, state.limits)
        await self.archive.caught_up(compacted.seq, COMPACTION_CATCH_UP_S)
        archived_seq = await self.archive.checkpoint()
        await cover(self.seen, self.history)
        try:
            await asyncio.to_thread(self._drop, compacted.seq, archived_seq, self.seen.encode())
        except OSError as error:
            raise CompactionFailed(f"dropping records that the snapshot covers failed: {error}") from error
        return compacted.dropped

    async def _merge(self, through_seq: int, limits: Limits) -> Compacted:
        limited = msgspec.json.encode(limits).decode()
        folder, seq = str(self._folder), str(through_seq)
        output, failure = await run_module("covenant.ledger.embedded.open", folder, seq, limited)
        if failure:
            raise CompactionFailed(f"merging the journal's segments failed {failure}")
        return msgspec.json.decode(output, type=Compacted)

    def _drop(self, snapshot_seq: int, archived_seq: int, seen: bytes) -> None:
        replace_private(self._home / SEEN, seen)
        fault_points.point("compaction.drop")
        covered = min(snapshot_seq, archived_seq)
        self.journal.drop_through(covered if self._shipped is None else self._shipped.droppable(covered))
        snapshot.drop_older(self._folder, snapshot_seq)

    async def search(self, tenant: str, parties: Sequence[str]) -> Sequence[SearchedPlace]:
        return await search_in_process(self.archive.path, self._folder, tenant, parties)

    async def copy_to(self, folder: Path) -> int:
        """Copies the archive first: it has durable records alone, so the journal that is sealed next has them all."""
        try:
            await asyncio.to_thread(copy_database, self.archive.path, folder / ARCHIVE_NAME)
            sealed_seq = await self.journal.rotate()
            await asyncio.to_thread(self._link_journal, folder / "journal", sealed_seq)
        except (OSError, sqlite3.Error) as error:
            raise Unavailable("backup_failed", f"the ledger could not be copied: {error}") from error
        return sealed_seq

    def _link_journal(self, folder: Path, sealed_seq: int) -> None:
        """Sealed segments and snapshots are never written again: a hard link is as good as a copy."""
        make_owned_folder(folder)
        found = snapshot.newest(self._folder)
        paths = [segment.path for segment in list_segments(self._folder) if segment.first_seq <= sealed_seq]
        for path in (*([found[1]] if found is not None else ()), *paths):
            os.link(path, folder / path.name)
        os.close(create_segment(folder, sealed_seq + 1))

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
        self.archive.start(self.journal, on_archived)
        self.archive.notify(self.journal.durable_seq)

    def state_at(self, _seq: int, _limits: Limits) -> LedgerState:
        raise AssertionError("memory does not fail, so there is nothing to go back to")

    def wants_compaction(self) -> bool:
        return False

    async def compact(self, state: LedgerState) -> int:
        await self.archive.caught_up(self.journal.last_seq, COMPACTION_CATCH_UP_S)
        dropped, state.resolved_events = state.resolved_events, 0
        return dropped

    async def search(self, tenant: str, parties: Sequence[str]) -> Sequence[SearchedPlace]:
        return await search_in_process(self.archive.path, self.archive.path.parent, tenant, parties)

    async def copy_to(self, _folder: Path) -> int:
        raise Unavailable("no_backup", "a ledger in memory has no backup")

    async def close(self) -> None:
        await self.journal.close()
        await self.archive.close()
        await self.history.close()


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
    archive_process: bool = False,
    shipped: ShippedSegments | None = None,
    node: str = NODE,
    boot: str | None = None,
) -> EmbeddedLedger:
    """The ledger in the folder `home`, which is created if it does not exist.

    `clock` is the wall clock and `monotonic_ms` a clock that nobody sets, by which steps of the first are noticed.
    Without it the wall clock is trusted: right for a clock that a test moves.

    `archive_process` has a process of its own write the archive: right for a long-running server. It is ignored with
    durability "os", since there the archive's reader must sync the journal, and report a failure to it. `shipped` keeps
    compaction from dropping segments that were not shipped.

    Raises HomeLocked if another process has it, Damaged if the files contradict each other, HomeUnusable if a file
    cannot be read or written.
    """
    new_id = new_id or uuid_source()
    boot = boot or new_id()
    try:
        await asyncio.to_thread(make_private_folder, home)
        lock = lock_home(home)
    except OSError as error:
        raise unusable_by(error, home) from error
    try:
        state = LedgerState(limits or Limits())
        keep = partial(save_ages, home / CLOCK_NAME)
        ledger_clock = Clock(clock, monotonic_ms or clock, pause_ms=clock_pause_ms, keep=keep)
        archive, opened, snapshot_seq, last_record_ms = await asyncio.to_thread(_recover, home, state, clock())
        ledger_clock.opened(last_record_ms, await asyncio.to_thread(load_ages, home / CLOCK_NAME))
        storage = FileStorage(
            home,
            lock,
            journal=Journal(opened, durability=durability, segment_bytes=segment_bytes),
            archive=archive,
            history=History(archive.path, boot=boot),
            seen=SeenIds.load(home / SEEN) or SeenIds(),
            archive_process=archive_process and durability == "fsync",
            shipped=shipped,
        )
    except OSError as error:
        lock.close()
        raise unusable_by(error, home / "journal") from error
    except BaseException:
        lock.close()
        raise
    ledger = EmbeddedLedger(state, storage, node=node, boot=boot, clock=ledger_clock, new_id=new_id, torn=opened.torn)
    try:
        # Only the archive has the tasks that the snapshot left out, so it must have them before any request.
        await _catch_up(archive, snapshot_seq)
        await cover(storage.seen, storage.history)
    except BaseException:
        await ledger.close()
        raise
    return ledger


async def _catch_up(archive: Archive, seq: int) -> None:
    """Waits for a long backlog, but not for a disk that cannot be written."""
    until_s = monotonic() + CATCH_UP_S
    while True:
        try:
            await archive.caught_up(seq, UNWRITABLE_WAIT_S)
        except Unavailable as refusal:
            if archive.failure is not None:
                raise unusable(archive.path, archive.failure, None) from refusal
            if monotonic() > until_s:
                raise
        else:
            return


def _recover(home: Path, state: LedgerState, now_ms: int) -> tuple[Archive, OpenedJournal, int, int]:
    """Returns the archive, the journal, the seq of the snapshot, and the time of the last record (or 0)."""
    if os.path.lexists(home / RESTORING_NAME):
        raise HomeUnusable(f"a restore into {home} was cut off; empty the folder, and restore again", None)
    check_mark(home)
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
            # Memory is for live work, also during replay: tasks that the archive has leave at once.
            state.evict(archive.archived_seq)
            state.unload(archive.archived_seq)

    opened = open_journal(
        folder, snapshot_seq=snapshot_seq, archived_seq=archive.archived_seq, now_ms=now_ms, replay=replay
    )
    return archive, opened, snapshot_seq, last_record_ms


def save_ages(path: Path, ages: Ages) -> None:
    """Called on the loop, before a decision uses the new time: a step of the clock is rare, and the file is small."""
    try:
        replace_private(path, msgspec.json.encode(ages))
    except OSError as error:
        log.warning("clock.not_kept", extra={"path": str(path), "reason": str(error)})


def load_ages(path: Path) -> Ages:
    """The clock steps that an earlier process saw. A file that cannot be read prevents no start."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Ages)
    except FileNotFoundError:
        return STEADY
    except (OSError, msgspec.DecodeError) as error:
        log.warning("clock.not_read", extra={"path": str(path), "reason": str(error)})
        return STEADY


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
    """A ledger without files: it ends with the process."""
    new_id = new_id or uuid_source()
    boot = boot or new_id()
    archive = Archive()
    storage = MemoryStorage(MemoryJournal(), archive, History(archive.path, boot=boot), SeenIds())
    ledger_clock = Clock(clock, monotonic_ms or clock, pause_ms=clock_pause_ms)
    return EmbeddedLedger(
        LedgerState(limits or Limits()), storage, node=node, boot=boot, clock=ledger_clock, new_id=new_id
    )
