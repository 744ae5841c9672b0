"""The contract over the embedded engine without a disk: the same engine as in `test_embedded`, its files in memory.

Not a second implementation. It shows that nothing in the contract but durability needs a disk, and it is what
`Mailbox.memory` and many tests run on.
"""

from collections.abc import AsyncIterator

import pytest

from tests.ledger_contract.contract import LedgerContract
from tests.ledger_contract.embedded_engine import EmbeddedInMemory


@pytest.mark.matrix
class TestEmbeddedLedgerInMemory(LedgerContract):
    @pytest.fixture
    async def engine(self) -> AsyncIterator[EmbeddedInMemory]:
        engine = EmbeddedInMemory()
        yield engine
        await engine.close()
