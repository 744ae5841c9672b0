"""Opening a journal: which bytes to trust, which to cut, when to refuse.

Everything from the first bad line on is a torn tail (never acknowledged: cut, kept aside, reported), unless there is
evidence that the missing record had been synced. Then a disk or a person changed it, and opening refuses and names the
file and the line: cutting would lose acknowledged records. The evidence:

    a later segment                    created only after the one before it was synced
    a later good line, by its `synced` written after the bad one was synced
    the snapshot or the archive        made only of synced records

Promises: `replay` gets each record after the snapshot once, in order, only written ones, and only records that are on
disk when `open_journal` returns. One process at a time may open a home: see `lock_home`.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple, Self

import msgspec

from covenant.ledger.embedded import fault_points
from covenant.ledger.embedded.disk import make_owned_folder, naming, open_owned, sync_dir
from covenant.ledger.embedded.journal.record import BadLine, Record, decode_line
from covenant.ledger.embedded.journal.segments import (
    Cursor,
    Segment,
    create_segment,
    list_segments,
    segment_path,
    write_all,
)
from covenant.ledger.machine.evolution import IllegalMoveError
from covenant.model.errors import Damaged, HomeLocked

CHUNK_BYTES: Final = 1 << 20
TAIL_COPY_NAME: Final = "tail.tmp"
CANNOT_FOLLOW: Final = (IllegalMoveError, LookupError, TypeError, ValueError, AssertionError)
"""Exceptions of replaying a record that does not follow from the records before it."""
_START: Final = re.compile(rb'\{"seq":\d+,"ts_ms":\d+,"synced":')


class TornTail(NamedTuple):
    """A tail that was cut: `seq` is the missing record, `kept` the file that now has the bytes."""

    file: str
    line: int
    seq: int
    length: int
    reason: str
    kept: Path


class OpenedJournal(NamedTuple):
    """`end` is where the next record goes; `replayed` counts the records given to `replay`."""

    folder: Path
    end: Cursor
    replayed: int
    torn: TornTail | None


class JournalDamage(NamedTuple):
    """The first bad line: its expected record, and its place."""

    seq: int
    line: int
    offset: int
    reason: str


class JournalReport(NamedTuple):
    """The findings of opening. `tail` is None for a new journal; `bad` is where a torn tail begins."""

    tail: Segment | None
    end: Cursor
    replayed: int
    bad: JournalDamage | None
    torn_bytes: int


def open_journal(
    folder: Path, *, snapshot_seq: int, archived_seq: int, now_ms: int, replay: Callable[[Record], None]
) -> OpenedJournal:
    """Checks the journal, replays the records after the snapshot, and makes the tail trustworthy.

    Reads only the segments that replay or the archive still need. Raises Damaged and leaves the files unchanged;
    OSError if the disk does not take the tail.
    """
    _make_folder(folder)
    found = examine_journal(folder, snapshot_seq=snapshot_seq, archived_seq=archived_seq, replay=replay)
    if found.tail is None:
        os.close(create_segment(folder, 1))
        return OpenedJournal(folder, Cursor(0, 1, 0), 0, None)
    with naming(found.tail.path):
        torn = None
        if found.bad is not None:
            torn = _keep_torn(folder, found.tail, found.bad, found.torn_bytes, now_ms)
        _rewrite(folder, found.tail, found.end.offset)
    return OpenedJournal(folder, found.end, found.replayed, torn)


def examine_journal(
    folder: Path, *, snapshot_seq: int, archived_seq: int, replay: Callable[[Record], None]
) -> JournalReport:
    """The same check and replay, without a change to any file. Raises Damaged."""
    segments = _needed(folder, snapshot_seq, archived_seq)
    if not segments:
        return JournalReport(None, Cursor(0, 1, 0), 0, None, 0)
    scan = _Scan(snapshot_seq, replay)
    for segment in segments[:-1]:
        bad = scan.segment(segment)
        if bad is not None:
            raise Damaged(str(segment.path), bad.line, f"{bad.reason}, and a later segment shows that it was synced")
    tail = segments[-1]
    bad = scan.segment(tail)
    written = _written(tail.path)
    if bad is not None and bad.offset >= written:
        bad = None  # reserved room that was never used
    covered = max(snapshot_seq, archived_seq)
    if scan.seq < covered:
        what = "snapshot" if snapshot_seq == covered else "archive"
        reason = bad.reason if bad else "the journal ends here"
        raise Damaged(str(tail.path), scan.line + 1, f"{reason}, but the {what} holds records up to {covered}")
    if bad is not None:
        _refuse_if_synced(tail, bad)
    end = Cursor(scan.seq, tail.first_seq, scan.offset)
    return JournalReport(tail, end, scan.replayed, bad, written - bad.offset if bad is not None else 0)


def _make_folder(folder: Path) -> None:
    if not folder.exists():
        make_owned_folder(folder)
        sync_dir(folder.parent)
    (folder / TAIL_COPY_NAME).unlink(missing_ok=True)  # left by a crash while opening; never part of the journal


def _needed(folder: Path, snapshot_seq: int, archived_seq: int) -> list[Segment]:
    """The segments from the first record that replay or the archive still needs."""
    segments = list_segments(folder)
    covered = min(snapshot_seq, archived_seq)
    held = [index for index, segment in enumerate(segments) if segment.first_seq <= covered + 1]
    if held:
        return segments[held[-1] :]
    # No segment has record covered + 1. That is right only for a new journal.
    if not segments and snapshot_seq == archived_seq == 0:
        return []
    what = "snapshot" if snapshot_seq == covered else "archive"
    missing = segment_path(folder, covered + 1)
    first = f"the oldest segment begins with record {segments[0].first_seq}" if segments else "there is no segment"
    raise Damaged(str(missing), 1, f"missing: the {what} ends with record {covered}, but {first}")


class _Scan:
    """Reads segments one after the other; `seq`, `line` and `offset` are those of the last good record."""

    def __init__(self, snapshot_seq: int, replay: Callable[[Record], None]) -> None:
        self._snapshot_seq = snapshot_seq
        self._replay = replay
        self.seq = -1
        self.line = 0
        self.offset = 0
        self.replayed = 0

    def segment(self, segment: Segment) -> JournalDamage | None:
        """Replays one segment up to its first bad line, and returns what is wrong there."""
        if self.seq not in (-1, segment.first_seq - 1):
            missing = segment_path(segment.path.parent, self.seq + 1)
            reason = f"missing: record {self.seq} is followed by the segment of {segment.first_seq}"
            raise Damaged(str(missing), 1, reason)
        self.seq, self.line, self.offset = segment.first_seq - 1, 0, 0
        with open(segment.path, "rb", buffering=CHUNK_BYTES) as lines:
            for line in lines:
                try:
                    record = decode_line(line)
                except BadLine as bad:
                    return JournalDamage(self.seq + 1, self.line + 1, self.offset, bad.reason)
                self._accept(segment, record)
                self.offset += len(line)
        return None

    def _accept(self, segment: Segment, record: Record) -> None:
        self.line += 1
        if record.seq != self.seq + 1:
            # Tearing never removes complete lines between others: a lost page leaves zeros, a bad line.
            raise Damaged(str(segment.path), self.line, f"record {record.seq} is where {self.seq + 1} belongs")
        self.seq = record.seq
        if record.seq <= self._snapshot_seq:
            return
        self.replayed += 1
        try:
            self._replay(record)
        except msgspec.MsgspecError as error:
            raise Damaged(str(segment.path), self.line, f"the events cannot be read: {error}") from error
        except CANNOT_FOLLOW as error:
            reason = f"record {record.seq} cannot follow those before it: {error}"
            raise Damaged(str(segment.path), self.line, reason) from error


def _written(path: Path) -> int:
    """The number of written bytes in a segment: a line has no zeros, and reserved room has nothing else."""
    with open(path, "rb", buffering=0) as file:
        end = os.fstat(file.fileno()).st_size
        while end > 0:
            start = max(0, end - CHUNK_BYTES)
            found = os.pread(file.fileno(), end - start, start).rstrip(b"\0")
            if found:
                return start + len(found)
            end = start
    return 0


def _refuse_if_synced(tail: Segment, bad: JournalDamage) -> None:
    """Refuses if a later record was written after the bad one had been synced. Other lines may be good or bad."""
    with open(tail.path, "rb", buffering=CHUNK_BYTES) as lines:
        lines.seek(bad.offset)
        for line in lines:
            for later in records_in(line):
                if later.synced >= bad.seq:
                    reason = f"{bad.reason}, and record {later.seq} was written after it had been synced"
                    raise Damaged(str(tail.path), bad.line, reason)


def records_in(line: bytes) -> Iterator[Record]:
    """The good record at the end of this line, wherever it begins: the newline before it may be lost."""
    for start in _START.finditer(line):
        with suppress(BadLine):
            yield decode_line(line[start.start() :])


def _keep_torn(folder: Path, tail: Segment, bad: JournalDamage, length: int, now_ms: int) -> TornTail:
    """Copies the torn bytes aside, durably, before they are cut: somebody may want to inspect them."""
    kept = folder / f"torn-{bad.seq}-{now_ms}.bin"
    fault_points.point("opening.keep_torn")
    with open(tail.path, "rb") as source, open(kept, "wb", opener=open_owned) as copy:
        source.seek(bad.offset)
        _copy(source.fileno(), copy.fileno(), length)
        os.fsync(copy.fileno())
    sync_dir(folder)
    return TornTail(str(tail.path), bad.line, bad.seq, length, bad.reason, kept)


def _rewrite(folder: Path, tail: Segment, length: int) -> None:
    """Replaces the tail by a synced copy of its good bytes.

    After a failed fsync the kernel may keep the pages and call them clean: this process reads bytes that the disk never
    got, and a second fsync has nothing to write and succeeds. Only bytes written anew are known to arrive. Hence a
    copy; it is synced before the rename, so that the name never leads to less than the old file had; and the directory
    is synced after it, so that later records are in the file that the name leads to.
    """
    path = folder / TAIL_COPY_NAME
    with open(tail.path, "rb") as source, open(path, "wb", opener=open_owned) as copy:
        _copy(source.fileno(), copy.fileno(), length, point="opening.copy_tail")
        fault_points.point("opening.sync_tail", copy.fileno())
        os.fsync(copy.fileno())
    fault_points.point("opening.rename_tail")
    os.replace(path, tail.path)
    fault_points.point("opening.sync_dir")
    sync_dir(folder)


def _copy(source: int, target: int, length: int, *, point: str = "") -> None:
    # Read and written, never cloned: a shared extent would be the old bytes again.
    while length > 0:
        data = os.read(source, min(CHUNK_BYTES, length))
        if not data:
            raise OSError("the file shrank while it was copied")
        if point:
            fault_points.point(point, target, data)
        write_all(target, data)
        length -= len(data)


class HomeLock:
    """Held until closed, or until the process ends in any way. The file stays: unlinking it would race."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def lock_home(home: Path) -> HomeLock:
    """Locks this home for opening. Raises HomeLocked, which names the process that has it."""
    path = home / "lock"
    fd = open_owned(path, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(fd, 0)
        os.pwrite(fd, b"%d\n" % os.getpid(), 0)
    except BlockingIOError:
        holder = os.pread(fd, 20, 0).decode("ascii", "replace").strip()
        os.close(fd)
        raise HomeLocked(
            f"{home} is already open in process {holder or 'unknown'}; stop it first, or use another home"
        ) from None
    except BaseException:
        os.close(fd)
        raise
    return HomeLock(fd)
