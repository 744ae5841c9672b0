"""Repair of a damaged ledger: what can be saved, what is lost, and how the ledger is made whole again.

A record that cannot be read is lost, and so is each later event that needs it, such as the lease of a task that was
never sent. Everything else becomes a snapshot, the archive is reconciled with it, and numbering continues after the
last record.

Before anything changes, the journal is linked into a folder beside it. After a crash the same command continues. The
caller holds the home's lock.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from covenant.daemon.home import JOURNAL_NAME
from covenant.ledger.embedded.archive.apply_batch import REJECTS_MAX, read_rejects
from covenant.ledger.embedded.archive.archive_file import ARCHIVE_NAME, SEQ_MAX, archived_seq_of, open_writer
from covenant.ledger.embedded.archive.reconciliation import ExpectedArchive, reconcile
from covenant.ledger.embedded.disk import make_owned_folder, open_owned, sync_dir
from covenant.ledger.embedded.journal import snapshot
from covenant.ledger.embedded.journal.record import BadLine, Record, decode_line, encode_line
from covenant.ledger.embedded.journal.recovery import CANNOT_FOLLOW, records_in
from covenant.ledger.embedded.journal.segments import Segment, create_segment, list_segments, segment_path
from covenant.ledger.embedded.open import SEEN
from covenant.ledger.embedded.state import LedgerState
from covenant.ledger.machine.events import AnyEvent, TaskEvent
from covenant.model.settings import Limits

BACKUP: Final = "put it back from a backup"
HISTORY_ONLY: Final = "it is not there; what was live then is in the snapshot, so only history is lost"
CHECKPOINT: Final = "PRAGMA wal_checkpoint(TRUNCATE)"
_raw_events: Final = msgspec.json.Decoder(list[msgspec.Raw]).decode
_event: Final[Any] = msgspec.json.Decoder(AnyEvent).decode


class CheckFinding(NamedTuple):
    """`way_out`: what to do about it, or a remark if all is `well`."""

    what: str
    well: bool = True
    way_out: str = ""


def bad_finding(what: str, way_out: str = BACKUP) -> CheckFinding:
    return CheckFinding(what, False, way_out)


class Checkup(NamedTuple):
    """`repair_plan`: what can be done about a damaged ledger. `rebuild`: the archive can be rebuilt without a loss."""

    findings: tuple[CheckFinding, ...]
    repair_plan: RepairPlan | None = None
    rebuild: bool = False

    @property
    def well(self) -> bool:
        return all(finding.well for finding in self.findings)


class Loss(NamedTuple):
    """Lost records: one, or all from `seq` to `through`. `said`: what is still known of them."""

    seq: int
    where: str
    reason: str
    said: tuple[str, ...] = ()
    through: int = 0

    @property
    def records(self) -> int:
        return max(self.seq, self.through) - self.seq + 1


class RepairPlan(NamedTuple):
    """A repaired ledger holds the records from `first_seq` to `last_seq`, except the losses.

    `archive_lost`: why the archive cannot be used; empty if it can.
    """

    first_seq: int
    last_seq: int
    losses: tuple[Loss, ...]
    limits: Limits
    archive_lost: str = ""


class _Line(NamedTuple):
    """A line of a segment. `record`: None if it cannot be read."""

    seq: int
    record: Record | None
    data: bytes
    where: str
    reason: str = ""


class _JournalContents(NamedTuple):
    snapshot_seq: int
    before: LedgerState
    after: LedgerState
    last_seq: int
    losses: list[Loss]
    changed: dict[int, bytes | None]
    """The line without its lost events; None if all of them are lost."""


def plan(home: Path, *, archived_seq: int, limits: Limits, archive_lost: str = "") -> RepairPlan:
    """Finds what would be lost. Only reads."""
    contents = _read_journal(home / JOURNAL_NAME, archived_seq, limits)
    first_seq = min(contents.snapshot_seq, archived_seq) + 1
    return RepairPlan(first_seq, contents.last_seq, tuple(contents.losses), limits, archive_lost)


def carry_out(home: Path, repair_plan: RepairPlan, now_ms: int) -> Path:
    """Replaces the damaged ledger. Returns where the damaged files are now."""
    folder = home / JOURNAL_NAME
    aside = home / f"{JOURNAL_NAME}.damaged-{now_ms}"
    make_owned_folder(aside)
    if not folder.exists():
        make_owned_folder(folder)
    for path in sorted(folder.iterdir()):
        _link(path, aside / path.name)
    sync_dir(aside)
    archive = home / ARCHIVE_NAME
    if repair_plan.archive_lost:
        for name in (ARCHIVE_NAME, f"{ARCHIVE_NAME}-wal", f"{ARCHIVE_NAME}-shm"):
            if (home / name).exists():
                (home / name).rename(aside / name)
        sync_dir(aside)
    with closing(open_writer(archive, lasting=True)) as db:
        archived_seq = archived_seq_of(db)
        contents = _read_journal(folder, archived_seq, repair_plan.limits)
        earlier = _remaining_lines(folder, contents, archived_seq)
        before_snapshot = (line for seq, line in earlier if seq <= contents.snapshot_seq)
        after_snapshot = (line for _, line in _remaining_lines(folder, contents, contents.snapshot_seq))
        reconcile(
            db,
            ExpectedArchive(
                contents.snapshot_seq,
                contents.before,
                contents.after,
                before_snapshot,
                after_snapshot,
                contents.last_seq,
            ),
        )
        db.execute(CHECKPOINT).fetchone()
    (home / SEEN).unlink(missing_ok=True)
    _replace_journal(folder, contents.last_seq, contents.after)
    sync_dir(home)
    return aside


def rebuild_archive(home: Path, limits: Limits, now_ms: int) -> Path | None:
    """Takes the archive back to the snapshot. The next start applies the rest of the journal, which is whole.

    Returns the file with the lines that the archive had set aside.
    """
    folder = home / JOURNAL_NAME
    with closing(open_writer(home / ARCHIVE_NAME, lasting=True)) as db:
        archived_seq = archived_seq_of(db)
        contents = _read_journal(folder, archived_seq, limits)
        kept = _save_rejects(home, db, now_ms)
        earlier = (
            line for seq, line in _remaining_lines(folder, contents, archived_seq) if seq <= contents.snapshot_seq
        )
        seq = contents.snapshot_seq
        reconcile(db, ExpectedArchive(seq, contents.before, contents.after, earlier, (), seq))
        db.execute(CHECKPOINT).fetchone()
        db.execute("DELETE FROM rejects WHERE seq <= ?", (archived_seq,))
    (home / SEEN).unlink(missing_ok=True)
    sync_dir(home)
    return kept


def _save_rejects(home: Path, db: sqlite3.Connection, now_ms: int) -> Path | None:
    lines = [reject.line for reject in read_rejects(db, REJECTS_MAX)]
    if not lines:
        return None
    path = home / f"archive.rejects-{now_ms}.jsonl"
    fd = open_owned(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    with os.fdopen(fd, "wb") as file:
        file.writelines(lines)
        file.flush()
        os.fsync(fd)
    return path


def _replace_journal(folder: Path, last_seq: int, state: LedgerState) -> None:
    """Writes a snapshot of everything and an empty segment behind it, as after a compaction."""
    state.evict(last_seq)
    snapshot.write(folder, last_seq, state)
    if not segment_path(folder, last_seq + 1).exists():
        os.close(create_segment(folder, last_seq + 1))
    for segment in list_segments(folder):
        if segment.first_seq != last_seq + 1:
            segment.path.unlink()
    snapshot.drop_older(folder, last_seq)
    sync_dir(folder)


def _link(path: Path, target: Path) -> None:
    try:
        os.link(path, target)
    except OSError:  # a file system without links
        shutil.copy2(path, target)


def _read_journal(folder: Path, archived_seq: int, limits: Limits) -> _JournalContents:
    """Reads the journal once, event by event, and notes what cannot be kept."""
    # The archive is rebuilt from these states, so they keep every body, however large.
    limits = replace(limits, body_bytes_on_disk=sys.maxsize)
    before, after = LedgerState(limits), LedgerState(limits)
    newest = snapshot.newest(folder)
    snapshot_seq = 0
    if newest is not None:
        snapshot_seq = snapshot.load(newest[1], before)
        snapshot.load(newest[1], after)
    covered = min(snapshot_seq, archived_seq)
    losses: list[Loss] = []
    changed: dict[int, bytes | None] = {}
    bad: dict[int, Loss] = {}
    last_seq = covered
    for line in _lines(folder, covered):
        if line.record is None:
            bad[line.seq] = Loss(line.seq, line.where, line.reason)
            continue
        losses += _missing_records(folder, last_seq + 1, line.seq - 1, bad, snapshot_seq)
        last_seq = line.seq
        if line.seq > snapshot_seq:
            loss = _keep_events(after, line, line.record, changed)
            losses += [loss] if loss is not None else []
    # A segment is made only after all records before it were synced, also if it is empty.
    begun = max((segment.first_seq - 1 for segment in _segments(folder)), default=0)
    known = max(last_seq, snapshot_seq, archived_seq, begun, *bad)
    losses += _missing_records(folder, last_seq + 1, known, bad, snapshot_seq)
    return _JournalContents(snapshot_seq, before, after, known, losses, changed)


def _missing_records(folder: Path, first: int, last: int, bad: dict[int, Loss], snapshot_seq: int) -> Iterator[Loss]:
    """The losses from `first` to `last`. Records of which nothing is left form one range."""
    while first <= last:
        if first in bad:
            yield bad[first]
            first += 1
            continue
        within = min([seq for seq in bad if first < seq <= last], default=last + 1) - 1
        through = min(within, snapshot_seq) if first <= snapshot_seq else within
        yield Loss(first, str(folder), HISTORY_ONLY if first <= snapshot_seq else "it is not there", (), through)
        first = through + 1


def _segments(folder: Path) -> list[Segment]:
    """The segments without stray files, whose numbers are beyond any journal."""
    segments = list_segments(folder) if folder.is_dir() else []
    return [segment for segment in segments if segment.first_seq <= SEQ_MAX]


def _lines(folder: Path, after_seq: int) -> Iterator[_Line]:
    """Every line after a record, in order. A bad line gets the number that it should have."""
    seq = after_seq
    for segment in _segments(folder):
        expected = segment.first_seq
        with segment.path.open("rb") as lines:
            for number, data in enumerate(lines, 1):
                if not data.strip(b"\0"):
                    continue  # room that was reserved and never used
                where = f"{segment.path.name}, line {number}"
                for line in _split_line(data, expected, where):
                    expected = line.seq + 1
                    if line.seq > seq:
                        seq = line.seq if line.record is not None else seq
                        yield line


def _split_line(data: bytes, expected: int, where: str) -> Iterator[_Line]:
    """A good record; or a bad one, and a good one behind it if the newline between them is lost."""
    try:
        record = decode_line(data)
    except BadLine as bad:
        found = next(records_in(data), None)
        yield _Line(expected, None, b"", where, bad.reason)
        if found is not None and found.seq > expected:
            yield _Line(found.seq, found, encode_line(found.seq, found.ts_ms, found.synced, bytes(found.events)), where)
    else:
        yield _Line(record.seq, record, data, where)


def _keep_events(state: LedgerState, line: _Line, record: Record, changed: dict[int, bytes | None]) -> Loss | None:
    """Applies every event of a record that can be applied. Returns what is lost of the record."""
    kept: list[msgspec.Raw] = []
    descriptions: list[str] = []
    reason = ""
    try:
        raw_events = _raw_events(record.events)
    except msgspec.MsgspecError as error:
        changed[record.seq] = None
        return Loss(record.seq, line.where, f"the events cannot be read: {error}")
    for raw in raw_events:
        try:
            event = _event(raw)
        except msgspec.MsgspecError as error:
            reason = reason or f"an event cannot be read: {error}"
            continue
        try:
            state.apply((event,), record.ts_ms, record.seq)
        except CANNOT_FOLLOW as error:
            reason = reason or f"it makes no sense without what is lost: {error}"
            descriptions.append(_description(event))
        else:
            kept.append(raw)
    if not reason:
        return None
    events = msgspec.json.encode(kept)
    changed[record.seq] = encode_line(record.seq, record.ts_ms, record.synced, events) if kept else None
    return Loss(record.seq, line.where, reason, tuple(descriptions))


def _description(event: Any) -> str:
    name = str(event.__struct_config__.tag).replace("_", " ")
    return f"{name} {event.task_id}" if isinstance(event, TaskEvent) else name


def _remaining_lines(folder: Path, contents: _JournalContents, after_seq: int) -> Iterator[tuple[int, bytes]]:
    """The remaining lines after a record, with their numbers."""
    for line in _lines(folder, after_seq):
        if line.record is not None:
            data = contents.changed.get(line.seq, line.data)
            if data is not None:
                yield line.seq, data
