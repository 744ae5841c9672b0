"""Files of a home: folders for their owner alone, and what to tell when the disk does not take or give one.

An error names the file, the reason, how much room there is, and what to do.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from covenant.model.errors import HomeUnusable

MIB: Final = 1 << 20
_ROOM: Final = "make room, and start it again; nothing that was acknowledged is lost"
_WAYS_OUT: Final = {
    errno.ENOSPC: _ROOM,
    errno.EDQUOT: _ROOM,
    errno.EROFS: "mount its file system for writing, or choose another home with --home",
    errno.EACCES: "run it as the owner of the home, or give the home to whoever runs it (chown -R)",
    errno.EPERM: "run it as the owner of the home, or give the home to whoever runs it (chown -R)",
    errno.EIO: "the disk or its file system fails: mend it, or put the home on another one from a backup",
}


def free_bytes(folder: Path) -> int | None:
    """What whoever runs this can still write there; None if that cannot be told."""
    try:
        found = os.statvfs(folder)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize


def told_free(path: Path) -> str:
    free = free_bytes(path if path.is_dir() else path.parent)
    return "" if free is None else f" ({free / MIB:,.1f} MiB are free there)"


def unusable(path: Path, reason: str, number: int | None) -> HomeUnusable:
    """The refusal of a home because of one file. `number` is the system's error number, if there is one."""
    free = free_bytes(path.parent)
    # SQLite calls it an I/O error when there is no room for its shared memory.
    full = free is not None and free < MIB and number != errno.EROFS
    known = _ROOM if full else _WAYS_OUT.get(number or 0)
    way_out = f"{known}; " if known else ""
    told = f"{path}: {reason}{told_free(path)}; {way_out}`covenant doctor` looks at all of the home"
    return HomeUnusable(told, number)


def unusable_by(error: OSError, fallback: Path) -> HomeUnusable:
    """The same of a failed system call. `fallback` is named where the error names no file."""
    named = error.filename if isinstance(error.filename, str) else None
    return unusable(Path(named) if named else fallback, error.strerror or str(error), error.errno)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Give system errors that name no file this one's name."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def make_private_folder(folder: Path) -> None:
    """Unless it is there. Folders that lead to it and are missing can be read by others, and changed by nobody else."""
    missing = [parent for parent in folder.parents if not parent.exists()]
    for parent in reversed(missing):
        parent.mkdir(mode=0o755, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)


def open_private(path: str, flags: int) -> int:
    """An `opener` for `open`."""
    return os.open(path, flags, 0o600)


def open_owned(path: str | Path, flags: int) -> int:
    """An `opener` for a file of a home. What root makes in another user's folder belongs to that user.

    Root follows no link in such a folder: its owner could have put the link there.
    """
    owner = _other_owner(os.path.dirname(path) or ".")
    if owner is None:
        return os.open(path, flags, 0o600)
    fd = os.open(path, flags | os.O_NOFOLLOW, 0o600)
    try:
        found = os.fstat(fd)
        if found.st_uid == 0 and found.st_nlink == 1:
            os.fchown(fd, *owner)
    except BaseException:
        os.close(fd)
        raise
    return fd


def make_owned_folder(folder: Path, *, exist_ok: bool = False) -> None:
    """A new folder of a home. What root makes in another user's folder belongs to that user."""
    owner = _other_owner(folder.parent)
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        if not exist_ok or not folder.is_dir():
            raise
        return
    if owner is not None:
        os.chown(folder, *owner, follow_symlinks=False)


def _other_owner(folder: str | Path) -> tuple[int, int] | None:
    """User and group of a folder, if root runs this and the folder is another user's."""
    if os.geteuid() != 0:
        return None
    found = os.stat(folder)
    return (found.st_uid, found.st_gid) if found.st_uid else None


def replace_private(path: Path, data: bytes) -> None:
    """Give a file this content, durably: a crash leaves the old one, or the new one."""
    unfinished = path.with_suffix(".tmp")
    with open(unfinished, "wb", opener=open_owned) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, path)
    sync_dir(path.parent)


def sync_dir(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
