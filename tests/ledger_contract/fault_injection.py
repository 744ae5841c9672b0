"""Faults by environment variable: what goes wrong, where, and at the how-manieth time.

    COVENANT_FAULT = <crash point>:<n>:<fault>       "journal.sync:3:lose"
    COVENANT_FAULT_NOTES = <folder>                  hits are counted there, over all processes that share it
    COVENANT_FAULT_HOME = <folder>                   the home that a power cut strips of what was not synced

The points are those of `covenant.ledger.embedded.fault_points`. Without a fault hits are only counted. Whoever runs
a program
under faults calls `arm` with its environment before anything else is imported; the shipped programs never do.

    kill     SIGKILL to the whole process group
    tear     half of the write reaches the file, then SIGKILL
    lose     a power cut: what was not synced is gone; what may be left is in <notes>/images
    eio      the step fails with EIO; enospc: with ENOSPC, after half of the write
"""

from __future__ import annotations

import errno
import fcntl
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from tests.ledger_contract.synced_disk import Disk

FAULT: Final = "COVENANT_FAULT"
NOTES: Final = "COVENANT_FAULT_NOTES"
HOME: Final = "COVENANT_FAULT_HOME"
FAULTS: Final = ("kill", "tear", "lose", "eio", "enospc")
IMAGES: Final = "images"
COUNTS: Final = "counts"
DISK: Final = "disk"


def arm(environment: Mapping[str, str]) -> None:
    """Arm this process as the environment says, if it says anything."""
    notes = environment.get(NOTES)
    if notes is None:
        return
    folder = Path(notes)
    (folder / COUNTS).mkdir(exist_ok=True)
    disk = None
    if HOME in environment:
        disk = Disk(Path(environment[HOME]), folder / DISK)
        disk.watch()
    # Only now: the modules below bind what `watch` replaces.
    from covenant.ledger.embedded import fault_points  # noqa: PLC0415

    def strike(step: fault_points.FaultPoint) -> None:
        half = step.data[: len(step.data) // 2] if step.fd >= 0 else b""
        match fault:
            case "kill":
                _die()
            case "tear":
                _write(step.fd, half)
                _die()
            case "lose":
                assert disk is not None, f"{HOME} must say where"
                disk.images(folder / IMAGES)
                _die()
            case "eio":
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            case "enospc":
                _write(step.fd, half)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            case _:
                raise AssertionError(f"{fault!r} is not a fault; the faults are {', '.join(FAULTS)}")

    point, nth, fault = environment[FAULT].split(":") if FAULT in environment else ("", "0", "")

    def hit(step: fault_points.FaultPoint) -> None:
        """Counts in files, so that a second process goes on where the first one is."""
        known = (*fault_points.POINTS, *fault_points.BLOB_POINTS, *fault_points.MOVE_POINTS)
        assert step.name in known, f"the point {step.name!r} is missing from POINTS"
        if _count(folder / COUNTS / step.name) == int(nth) and step.name == point:
            strike(step)

    fault_points.arm(hit)


def hits(notes: Path) -> dict[str, int]:
    """How often each point was hit by now."""
    return {path.name: path.stat().st_size for path in (notes / COUNTS).iterdir()}


def _count(path: Path) -> int:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        os.write(fd, b".")
        return os.fstat(fd).st_size
    finally:
        os.close(fd)


def _write(fd: int, data: bytes) -> None:
    if fd >= 0 and data:
        os.write(fd, data)


def _die() -> None:
    """The whole group: a power cut or an out-of-memory killer is not kind to children either."""
    os.killpg(os.getpgid(0), signal.SIGKILL)
    signal.pause()
