"""What is done elsewhere: the tree over two daemons."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.browser.visitor import open_visitor
from tests.e2e.linked_daemons import LinkedDaemons
from tests.waits import until

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = pytest.mark.browser


def test_a_tree_over_two_daemons_has_the_network_icon_where_work_is_elsewhere(
    chromium: Browser, daemons: LinkedDaemons
) -> None:
    a, b = daemons.start("a"), daemons.start("b")
    a.knows(b=(b, "relay"))
    task = a.send("relay", "b echo")
    with open_visitor(chromium, a.daemon.url) as visitor:
        page = visitor.log_in(a.token, f"/ui/tree/{task['id']}")
        rows = page.locator("#rows tr")
        page.wait_for_selector("#rows tr >> nth=1")
        until(lambda: rows.count() == 2)
        assert rows.nth(0).locator("svg[aria-label='done elsewhere']").count() == 0
        remote = rows.nth(1)
        remote.locator("svg[aria-label='done elsewhere']").wait_for()
        remote.locator(f".net a[href='{b.daemon.url}/v1/a2a/agents/relay']").wait_for()
        page.click("#rows tr >> nth=0 >> button.twist")
        page.wait_for_selector("#rows tr >> nth=1", state="detached")
        page.click("#rows tr >> nth=0 >> button.twist")
        remote.locator("a.row").click()
        page.wait_for_url("**/ui/task/**")
