"""A world with both doors open."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.doors.speakers import HttpSpeaker, IpcSpeaker, Speaker
from tests.doors.world import World, open_world


@pytest.fixture
async def world(short_path: Path) -> AsyncIterator[World]:
    async with open_world(short_path) as opened:
        yield opened


@pytest.fixture(params=["http", "ipc"])
def speaker(request: pytest.FixtureRequest, world: World) -> Speaker:
    return HttpSpeaker() if request.param == "http" else IpcSpeaker(world)
