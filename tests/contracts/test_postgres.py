"""The contract over the engine on PostgreSQL, on a real server."""

from collections.abc import AsyncIterator
from typing import Final

import pytest

from tests.ledger_contract.contract import DurableLedgerContract
from tests.ledger_contract.postgres_engine import PostgresEngine
from tests.ledger_contract.postgres_server import Databases

LEASE_MS: Final = 15_000
"""Each test has one node, and a busy machine must not make it refuse anything."""


class TestPostgresLedger(DurableLedgerContract):
    @pytest.fixture
    async def engine(self, databases: Databases) -> AsyncIterator[PostgresEngine]:
        url = await databases.borrow()
        engine = PostgresEngine(url, lease_ms=LEASE_MS)
        yield engine
        await engine.close()
        await databases.give_back(url)
