"""The contract over the engine in memory: the same promises, but for those that need a disk."""

from collections.abc import AsyncIterator

import pytest

from tests.ledger_contract.contract import LedgerContract
from tests.ledger_contract.log_engine import MemoryEngine


class TestMemoryLedger(LedgerContract):
    @pytest.fixture
    async def engine(self) -> AsyncIterator[MemoryEngine]:
        engine = MemoryEngine()
        yield engine
        await engine.close()
