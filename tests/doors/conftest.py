"""A world with both doors open."""

import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.doors.speakers import HttpSpeaker, IpcSpeaker, Speaker
from tests.doors.world import World, open_world


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short name: a Unix socket's path may have some hundred bytes."""
    made = Path(tempfile.mkdtemp(prefix="cov-"))
    yield made
    shutil.rmtree(made)


@pytest.fixture
async def world(folder: Path) -> AsyncIterator[World]:
    async with open_world(folder) as opened:
        yield opened


@pytest.fixture(params=["http", "ipc"])
def speaker(request: pytest.FixtureRequest, world: World) -> Speaker:
    return HttpSpeaker() if request.param == "http" else IpcSpeaker(world)
