"""The blob store in a folder of the home.

    incoming/<id>/bytes                   a blob being written or removed; emptied at the start
    <space>/<aa>/<sha256>/bytes           a blob
    <space>/<aa>/<sha256>/<task id>       a reference to it: an empty file

A blob is published by one rename of its folder, after everything in it was synced. One rename removes it, too. So a
published folder has its bytes and, if it was requested, its first reference. No code here follows a link.

File operations run in threads. One lock orders changes of blobs and references.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import io
import os
import re
import shutil
import stat
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from heapq import nsmallest
from pathlib import Path
from typing import IO, Final
from weakref import WeakValueDictionary

from covenant.ledger.contract.blobs import (
    CHUNK_BYTES,
    COLLECTED_MAX,
    REFERENCES_MAX,
    Blob,
    BlobFault,
    BlobQuota,
    BlobUsage,
    Collected,
    Known,
    StoredBlob,
    check_quota,
    is_sha256,
    is_space,
    no_blob,
)
from covenant.ledger.embedded import fault_points
from covenant.ledger.embedded.disk import free_space_text, make_owned_folder, open_owned, sync_dir
from covenant.model.errors import Invalid, Refusal, Unavailable
from covenant.model.ids import TaskId, parse_task_id

FOLDER_NAME: Final = "blobs"
INCOMING: Final = "incoming"
BYTES: Final = "bytes"
TASKS_LISTED_MAX: Final = 10
_IS_TASK: Final = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}").fullmatch


class BlobFolder:
    def __init__(self, folder: Path, new_id: Callable[[], str]) -> None:
        """Creates the folder, and drops the unfinished blobs of an earlier process."""
        self.path = folder
        self._new_id = new_id
        self._lock = threading.Lock()
        self._usage: dict[str, list[int]] = {}
        self._walk: Iterator[tuple[Path | None, TaskId | None]] | None = None
        self._listed: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        make_owned_folder(folder, exist_ok=True)
        _drop(folder / INCOMING)
        make_owned_folder(folder / INCOMING, exist_ok=True)
        sync_dir(folder)

    async def writer(self, space: str, quota: BlobQuota) -> FolderWriter:
        writer = FolderWriter(self, space, quota, self.path / INCOMING / self._new_id())
        try:
            await asyncio.to_thread(writer.begin)
        except BaseException:
            await asyncio.shield(writer.discard())
            raise
        return writer

    async def refer(self, space: str, sha256: str, task_id: TaskId) -> int | None:
        return await asyncio.to_thread(self._refer, space, sha256, task_id)

    def _refer(self, space: str, sha256: str, task_id: TaskId) -> int | None:
        place = self.place(space, sha256)
        with self._lock, _disk_refusals(self.path):
            size = size_at(place)
            if size is not None:
                self.add_reference(place, task_id)
        return size

    def add_reference(self, place: Path, task_id: TaskId) -> None:
        """Adds a durable reference. The caller has the lock, and the blob is published."""
        path = place / parse_task_id(task_id)
        fault_points.point("blobs.refer")
        os.close(open_owned(path, os.O_CREAT | os.O_WRONLY | os.O_NOFOLLOW))
        os.utime(path, follow_symlinks=False)
        os.utime(place / BYTES, follow_symlinks=False)  # now: a round that would find it leaves out an older blob
        fault_points.point("blobs.sync_reference")
        sync_dir(place)

    def publish(self, space: str, blob: Blob, staged: Path, quota: BlobQuota, task_id: TaskId | None) -> None:
        """Publishes a synced, staged blob; or replaces the bytes, if the space already has this content."""
        place = self.place(space, blob.sha256)
        with self._lock:
            if place.is_dir() and not place.is_symlink():
                self._replace(place, blob, staged, quota)
                if task_id is not None:
                    self.add_reference(place, task_id)
                return
            used = self._used(space)
            check_quota(quota, BlobUsage(*used), blob.size)
            _drop(place)  # a link or a file, which is not readable as a blob
            if task_id is not None:
                os.close(open_owned(staged / parse_task_id(task_id), os.O_CREAT | os.O_WRONLY | os.O_EXCL))
                os.utime(staged / BYTES, follow_symlinks=False)
            fault_points.point("blobs.sync_staged")
            sync_dir(staged)
            self._make_parents(place)
            fault_points.point("blobs.rename")
            os.rename(staged, place)
            fault_points.point("blobs.sync_dir")
            sync_dir(place.parent)
            used[0] += 1
            used[1] += blob.size

    def _replace(self, place: Path, blob: Blob, staged: Path, quota: BlobQuota) -> None:
        """Replaces bytes that may be damaged by the new, verified ones. References stay."""
        before, space = size_at(place), place.parent.parent.name
        if before != blob.size:
            self._usage.pop(space, None)  # the count is from before the damage
            files, size = self._used(space)
            check_quota(quota, BlobUsage(files - 1, size - (before or 0)), blob.size)
            if before is None:
                _drop(place / BYTES)
        fault_points.point("blobs.replace")
        os.rename(staged / BYTES, place / BYTES)
        sync_dir(place)
        self._used(space)[1] += blob.size - (before or 0)
        shutil.rmtree(staged)

    def _make_parents(self, place: Path) -> None:
        for folder in (place.parent.parent, place.parent):
            if not folder.is_dir():
                make_owned_folder(folder)
                sync_dir(folder.parent)

    async def find(self, space: str, sha256: str, task_id: TaskId | None = None) -> int | None:
        return await asyncio.to_thread(self._find, space, sha256, task_id)

    def _find(self, space: str, sha256: str, task_id: TaskId | None) -> int | None:
        place = self.place(space, sha256)
        if task_id is not None and not os.path.lexists(place / parse_task_id(task_id)):
            return None
        return size_at(place)

    async def read(self, space: str, sha256: str, start: int, stop: int) -> AsyncIterator[bytes]:
        file = _ReadFile(self.place(space, sha256) / BYTES)
        try:
            while start < stop:
                data = await asyncio.to_thread(file.read, min(CHUNK_BYTES, stop - start), start)
                if not data:
                    raise no_blob(sha256)
                start += len(data)
                yield data
        finally:
            file.close()

    async def usage(self, space: str | None = None) -> BlobUsage:
        return await asyncio.to_thread(self._read_usage, space)

    def _read_usage(self, space: str | None) -> BlobUsage:
        with self._lock:
            found = [self._used(each) for each in ([space] if space is not None else self._spaces())]
        return BlobUsage(sum(files for files, _ in found), sum(size for _, size in found))

    def used_now(self, space: str) -> BlobUsage:
        with self._lock:
            return BlobUsage(*self._used(space))

    def _used(self, space: str) -> list[int]:
        """A space's usage, counted at the first call and kept up to date from then on. The caller has the lock."""
        used = self._usage.get(space)
        if used is None:
            sizes = [size_at(place) or 0 for place in self._places(space)]
            used = self._usage[space] = [len(sizes), sum(sizes)]
        return used

    async def listing(self, space: str, after: str, limit: int) -> Sequence[StoredBlob]:
        """One at a time for each space: a page of much referred files takes long, and others need the threads."""
        async with self._listed.setdefault(space, asyncio.Lock()):
            return await asyncio.to_thread(self._listing, space, after, limit)

    def _listing(self, space: str, after: str, limit: int) -> list[StoredBlob]:
        found: list[StoredBlob] = []
        for place in self._places(space, after):
            if len(found) >= limit:
                break
            try:
                tasks, found_bytes = _references(place), os.lstat(place / BYTES)
            except FileNotFoundError:
                continue
            listed, at_ms = tuple(nsmallest(TASKS_LISTED_MAX, tasks)), found_bytes.st_mtime_ns // 1_000_000
            stored = StoredBlob(
                sha256=place.name, size=found_bytes.st_size, stored_at_ms=at_ms, references=len(tasks), tasks=listed
            )
            found.append(stored)
        return found

    async def collect(self, known: Known, before_ms: int, since_ms: int = 0) -> Collected:
        found, more = await asyncio.to_thread(self._next, since_ms, before_ms)
        references = blobs = size = 0
        for place, old in found.items():
            unreferenced = [place / task_id for task_id in old if not await known(task_id)]
            dropped, freed = await asyncio.to_thread(self._collect_one, place, unreferenced, before_ms)
            references += dropped
            if freed is not None:
                blobs, size = blobs + 1, size + freed
        return Collected(len(found), references, blobs, size, more)

    def _next(self, since_ms: int, before_ms: int) -> tuple[dict[Path, list[TaskId]], bool]:
        """The next blobs with their old references; of one with many, only some. False at the end of all."""
        found: dict[Path, list[TaskId]] = {}
        left = REFERENCES_MAX
        self._walk = self._walk or self._all_references(since_ms)
        for place, task_id in self._walk:
            if place is not None:
                old = found.setdefault(place, [])
                if task_id is not None and _aged(place / task_id, before_ms, since_ms):
                    old.append(task_id)
            left -= place is None or task_id is not None
            if not left or (task_id is None and len(found) == COLLECTED_MAX):
                return found, True
        self._walk = None
        return found, False

    def _all_references(self, since_ms: int) -> Iterator[tuple[Path | None, TaskId | None]]:
        """Each reference, and None at the end of each blob. A pass takes some, and the next pass those after them.

        Of a blob without a new reference there is no place: each reference that is added renews the blob's time.
        """
        for place in all_places(self.path):
            if since_ms and _blob_aged(place, since_ms):
                yield None, None
                continue
            with suppress(OSError), os.scandir(place) as found:
                yield from ((place, TaskId(each.name)) for each in found if _IS_TASK(each.name))
                yield place, None

    def _collect_one(self, place: Path, unreferenced: Sequence[Path], before_ms: int) -> tuple[int, int | None]:
        dropped = 0
        with self._lock:
            for path in unreferenced:
                if _aged(path, before_ms):  # unless it was made anew meanwhile
                    fault_points.point("blobs.drop_reference")
                    path.unlink(missing_ok=True)
                    dropped += 1
            if not _blob_aged(place, before_ms) or any(map(_IS_TASK, os.listdir(place))):
                return dropped, None
            used, size = self._used(place.parent.parent.name), size_at(place) or 0
            condemned = self.path / INCOMING / self._new_id()
            fault_points.point("blobs.condemn")
            os.rename(place, condemned)
            used[0] -= 1
            used[1] -= size
        fault_points.point("blobs.drop")
        shutil.rmtree(condemned, ignore_errors=True)
        return dropped, size

    async def erase(self, space: str) -> None:
        await asyncio.to_thread(self._erase, space)

    def _erase(self, space: str) -> None:
        if not is_space(space):
            raise ValueError("this is not a blob space")
        with self._lock, _disk_refusals(self.path):
            _drop(self.path / space)
            sync_dir(self.path)
            self._usage.pop(space, None)

    async def check(self, known: Known, *, hashes: bool) -> Sequence[BlobFault]:
        faults: list[BlobFault] = []
        for space in await asyncio.to_thread(self._spaces):
            for place in await asyncio.to_thread(lambda each: list(self._places(each)), space):
                found = await asyncio.to_thread(fault_at, place, hashes=hashes)
                references = nsmallest(TASKS_LISTED_MAX, await asyncio.to_thread(_references, place))
                if found is None and not any([await known(each) for each in references]):
                    found = BlobFault("orphan", space, place.name, "no task refers to it; the collector takes it")
                if found is not None:
                    faults.append(found)
        return faults

    async def close(self) -> None:
        """Does nothing: no file is kept open."""

    def place(self, space: str, sha256: str) -> Path:
        if not (is_space(space) and is_sha256(sha256)):
            raise no_blob(sha256)
        return self.path / space / sha256[:2] / sha256

    def _spaces(self) -> list[str]:
        return sorted(each.name for each in _folders(self.path) if is_space(each.name))

    def _places(self, space: str, after: str = "") -> Iterator[Path]:
        return places_in(self.path / space, after)


def link_blobs(source: Path, target: Path) -> None:
    """Hard-links every blob and reference under `target`. Blobs that are collected meanwhile are left out."""
    for place in all_places(source):
        copy = target / place.relative_to(source)
        for folder in reversed(copy.parents[: len(copy.relative_to(target).parts)]):
            make_owned_folder(folder, exist_ok=True)
        make_owned_folder(copy)
        with suppress(FileNotFoundError):
            for name in (BYTES, *_references(place)):
                os.link(place / name, copy / name, follow_symlinks=False)


def all_places(folder: Path) -> Iterator[Path]:
    for space in sorted(_folders(folder), key=lambda each: each.name):
        if is_space(space.name):
            yield from places_in(Path(space.path))


def places_in(space: Path, after: str = "") -> Iterator[Path]:
    """The folders of a space's blobs, by hash, after the hash `after`."""
    for group in sorted(_folders(space), key=lambda each: each.name):
        if group.name >= after[:2]:
            names = sorted(each.name for each in _folders(Path(group.path)) if is_sha256(each.name))
            yield from (Path(group.path, name) for name in names if name > after)


class _ReadFile:
    """One file that threads read. The thread of a canceled call may still run: then that thread closes the file."""

    def __init__(self, path: Path) -> None:
        self._path, self._fd, self._closed = path, -1, False
        self._lock = threading.Lock()

    def read(self, length: int, start: int) -> bytes:
        try:
            with self._lock:
                self._fd = self._fd if self._fd >= 0 else self._open()
                return os.pread(self._fd, length, start)
        finally:
            self._close_if_idle()

    def _open(self) -> int:
        try:
            return os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW)
        except OSError as error:
            raise no_blob(self._path.parent.name) from error

    def close(self) -> None:
        self._closed = True
        self._close_if_idle()

    def _close_if_idle(self) -> None:
        if self._closed and self._lock.acquire(blocking=False):
            if self._fd >= 0:
                os.close(self._fd)
            self._fd = -1
            self._lock.release()


class FolderWriter:
    """Writes in threads, one call at a time. A canceled call may still run in its thread: `discard` waits for it."""

    def __init__(self, store: BlobFolder, space: str, quota: BlobQuota, staged: Path) -> None:
        self.size = 0
        self._store = store
        self._space = space
        self._quota = quota
        self._staged = staged
        self._file: IO[bytes] = io.BytesIO()
        """Until `begin`, no file."""
        self._hash = hashlib.sha256()
        self._lock = threading.Lock()
        """Without it, `discard` could remove the bytes of a blob while a thread publishes it."""

    def begin(self) -> None:
        with self._lock, _disk_refusals(self._store.path):
            make_owned_folder(self._staged)
            # Nothing else opens the file: its folder has a new id, and was created here.
            self._file = open(self._staged / BYTES, "xb", buffering=0, opener=open_owned)  # noqa: SIM115

    async def write(self, data: bytes) -> None:
        await asyncio.to_thread(self._write, data)

    def _write(self, data: bytes) -> None:
        with self._lock:
            used = self._store.used_now(self._space)
            check_quota(self._quota, BlobUsage(0, used.bytes), self.size + len(data))
            with _disk_refusals(self._staged):
                fault_points.point("blobs.write", self._file.fileno(), data)
                left = memoryview(data)
                while left:
                    left = left[self._file.write(left) :]
            self._hash.update(data)
            self.size += len(data)

    async def finish(self, task_id: TaskId | None = None, *, sha256: str | None = None) -> Blob:
        try:
            return await asyncio.to_thread(self._finish, task_id, sha256)
        except BaseException:
            await asyncio.shield(self.discard())
            raise

    def _finish(self, task_id: TaskId | None, claimed: str | None) -> Blob:
        blob = Blob(self._hash.hexdigest(), self.size)
        if claimed is not None and claimed != blob.sha256:
            raise Invalid("wrong_hash", f"the received bytes have the SHA-256 {blob.sha256}, not {claimed[:64]}")
        with self._lock, _disk_refusals(self._staged):
            fault_points.point("blobs.sync", self._file.fileno())
            os.fsync(self._file.fileno())
            self._file.close()
            self._store.publish(self._space, blob, self._staged, self._quota, task_id)
        return blob

    async def discard(self) -> None:
        await asyncio.to_thread(self._discard)

    def _discard(self) -> None:
        with self._lock:
            self._file.close()
            shutil.rmtree(self._staged, ignore_errors=True)


@contextmanager
def _disk_refusals(path: Path) -> Iterator[None]:
    """Turns a full or failing disk into a refusal. Nothing that was acknowledged is lost by it."""
    try:
        yield
    except Refusal:
        raise
    except OSError as error:
        room = free_space_text(path) if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        raise Unavailable("files_unwritable", f"the file cannot be stored: {error.strerror}{room}") from error


def size_at(place: Path) -> int | None:
    """The size of a blob; None if its bytes are not a plain file, which a link is not."""
    try:
        found = os.lstat(place / BYTES)
    except OSError:
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else None


def _references(place: Path) -> list[TaskId]:
    """In no order. A task may refer to a file, and a hundred thousand may: this takes a microsecond for each."""
    return [TaskId(name) for name in os.listdir(place) if _IS_TASK(name)]


def _blob_aged(place: Path, before_ms: int) -> bool:
    """The folder's own time stands for a blob whose bytes are lost."""
    return _aged(place / BYTES if os.path.lexists(place / BYTES) else place, before_ms)


def _aged(path: Path, before_ms: int, since_ms: int = 0) -> bool:
    try:
        return since_ms <= os.lstat(path).st_mtime_ns // 1_000_000 < before_ms
    except FileNotFoundError:
        return False


def _folders(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as found:
            return [each for each in found if each.is_dir(follow_symlinks=False)]
    except FileNotFoundError:
        return []


def _drop(path: Path) -> None:
    """Removes a folder with everything in it. Of a link, only the link is removed."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.is_dir():
        shutil.rmtree(path)


def fault_at(place: Path, *, hashes: bool) -> BlobFault | None:
    space, sha256, path = place.parent.parent.name, place.name, place / BYTES
    if not os.path.lexists(path):
        return BlobFault("missing", space, sha256, "its bytes are gone; put them back from a backup")
    size = size_at(place)
    if size is None:
        return BlobFault("not_a_file", space, sha256, "a link or a folder stands where its bytes belong")
    if not hashes:
        return None
    found = hashlib.sha256()
    with open(path, "rb") as file:
        while data := file.read(CHUNK_BYTES):
            found.update(data)
    if found.hexdigest() == sha256:
        return None
    return BlobFault("wrong_hash", space, sha256, "its bytes are not those that were stored; put back a backup")
