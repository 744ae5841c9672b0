"""What every suite of the contract starts from: an engine that its subclass provides, and a desk at it."""

from __future__ import annotations

import pytest

from covenant.testing.desk import Desk
from covenant.testing.engine import Engine


class Suite:
    @pytest.fixture
    def engine(self) -> Engine:
        raise NotImplementedError("a subclass for an engine overrides this fixture")

    @pytest.fixture
    async def desk(self, engine: Engine) -> Desk:
        return Desk(await engine.open(), engine.clock)
