"""The machine under the measurement: how busy it is, what a sync costs, what a process uses."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Final

_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")


def load_average() -> float:
    return os.getloadavg()[0]


class Noise:
    """How much of the machine others use from now on, the kernel's own threads included."""

    def __init__(self) -> None:
        self._begun_s = perf_counter()
        self._others_s = _others_s()

    def cores(self) -> float:
        """As a share of one core. Processes of ours that still run count as others'."""
        return max(0.0, _others_s() - self._others_s) / (perf_counter() - self._begun_s)


def _others_s() -> float:
    user, nice, system, _, _, *rest = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:9]
    busy_s = sum(map(int, (user, nice, system, *rest))) / _TICKS_PER_S
    ours = os.times()
    return busy_s - (ours.user + ours.system + ours.children_user + ours.children_system)


def described(folder: Path) -> str:
    return (
        f"{os.cpu_count()} cores, Python {platform.python_version()}, {platform.system()} {platform.release()}; "
        f"fdatasync of 1 KiB {sync_s(folder) * 1e6:.0f} µs (median); load average {load_average():.2f}"
    )


def sync_s(folder: Path, count: int = 50) -> float:
    """The median time of appending 1 KiB and syncing it."""
    path = folder / "sync.probe"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    took: list[float] = []
    try:
        for _ in range(count):
            begun = perf_counter()
            os.write(fd, b"x" * 1024)
            os.fdatasync(fd)
            took.append(perf_counter() - begun)
    finally:
        os.close(fd)
        path.unlink()
    return median(took)


def cpu_s(pid: int) -> float:
    """User and system time so far, of all threads of a process and of every process that it started."""
    ticks, children = _ticks(pid), _children()
    below = list(children.get(pid, ()))
    while below:
        child = below.pop()
        ticks += _ticks(child)
        below += children.get(child, ())
    return ticks / _TICKS_PER_S


def _children() -> dict[int, list[int]]:
    children: dict[int, list[int]] = {}
    for path in Path("/proc").iterdir():
        if path.name.isdigit() and (fields := _stat(int(path.name))):
            children.setdefault(int(fields[1]), []).append(int(path.name))
    return children


def _ticks(pid: int) -> int:
    """With those of children that have ended; none if it has ended itself."""
    return sum(map(int, _stat(pid)[11:15]))


def _stat(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(") ")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def resident_mib(pid: int) -> float:
    """What another process holds in memory, of its own."""
    for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) / 1024
    raise LookupError(f"process {pid} has no memory")


def resident_bytes() -> int:
    """What this process holds in memory now."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * _PAGE_BYTES


def forget_pages(folder: Path) -> None:
    """Drop a folder's files from the page cache: as cold as it gets without root."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            try:
                os.fsync(fd)  # dirty pages cannot be dropped
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
