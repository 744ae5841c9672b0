"""Named fault points: one before every step that touches a file, so that a test can stop the process exactly there.

`point(name)` stands directly before the step that it names. Unless a plan is armed it does nothing, at the cost of one
look at a global. An armed plan counts the hits of every point and, at the n-th hit of the point that it names, performs
its action: kill the process, tear the write, lose unsynced data, or fail as a disk fails. "After step A" needs no point
of its own: it is "before the step that follows A".

Nothing here reads the environment or arms itself.
"""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
_KNOWN: Final = frozenset((*POINTS, *BLOB_POINTS, *MOVE_POINTS))


class FaultPoint(NamedTuple):
    """The step that is about to happen at a point. Fields that a step does not have are empty."""

    name: str
    fd: int  # the file that the step touches, -1 if none is open
    data: bytes  # the bytes that the step is about to write
    kept: int  # the number of bytes of the file that are known to be synced
    path: Path | None  # a name in a directory that was not yet synced


Action = Callable[[FaultPoint], None]


def kill(_step: FaultPoint) -> None:
    """`kill -9`: written bytes stay, later steps never happen."""
    os.kill(os.getpid(), signal.SIGKILL)


def tear(length: int) -> Action:
    """The process dies with only the first bytes of this write in the file."""

    def action(step: FaultPoint) -> None:
        if step.fd >= 0 and step.data:
            os.write(step.fd, step.data[:length])
        kill(step)

    return action


def lose(step: FaultPoint) -> None:
    """The power fails: unsynced bytes and names are gone."""
    if step.fd >= 0:
        os.ftruncate(step.fd, step.kept)
    elif step.path is not None:
        step.path.unlink(missing_ok=True)
    kill(step)


def fail(errno: int, *, written: int = 0) -> Action:
    """The disk refuses this step (EIO, ENOSPC), after taking the first `written` bytes of it."""

    def action(step: FaultPoint) -> None:
        if written and step.fd >= 0 and step.data:
            os.write(step.fd, step.data[:written])
        raise OSError(errno, os.strerror(errno))

    return action


class Plan:
    """The action at the n-th hit of one point; without an action it only counts. Any thread may hit it."""

    def __init__(self, name: str | None = None, action: Action | None = None, *, nth: int = 1) -> None:
        if name is not None and name not in _KNOWN:
            raise ValueError(f"{name!r} is not a crash point; the points are {', '.join(sorted(_KNOWN))}")
        self.hits: Counter[str] = Counter()
        self.fired = False
        self._name = name
        self._action = action
        self._nth = nth
        self._lock = threading.Lock()

    def hit(self, step: FaultPoint) -> None:
        assert step.name in _KNOWN, f"the point {step.name!r} is missing from POINTS"
        with self._lock:
            self.hits[step.name] += 1
            due = step.name == self._name and self.hits[step.name] == self._nth
            self.fired = self.fired or due
        if due and self._action is not None:
            self._action(step)


_plan: Plan | None = None


def point(name: str, fd: int = -1, data: bytes = b"", kept: int = 0, path: Path | None = None) -> None:
    if _plan is not None:
        _plan.hit(FaultPoint(name, fd, data, kept, path))


def arm(plan: Plan | None) -> None:
    """One plan for the whole process; None disarms."""
    global _plan  # noqa: PLW0603  the point of this module: call sites must not carry a plan around
    _plan = plan


@contextmanager
def armed(plan: Plan) -> Iterator[Plan]:
    arm(plan)
    try:
        yield plan
    finally:
        arm(None)
