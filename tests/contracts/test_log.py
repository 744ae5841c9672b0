"""The contract over the log engine: on files, with segments so small that every test crosses several."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from covenant.testing.contract import DurableLedgerContract
from covenant.testing.log import LogEngine


class TestLogLedger(DurableLedgerContract):
    @pytest.fixture
    async def engine(self, tmp_path: Path) -> AsyncIterator[LogEngine]:
        engine = LogEngine(tmp_path, segment_bytes=2_000)
        yield engine
        await engine.close()
