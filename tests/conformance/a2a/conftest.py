"""`binding` is what a test speaks: each of those that its requirements name. `me` is a client in it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from covenant.exchange import a2a_service as conversation
from tests.conformance.a2a.bindings import Binding
from tests.conformance.a2a.server_under_test import ServerUnderTest, open_server
from tests.conformance.a2a.spoken import BINDINGS
from tests.conformance.a2a.table import HERE, ROOT, bindings_of


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    path = metafunc.definition.path
    if path.is_relative_to(HERE) and "binding" in metafunc.fixturenames:
        test = f"{path.relative_to(ROOT).as_posix()}::{metafunc.definition.originalname}"
        named = bindings_of(test)
        assert named, f"{test} speaks, and no requirement says what"
        metafunc.parametrize("binding", [BINDINGS[name] for name in named], ids=named)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def under_test(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ServerUnderTest]:
    async with open_server(Path(tmp_path_factory.mktemp("world"))) as opened:
        yield opened


@pytest.fixture
def me(under_test: ServerUnderTest, binding: type[Binding]) -> Binding:
    return under_test.client(binding)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams wait for an agent that answers with a bare message, however busy the machine is."""
    monkeypatch.setattr(conversation, "REPLY_S", 10.0)
