"""A backup as one file: a tar of a home's files, with a manifest as its last member.

    journal/…, archive.db      the ledger at one position
    blobs/…                    the files that it refers to, and perhaps some more
    settings.toml, agents/…    the operator's own files
    operator.token, identity/… the secrets; locked ones stay locked
    manifest.json              the position, and the SHA-256 of every file above

The manifest comes last, so a truncated file has none. A reader trusts no name in a backup: a member that is not a plain
file, or whose name leads outside of the folder, is refused.

A running daemon first copies its ledger into a folder under `backups/` in the home, until it was read. A copy takes as
much room as the archive: it is not begun if that would leave less than `ROOM_BYTES_MIN` free. At most two copies are
kept, and none over a restart: a reader whose copy is gone begins again.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import os
import re
import shutil
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Final

import msgspec

from covenant.ledger.embedded.archive.archive_file import ARCHIVE_NAME
from covenant.ledger.embedded.blob_folder import FOLDER_NAME as BLOBS_NAME
from covenant.ledger.embedded.blob_folder import link_blobs
from covenant.ledger.embedded.disk import MIB, free_bytes, make_owned_folder, open_owned, sync_dir
from covenant.ledger.embedded.engine import EmbeddedLedger
from covenant.ledger.embedded.journal.shipped_segments import ShippedSegments
from covenant.model.errors import Conflict, CovenantError, Unavailable

STAGED_NAME: Final = "backups"
STAGED_MAX: Final = 2
ROOM_BYTES_MIN: Final = 256 * MIB
INCARNATION_NAME: Final = "incarnation.json"
ORIGINAL: Final = "original"
MANIFEST_NAME: Final = "manifest.json"
FORMAT: Final = 1
MANIFEST_BYTES_MAX: Final = 256 * MIB
FILES_MAX: Final = 1_000_000
HOME_FILES_MAX: Final = 50_000
HOME_FILE_BYTES_MAX: Final = 64 * MIB
HOME_FILES: Final = (
    "settings.toml",
    "operator.token",
    "mcp_servers.json",
    "a2a_agents.json",
    "model_prices.json",
    "identity",
    "agents",
    "memory",
)
"""The files of a home that a backup has besides the ledger. Folders are taken with everything in them."""
_MEMBER: Final = re.compile(r"(?!\.\.?/)[^/\x00]{1,255}(/(?!\.\.?(/|$))[^/\x00]{1,255}){0,15}")
_CHUNK_BYTES: Final = 1 << 20


class Incarnation(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """An epoch of a ledger: each restore begins a new one, with `position` records of the one before."""

    id: str = ORIGINAL
    restored_from: str | None = None
    position: int = 0
    restored_at_ms: int | None = None


def read_incarnation(home: Path) -> Incarnation:
    try:
        return msgspec.json.decode((home / INCARNATION_NAME).read_bytes(), type=Incarnation)
    except FileNotFoundError:
        return Incarnation()


class StagedBackup(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """`folder` has the archive and the journal up to record `position`, and no later one."""

    id: str
    folder: str
    position: int
    incarnation: str
    made_at_ms: int


class StagedBackups:
    """Used on the loop of its ledger. `shipped` records each copy, which closes gaps between earlier ones."""

    def __init__(
        self,
        home: Path,
        ledger: EmbeddedLedger,
        new_id: Callable[[], str],
        *,
        shipped: ShippedSegments | None = None,
    ) -> None:
        self._folder = home / STAGED_NAME
        self._home = home
        self._ledger = ledger
        self._new_id = new_id
        self._shipped = shipped
        self._staged: dict[str, Path] = {}
        self._staging = asyncio.Lock()

    @property
    def warning(self) -> str | None:
        return self._shipped.status.warning if self._shipped is not None else None

    async def clear(self) -> None:
        """Removes the copies of an earlier process."""
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)

    async def begin(self) -> StagedBackup:
        """Copies the present ledger. Raises Conflict while another copy is being made."""
        if self._staging.locked():
            raise Conflict("backup_running", "another backup is being made; repeat when it is done")
        async with self._staging:
            while len(self._staged) >= STAGED_MAX:
                await self.end(next(iter(self._staged)))
            self._check_room()
            backup_id = self._new_id()
            folder = self._folder / backup_id
            await asyncio.to_thread(_make_folder, folder)
            try:
                position = await self._ledger.copy_to(folder)
                # After the ledger, whose blobs were stored before it. Hard links keep them from being collected.
                await asyncio.to_thread(link_blobs, self._home / BLOBS_NAME, folder / BLOBS_NAME)
            except BaseException:
                await asyncio.shield(asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True))
                raise
            self._staged[backup_id] = folder
        now_ms = self._ledger.now_ms()
        if self._shipped is not None:
            await asyncio.to_thread(self._shipped.note_backup, position, now_ms)
        return StagedBackup(
            id=backup_id,
            folder=str(folder),
            position=position,
            incarnation=read_incarnation(self._home).id,
            made_at_ms=now_ms,
        )

    async def end(self, backup_id: str) -> bool:
        """Removes a copy; False if there is none with this id."""
        folder = self._staged.pop(backup_id, None)
        if folder is None:
            return False
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        return True

    def _check_room(self) -> None:
        needed = ROOM_BYTES_MIN + sum(_size(self._home / name) for name in (ARCHIVE_NAME, f"{ARCHIVE_NAME}-wal"))
        free = free_bytes(self._home)
        if free is not None and free < needed:
            why = f"a backup needs {needed / MIB:,.0f} MiB of room beside the home, and {free / MIB:,.0f} MiB are free"
            raise Unavailable("no_room", why)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _make_folder(folder: Path) -> None:
    make_owned_folder(folder.parent, exist_ok=True)
    make_owned_folder(folder)


class BadBackup(CovenantError):
    """The file is no complete backup, or not one that this program can read. The message says why."""


class BackedUpFile(msgspec.Struct, frozen=True, gc=False):
    name: str
    size: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    format: int = FORMAT
    backup_id: str
    position: int
    incarnation: str
    made_at_ms: int
    version: str
    """The version of the program that wrote it."""
    files: tuple[BackedUpFile, ...] = ()


def write_backup(out: IO[bytes], home: Path, staged: StagedBackup, version: str) -> Manifest:
    """Writes the staged ledger and the home's own files. Raises OSError."""
    files: list[BackedUpFile] = []
    with tarfile.open(fileobj=out, mode="w|", format=tarfile.PAX_FORMAT) as tar:
        for name, path in _ledger_files(Path(staged.folder)):
            with open(path, "rb") as source:
                files.append(_add(tar, name, source, os.fstat(source.fileno()).st_size, staged.made_at_ms))
        for name, path in _home_files(home):
            # A file may change meanwhile: its content is read at once.
            with open(path, "rb") as source:
                data = source.read(HOME_FILE_BYTES_MAX + 1)
            if len(data) > HOME_FILE_BYTES_MAX:
                raise OSError(f"{path} is larger than {HOME_FILE_BYTES_MAX // MIB} MiB; move it out of the home")
            files.append(_add(tar, name, io.BytesIO(data), len(data), staged.made_at_ms))
        manifest = Manifest(
            backup_id=staged.id,
            position=staged.position,
            incarnation=staged.incarnation,
            made_at_ms=staged.made_at_ms,
            version=version,
            files=tuple(files),
        )
        encoded = msgspec.json.encode(manifest)
        _add(tar, MANIFEST_NAME, io.BytesIO(encoded), len(encoded), staged.made_at_ms)
    return manifest


def _ledger_files(folder: Path) -> Iterator[tuple[str, Path]]:
    yield from ((path.name, path) for path in sorted(folder.iterdir()) if path.is_file())
    yield from ((f"journal/{path.name}", path) for path in sorted((folder / "journal").iterdir()))
    for path in sorted((folder / BLOBS_NAME).rglob("*")):
        if path.is_file():
            yield path.relative_to(folder).as_posix(), path


def _home_files(home: Path) -> Iterator[tuple[str, Path]]:
    """Yields plain files alone: the target of a link is not part of the home."""
    count = 0
    for name in HOME_FILES:
        path = home / name
        found = sorted(path.rglob("*")) if path.is_dir() and not path.is_symlink() else [path]
        for each in found:
            if each.is_file() and not each.is_symlink() and not each.name.endswith(".tmp"):
                count += 1
                if count > HOME_FILES_MAX:
                    raise OSError(f"{path} has more than {HOME_FILES_MAX} files")
                yield each.relative_to(home).as_posix(), each


def _add(tar: tarfile.TarFile, name: str, source: IO[bytes], size: int, at_ms: int) -> BackedUpFile:
    member = tarfile.TarInfo(name)
    member.size, member.mode, member.mtime = size, 0o600, at_ms // 1000
    hashing = _Hashing(source)
    tar.addfile(member, hashing)  # type: ignore[arg-type]  # it reads, and does nothing else
    return BackedUpFile(name, size, hashing.sha256.hexdigest())


class _Hashing:
    """A file that is hashed while it is read."""

    def __init__(self, source: IO[bytes]) -> None:
        self._source = source
        self.sha256 = hashlib.sha256()

    def read(self, size: int) -> bytes:
        data = self._source.read(size)
        self.sha256.update(data)
        return data


def unpack_backup(source: IO[bytes], folder: Path) -> Manifest:
    """Writes every file of a backup into an empty folder, synced, and compares each with the manifest.

    Raises BadBackup and OSError. Only the owner can read the folder and its files.
    """
    found: dict[str, BackedUpFile] = {}
    manifest_bytes: bytes | None = None
    try:
        with tarfile.open(fileobj=source, mode="r|") as tar:
            for member in tar:
                if manifest_bytes is not None:
                    raise BadBackup("there is data after its manifest")
                data = tar.extractfile(member) if member.isreg() else None
                if data is None or _MEMBER.fullmatch(member.name) is None or member.name in found:
                    raise BadBackup(f"{member.name!r} is no file of a home")
                if member.name == MANIFEST_NAME:
                    manifest_bytes = data.read(MANIFEST_BYTES_MAX)
                    continue
                if len(found) >= FILES_MAX:
                    raise BadBackup(f"it has more than {FILES_MAX} files")
                found[member.name] = _write(folder / member.name, member.name, data)
    except (tarfile.TarError, EOFError) as error:
        raise BadBackup(f"it cannot be read: {error}") from error
    if manifest_bytes is None:
        raise BadBackup("it is cut off: its manifest is missing")
    manifest = _read_manifest(manifest_bytes)
    for file in manifest.files:
        if found.pop(file.name, None) != file:
            raise BadBackup(f"{file.name} is not what was backed up: its SHA-256 differs, or it is missing")
    if found:
        raise BadBackup(f"{next(iter(found))} is not in its manifest")
    for path in (folder, *(each for each in folder.rglob("*") if each.is_dir())):
        sync_dir(path)
    return manifest


def _read_manifest(encoded: bytes) -> Manifest:
    try:
        manifest = msgspec.json.decode(encoded, type=Manifest)
    except msgspec.MsgspecError as error:
        raise BadBackup(f"its manifest cannot be read: {error}") from error
    if manifest.format > FORMAT:
        raise BadBackup(f"it has format {manifest.format}, and this program knows {FORMAT}: run the newer program")
    return manifest


def _write(path: Path, name: str, data: IO[bytes]) -> BackedUpFile:
    for parent in reversed(path.parents):
        if not parent.exists():
            make_owned_folder(parent)
    hashing, size = _Hashing(data), 0
    with open(path, "xb", opener=open_owned) as file:
        while chunk := hashing.read(_CHUNK_BYTES):
            file.write(chunk)
            size += len(chunk)
        file.flush()
        os.fsync(file.fileno())
    return BackedUpFile(name, size, hashing.sha256.hexdigest())
