"""The contract over the embedded engine: on files, with segments so small that every test crosses several."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from covenant.ledger.embedded import queues
from tests.ledger_contract.acceptance import AcceptanceSuite
from tests.ledger_contract.compaction import CompactionSuite
from tests.ledger_contract.contract import DurableLedgerContract
from tests.ledger_contract.durability import DurabilitySuite
from tests.ledger_contract.embedded_engine import EmbeddedEngine
from tests.ledger_contract.expiry import ExpirySuite
from tests.ledger_contract.idempotency import IdempotencySuite
from tests.ledger_contract.leases import LeaseSuite
from tests.ledger_contract.repair import RepairSuite


class TestEmbeddedLedger(DurableLedgerContract):
    @pytest.fixture
    async def engine(self, tmp_path: Path) -> AsyncIterator[EmbeddedEngine]:
        engine = EmbeddedEngine(tmp_path, segment_bytes=2_000)
        yield engine
        await engine.close()


@pytest.mark.matrix
class TestEmbeddedLedgerWithBodiesOnDisk(
    DurabilitySuite, CompactionSuite, AcceptanceSuite, IdempotencySuite, LeaseSuite, RepairSuite, ExpirySuite
):
    """Whatever is asked of live tasks is the same when no body stays in memory, however small it is."""

    @pytest.fixture
    async def engine(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[EmbeddedEngine]:
        monkeypatch.setattr(queues, "WAITING_BYTES_MAX", 0)
        engine = EmbeddedEngine(tmp_path, segment_bytes=2_000, body_bytes_on_disk=1)
        yield engine
        await engine.close()
