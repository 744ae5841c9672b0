"""What every suite of the contract starts from: an engine that its subclass provides, and a driver of its ledger."""

from __future__ import annotations

import pytest

from tests.ledger_contract.driver import LedgerDriver
from tests.ledger_contract.engine import Engine


class Suite:
    @pytest.fixture
    def engine(self) -> Engine:
        raise NotImplementedError("a subclass for an engine overrides this fixture")

    @pytest.fixture
    async def driver(self, engine: Engine) -> LedgerDriver:
        return LedgerDriver(await engine.open(), engine.clock)
