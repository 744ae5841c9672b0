"""The contract over the log engine: on files, with segments so small that every test crosses several."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from covenant.ledger.log import bodies
from covenant.testing.compacting import CompactingSuite
from covenant.testing.contract import DurableLedgerContract
from covenant.testing.expiring import ExpiringSuite
from covenant.testing.leasing import LeasingSuite
from covenant.testing.log import LogEngine
from covenant.testing.repairing import RepairingSuite
from covenant.testing.sending import SendingSuite
from covenant.testing.sharing import SharingSuite
from covenant.testing.surviving import SurvivingSuite


class TestLogLedger(DurableLedgerContract):
    @pytest.fixture
    async def engine(self, tmp_path: Path) -> AsyncIterator[LogEngine]:
        engine = LogEngine(tmp_path, segment_bytes=2_000)
        yield engine
        await engine.close()


class TestLogLedgerWithBodiesOnDisk(
    SurvivingSuite, CompactingSuite, SendingSuite, SharingSuite, LeasingSuite, RepairingSuite, ExpiringSuite
):
    """Whatever is asked of live tasks is the same when no body stays in memory, however small it is."""

    @pytest.fixture
    async def engine(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[LogEngine]:
        monkeypatch.setattr(bodies, "WAITING_BYTES_MAX", 0)
        engine = LogEngine(tmp_path, segment_bytes=2_000, body_bytes_on_disk=1)
        yield engine
        await engine.close()
