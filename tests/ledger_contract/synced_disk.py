"""A disk that keeps nothing but what was synced: what a home would look like after a power cut, at any moment.

`Disk` watches this process sync files and directories below a root, and keeps a copy of what is durable by then: the
bytes of a file as of its last sync, and the names in a directory as of its last one. `images` writes out what a power
cut would leave: a file that was never synced is empty, a name that its directory never synced is not there. The worst
case the rules allow; `kill -9` is the best one.

Several processes may watch the same root: what is known is kept in a folder, under a lock. SQLite syncs on its own,
unseen; its log is taken as lost, and its main file as durable, because only a checkpoint writes there, and syncs.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec

UNSEEN: Final = ("-wal", "-shm", "-journal")
DATABASE: Final = ".db"


class _Known(msgspec.Struct):
    """`nodes`: inode to the file it is now; `names`: directory to what its last sync found in it."""

    nodes: dict[str, str] = {}
    names: dict[str, dict[str, str]] = {}
    files: int = 0


class Disk:
    def __init__(self, root: Path, notes: Path) -> None:
        self._root = root.resolve()
        self._notes = notes
        self._mutex = threading.RLock()
        notes.mkdir(exist_ok=True)
        self._fsync = os.fsync
        self._fdatasync = getattr(os, "fdatasync", os.fsync)
        self._open = os.open

    def watch(self) -> None:
        """From now on, for the rest of this process. Before the modules that bind these functions are imported."""

        def fsync(fd: int) -> None:
            self._synced(fd, self._fsync)

        def fdatasync(fd: int) -> None:
            self._synced(fd, self._fdatasync)

        def opened(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
            new = bool(flags & os.O_CREAT) and not os.path.lexists(path)
            fd = self._open(path, flags, mode, dir_fd=dir_fd)
            if new:
                self._created(fd)
            return fd

        os.fsync = fsync  # type: ignore[assignment]
        os.fdatasync = fdatasync  # type: ignore[assignment]
        os.open = opened

    def adopt(self) -> None:
        """Take everything that is there now as durable: where a test starts from."""
        with self._locked() as known:
            for folder, _, files in os.walk(self._root):
                for name in files:
                    path = Path(folder, name)
                    shutil.copy(path, self._file(known, path.stat().st_ino))
                known.names[folder] = self._listed(known, Path(folder))

    def images(self, target: Path) -> None:
        """Write what a power cut may leave now, into folders in `target`.

        Nobody promises in which order names come and go without a sync. So there are two: in one, names that were
        removed are back; in the other they are gone, although what was named later is not there yet either.
        Nothing is synced by this process any more: the lock is kept.
        """
        self._mutex.acquire()
        target.mkdir()
        with self._locked() as known:
            self._restore(known, self._root, target / "removed-are-back", gone=False)
            self._restore(known, self._root, target / "removed-are-gone", gone=True)

    def _restore(self, known: _Known, folder: Path, target: Path, *, gone: bool) -> None:
        target.mkdir(mode=0o700)
        for name, node in known.names.get(str(folder), {}).items():
            if gone and not (folder / name).exists():
                continue
            if node == "folder":
                self._restore(known, folder / name, target / name, gone=gone)
            elif node == "database":
                shutil.copy(folder / name, target / name)
            elif (self._notes / node).exists():
                shutil.copy(self._notes / node, target / name)
            else:
                (target / name).touch()

    def _synced(self, fd: int, sync: Any) -> None:
        with self._mutex:
            sync(fd)
            path = Path(f"/proc/self/fd/{fd}").readlink()
            if not path.is_relative_to(self._root):
                return
            status = os.fstat(fd)
            with self._locked() as known:
                if stat.S_ISDIR(status.st_mode):
                    known.names[str(path)] = self._listed(known, path)
                else:
                    shutil.copy(f"/proc/self/fd/{fd}", self._file(known, status.st_ino))

    def _created(self, fd: int) -> None:
        """A new file has nothing durable in it, whatever file had its inode before."""
        with self._mutex:
            status = os.fstat(fd)
            if Path(f"/proc/self/fd/{fd}").readlink().is_relative_to(self._root):
                with self._locked() as known:
                    known.nodes.pop(str(status.st_ino), None)

    def _file(self, known: _Known, inode: int) -> Path:
        """Where the durable bytes of a file are kept."""
        node = known.nodes.get(str(inode))
        if node is None:
            known.files += 1
            node = known.nodes[str(inode)] = f"file-{known.files}"
        return self._notes / node

    def _listed(self, known: _Known, folder: Path) -> dict[str, str]:
        names: dict[str, str] = {}
        for found in os.scandir(folder):
            if found.is_dir(follow_symlinks=False):
                names[found.name] = "folder"
            elif found.name.endswith(DATABASE):
                names[found.name] = "database"
            elif found.is_file(follow_symlinks=False) and not found.name.endswith(UNSEEN):
                names[found.name] = self._file(known, found.inode()).name
        return names

    @contextmanager
    def _locked(self) -> Iterator[_Known]:
        lock = self._open(self._notes / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            path = self._notes / "known.json"
            known = msgspec.json.decode(path.read_bytes(), type=_Known) if path.exists() else _Known({}, {})
            yield known
            path.write_bytes(msgspec.json.encode(known))
        finally:
            os.close(lock)
