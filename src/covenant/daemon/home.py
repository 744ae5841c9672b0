"""The home: the folder with a daemon's identity and memory, and the secrets in it.

    settings.toml        optional
    operator.token       the operator's bearer token: who can read it is the operator
    identity/local.key   the Ed25519 key that signs grants, 32 bytes in hex; or locked with a passphrase (`keystore`)
    sock, lock           where the CLI calls; one daemon at a time
    http.url             where the daemon listens for HTTP, while it does

A daemon does not start with a secret that others can read, or that is not a plain file. A secret gets its name when it
is on disk, and is never replaced by accident: two daemons that start at once on an empty home use the same one.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from covenant.ledger.embedded.disk import make_owned_folder, make_private_folder, open_owned, sync_dir
from covenant.model.errors import CovenantError, SettingsError
from covenant.model.ids import base58_size

LOST_COMMITS_NAME: Final = "lost_commits.json"
"""The commits that the ledger's database has lost, as far as this daemon knows."""
TOKEN_NAME: Final = "operator.token"  # noqa: S105  (the name of a file)
KEY_NAME: Final = "identity/local.key"
SOCKET_NAME: Final = "sock"
JOURNAL_NAME: Final = "journal"
SECRET_BYTES_MAX: Final = 4_096
_TOKEN: Final = re.compile(r"[!-~]+").fullmatch
OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO
URL_NAME: Final = "http.url"
URL_LENGTH_MAX: Final = 300


class UnsafeHome(CovenantError):
    """The home, or a secret in it, cannot be trusted as it is. The message says what to do."""


class LockedHome(UnsafeHome):
    """The key is encrypted with a passphrase, and none, or a wrong one, was given."""


def make_home(home: Path) -> None:
    """Makes the folder, for its owner alone. Refuses a folder that others may write to: they could swap the secrets."""
    try:
        make_private_folder(home)
        mode = home.stat().st_mode
    except OSError as error:
        raise UnsafeHome(f"the home {home} cannot be made: {error.strerror}; choose another with --home") from error
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise UnsafeHome(f"others may write to the home {home}; run: chmod 700 {home}")


def is_there(path: Path) -> bool:
    """Whether something has this name; a dangling link counts, too."""
    return path.exists() or path.is_symlink()


def read_or_make_token(home: Path, new_token: Callable[[], str]) -> str:
    path = home / TOKEN_NAME
    if not is_there(path):
        _make_secret(path, new_token())
    return read_token(path)


def read_token(path: Path) -> str:
    token = read_secret(path)
    if base58_size(token) != 32:
        raise UnsafeHome(f"{path} holds no token; remove it, and the next start makes a new one")
    return token


def save_token(home: Path, token: str) -> None:
    save_secret(home / TOKEN_NAME, token)


def save_secret(path: Path, text: str) -> None:
    """Replaces the secret, durably."""
    _write_aside(path, text).replace(path)
    sync_dir(path.parent)


def make_key_file(path: Path, text: str) -> None:
    """Writes the secret unless there is one."""
    make_owned_folder(path.parent, exist_ok=True)
    _make_secret(path, text)


def read_secret(path: Path) -> str:
    return read_secret_bytes(path, SECRET_BYTES_MAX).decode("ascii", "replace").strip()


def read_secret_bytes(path: Path, bytes_max: int) -> bytes:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if path.is_symlink():
            raise UnsafeHome(f"{path} is a symbolic link; put the file itself there") from error
        raise UnsafeHome(f"{path} cannot be read: {error.strerror}") from error
    with os.fdopen(fd, "rb") as file:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise UnsafeHome(f"{path} is not a plain file; put the file itself there")
        if found.st_mode & OTHERS:
            raise UnsafeHome(f"others can read {path}; run: chmod 600 {path}")
        if found.st_uid not in _trusted(path):
            raise UnsafeHome(f"{path} belongs to another user; make it yours, or run as its owner")
        return file.read(bytes_max)


def _trusted(path: Path) -> tuple[int, ...]:
    """The users who may own a secret here: the caller and root; for root, also the owner of the folder."""
    caller = os.geteuid()
    return (caller, 0) if caller else (0, path.parent.stat().st_uid)


def read_token_file(named: str, named_by: str) -> str:
    """The token in a file for its owner alone; empty if no file is named. Raises SettingsError and UnsafeHome."""
    if not named:
        return ""
    path = Path(named).expanduser()
    token = read_secret(path)
    if not _TOKEN(token):
        raise SettingsError(f"{named_by}: {path} must have one token, without spaces, in ASCII")
    return token


def _make_secret(path: Path, text: str) -> None:
    """Makes a new file. If another process was faster, its file stays."""
    unfinished = _write_aside(path, text)
    try:
        with suppress(FileExistsError):
            os.link(unfinished, path)
    finally:
        unfinished.unlink()
    sync_dir(path.parent)


def drop_unfinished(path: Path) -> None:
    """Removes the temporary files that a crash left of this secret. The caller holds the home's lock."""
    for unfinished in path.parent.glob(f".{path.name}.*.tmp"):
        unfinished.unlink(missing_ok=True)


def _write_aside(path: Path, text: str) -> Path:
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    unfinished.unlink(missing_ok=True)
    fd = open_owned(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    with os.fdopen(fd, "w", encoding="ascii") as file:
        file.write(text + "\n")
        file.flush()
        os.fsync(fd)
    return unfinished


def url_files(home: Path) -> tuple[Path, Path]:
    """The file with the daemon's URL, and the temporary file that becomes it."""
    path = home / URL_NAME
    return path, path.with_suffix(".new")


@contextmanager
def published_url(home: Path, url: str) -> Iterator[None]:
    """Keeps the daemon's URL in a file while it listens."""
    path, aside = url_files(home)
    try:
        aside.unlink(missing_ok=True)
        with open(aside, "x", encoding="ascii", opener=open_owned) as file:
            file.write(url + "\n")
        aside.replace(path)
    except OSError as error:
        raise UnsafeHome(
            f"{path} cannot be written: {error.strerror}; make room for it, or remove what is there"
        ) from error
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def url_in(home: Path) -> str | None:
    """The URL in the file; None if no daemon listens here."""
    with suppress(OSError, UnicodeDecodeError):
        url = (home / URL_NAME).read_text(encoding="ascii").strip()
        if url.startswith(("http://", "https://")) and len(url) <= URL_LENGTH_MAX:
            return url
    return None
