"""What the archive and its writer are to each other: where records come from, and who has the file open for writing."""

from __future__ import annotations

from typing import Protocol

from covenant.ledger.contract.retention import Erased, EraseTasks, Scrub
from covenant.ledger.embedded.journal.segments import Cursor, Lines


class ArchiveSource(Protocol):
    """Where durable records come from. For one thread other than the loop's; `Journal` is one."""

    def cursor(self, after_seq: int) -> Cursor: ...
    def read(self, cursor: Cursor, max_bytes: int) -> Lines: ...
    def trim(self, seq: int) -> None: ...
    def release(self) -> None:
        """Nothing more is read for now."""


class ArchiveWriter(Protocol):
    """Whoever has the archive open for writing. For one thread; after an exception there is only `close`."""

    archived_seq: int
    rejected: int
    """How many records are set aside."""

    def apply_next(self) -> int:
        """Apply the next batch of durable records; the seq that the archive has come to."""

    def checkpoint(self) -> bool:
        """Sync everything applied so far; False if somebody is in the way."""

    def erase(self, which: EraseTasks | Scrub) -> Erased: ...
    def pack_older(self, after_no: int) -> int | None:
        """Pack some finished tasks behind one; where to go on, or None if there are no more."""

    def close(self) -> None: ...
