"""The contract over the engine on PostgreSQL, on a real server."""

from collections.abc import AsyncIterator

import pytest

from tests.ledger_contract.contract import DurableLedgerContract
from tests.ledger_contract.postgres_engine import PostgresEngine
from tests.ledger_contract.postgres_server import Databases


class TestPostgresLedger(DurableLedgerContract):
    @pytest.fixture
    async def engine(self, databases: Databases) -> AsyncIterator[PostgresEngine]:
        url = await databases.borrow()
        engine = PostgresEngine(url)
        yield engine
        await engine.close()
        await databases.give_back(url)
