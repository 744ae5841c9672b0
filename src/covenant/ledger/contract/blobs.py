"""The blob store: the bytes of large files, by hash, in spaces that share nothing.

Promises of every store:
- A blob is complete and durable when `finish` or `refer` returns, and so is the requested reference.
- A blob with a reference to a known task is never collected; neither is one that was stored or referred to less than
  the given time ago.
- A space keeps the same content once; where its bytes are damaged, a new upload replaces them.
- No call on one space depends on the content of another one.
- A reader gets the stored bytes or an error, never other bytes.

A store trusts no hash: it computes its own. It does not know the names of files.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Final, Literal, Protocol

import msgspec

from covenant.model.errors import NotFound, OverLimit, TooLarge
from covenant.model.ids import TaskId

CHUNK_BYTES: Final = 256 * 1024
"""The most bytes of a blob that are read, written or held at once."""
COLLECTED_MAX: Final = 1_000
"""The most blobs that one pass of the collector looks at."""
REFERENCES_MAX: Final = 5_000
"""The most references that one pass looks up: a file may have one of each task that was ever sent."""

Known = Callable[[TaskId], Awaitable[bool]]
"""Returns whether the ledger knows a task."""
FaultKind = Literal["missing", "truncated", "wrong_hash", "orphan", "not_a_file"]

_SHA256: Final = re.compile(r"[0-9a-f]{64}")
_SPACE: Final = re.compile(r"[0-9a-f]{32}")


class Blob(msgspec.Struct, frozen=True, gc=False):
    sha256: str
    size: int


class BlobQuota(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """The limits of one space and of one file."""

    file_bytes_max: int
    bytes_max: int
    files_max: int


class BlobUsage(msgspec.Struct, frozen=True, gc=False):
    files: int = 0
    bytes: int = 0


class StoredBlob(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """A blob in a listing; `tasks` are the first few ids of the tasks that refer to it."""

    sha256: str
    size: int
    stored_at_ms: int
    references: int
    tasks: tuple[str, ...] = ()


class BlobFault(msgspec.Struct, frozen=True, gc=False):
    kind: FaultKind
    space: str
    sha256: str
    what: str = ""


class Collected(msgspec.Struct, frozen=True, gc=False):
    """The outcome of one pass. `more`: it ended before the last blob."""

    looked: int = 0
    references: int = 0
    blobs: int = 0
    bytes: int = 0
    more: bool = False


class BlobWriter(Protocol):
    """One blob that is being written. It ends with `finish` or `discard`."""

    @property
    def size(self) -> int:
        """The number of bytes so far."""

    async def write(self, data: bytes) -> None:
        """Raises OverLimit or TooLarge above the limits of the space, and Unavailable if the disk is full or fails."""

    async def finish(self, task_id: TaskId | None = None, *, sha256: str | None = None) -> Blob:
        """Makes the blob durable, with a reference of this task. Raises Invalid if its hash is not the given one."""

    async def discard(self) -> None: ...


class BlobStore(Protocol):
    async def writer(self, space: str, quota: BlobQuota) -> BlobWriter: ...
    async def refer(self, space: str, sha256: str, task_id: TaskId) -> int | None:
        """Adds a reference of this task to a blob. Returns the blob's size, or None if there is no such blob."""

    async def find(self, space: str, sha256: str, task_id: TaskId | None = None) -> int | None:
        """The size of a blob that is complete and, with `task_id`, referred to by this task; else None."""

    def read(self, space: str, sha256: str, start: int, stop: int) -> AsyncIterator[bytes]:
        """Yields the bytes from `start` to before `stop`. Raises NotFound if they are missing."""

    async def usage(self, space: str | None = None) -> BlobUsage:
        """The usage of one space, or of all."""

    async def listing(self, space: str, after: str, limit: int) -> Sequence[StoredBlob]:
        """Blobs by hash, after the hash `after`."""

    async def collect(self, known: Known, before_ms: int, since_ms: int = 0) -> Collected:
        """Runs one pass, which continues where the last one ended. Blobs newer than `before_ms` are left alone.

        References made before `since_ms` are not looked up, nor blobs to which none was added since. It stays the same
        until a pass has no `more`.
        """

    async def erase(self, space: str) -> None:
        """Erases everything in a space."""

    async def check(self, known: Known, *, hashes: bool) -> Sequence[BlobFault]:
        """The faults of all blobs; with `hashes`, every byte is read."""

    async def close(self) -> None: ...


def space_of(account: str) -> str:
    """The space of an account: a tenant's name, or that of a mailbox identity (`account_of`)."""
    return hashlib.sha256(b"covenant.blobs\0" + account.encode()).hexdigest()[:32]


def is_sha256(text: str) -> bool:
    return _SHA256.fullmatch(text) is not None


def is_space(text: str) -> bool:
    return _SPACE.fullmatch(text) is not None


def no_blob(sha256: str) -> NotFound:
    return NotFound("unknown_file", f"the file {sha256[:12]}… is missing or incomplete; `covenant doctor` shows more")


def damaged_blob(sha256: str) -> NotFound:
    return NotFound(
        "file_damaged",
        f"the bytes of the file {sha256[:12]}… are not those that were stored; upload it again, or put back a backup",
    )


def check_quota(quota: BlobQuota, usage: BlobUsage, size: int) -> None:
    """`size` is the size so far of a blob that the space does not have yet."""
    if size > quota.file_bytes_max:
        raise TooLarge("file_too_large", f"a file has at most {quota.file_bytes_max} bytes (blobs.file_bytes_max)")
    if quota.bytes_max and usage.bytes + size > quota.bytes_max:
        raise OverLimit(
            "files_full", f"these files would take more than {quota.bytes_max} bytes (blobs.tenant_bytes_max)"
        )
    if quota.files_max and usage.files >= quota.files_max:
        raise OverLimit("files_full", f"there are {usage.files} files already (blobs.tenant_files_max)")
