"""The suite of blob stores, for each of them."""

import hashlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

import pytest

from covenant.ledger.clock import uuid_source
from covenant.ledger.contract.blobs import BlobStore, BlobUsage
from covenant.ledger.embedded.blob_folder import BlobFolder
from covenant.ledger.postgres.blob_rows import BlobRows
from covenant.ledger.postgres.open_postgres import open_blob_rows
from covenant.model.errors import NotFound, Unavailable
from covenant.outbound.s3_objects import ATTEMPTS_MAX
from tests.ledger_contract.blobs import ACME, LATER_MS, NOBODY, OTHER, PIECE, QUOTA, BlobSuite, get, knows, put
from tests.ledger_contract.postgres_engine import PostgresEngine
from tests.ledger_contract.postgres_server import Databases
from tests.ledger_contract.samples import task_id
from tests.outbound.s3_server import Fault, S3Server, s3_server
from tests.outbound.test_s3_objects import objects_of


class TestFolder(BlobSuite):
    @pytest.fixture
    async def store(self, tmp_path: Path) -> BlobStore:
        return BlobFolder(tmp_path / "blobs", uuid_source())


class S3Store(NamedTuple):
    rows: BlobRows
    server: S3Server


@pytest.fixture
async def s3_store(databases: Databases) -> AsyncIterator[S3Store]:
    url = await databases.borrow()
    engine = PostgresEngine(url)
    await engine.open()
    async with s3_server() as server:
        rows = await open_blob_rows(url, upload_bytes=objects_of(server))
        yield S3Store(rows, server)
        await rows.close()
    await engine.close()
    await databases.give_back(url)


class TestS3(BlobSuite):
    @pytest.fixture
    async def store(self, s3_store: S3Store) -> BlobStore:
        return s3_store.rows

    async def test_nothing_is_left_in_the_bucket_of_what_is_gone(self, s3_store: S3Store) -> None:
        rows, server = s3_store
        await put(rows, PIECE)
        await put(rows, PIECE)
        await put(rows, b"other", space=OTHER)
        assert sorted(server.objects.values()) == sorted([PIECE, b"other"])
        await rows.erase(OTHER)
        assert list(server.objects.values()) == [PIECE]
        assert (await rows.collect(knows(NOBODY), LATER_MS)).blobs == 1
        assert server.objects == {}

    async def test_a_blob_is_there_only_once_the_bucket_has_acknowledged_it(self, s3_store: S3Store) -> None:
        rows, server = s3_store
        server.down = True
        with pytest.raises(Unavailable):
            await put(rows, PIECE, task_id(1))
        assert await rows.find(ACME, hashlib.sha256(PIECE).hexdigest()) is None
        server.down, server.faults = False, [Fault("PUT", "lost"), Fault("PUT", 500)]
        blob = await put(rows, PIECE, task_id(1))
        assert await get(rows, blob) == PIECE
        await rows.collect(knows([task_id(1)]), LATER_MS)
        assert list(server.objects.values()) == [PIECE]

    async def test_what_could_not_be_dropped_is_dropped_by_a_later_pass(self, s3_store: S3Store) -> None:
        rows, server = s3_store
        await put(rows, PIECE)
        server.faults = [Fault("DELETE", 503) for _ in range(2 * ATTEMPTS_MAX)]
        assert (await rows.collect(knows(NOBODY), LATER_MS)).blobs == 1
        assert (len(server.objects), await rows.usage()) == (1, BlobUsage(0, 0))
        await rows.collect(knows(NOBODY), LATER_MS)
        assert server.objects == {}

    async def test_an_object_that_is_lost_or_changed_is_found(self, s3_store: S3Store) -> None:
        rows, server = s3_store
        blob = await put(rows, PIECE, task_id(1))
        (key,) = server.objects
        server.objects[key] = PIECE[:-1] + b"?"
        (fault,) = await rows.check(knows([task_id(1)]), hashes=True)
        assert (fault.kind, fault.sha256) == ("wrong_hash", blob.sha256)
        assert await put(rows, PIECE, task_id(2)) == blob
        assert await get(rows, blob) == PIECE
        assert (await rows.usage(ACME), list(server.objects.values())) == (BlobUsage(1, blob.size), [PIECE])
        assert await rows.find(ACME, blob.sha256, task_id(1)) == blob.size
        server.objects.clear()
        (fault,) = await rows.check(knows([task_id(1)]), hashes=True)
        assert fault.kind == "missing"
        with pytest.raises(NotFound):
            await get(rows, blob)


class TestPostgres(BlobSuite):
    @pytest.fixture
    async def store(self, databases: Databases) -> AsyncIterator[BlobStore]:
        url = await databases.borrow()
        engine = PostgresEngine(url)
        await engine.open()
        store = await open_blob_rows(url)
        yield store
        await store.close()
        await engine.close()
        await databases.give_back(url)

    async def test_bytes_that_are_damaged_are_replaced_when_they_come_again(self, store: BlobStore) -> None:
        assert isinstance(store, BlobRows)
        blob = await put(store, PIECE, task_id(1))
        async with store.connections.transaction() as db:
            await db.execute("UPDATE blob_chunk SET body = set_byte(body, 5, 9)")
        assert await get(store, blob) != PIECE
        assert await put(store, PIECE, task_id(2)) == blob
        assert await get(store, blob) == PIECE
        assert await store.find(ACME, blob.sha256, task_id(1)) == blob.size
        async with store.connections.transaction() as db:
            assert await db.fetchval("SELECT count(DISTINCT upload_id) FROM blob_chunk") == 1
            assert await db.fetchval("SELECT count(*) FROM blob_upload") == 0

    async def test_a_discard_after_a_commit_whose_answer_was_lost_drops_no_published_bytes(
        self, store: BlobStore
    ) -> None:
        writer = await store.writer(ACME, QUOTA)
        await writer.write(PIECE)
        blob = await writer.finish(task_id(1))
        await writer.discard()
        assert await get(store, blob) == PIECE

    async def test_an_upload_that_the_collector_has_dropped_meanwhile_is_refused(self, store: BlobStore) -> None:
        assert isinstance(store, BlobRows)
        writer = await store.writer(ACME, QUOTA)
        await writer.write(PIECE)
        await store.collect(knows(NOBODY), LATER_MS)
        with pytest.raises(Unavailable, match=r"blobs\.kept_ms"):
            await writer.finish(task_id(1))
        assert await store.find(ACME, hashlib.sha256(PIECE).hexdigest()) is None
        async with store.connections.transaction() as db:
            assert await db.fetchval("SELECT count(*) FROM blob_chunk") == 0
