"""The system's chromium, driven by Playwright: one for all tests of a module, each with a profile of its own."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.e2e.linked_daemons import LinkedDaemons, open_linked_daemons

if TYPE_CHECKING:
    from playwright.sync_api import Browser


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    # Not installed where there is no browser, and these tests are left out there.
    from playwright.sync_api import sync_playwright  # noqa: PLC0415

    # Its sandbox refuses to run as root.
    flags = ["--disable-dev-shm-usage", *(["--no-sandbox"] if os.geteuid() == 0 else [])]
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=flags)
        yield browser
        browser.close()


@pytest.fixture
def daemons(short_path: Path) -> Iterator[LinkedDaemons]:
    with open_linked_daemons(short_path) as made:
        yield made


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What was measured in passing, whichever worker did it."""
    for report in terminalreporter.stats.get("passed", []):
        for name, value in report.user_properties:
            if name == "measured":
                terminalreporter.write_line(str(value))
