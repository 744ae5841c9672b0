from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.daemon_under_test import DaemonUnderTest
from tests.dashboard.browser import Browser, open_browser, open_pages


@pytest.fixture
async def daemon(short_path: Path) -> AsyncIterator[DaemonUnderTest]:
    async with open_pages(short_path) as opened:
        yield opened


@pytest.fixture
async def operator(daemon: DaemonUnderTest) -> AsyncIterator[Browser]:
    """A browser that the operator is logged in with."""
    async with open_browser(daemon, daemon.token) as browser:
        yield browser
