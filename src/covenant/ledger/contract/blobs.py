"""The blob store: the bytes of large files, by hash, in spaces that share nothing.

Promises of every store:
- A blob is whole and durable when `finish` or `refer` returns, and so is the reference that was asked for.
- A blob with a reference to a known task is never collected; neither is one that was stored or referred to less than
  the given time ago.
- The same content is kept once a space. No call on one space depends on what another one holds.
- A reader is given the bytes that were stored, or an error: never other bytes.

A store believes no hash: it computes its own. Names of files do not come here.
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
"""What is read, written or held of a blob at once."""
COLLECTED_MAX: Final = 1_000
"""Blobs that one pass of the collector looks at."""

Known = Callable[[TaskId], Awaitable[bool]]
"""Whether the ledger knows a task."""
FaultKind = Literal["missing", "truncated", "wrong_hash", "orphan", "not_a_file"]

_SHA256: Final = re.compile(r"[0-9a-f]{64}")
_SPACE: Final = re.compile(r"[0-9a-f]{32}")


class Blob(msgspec.Struct, frozen=True, gc=False):
    sha256: str
    size: int


class BlobQuota(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """What one space may hold, and one file."""

    file_bytes_max: int
    bytes_max: int
    files_max: int


class BlobUsage(msgspec.Struct, frozen=True, gc=False):
    files: int = 0
    bytes: int = 0


class StoredBlob(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """A blob as a listing has it; `tasks` are the ids of those that refer to it, the first few."""

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
    """What one pass did. `more`: it ended before the last blob."""

    looked: int = 0
    references: int = 0
    blobs: int = 0
    bytes: int = 0
    more: bool = False


class BlobWriter(Protocol):
    """One blob on its way. It ends with `finish` or `discard`."""

    @property
    def size(self) -> int:
        """Bytes so far."""

    async def write(self, data: bytes) -> None:
        """Raises OverLimit or TooLarge beyond what the space may hold, and Unavailable if the disk takes no more."""

    async def finish(self, task_id: TaskId | None = None, *, sha256: str | None = None) -> Blob:
        """Durable when it returns, with a reference of this task. Raises Invalid if the hash is not the given one."""

    async def discard(self) -> None: ...


class BlobStore(Protocol):
    async def writer(self, space: str, quota: BlobQuota) -> BlobWriter: ...
    async def refer(self, space: str, sha256: str, task_id: TaskId) -> int | None:
        """The task refers to this blob from now on; its size, or None if there is no such blob."""

    async def find(self, space: str, sha256: str, task_id: TaskId | None = None) -> int | None:
        """The size of a blob, if it is there, whole, and referred to by this task."""

    def read(self, space: str, sha256: str, start: int, stop: int) -> AsyncIterator[bytes]:
        """The bytes from `start` to before `stop`. Raises NotFound if they are not there."""

    async def usage(self, space: str | None = None) -> BlobUsage:
        """Of one space, or of all."""

    async def listing(self, space: str, after: str, limit: int) -> Sequence[StoredBlob]:
        """By hash, behind the hash `after`."""

    async def collect(self, known: Known, before_ms: int) -> Collected:
        """One pass, which goes on where the last one ended. `before_ms`: nothing younger is touched."""

    async def erase(self, space: str) -> None:
        """Everything of a space."""

    async def check(self, known: Known, *, hashes: bool) -> Sequence[BlobFault]:
        """What is not as it should be; with `hashes`, every byte is read."""

    async def close(self) -> None: ...


def space_of(account: str) -> str:
    """The space of an account: a tenant's name, or that of a mailbox identity (`account_of`)."""
    return hashlib.sha256(b"covenant.blobs\0" + account.encode()).hexdigest()[:32]


def is_sha256(text: str) -> bool:
    return _SHA256.fullmatch(text) is not None


def is_space(text: str) -> bool:
    return _SPACE.fullmatch(text) is not None


def no_blob(sha256: str) -> NotFound:
    return NotFound("unknown_file", f"the file {sha256[:12]}… is not here, or not whole; `covenant doctor` tells more")


def check_quota(quota: BlobQuota, usage: BlobUsage, size: int) -> None:
    """`size` is that of a blob that the space does not have yet, as far as it is known."""
    if size > quota.file_bytes_max:
        raise TooLarge("file_too_large", f"a file has at most {quota.file_bytes_max} bytes (blobs.file_bytes_max)")
    if quota.bytes_max and usage.bytes + size > quota.bytes_max:
        raise OverLimit(
            "files_full", f"these files would take more than {quota.bytes_max} bytes (blobs.tenant_bytes_max)"
        )
    if quota.files_max and usage.files >= quota.files_max:
        raise OverLimit("files_full", f"there are {usage.files} files already (blobs.tenant_files_max)")
