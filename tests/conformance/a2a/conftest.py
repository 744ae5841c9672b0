"""`binding` is what a test speaks: each of those that its requirements name. `me` is a client in it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from zlib import crc32

import pytest
import pytest_asyncio

from covenant.exchange import a2a_service as conversation
from tests.conformance.a2a.bindings import Binding
from tests.conformance.a2a.server_under_test import ServerUnderTest, open_server
from tests.conformance.a2a.spoken import BINDINGS
from tests.conformance.a2a.table import HERE, ROOT, bindings_of
from tests.matrices import first_of
from tests.waits import BOUND_S


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    path = metafunc.definition.path
    if path.is_relative_to(HERE) and "binding" in metafunc.fixturenames:
        test = f"{path.relative_to(ROOT).as_posix()}::{metafunc.definition.originalname}"
        named = bindings_of(test)
        assert named, f"{test} speaks, and no requirement says what"
        # Of each test another one comes first: all of them are spoken in `make test`, and each test in one.
        at = crc32(test.encode()) % len(named)
        turned = [*named[at:], *named[:at]]
        metafunc.parametrize("binding", first_of(BINDINGS[name] for name in turned), ids=turned)


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
    monkeypatch.setattr(conversation, "REPLY_S", BOUND_S)
