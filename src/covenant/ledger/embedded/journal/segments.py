"""The folder of journal segments: their names, the writer of the active one, and a reader that follows it.

A segment is `<seq of its first record, 20 digits>.jsonl`. All but the newest are sealed: complete, synced, never
written again. The name of the segment after a record follows from the record's seq, so a reader needs no listing. A
`Cursor` is a place between two lines. After the last line of the newest segment there may be zeros, where room was
reserved.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
from itertools import pairwise
from pathlib import Path
from typing import Final, NamedTuple

from covenant.ledger.embedded import fault_points
from covenant.ledger.embedded.disk import open_owned, sync_dir
from covenant.ledger.embedded.journal.record import seq_of

_NAME: Final = re.compile(r"\d{20}\.jsonl")

FULL_SYNC: Final[int | None] = getattr(fcntl, "F_FULLFSYNC", None)
"""On macOS `fsync` leaves the bytes in the disk's own cache; this call writes them. Other systems have no such call."""
# If a file grows with every batch, each sync also waits for the file system's own journal. So it does if room is only
# allocated: the first write to it must be noted there. Zeros that were written before avoid both: syncing 84 KB took
# 145 µs, instead of 237 when allocated and 302 when growing; 1.3 KB took 87, 93 and 131 (medians of 600). The zeros
# reach the disk with the next batch.
RESERVED_BYTES: Final = 256 << 10


def datasync(fd: int) -> None:
    """Writes a file's bytes and length to the disk."""
    if FULL_SYNC is not None:
        fcntl.fcntl(fd, FULL_SYNC)
    else:
        os.fdatasync(fd)


class Segment(NamedTuple):
    first_seq: int
    path: Path


class Cursor(NamedTuple):
    """The place after record `seq`: `offset` bytes into the segment that begins with record `segment`."""

    seq: int
    segment: int
    offset: int


class Lines(NamedTuple):
    """Complete lines, in order. Without new lines, `data` is empty, and `last_seq` and `cursor` are unchanged."""

    data: bytes
    last_seq: int
    cursor: Cursor


def segment_path(folder: Path, first_seq: int) -> Path:
    return folder / f"{first_seq:020d}.jsonl"


def list_segments(folder: Path) -> list[Segment]:
    """Every segment, oldest first. Other files in the folder (kept torn tails) are not part of the journal."""
    names = sorted(name for name in os.listdir(folder) if _NAME.fullmatch(name))
    return [Segment(int(name[:20]), folder / name) for name in names]


def create_segment(folder: Path, first_seq: int) -> int:
    """Creates an empty segment and returns its descriptor when its name is durable.

    The name first: a record synced into a file that the directory forgets would be a lost record.
    """
    path = segment_path(folder, first_seq)
    fault_points.point("journal.create_segment")
    fd = open_owned(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        fault_points.point("journal.sync_dir", path=path)
        sync_dir(folder)
    except BaseException:
        os.close(fd)
        raise
    return fd


def write_all(fd: int, data: bytes) -> None:
    """One `write`, unless the system takes less; then the next one raises the reason (a full disk)."""
    written = os.write(fd, data)
    while written < len(data):
        written += os.write(fd, data[written:])


def drop_through(folder: Path, seq: int) -> list[Segment]:
    """Deletes the sealed segments whose records are all at or below `seq`, and returns them.

    Oldest first, so that a crash leaves one run of records. The newest segment is never dropped.
    """
    segments = list_segments(folder)
    dropped = [segment for segment, after in pairwise(segments) if after.first_seq <= seq + 1]
    for segment in dropped:
        fault_points.point("journal.drop_segment")
        segment.path.unlink()
    if dropped:
        fault_points.point("journal.sync_drop")
        sync_dir(folder)
    return dropped


def cursor_after(folder: Path, seq: int) -> Cursor:
    """The place after record `seq`, by reading one segment. LookupError if the record after it was dropped.

    The caller knows that `seq` is in the journal: lines are counted, not checked.
    """
    segments = [segment for segment in list_segments(folder) if segment.first_seq <= seq + 1]
    if not segments:
        raise LookupError(f"the journal no longer holds record {seq + 1}")
    first_seq, path = segments[-1]
    offset = 0
    with open(path, "rb", buffering=1 << 20) as lines:
        for _, line in zip(range(seq - first_seq + 1), lines, strict=False):
            offset += len(line)
    return Cursor(seq, first_seq, offset)


class SegmentWriter:
    """The active segment. One thread at a time may use it, which the group commit ensures.

    After any exception it must not be used again: the file's content beyond `synced_size` is unknown.
    """

    def __init__(self, folder: Path, active: Cursor, *, segment_bytes: int, sync: bool) -> None:
        self._folder = folder
        self._segment_bytes = segment_bytes
        self._sync = sync
        self._fd = os.open(segment_path(folder, active.segment), os.O_WRONLY)
        os.lseek(self._fd, active.offset, os.SEEK_SET)
        self._reserves = sync
        self._reserved_size = active.offset
        self._synced_size = active.offset
        self.end = active
        self.synced_seq = active.seq

    @property
    def is_full(self) -> bool:
        return self.end.offset >= self._segment_bytes

    def write(self, data: bytes, last_seq: int) -> Cursor:
        """Appends complete lines up to record `last_seq`; they are synced when it returns, if this writer syncs."""
        if self.is_full:
            self.seal()
        _, segment, offset = self.end
        if self._reserves and offset + len(data) > self._reserved_size:
            self._reserve(len(data) + RESERVED_BYTES)
        fault_points.point("journal.write", self._fd, data, self._synced_size)
        write_all(self._fd, data)
        self.end = Cursor(last_seq, segment, offset + len(data))
        if self._sync:
            self.sync()
        fault_points.point("journal.acknowledge")
        return self.end

    def _reserve(self, length: int) -> None:
        """Reserves room after the last line. Without free room, writing goes on without."""
        try:
            written = os.pwrite(self._fd, bytes(length), self.end.offset)
        except OSError:
            self._reserves = False
        else:
            self._reserved_size = self.end.offset + written

    def cut_unused(self) -> None:
        """Cuts off reserved room that was not written."""
        if self._reserved_size > self.end.offset:
            os.ftruncate(self._fd, self.end.offset)
            self._reserved_size = self.end.offset

    def sync(self) -> None:
        fault_points.point("journal.sync", self._fd, kept=self._synced_size)
        datasync(self._fd)
        self._synced_size = self.end.offset
        self.synced_seq = self.end.seq

    def seal(self) -> Cursor:
        """Closes the active segment and begins the next one; does nothing while it is empty.

        The segment is synced before the next one exists, whatever the durability: so a segment with a successor is
        complete, and a bad line in it is damage and never a torn tail.
        """
        seq, _, offset = self.end
        if offset == 0:
            return self.end
        fault_points.point("journal.seal", self._fd, kept=self._synced_size)
        self.cut_unused()
        if FULL_SYNC is not None:
            datasync(self._fd)
        os.fsync(self._fd)  # also the truncation, not only the bytes
        self.synced_seq = seq
        old, self._fd = self._fd, create_segment(self._folder, seq + 1)
        os.close(old)
        self._reserved_size = self._synced_size = 0
        self.end = Cursor(seq, seq + 1, 0)
        return self.end

    def close(self) -> None:
        os.close(self._fd)


class SegmentReader:
    """Reads complete lines from a cursor up to an end, at a cost that does not depend on the journal's length.

    For one thread. It keeps the descriptor of the segment that it last read: beside a busy loop each system call can
    cost a wait for the interpreter's lock.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._segment = 0
        self._fd = -1

    def read(self, cursor: Cursor, end: Cursor, max_bytes: int) -> Lines:
        """Reads at most `max_bytes`, but at least one line if there is one before `end`."""
        while cursor.seq < end.seq:
            fd = self._open(cursor.segment)
            sealed = cursor.segment != end.segment
            limit = os.fstat(fd).st_size if sealed else end.offset
            if cursor.offset < limit:
                return self._lines(fd, cursor, limit, max_bytes)
            cursor = Cursor(cursor.seq, cursor.seq + 1, 0)
        return Lines(b"", cursor.seq, cursor)

    def _lines(self, fd: int, cursor: Cursor, limit: int, max_bytes: int) -> Lines:
        length = max(max_bytes, 1)
        while True:
            data = os.pread(fd, min(length, limit - cursor.offset), cursor.offset)
            whole = data.rfind(b"\n") + 1
            if whole:
                break
            if len(data) < length:
                raise OSError(errno.EIO, f"segment {cursor.segment} is shorter than what was written to it")
            length *= 2
        last_seq = seq_of(data[data.rfind(b"\n", 0, whole - 1) + 1 : whole])
        return Lines(data[:whole], last_seq, Cursor(last_seq, cursor.segment, cursor.offset + whole))

    def sync(self, segment: int) -> None:
        """Writes a segment's bytes to the disk, for a journal whose writer does not."""
        fault_points.point("journal.sync")
        datasync(self._open(segment))

    def _open(self, segment: int) -> int:
        if segment != self._segment:
            self.close()
            self._fd = os.open(segment_path(self._folder, segment), os.O_RDONLY)
            self._segment = segment
        return self._fd

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._segment, self._fd = 0, -1
