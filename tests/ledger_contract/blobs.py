"""What every blob store promises."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterable

import pytest

from covenant.ledger.contract.blobs import CHUNK_BYTES, Blob, BlobQuota, BlobStore, BlobUsage, Known, space_of
from covenant.model.errors import Invalid, NotFound, OverLimit, TooLarge
from covenant.model.ids import TaskId
from tests.ledger_contract.samples import task_id

ACME, OTHER = space_of("acme"), space_of("other")
QUOTA = BlobQuota(file_bytes_max=10_000_000, bytes_max=50_000_000, files_max=100_000)
PIECE = bytes(range(256)) * 300
NOBODY: frozenset[TaskId] = frozenset()
LATER_MS, NEVER_MS = 1 << 62, 0
"""Moments for the collector: everything is older than the first, nothing older than the second."""


def knows(tasks: Iterable[TaskId]) -> Known:
    found = frozenset(tasks)

    async def known(each: TaskId) -> bool:
        return each in found

    return known


async def put(
    store: BlobStore, data: bytes, by: TaskId | None = None, space: str = ACME, quota: BlobQuota = QUOTA
) -> Blob:
    writer = await store.writer(space, quota)
    try:
        for start in range(0, len(data), 100_000):
            await writer.write(data[start : start + 100_000])
    except BaseException:
        await writer.discard()
        raise
    return await writer.finish(by)


async def get(store: BlobStore, blob: Blob, start: int = 0, stop: int | None = None, space: str = ACME) -> bytes:
    found = store.read(space, blob.sha256, start, blob.size if stop is None else stop)
    return b"".join([piece async for piece in found])


class BlobSuite:
    @pytest.fixture
    async def store(self) -> BlobStore:
        raise NotImplementedError("a subclass for a store overrides this fixture")

    async def test_what_was_stored_is_read_again_whole_and_in_any_range(self, store: BlobStore) -> None:
        data = PIECE * 10
        blob = await put(store, data, task_id(1))
        assert blob == Blob(hashlib.sha256(data).hexdigest(), len(data))
        assert await get(store, blob) == data
        edge = CHUNK_BYTES
        for start, stop in [(0, 1), (edge - 1, edge + 1), (edge, 2 * edge), (len(data) - 1, len(data)), (5, 5)]:
            assert await get(store, blob, start, stop) == data[start:stop]

    async def test_a_blob_of_no_bytes_is_a_blob(self, store: BlobStore) -> None:
        blob = await put(store, b"", task_id(1))
        assert (await get(store, blob), await store.find(ACME, blob.sha256, task_id(1))) == (b"", 0)

    async def test_only_a_task_that_refers_to_a_blob_finds_it(self, store: BlobStore) -> None:
        blob = await put(store, PIECE, task_id(1))
        assert await store.find(ACME, blob.sha256, task_id(1)) == blob.size
        assert await store.find(ACME, blob.sha256, task_id(2)) is None
        assert await store.refer(ACME, blob.sha256, task_id(2)) == blob.size
        assert await store.find(ACME, blob.sha256, task_id(2)) == blob.size
        assert await store.refer(ACME, hashlib.sha256(b"else").hexdigest(), task_id(2)) is None

    async def test_a_space_knows_nothing_of_what_another_one_has(self, store: BlobStore) -> None:
        blob = await put(store, PIECE, task_id(1))
        assert await store.find(OTHER, blob.sha256) is None
        assert await store.refer(OTHER, blob.sha256, task_id(2)) is None
        with pytest.raises(NotFound):
            await get(store, blob, space=OTHER)
        assert await store.usage(OTHER) == BlobUsage(0, 0)
        await put(store, PIECE, task_id(3), OTHER)
        assert await store.usage(OTHER) == BlobUsage(1, blob.size)
        await store.erase(ACME)
        assert await get(store, blob, space=OTHER) == PIECE

    async def test_the_same_content_is_kept_and_counted_once_a_space(self, store: BlobStore) -> None:
        blob = await put(store, PIECE, task_id(1))
        assert await put(store, PIECE, task_id(2)) == blob
        assert await store.usage(ACME) == await store.usage() == BlobUsage(1, blob.size)
        (listed,) = await store.listing(ACME, "", 10)
        assert (listed.sha256, listed.size, listed.references) == (blob.sha256, blob.size, 2)
        assert listed.tasks == tuple(sorted((task_id(1), task_id(2))))

    async def test_a_listing_goes_on_behind_the_last_hash(self, store: BlobStore) -> None:
        stored = sorted([(await put(store, bytes([n]), task_id(1))).sha256 for n in range(7)])
        found: list[str] = []
        while page := await store.listing(ACME, found[-1] if found else "", 3):
            found += [each.sha256 for each in page]
        assert found == stored

    async def test_a_hash_that_is_claimed_wrongly_is_refused_and_nothing_is_kept(self, store: BlobStore) -> None:
        writer = await store.writer(ACME, QUOTA)
        await writer.write(b"one thing")
        with pytest.raises(Invalid) as refused:
            await writer.finish(task_id(1), sha256=hashlib.sha256(b"another").hexdigest())
        assert refused.value.code == "wrong_hash"
        assert await store.usage(ACME) == BlobUsage(0, 0)

    async def test_a_blob_that_is_discarded_leaves_nothing(self, store: BlobStore) -> None:
        writer = await store.writer(ACME, QUOTA)
        await writer.write(PIECE)
        await writer.discard()
        assert await store.usage() == BlobUsage(0, 0)
        assert await store.find(ACME, hashlib.sha256(PIECE).hexdigest()) is None

    async def test_a_space_and_a_file_are_limited_in_bytes_and_count(self, store: BlobStore) -> None:
        quota = BlobQuota(file_bytes_max=1_000, bytes_max=1_500, files_max=2)
        with pytest.raises(TooLarge):
            await put(store, b"x" * 1_001, quota=quota)
        await put(store, b"x" * 1_000, quota=quota)
        with pytest.raises(OverLimit):
            await put(store, b"y" * 501, quota=quota)
        await put(store, b"y", quota=quota)
        with pytest.raises(OverLimit):
            await put(store, b"z", quota=quota)
        assert await store.usage(ACME) == BlobUsage(2, 1_001)
        await put(store, b"z", space=OTHER, quota=quota)

    async def test_what_a_known_task_refers_to_is_never_collected(self, store: BlobStore) -> None:
        blob = await put(store, PIECE, task_id(1))
        await store.refer(ACME, blob.sha256, task_id(2))
        collected = await store.collect(knows([task_id(2)]), LATER_MS)
        assert (collected.references, collected.blobs) == (1, 0)
        assert await get(store, blob) == PIECE
        assert await store.find(ACME, blob.sha256, task_id(1)) is None
        collected = await store.collect(knows(NOBODY), LATER_MS)
        assert (collected.references, collected.blobs, collected.bytes) == (1, 1, blob.size)
        assert await store.usage(ACME) == BlobUsage(0, 0)
        with pytest.raises(NotFound):
            await get(store, blob)

    async def test_a_pass_looks_up_few_of_many_references_and_the_next_one_goes_on(
        self, store: BlobStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for engine in ("embedded.blob_folder", "postgres.blob_rows"):
            monkeypatch.setattr(f"covenant.ledger.{engine}.REFERENCES_MAX", 10)
        live = [task_id(number) for number in range(35)]
        asked: list[TaskId] = []

        async def known(each: TaskId) -> bool:
            asked.append(each)
            return each in live

        blobs = [await put(store, data, live[0]) for data in (PIECE, b"other")]
        for each in live[1:]:
            await store.refer(ACME, blobs[0].sha256, each)
        passes = [await store.collect(known, LATER_MS)]
        while passes[-1].more:
            assert len(asked) <= 10 * len(passes)
            passes.append(await store.collect(known, LATER_MS))
        assert sorted(asked) == sorted([*live, live[0]])
        assert len(passes) >= 4
        live = live[:1]
        collected = [await store.collect(known, LATER_MS) for _ in passes]
        assert sum(each.references for each in collected) == 34
        live = []
        while (await store.usage(ACME)).files:
            await store.collect(known, LATER_MS)

    async def test_references_made_before_a_moment_are_not_looked_up_again(self, store: BlobStore) -> None:
        asked: list[TaskId] = []

        async def known(each: TaskId) -> bool:
            asked.append(each)
            return each != task_id(3)

        blob, other = await put(store, PIECE, task_id(1)), await put(store, b"other", task_id(2))
        await store.collect(known, LATER_MS, NEVER_MS)
        assert sorted(asked) == [task_id(1), task_id(2)]
        since_ms = max([each.stored_at_ms for each in await store.listing(ACME, "", 10)]) + 1
        while min([each.stored_at_ms for each in await store.listing(ACME, "", 10)]) <= since_ms:
            await store.refer(ACME, blob.sha256, task_id(3))
            await store.refer(ACME, other.sha256, task_id(2))
        await store.refer(ACME, blob.sha256, task_id(4))
        asked.clear()
        collected = await store.collect(known, LATER_MS, since_ms)
        assert (sorted(asked), collected.references) == ([task_id(2), task_id(3), task_id(4)], 1)
        asked.clear()
        assert (await store.collect(known, LATER_MS, LATER_MS - 1)).looked == 0
        assert asked == []

    async def test_a_reference_is_no_younger_than_its_blob(self, store: BlobStore) -> None:
        """Between the two times a round may end, and the next round leaves out the blob, which is older."""
        asked: list[TaskId] = []

        async def known(each: TaskId) -> bool:
            asked.append(each)
            return True

        async def looked_up(blob: Blob) -> set[TaskId]:
            asked.clear()
            (stored,) = [each for each in await store.listing(ACME, "", 100) if each.sha256 == blob.sha256]
            while (await store.collect(known, stored.stored_at_ms + 1)).more:
                pass
            return set(asked)

        for number in range(20):
            writer = await store.writer(ACME, QUOTA)
            await writer.write(str(number).encode())
            await asyncio.sleep(0.005)  # whoever sends the bytes ends the upload when they like
            blob = await writer.finish(task_id(number))
            assert task_id(number) in await looked_up(blob)
            await store.refer(ACME, blob.sha256, task_id(100 + number))
            assert task_id(100 + number) in await looked_up(blob)

    async def test_what_is_young_is_not_collected_whoever_knows_it(self, store: BlobStore) -> None:
        """A decision that is about to refer to it may not be committed yet."""
        referred, bare = await put(store, b"one", task_id(1)), await put(store, b"two")
        collected = await store.collect(knows(NOBODY), NEVER_MS)
        assert (collected.looked, collected.references, collected.blobs) == (2, 0, 0)
        assert (await get(store, referred), await get(store, bare)) == (b"one", b"two")

    async def test_what_was_collected_can_be_stored_again(self, store: BlobStore) -> None:
        await put(store, PIECE)
        assert (await store.collect(knows(NOBODY), LATER_MS)).blobs == 1
        blob = await put(store, PIECE, task_id(1))
        assert await get(store, blob) == PIECE
        assert await store.usage(ACME) == BlobUsage(1, blob.size)

    async def test_erasing_a_space_leaves_nothing_of_it(self, store: BlobStore) -> None:
        blob = await put(store, PIECE, task_id(1))
        await store.erase(ACME)
        assert await store.find(ACME, blob.sha256) is None
        assert (await store.usage(ACME), await store.listing(ACME, "", 10)) == (BlobUsage(0, 0), [])

    async def test_a_check_tells_of_blobs_that_nothing_refers_to(self, store: BlobStore) -> None:
        blob = await put(store, PIECE, task_id(1))
        assert list(await store.check(knows([task_id(1)]), hashes=True)) == []
        (fault,) = await store.check(knows(NOBODY), hashes=True)
        assert (fault.kind, fault.sha256) == ("orphan", blob.sha256)

    async def test_names_that_are_no_hash_lead_nowhere(self, store: BlobStore) -> None:
        for name in ("../../etc/passwd", "", "A" * 64, "0" * 63, "0" * 64 + "/.."):
            with pytest.raises(NotFound):
                await store.find(ACME, name)
            with pytest.raises(NotFound):
                await get(store, Blob(name, 1))
