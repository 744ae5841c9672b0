"""The page of the daemons that share a ledger."""

from __future__ import annotations

import asyncio
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from tests.browser.visitor import open_visitor
from tests.e2e.linked_daemons import LinkedDaemons
from tests.e2e.test_shared_ledger import copy_keys
from tests.ledger_contract.postgres_server import Databases

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = pytest.mark.browser


def test_a_stopped_daemon_has_left_and_a_lost_one_is_called_so_and_its_time_stands_still(
    chromium: Browser, daemons: LinkedDaemons, databases: Databases
) -> None:
    with ThreadPoolExecutor(1) as thread:  # Playwright's loop runs in this one
        url = thread.submit(asyncio.run, databases.make()).result()
    one = daemons.start("a", "--ledger", url, "--ledger-durability", "os")
    copy_keys(daemons.folder)
    other = daemons.start("b", "--ledger", url, "--ledger-durability", "os")
    with open_visitor(chromium, one.daemon.url) as visitor:
        page = visitor.log_in(one.token, "/ui/nodes")
        page.wait_for_selector("text=2 of 2 daemons alive")
        other.daemon.stop()
        page.locator("#rows tr:has(.state:has-text('Left'))").wait_for()
        other = daemons.start("b", "--ledger", url, "--ledger-durability", "os")
        page.wait_for_selector("text=2 of 2 daemons alive")
        other.daemon.stop(signal.SIGKILL)
        lost = page.locator("#rows tr:has(.state:has-text('Lost'))")
        lost.wait_for()
        page.wait_for_selector("text=1 of 2 daemons alive")
        up = lost.locator("[data-slot=up]").inner_text()
        page.reload()
        lost.wait_for()
        assert lost.locator("[data-slot=up]").inner_text() == up
