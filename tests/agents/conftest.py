"""Each test on a ledger in memory and on one on files, unless it asks for one of them."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from covenant.ledger.contract.ledger import Ledger
from tests.agents.pool_under_test import PoolUnderTest, a_ledger, open_pool
from tests.matrices import first_of


@pytest.fixture(params=first_of(["file", "memory"]))
async def ledger(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Ledger]:
    async with a_ledger(tmp_path / "home" if request.param == "file" else None) as opened:
        yield opened


@pytest.fixture
async def pool(ledger: Ledger) -> AsyncIterator[PoolUnderTest]:
    async with open_pool(ledger, stop_s=0.2) as opened:
        yield opened
