"""Opening a home: lock, snapshot, archive, journal, in this order, and a ledger on top.

Bounded by live work: the snapshot holds what is live, the segments after it are few, and the archive is asked only
where it stands.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import Final

from covenant.ledger.clock import PAUSE_MS, Clock, Uuids
from covenant.ledger.embedded.archive.archive import ARCHIVE_NAME, Archive
from covenant.ledger.embedded.archive.history import History
from covenant.ledger.embedded.archive.seen_filter import SeenIds
from covenant.ledger.embedded.disk import make_private_folder, unusable, unusable_by
from covenant.ledger.embedded.engine import EmbeddedLedger
from covenant.ledger.embedded.journal import snapshot
from covenant.ledger.embedded.journal.journal import SEGMENT_BYTES, Durability, Journal, MemoryJournal
from covenant.ledger.embedded.journal.record import Record, decode_events
from covenant.ledger.embedded.journal.recovery import OpenedJournal, lock_home, open_journal
from covenant.ledger.embedded.journal.snapshot import EVICT_EVERY
from covenant.ledger.embedded.state import LedgerState
from covenant.ledger.embedded.storage import SEEN, FileStorage, MemoryStorage, cover
from covenant.ledger.machine.view import Limits
from covenant.model.errors import Unavailable

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
