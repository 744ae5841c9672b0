"""The suite of blob stores, for each of them."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from covenant.ledger.clock import Uuids
from covenant.ledger.contract.blobs import BlobStore
from covenant.ledger.embedded.blob_folder import BlobFolder
from covenant.ledger.postgres.open_postgres import open_blob_rows
from tests.ledger_contract.blobs import BlobSuite
from tests.ledger_contract.postgres_engine import PostgresEngine
from tests.ledger_contract.postgres_server import Databases, databases

__all__ = ["databases"]


class TestFolder(BlobSuite):
    @pytest.fixture
    async def store(self, tmp_path: Path) -> BlobStore:
        return BlobFolder(tmp_path / "blobs", Uuids())


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
