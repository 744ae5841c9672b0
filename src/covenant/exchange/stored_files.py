"""Files of tasks: large bytes go to the blob store before a task refers to them, and come back from there.

`store` is called before every commit of content from senders, agents and workers. It replaces large bytes, and links
to uploads, by `File` blocks, whose references are durable when it returns. If the commit is refused, the collector
removes the files again.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import logging
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import contextmanager
from operator import is_
from typing import Any, Final, cast

import msgspec

from covenant.exchange.file_links import UPLOAD, FileLinks, LinkedFile
from covenant.ledger.contract.blobs import (
    CHUNK_BYTES,
    Blob,
    BlobQuota,
    BlobStore,
    BlobUsage,
    BlobWriter,
    Collected,
    damaged_blob,
    no_blob,
    space_of,
)
from covenant.ledger.contract.ledger import Ledger
from covenant.ledger.contract.tasks import Parties
from covenant.ledger.machine.decisions.context import unknown_task
from covenant.model.content import (
    Audio,
    Content,
    Embedded,
    File,
    Image,
    Json,
    Resource,
    ResourceLink,
    SentContent,
    Text,
)
from covenant.model.errors import Forbidden, Invalid, OverLimit
from covenant.model.ids import AgentId, PublicKey, TaskId
from covenant.model.settings import BlobSettings
from covenant.model.task import Result, Task, account_of
from covenant.model.task_event import Update
from covenant.model.task_view import TaskView

INLINED_BYTES_MAX: Final = 16 * 1024 * 1024
"""The most bytes of one message that an agent gets inline: more stay files."""
WHOLE_ROUNDS: Final = 24
"""In the time that files are kept, all references are looked up at most this often, however often tasks are erased."""
_BASE64_FACTOR: Final = 4 / 3
log = logging.getLogger(__name__)
replace = msgspec.structs.replace


class StoredFiles:
    def __init__(self, store: BlobStore, ledger: Ledger, links: FileLinks, settings: BlobSettings) -> None:
        self.links = links
        self.settings = settings
        self._store = store
        self._ledger = ledger
        self._inline_chars = int(settings.inline_bytes_max * _BASE64_FACTOR) + 4
        self._quota = BlobQuota(
            file_bytes_max=settings.file_bytes_max,
            bytes_max=settings.tenant_bytes_max,
            files_max=settings.tenant_files_max,
        )
        self._uploads: Counter[str] = Counter()
        self._writes: defaultdict[str, dict[asyncio.Timeout, asyncio.Event]] = defaultdict(dict)
        """The running writes of each space: the timeout that can end a write, and the event of its end."""
        self._known_before_ms = 0
        """All references made before this were found known, unless their tasks were erased since."""
        self._round_ms: int | None = None
        """The collector's round under way: references made before this are looked up."""
        self._round_failed = False
        """A pass of the round failed, so that the round may have left references out."""
        self._erased = False
        """Tasks were erased since the last round of all references began."""
        self._whole_round_ms = ledger.clock.monotonic_ms()
        ledger.on_erased(self._on_erased)

    def may_store(self, parts: Iterable[Content]) -> bool:
        """Whether `store` would inspect one of these parts. Does not look at their bytes."""
        return any(type(part) is not Text and type(part) is not Json for part in parts)

    async def store(self, parts: tuple[Content, ...], account: str, task_id: TaskId) -> tuple[Content, ...]:
        """The parts of a task of this account (`account_of`), as they are kept. The same tuple if nothing changes.

        Raises OverLimit, TooLarge, Unavailable; Invalid for bytes that are not base64; Forbidden for an expired link.
        """
        space = space_of(account)
        kept = [await self._stored(part, space, task_id) for part in parts]
        return parts if all(map(is_, kept, parts)) else tuple(kept)

    async def store_task(self, task: Task) -> Task:
        if not self.may_store(task.parts):
            return task
        return replace(task, parts=await self.store(task.parts, account_of(task), task.id))

    async def store_update(self, update: Update, task_id: TaskId, agent: AgentId) -> Update:
        """Stores the files of an update. Only the task's recipient may add files."""
        parties = await self._ledger.parties(task_id)
        if parties is None:
            raise unknown_task(task_id)
        _check_recipient(parties, agent)
        changed: Update = replace(update, parts=await self.store(update.parts, account_of_parties(parties), task_id))
        return changed

    async def store_answer(self, result: Result, parties: Parties, agent: AgentId) -> Result:
        _check_recipient(parties, agent)
        return await self.store_result(result, account_of_parties(parties))

    async def store_result(self, result: Result, account: str) -> Result:
        content = await self.store(result.content, account, result.task_id)
        return result if content is result.content else replace(result, content=content)

    def named_by_hash(self, parts: tuple[Content, ...]) -> tuple[Content, ...]:
        """The parts with each file's hash in place of its URL, which differs each time. The same tuple without any.

        Does not read the store: `store` checks whether the files exist and their URLs are still valid.
        """
        named = [self._name_by_hash(part) for part in parts]
        return parts if all(map(is_, named, parts)) else tuple(named)

    def _name_by_hash(self, part: Content) -> Content:
        if isinstance(part, File):
            sha256, size, name = part.sha256, part.size, part.filename or ""
        elif isinstance(part, ResourceLink) and (linked := self.links.read(part.uri, expired=True)) is not None:
            sha256, size, name = linked.sha256, linked.size, part.name
        else:
            return part
        return ResourceLink(
            f"urn:sha256:{sha256}",
            name,
            part.mimeType,
            metadata=part.metadata,
            size=size,
            annotations=part.annotations,
            meta=part.meta,
        )

    async def _stored(self, part: Content, space: str, task_id: TaskId) -> Content:
        match part:
            case File():
                return await self._check_file(part, space, task_id)
            case ResourceLink(uri=uri):
                linked = self.links.read(uri)
                return part if linked is None else await self._store_link(part, linked, space, task_id)
            case Image(data) | Audio(data) if len(data) > self._inline_chars:
                return await self._store_bytes(part, data, space, task_id)
            case Resource(resource) if resource.blob is not None and len(resource.blob) > self._inline_chars:
                return await self._store_bytes(part, resource.blob, space, task_id)
            case _:
                return part

    async def _store_bytes(self, part: Image | Audio | Resource, encoded: str, space: str, task_id: TaskId) -> File:
        try:
            data = await asyncio.to_thread(base64.b64decode, encoded, validate=True)
        except (binascii.Error, ValueError):
            raise Invalid("invalid_content", "a part's bytes are not base64") from None
        blob = await self._write(space, _pieces(data), task_id)
        about: dict[str, Any] = {"annotations": part.annotations, "meta": part.meta}
        if isinstance(part, Resource):
            inner = part.resource
            about |= {"came_as": "resource", "mimeType": inner.mimeType, "uri": inner.uri, "resource_meta": inner.meta}
            about |= {"filename": part.filename, "metadata": part.metadata}
        else:
            about |= {"came_as": "image" if isinstance(part, Image) else "audio", "mimeType": part.mimeType}
        return File(sha256=blob.sha256, size=blob.size, space=space, task_id=task_id, **about)

    async def _store_link(self, part: ResourceLink, linked: LinkedFile, space: str, task_id: TaskId) -> File:
        """A caller with a signed URL may read the file, and so may send it on; to another space by a copy."""
        sha256 = linked.sha256
        if await self.size(linked.space, sha256, linked.owner) != linked.size:
            raise no_blob(sha256)
        if linked.space == space:
            await self._add_reference(space, sha256, linked.size, task_id)
        else:
            pieces = self._store.read(linked.space, sha256, 0, linked.size)
            with self._uploading(space):
                await self._write(space, pieces, task_id, sha256)
        return File(
            sha256=sha256,
            size=linked.size,
            space=space,
            task_id=task_id,
            mimeType=part.mimeType,
            filename=part.name or None,
            metadata=part.metadata,
            annotations=part.annotations,
            meta=part.meta,
        )

    async def _check_file(self, file: File, space: str, task_id: TaskId) -> File:
        """Checks a file that an agent saved for this task, or passes on from another task of its tenant."""
        if file.space != space:
            raise no_blob(file.sha256)
        if file.task_id == task_id:
            if await self._store.find(space, file.sha256, task_id) != file.size:
                raise no_blob(file.sha256)
            return file
        await self._add_reference(space, file.sha256, file.size, task_id)
        return replace(file, task_id=task_id)

    async def _add_reference(self, space: str, sha256: str, size: int, task_id: TaskId) -> None:
        if await self._store.refer(space, sha256, task_id) != size:
            raise no_blob(sha256)

    async def upload(
        self,
        pieces: AsyncIterator[bytes],
        account: str,
        *,
        sha256: str | None = None,
        task_id: TaskId | None = None,
    ) -> Blob:
        """Stores an upload; durable when it returns. At most `blobs.uploads_max` at once for an account."""
        space = space_of(account)
        with self._uploading(space):
            return await self._write(space, pieces, task_id, sha256)

    async def _write(
        self, space: str, pieces: AsyncIterator[bytes], task_id: TaskId | None, sha256: str | None = None
    ) -> Blob:
        ending, ended = asyncio.timeout(None), asyncio.Event()
        self._writes[space][ending] = ended
        try:
            async with ending:
                return await _write_pieces(await self._store.writer(space, self._quota), pieces, task_id, sha256)
        except TimeoutError:
            if not ending.expired():
                raise
            raise Forbidden("files_erased", "the files of this tenant are being erased") from None
        finally:
            ended.set()
            del self._writes[space][ending]
            if not self._writes[space]:
                del self._writes[space]

    @contextmanager
    def _uploading(self, space: str) -> Iterator[None]:
        if self._uploads[space] >= self.settings.uploads_max:
            raise OverLimit("uploads_full", f"{self._uploads[space]} uploads run now (blobs.uploads_max); try later")
        self._uploads[space] += 1
        try:
            yield
        finally:
            self._uploads[space] -= 1
            if not self._uploads[space]:
                del self._uploads[space]

    async def save(
        self, pieces: AsyncIterator[bytes], account: str, task_id: TaskId, name: str, media_type: str | None
    ) -> File:
        """Stores a file that an agent makes, for a part of this task."""
        blob = await self.upload(pieces, account, task_id=task_id)
        return File(
            sha256=blob.sha256,
            size=blob.size,
            space=space_of(account),
            task_id=task_id,
            mimeType=media_type,
            filename=name,
        )

    async def size(self, space: str, sha256: str, owner: str) -> int:
        """The size of a file that this task refers to, or that was uploaded. Raises NotFound."""
        task_id = None if owner == UPLOAD else TaskId(owner)
        if task_id is not None and not await self._known(task_id):
            raise no_blob(sha256)
        size = await self._store.find(space, sha256, task_id)
        if size is None:
            raise no_blob(sha256)
        return size

    def read(self, space: str, sha256: str, start: int, stop: int) -> AsyncIterator[bytes]:
        return self._store.read(space, sha256, start, stop)

    def open(self, file: File) -> AsyncIterator[bytes]:
        return self.read_whole(file.space, file.sha256, file.size)

    async def read_whole(self, space: str, sha256: str, size: int) -> AsyncIterator[bytes]:
        """All bytes of a file, in pieces. The last piece comes only after the hash was checked; otherwise an error."""
        found, held = hashlib.sha256(), b""
        async for piece in self._store.read(space, sha256, 0, size):
            found.update(piece)
            if held:
                yield held
            held = piece
        if found.hexdigest() != sha256:
            log.error("files.damaged", extra={"space": space, "sha256": sha256})
            raise damaged_blob(sha256)
        if held:
            yield held

    async def inlined(self, parts: tuple[Content, ...], *, uploads: bool = False) -> tuple[Content, ...]:
        """Files as the blocks that they came as, within the limit; `uploads`: uploaded files, too."""
        left, blocks = INLINED_BYTES_MAX, list(parts)
        for at, part in enumerate(parts):
            if isinstance(part, File) and part.size <= left and (part.came_as or uploads):
                left -= part.size
                data = b"".join([piece async for piece in self.open(part)])
                blocks[at] = _block(part, await asyncio.to_thread(base64.b64encode, data))
        return tuple(blocks)

    async def portable(self, parts: tuple[Content, ...]) -> tuple[SentContent, ...]:
        """Parts for another instance: files with their bytes, or with their hash alone if they are too large."""
        if not any(isinstance(part, File) for part in parts):
            return cast("tuple[SentContent, ...]", parts)
        return tuple(map(_portable, await self.inlined(parts, uploads=True)))

    async def portable_view(self, view: TaskView) -> TaskView:
        """As `portable`, for a task's artifacts and message."""
        made = [replace(each, parts=await self.portable(each.parts)) for each in view.artifacts]
        message = view.message
        if message is not None:
            message = replace(message, parts=await self.portable(message.parts))
        return replace(view, artifacts=tuple(made), message=message)

    async def listing(self, account: str, after: str, limit: int) -> Any:
        return await self._store.listing(space_of(account), after, limit)

    async def usage(self, account: str | None = None) -> BlobUsage:
        return await self._store.usage(None if account is None else space_of(account))

    async def space_for(self, task_id: TaskId, viewer: PublicKey | None) -> str:
        """The space of a task's files. Raises NotFound if the viewer may not see the task. None: the operator."""
        found = await self._ledger.parties(task_id)
        if found is None or viewer not in (None, found.sender.pubkey, found.recipient.pubkey):
            raise unknown_task(task_id)
        return space_of(account_of_parties(found))

    async def erase(self, account: str) -> None:
        """Erases the files of an account for which nothing more is accepted. Running writes are ended first."""
        space, now_s = space_of(account), asyncio.get_running_loop().time()
        under_way = dict(self._writes.get(space, {}))
        for ending in under_way:
            if not ending.expired():
                ending.reschedule(now_s)
        for ended in under_way.values():
            await ended.wait()
        await self._store.erase(space)

    async def collect(self) -> Collected:
        """Runs one pass of the collector; does nothing while the clock is paused after a step.

        Passes make rounds. A round looks up the references that have become old enough since the round before: an
        older one was found known, and its task can only have been erased. After an erasure a round looks up all.
        """
        clock, kept_ms = self._ledger.clock, self.settings.kept_ms
        if clock.is_paused():
            return Collected()
        before_ms = self._ledger.now_ms() - kept_ms
        if self._round_ms is None:
            self._round_ms, now_ms = before_ms, clock.monotonic_ms()
            if self._erased and now_ms - self._whole_round_ms >= kept_ms // WHOLE_ROUNDS:
                self._erased, self._known_before_ms, self._whole_round_ms = False, 0, now_ms
            self._known_before_ms = min(self._known_before_ms, before_ms)  # the clock may have been set back
        try:
            collected = await self._store.collect(self._known, before_ms, self._known_before_ms)
        except BaseException:
            self._round_failed = True
            raise
        if not collected.more:
            if not self._round_failed:
                self._known_before_ms = self._round_ms
            self._round_ms, self._round_failed = None, False
        return collected

    def _on_erased(self) -> None:
        self._erased = True

    async def _known(self, task_id: TaskId) -> bool:
        return await self._ledger.parties(task_id) is not None


def _check_recipient(parties: Parties, agent: AgentId) -> None:
    if parties.recipient.pubkey != agent.pubkey:
        raise Forbidden("not_recipient", "only the task's recipient may add files to it")


def account_of_parties(parties: Parties) -> str:
    """The account of a task's files; the same as `task.account_of`."""
    return parties.tenant if parties.tenant is not None else f"@{parties.sender.pubkey}"


async def _write_pieces(
    writer: BlobWriter, pieces: AsyncIterator[bytes], task_id: TaskId | None, sha256: str | None = None
) -> Blob:
    try:
        async for piece in pieces:
            await writer.write(piece)
    except BaseException:
        await asyncio.shield(writer.discard())
        raise
    return await writer.finish(task_id, sha256=sha256)


async def _pieces(data: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(data), CHUNK_BYTES):
        yield data[start : start + CHUNK_BYTES]


def _portable(part: Content) -> SentContent:
    if not isinstance(part, File):
        return part
    return ResourceLink(
        f"urn:sha256:{part.sha256}", part.filename or "", part.mimeType, metadata=part.metadata, size=part.size
    )


def _block(file: File, encoded: bytes) -> Content:
    data, media_type = encoded.decode("ascii"), file.mimeType or "application/octet-stream"
    if file.came_as == "image":
        return Image(data, media_type, file.annotations, file.meta)
    if file.came_as == "audio":
        return Audio(data, media_type, file.annotations, file.meta)
    inner = Embedded(file.uri, file.mimeType, blob=data, meta=file.resource_meta)
    return Resource(inner, file.filename, file.metadata, file.annotations, file.meta)
