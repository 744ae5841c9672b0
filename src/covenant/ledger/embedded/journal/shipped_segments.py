"""The record of shipped sealed segments: `backup.json` in the home, beside the ledger.

Compaction drops only shipped segments, as long as those that wait take no more than `kept_bytes_max`. Above that the
oldest are dropped unshipped, which leaves a gap: an older backup cannot be brought past it. A backup that is newer than
the gap closes it. `doctor` reads the same file of a closed home.
"""

from __future__ import annotations

import threading
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from covenant.ledger.embedded.disk import replace_private
from covenant.ledger.embedded.journal.segments import Segment, list_segments

STATUS_NAME: Final = "backup.json"
STATUS_BYTES_MAX: Final = 64 << 10
REASON_LENGTH_MAX: Final = 500


class ShippingStatus(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """`failures` counts those in a row; `gap` is the last record dropped unshipped, and in no backup since."""

    shipped_seq: int = 0
    failures: int = 0
    failure: str | None = None
    failing_since_ms: int | None = None
    gap: int = 0
    backup_seq: int = 0
    backup_at_ms: int | None = None

    @property
    def warning(self) -> str | None:
        """A warning for the operator: a sentence, then the fix after a semicolon."""
        if self.gap > self.backup_seq:
            return f"segments through record {self.gap} were dropped before they were shipped; take a new backup"
        if self.failure is not None:
            return (
                f"backup.command has failed {self.failures} time(s): {self.failure}; correct it, the daemon tries again"
            )
        return None


class SealedSegment(NamedTuple):
    first_seq: int
    last_seq: int
    path: Path


def sealed_segments(folder: Path) -> list[SealedSegment]:
    """All segments but the newest, oldest first."""

    def sealed(segment: Segment, after: Segment) -> SealedSegment:
        return SealedSegment(segment.first_seq, after.first_seq - 1, segment.path)

    return [sealed(segment, after) for segment, after in pairwise(list_segments(folder))]


def read_status(home: Path) -> ShippingStatus:
    """The stored status; an unreadable one counts as empty: its segments are shipped once more."""
    try:
        with open(home / STATUS_NAME, "rb") as file:
            return msgspec.json.decode(file.read(STATUS_BYTES_MAX), type=ShippingStatus)
    except (FileNotFoundError, msgspec.MsgspecError):
        return ShippingStatus()


class ShippedSegments:
    """For any thread."""

    def __init__(self, home: Path, *, kept_bytes_max: int) -> None:
        self._home = home
        self._folder = home / "journal"
        self._kept_bytes_max = kept_bytes_max
        self._lock = threading.Lock()
        self.status = read_status(home)

    def pending(self) -> list[SealedSegment]:
        return [each for each in sealed_segments(self._folder) if each.last_seq > self.status.shipped_seq]

    def note_shipped(self, segment: SealedSegment) -> None:
        self._save(shipped_seq=segment.last_seq, failures=0, failure=None, failing_since_ms=None)

    def note_failure(self, reason: str, now_ms: int) -> None:
        was = self.status
        since_ms = was.failing_since_ms or now_ms
        self._save(failures=was.failures + 1, failure=reason[:REASON_LENGTH_MAX], failing_since_ms=since_ms)

    def note_backup(self, seq: int, now_ms: int) -> None:
        self._save(backup_seq=seq, backup_at_ms=now_ms)

    def droppable(self, seq: int) -> int:
        """The last record up to which compaction may drop, at most `seq`."""
        kept, over = 0, self.status.shipped_seq
        for segment in reversed(self.pending()):
            kept += segment.path.stat().st_size
            if kept > self._kept_bytes_max and segment.last_seq <= seq:
                over = segment.last_seq
                break
        if over > self.status.shipped_seq:
            self._save(gap=over, shipped_seq=over)
        return min(seq, over)

    def _save(self, **changed: Any) -> None:
        with self._lock:
            self.status = msgspec.structs.replace(self.status, **changed)
            replace_private(self._home / STATUS_NAME, msgspec.json.encode(self.status))
