"""A world with both doors open."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.doors.doors_under_test import DoorsUnderTest, open_doors
from tests.doors.speakers import HttpSpeaker, IpcSpeaker, Speaker


@pytest.fixture
async def under_test(short_path: Path) -> AsyncIterator[DoorsUnderTest]:
    async with open_doors(short_path) as opened:
        yield opened


@pytest.fixture(params=["http", "ipc"])
def speaker(request: pytest.FixtureRequest, under_test: DoorsUnderTest) -> Speaker:
    return HttpSpeaker() if request.param == "http" else IpcSpeaker(under_test)
