"""The blob store of daemons that share a database: a row for each blob and each reference.

The bytes are in chunks in the database, or elsewhere (`UploadBytes`), by the id of their upload. They belong to no blob
until one transaction creates the blob and its first reference; if the space already has this content, they are dropped.
Referring and collecting lock the row of a blob: so one of the two sees what the other has done.

An upload has a row until its blob is published, and again once its blob is gone, until its bytes are dropped: so the
uploads of a dead daemon are collected, wherever their bytes are. The row is locked to publish the blob, and condemned
before the bytes are dropped: a published blob keeps its bytes, and a condemned upload is not published.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final, Protocol

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
from covenant.ledger.postgres.connections import Connections, fetch_rows, fetch_value
from covenant.model.errors import Invalid, Unavailable
from covenant.model.ids import TaskId

_rows, _value = partial(fetch_rows, "blobs"), partial(fetch_value, "blobs")
LAST: Final = "~"
"""Comes after every task's id: the references of a blob that were all looked at."""


class BytesWriter(Protocol):
    async def write(self, data: bytes) -> None: ...

    async def finish(self) -> None:
        """Makes the written bytes durable."""


class UploadBytes(Protocol):
    """The store of the uploads' bytes."""

    def writer(self, upload_id: int) -> BytesWriter: ...

    def read(self, upload_id: int, start: int, stop: int) -> AsyncIterator[bytes]:
        """Yields the bytes from `start` to before `stop`; ends early if there are fewer."""

    async def drop(self, upload_id: int) -> None:
        """Drops the bytes of an upload, finished or not."""

    async def close(self) -> None: ...


class BlobRows:
    def __init__(self, connections: Connections, upload_bytes: UploadBytes | None = None) -> None:
        """Takes a pool of its own, which `close` closes: large transfers do not delay other reads.

        `upload_bytes`: the store of the bytes, if not the database.
        """
        self.connections = connections
        self.rows = partial(connections.rows, "blobs")
        self.upload_bytes = upload_bytes or ChunkRows(connections)
        self._cursor = ("", "", "")

    async def writer(self, space: str, quota: BlobQuota) -> RowsWriter:
        _check(space)
        (begun,) = await self.rows("begin")
        usage = await self.usage(space)
        return RowsWriter(self, space, quota, begun["id"], usage)

    async def refer(self, space: str, sha256: str, task_id: TaskId) -> int | None:
        _check(space, sha256)
        async with self.connections.transaction() as db:
            size: int | None = await _value(db, "touch", space=space, sha256=sha256)
            if size is not None:
                await _value(db, "refer", space=space, sha256=sha256, task_id=task_id)
        return size

    async def find(self, space: str, sha256: str, task_id: TaskId | None = None) -> int | None:
        _check(space, sha256)
        size: int | None = await self.connections.value("blobs", "find", space=space, sha256=sha256, task_id=task_id)
        return size

    async def read(self, space: str, sha256: str, start: int, stop: int) -> AsyncIterator[bytes]:
        _check(space, sha256)
        rows = await self.rows("find", space=space, sha256=sha256, task_id=None)
        if not rows:
            raise no_blob(sha256)
        async for data in self.upload_bytes.read(rows[0]["upload_id"], start, stop):
            start += len(data)
            yield data
        if start < stop:
            raise no_blob(sha256)

    async def usage(self, space: str | None = None) -> BlobUsage:
        (used,) = await self.rows("usage", space=space)
        return BlobUsage(used["files"], used["bytes"])

    async def listing(self, space: str, after: str, limit: int) -> Sequence[StoredBlob]:
        rows = await self.rows("listing", space=space, after=after, limit=limit)
        return [
            StoredBlob(
                sha256=row["sha256"],
                size=row["size"],
                stored_at_ms=row["stored_at_ms"],
                references=row["references"],
                tasks=tuple(row["tasks"]),
            )
            for row in rows
        ]

    async def collect(self, known: Known, before_ms: int, since_ms: int = 0) -> Collected:
        space, sha256, after = self._cursor
        begin = {"space": space, "sha256": sha256, "task_id": after, "since_ms": since_ms}
        places = await self.rows("page", **begin, limit=COLLECTED_MAX)
        looked = references = blobs = size = 0
        remaining = REFERENCES_MAX
        for each in places:
            after = after if (each["space"], each["sha256"]) == (space, sha256) else ""
            key = {"space": each["space"], "sha256": each["sha256"], "before_ms": before_ms}
            rows = await self.rows("old_references", **key, since_ms=since_ms, task_id=after, limit=remaining)
            old = [TaskId(row["task_id"]) for row in rows]
            self._cursor = each["space"], each["sha256"], old[-1] if len(old) == remaining else LAST
            dropped, freed = await self._collect(key, old, known)
            looked, remaining, references = looked + 1, remaining - len(old), references + dropped
            if freed is not None:
                blobs, size = blobs + 1, size + freed
            if not remaining:
                break
        with suppress(Unavailable):  # a later pass continues
            for row in await self.rows("condemn_stale_uploads", before_ms=before_ms):
                await self.drop(row["id"])
        more = not remaining or looked == COLLECTED_MAX
        self._cursor = self._cursor if more else ("", "", "")
        return Collected(looked, references, blobs, size, more)

    async def _collect(self, key: dict[str, Any], old: Sequence[TaskId], known: Known) -> tuple[int, int | None]:
        lost = [each for each in old if not await known(each)]
        async with self.connections.transaction() as db:
            if lost:
                await _value(db, "drop_references", **key, tasks=lost)
            blobs = await _rows(db, "collect", **key)
            for blob in blobs:
                await _value(db, "condemned_upload", upload_id=blob["upload_id"])
        for blob in blobs:
            with suppress(Unavailable):  # a later pass drops it
                await self.drop(blob["upload_id"])
        return len(lost), blobs[0]["size"] if blobs else None

    async def drop(self, upload_id: int) -> None:
        """Drops the bytes of an upload without a blob, and then its row."""
        await self.upload_bytes.drop(upload_id)
        await self.rows("forget", upload_id=upload_id)

    async def erase(self, space: str) -> None:
        _check(space)
        for row in await self.rows("erase", space=space):
            await self.drop(row["id"])

    async def check(self, known: Known, *, hashes: bool) -> Sequence[BlobFault]:
        faults: list[BlobFault] = []
        space, sha256 = "", ""
        all_blobs = {"task_id": LAST, "since_ms": 0, "limit": COLLECTED_MAX}
        while page := await self.rows("page", space=space, sha256=sha256, **all_blobs):
            for row in page:
                space, sha256 = row["space"], row["sha256"]
                fault = await self._fault(space, sha256) if hashes else None
                tasks = [TaskId(each["task_id"]) for each in await self.rows("references", space=space, sha256=sha256)]
                if fault is None and not any([await known(each) for each in tasks]):
                    fault = BlobFault("orphan", space, sha256, "no task refers to it; the collector takes it")
                if fault is not None:
                    faults.append(fault)
        return faults

    async def damaged_upload(self, space: str, sha256: str) -> int | None:
        """The upload of a blob whose bytes are damaged; None if they are intact."""
        rows = await self.rows("find", space=space, sha256=sha256, task_id=None)
        damaged = bool(rows) and await self._fault(space, sha256) is not None
        return rows[0]["upload_id"] if damaged else None

    async def _fault(self, space: str, sha256: str) -> BlobFault | None:
        size = await self.find(space, sha256) or 0
        found = hashlib.sha256()
        try:
            async for piece in self.read(space, sha256, 0, size):
                found.update(piece)
        except Exception as error:  # noqa: BLE001  (whatever keeps it from being read)
            return BlobFault("missing", space, sha256, str(error))
        return None if found.hexdigest() == sha256 else BlobFault("wrong_hash", space, sha256)

    async def close(self) -> None:
        await self.upload_bytes.close()
        await self.connections.close()


class RowsWriter:
    def __init__(self, store: BlobRows, space: str, quota: BlobQuota, upload_id: int, usage: BlobUsage) -> None:
        self.size = 0
        self._store = store
        self._space = space
        self._quota = quota
        self._upload_id = upload_id
        self._usage = usage
        self._hash = hashlib.sha256()
        self._bytes_writer = store.upload_bytes.writer(upload_id)

    async def write(self, data: bytes) -> None:
        check_quota(self._quota, BlobUsage(0, self._usage.bytes), self.size + len(data))
        self.size += len(data)
        self._hash.update(data)
        await self._bytes_writer.write(data)

    async def finish(self, task_id: TaskId | None = None, *, sha256: str | None = None) -> Blob:
        blob = Blob(self._hash.hexdigest(), self.size)
        if sha256 is not None and sha256 != blob.sha256:
            await self.discard()
            raise Invalid("wrong_hash", f"the received bytes have the SHA-256 {blob.sha256}, not {sha256[:64]}")
        key = {"space": self._space, "sha256": blob.sha256}
        damaged, replaced = await self._store.damaged_upload(**key), False
        try:
            await self._bytes_writer.finish()
            async with self._store.connections.transaction() as db:
                await _value(db, "lock_space", space=self._space)
                if await _value(db, "lock_upload", upload_id=self._upload_id) is None:
                    with suppress(Unavailable):
                        await self._store.upload_bytes.drop(self._upload_id)  # the bytes that came after the collector
                    raise Unavailable(
                        "blobs_unavailable", "the upload took longer than blobs.kept_ms and was dropped; repeat it"
                    )
                stored = await _value(db, "touch", **key) is not None
                if not stored:
                    ((files, size),) = await _rows(db, "usage", space=self._space)
                    check_quota(self._quota, BlobUsage(files, size), blob.size)
                    await _value(db, "publish", **key, size=blob.size, upload_id=self._upload_id)
                elif damaged is not None:
                    new = {"size": blob.size, "upload_id": self._upload_id, "damaged": damaged}
                    replaced = await _value(db, "replace", **key, **new) is not None
                if task_id is not None:
                    await _value(db, "refer", **key, task_id=task_id)
        except BaseException:
            await self.discard()
            raise
        if replaced:
            assert damaged is not None
            with suppress(Unavailable):  # the collector drops it
                await self._store.drop(damaged)
        elif stored:
            await self.discard()
        return blob

    async def discard(self) -> None:
        """Drops the upload, unless its blob was published: the answer to that commit may have been lost."""
        with suppress(Unavailable):  # the collector drops it
            if await self._store.rows("condemn_upload", upload_id=self._upload_id):
                await self._store.drop(self._upload_id)


class ChunkRows:
    """Bytes in the database. All chunks but the last have the same size: so an offset determines its chunk."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._rows = partial(connections.rows, "blobs")

    def writer(self, upload_id: int) -> ChunkWriter:
        return ChunkWriter(self._connections, upload_id)

    async def read(self, upload_id: int, start: int, stop: int) -> AsyncIterator[bytes]:
        while start < stop:
            no, skipped = divmod(start, CHUNK_BYTES)
            found = await self._rows("chunk", upload_id=upload_id, no=no)
            data: bytes = found[0]["body"][skipped : skipped + stop - start] if found else b""
            if not data:
                return
            start += len(data)
            yield data

    async def drop(self, upload_id: int) -> None:
        await self._rows("drop_chunks", upload_id=upload_id)

    async def close(self) -> None:
        """Does nothing: the connections belong to the caller."""


class ChunkWriter:
    def __init__(self, connections: Connections, upload_id: int) -> None:
        self._rows = partial(connections.rows, "blobs")
        self._upload_id = upload_id
        self._rest = bytearray()
        self._chunks = 0

    async def write(self, data: bytes) -> None:
        self._rest += data
        while len(self._rest) >= CHUNK_BYTES:
            await self._put(bytes(self._rest[:CHUNK_BYTES]))
            del self._rest[:CHUNK_BYTES]

    async def finish(self) -> None:
        if self._rest:
            await self._put(bytes(self._rest))

    async def _put(self, body: bytes) -> None:
        await self._rows("write", upload_id=self._upload_id, no=self._chunks, body=body)
        self._chunks += 1


def _check(space: str, sha256: str = "0" * 64) -> None:
    if not (is_space(space) and is_sha256(sha256)):
        raise no_blob(sha256)
