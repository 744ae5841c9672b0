"""The tree of a task: branches that have ended are folded, and read when they are opened."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.browser.visitor import open_visitor
from tests.e2e.linked_daemons import LinkedDaemons
from tests.waits import until

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = pytest.mark.browser


def test_a_branch_that_has_ended_is_read_when_it_is_opened_and_stays_open(
    chromium: Browser, daemons: LinkedDaemons
) -> None:
    one = daemons.start("a")
    root = one.send("late", "race", wait=False)["id"]
    tree = one.tree_when(root, lambda node: any(each["a2a_state"] == "completed" for each in node["children"]))
    (branch,) = tree["children"]
    below = {node["task_id"] for node in branch["children"]}
    assert len(below) == 3
    with open_visitor(chromium, one.daemon.url) as visitor:
        page = visitor.log_in(one.token, f"/ui/tree/{root}")
        page.wait_for_selector(".live[data-state=live]")
        page.wait_for_selector("main .head >> text=5 tasks, 3 of them folded")
        until(lambda: page.locator("#rows > *").count() == 2)
        page.click(f"#rows [data-key='{branch['task_id']}'] button.twist")
        for task_id in below:
            page.wait_for_selector(f"#rows [data-key='{task_id}']")
        one.cancel("late", root)
        page.wait_for_selector(f"#rows [data-key='{root}'] .state:has-text('Canceled')")
        assert page.locator("#rows > *").count() == 5, "what was opened stays open"
        reads = [url for url in visitor.asked if f"{branch['task_id']}/tree" in url]
        assert len(reads) == 1, "what has ended is read once"
        page.click(f"#rows [data-key='{branch['task_id']}'] button.twist")
        page.wait_for_selector(f"#rows [data-key='{next(iter(below))}']", state="detached")
        page.click("#open-all")
        for task_id in below:
            page.wait_for_selector(f"#rows [data-key='{task_id}']")


def test_the_tree_of_a_task_that_is_not_there_says_so(chromium: Browser, daemons: LinkedDaemons) -> None:
    one = daemons.start("a")
    with open_visitor(chromium, one.daemon.url) as visitor:
        page = visitor.log_in(one.token, "/ui/tree/00000000-0000-4000-8000-000000000000")
        page.wait_for_selector("#refused:has-text('There is no such task.')")
