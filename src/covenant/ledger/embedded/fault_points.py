"""Named fault points: one before every step that touches a file, so that a test can stop the process exactly there.

`point(name)` stands directly before the step that it names. Unless a test has armed it, it does nothing, at the cost of
one look at a global. "After step A" needs no point of its own: it is "before the step that follows A".

Nothing here reads the environment or arms itself.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

POINTS: Final = (
    "journal.write",  # a batch of lines is about to be written to the active segment
    "journal.sync",  # the batch is written, and not yet synced
    "journal.acknowledge",  # the batch is durable, and not acknowledged
    "journal.seal",  # the active segment is full (or asked to close), its last bytes about to be synced
    "journal.create_segment",  # the old segment is sealed, the new one does not exist
    "journal.sync_dir",  # the new segment exists, its name is not durable
    "journal.drop_segment",  # a covered segment is about to be unlinked
    "journal.sync_drop",  # covered segments are unlinked, the directory is not synced
    "opening.keep_torn",  # a torn tail is about to be copied aside
    "opening.copy_tail",  # the good bytes of the tail are about to be copied (one hit a chunk)
    "opening.sync_tail",  # the copy is whole, and not synced
    "opening.rename_tail",  # the copy is durable, the old tail still has the name
    "opening.sync_dir",  # the copy has the name, the directory is not synced
    "snapshot.write",
    "snapshot.sync",
    "snapshot.rename",
    "snapshot.sync_dir",
    "archive.apply",
    "archive.commit",
    "archive.erase",  # a batch of finished tasks is about to be erased
    "archive.erase_commit",
    "archive.scrub",  # the archive is about to be rewritten without erased data
    "archive.scrub_truncate",  # the archive is rewritten, and the WAL still has old pages
    "archive.pack_commit",
    "compaction.drop",
    "compaction.drop_snapshot",
)
BLOB_POINTS: Final = (
    "blobs.write",  # a piece of a blob is about to be written
    "blobs.sync",  # the piece is written, and not yet synced
    "blobs.sync_staged",  # its bytes are durable, its staged name and first reference are not
    "blobs.rename",  # the staged blob is complete and durable
    "blobs.sync_dir",  # the blob is published, its name is not durable
    "blobs.replace",  # the same content came again, and is about to replace the bytes
    "blobs.refer",  # a further reference is about to be created
    "blobs.sync_reference",  # the reference is created, and not durable
    "blobs.drop_reference",  # a reference to an unknown task is about to be dropped
    "blobs.condemn",  # no task refers to a blob, which is about to be moved away
    "blobs.drop",  # the blob is moved away, its bytes still exist
)
"""Points of the blob store."""
MOVE_POINTS: Final = (
    "move.written",  # the target is written, and not compared yet
    "move.commit",  # the target is compared, the database is about to commit
    "move.mark",  # the database has the ledger, the home is not marked so
    "move.publish",  # the database has released the ledger, the home has it in a staging folder
    "move.place",  # the journal is in its place in the home, the other files are still in the staging folder
    "move.unmark",  # every file is in its place, the home is still marked
)
"""Points of a move between a home and a database."""


class FaultPoint(NamedTuple):
    """The step that is about to happen at a point. Fields that a step does not have are empty."""

    name: str
    fd: int  # the file that the step touches, -1 if none is open
    data: bytes  # the bytes that the step is about to write
    kept: int  # the number of bytes of the file that are known to be synced
    path: Path | None  # a name in a directory that was not yet synced


_armed: Callable[[FaultPoint], None] | None = None


def point(name: str, fd: int = -1, data: bytes = b"", kept: int = 0, path: Path | None = None) -> None:
    if _armed is not None:
        _armed(FaultPoint(name, fd, data, kept, path))


def arm(hit: Callable[[FaultPoint], None] | None) -> None:
    """One for the whole process, called at every point by any thread; None disarms."""
    global _armed  # noqa: PLW0603  the point of this module: call sites must not carry a plan around
    _armed = hit
