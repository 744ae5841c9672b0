"""Files of a home: private folders, and error texts for a disk that fails or is full.

An error names the file, the reason, the free space and the fix.
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
_MAKE_ROOM: Final = "make room, and start it again; nothing that was acknowledged is lost"
_FIXES: Final = {
    errno.ENOSPC: _MAKE_ROOM,
    errno.EDQUOT: _MAKE_ROOM,
    errno.EROFS: "mount its file system for writing, or choose another home with --home",
    errno.EACCES: "run it as the owner of the home, or give the home to the user who runs it (chown -R)",
    errno.EPERM: "run it as the owner of the home, or give the home to the user who runs it (chown -R)",
    errno.EIO: "the disk or its file system fails: repair it, or restore the home on another one from a backup",
}


def free_bytes(folder: Path) -> int | None:
    """The number of bytes that this user can still write there; None if it is unknown."""
    try:
        found = os.statvfs(folder)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize


def free_space_text(path: Path) -> str:
    free = free_bytes(path if path.is_dir() else path.parent)
    return "" if free is None else f" ({free / MIB:,.1f} MiB are free there)"


def unusable(path: Path, reason: str, number: int | None) -> HomeUnusable:
    """The error for a home with an unusable file. `number` is the system's error number, if there is one."""
    free = free_bytes(path.parent)
    # SQLite reports an I/O error when there is no room for its shared memory.
    full = free is not None and free < MIB and number != errno.EROFS
    known = _MAKE_ROOM if full else _FIXES.get(number or 0)
    fix = f"{known}; " if known else ""
    message = f"{path}: {reason}{free_space_text(path)}; {fix}`covenant doctor` looks at all of the home"
    return HomeUnusable(message, number)


def unusable_by(error: OSError, fallback: Path) -> HomeUnusable:
    """The error for a failed system call. `fallback` is named if the error names no file."""
    named = error.filename if isinstance(error.filename, str) else None
    return unusable(Path(named) if named else fallback, error.strerror or str(error), error.errno)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Adds this file's name to system errors that name no file."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def make_private_folder(folder: Path) -> None:
    """Creates a private folder if it is missing. Missing parents are readable by others, writable by the owner."""
    missing = [parent for parent in folder.parents if not parent.exists()]
    for parent in reversed(missing):
        parent.mkdir(mode=0o755, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)


def open_private(path: str, flags: int) -> int:
    """An `opener` for `open` that creates private files."""
    return os.open(path, flags, 0o600)


def open_owned(path: str | Path, flags: int) -> int:
    """An `opener` for a file of a home. A file that root creates in another user's folder belongs to that user.

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
    """Creates a folder of a home. A folder that root creates in another user's folder belongs to that user."""
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
    """Replaces a file's content durably: a crash leaves the old content or the new one."""
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
