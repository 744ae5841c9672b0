"""The suite of blob stores, for each of them."""

from pathlib import Path

import pytest

from covenant.ledger.clock import Uuids
from covenant.ledger.contract.blobs import BlobStore
from covenant.ledger.embedded.blob_folder import BlobFolder
from tests.ledger_contract.blobs import BlobSuite


class TestFolder(BlobSuite):
    @pytest.fixture
    async def store(self, tmp_path: Path) -> BlobStore:
        return BlobFolder(tmp_path / "blobs", Uuids())
