"""A task's story in time: which bars it has, from what the ledger knows."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import pytest

from tests.browser.visitor import open_visitor, wait_for_state
from tests.e2e.linked_daemons import LinkedDaemons
from tests.waits import until

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = pytest.mark.browser


def test_calls_waits_and_pushes_are_bars_turns_are_bands_and_output_is_one_bar(
    chromium: Browser, daemons: LinkedDaemons
) -> None:
    home = daemons.folder / "a"
    home.mkdir(mode=0o700)
    (home / "settings.toml").write_text("[a2a]\npush_notifications = true\n")
    one = daemons.start("a")
    parent = one.send("relay", "echo hello")
    waits = one.send("asker", "one of them")
    hook = {"id": "hook", "url": "https://example.com/hook"}
    configuration = {"returnImmediately": True, "taskPushNotificationConfig": hook}
    message = {"messageId": "p", "role": "ROLE_USER", "parts": [{"text": "it"}]}
    pushed = one.rpc("held", "SendMessage", message=message, configuration=configuration)["task"]
    with open_visitor(chromium, one.daemon.url) as visitor:
        page = visitor.log_in(one.token, f"/ui/task/{parent['id']}")
        wait_for_state(page, "Completed")
        page.wait_for_selector("#fall a:has-text('echo')")
        page.wait_for_selector("#fall .fall-row >> nth=1")
        page.goto(f"{one.daemon.url}/ui/task/{pushed['id']}")
        page.wait_for_selector("#fall .fall-row:has-text('Push to example.com')")
        page.goto(f"{one.daemon.url}/ui/task/{waits['id']}")
        page.wait_for_selector("#fall .fall-row:has-text('Waits for its sender')")
        page.fill("#answer textarea", "the second")
        page.press("#answer textarea", "Control+Enter")
        wait_for_state(page, "Completed")
        page.wait_for_selector("#fall .fall-row:has-text('Output')")
        first = page.locator("#fall .fall-row").first
        until(lambda: first.locator(".band").count() == 2)  # one for each turn
        daemons.open()


@pytest.mark.parametrize("width", [500, 1_400])
def test_the_times_of_the_axis_do_not_overlap(chromium: Browser, daemons: LinkedDaemons, width: int) -> None:
    one = daemons.start("a")
    task = one.send("gated", "it", wait=False)
    daemons.begun("a gated it")
    with open_visitor(chromium, one.daemon.url, viewport={"width": width, "height": 800}) as visitor:
        page = visitor.log_in(one.token, f"/ui/task/{task['id']}")
        page.wait_for_selector("#fall .fall-axis div span")
        places = page.eval_on_selector_all(
            "#fall .fall-axis div span",
            "all => all.map((each) => each.getBoundingClientRect()).map(({ left, right }) => [left, right])",
        )
        assert len(places) >= 2, "the beginning and the end, at least"
        assert all(before[1] < after[0] for before, after in pairwise(places))
        daemons.open()


def test_each_tab_of_a_task_is_in_sight(chromium: Browser, daemons: LinkedDaemons) -> None:
    home = daemons.folder / "a"
    home.mkdir(mode=0o700)
    (home / "settings.toml").write_text("[log]\nframe_bytes_max = 1000000\n")
    one = daemons.start("a")
    task = one.send("echo", "hello")
    with open_visitor(chromium, one.daemon.url, viewport={"width": 1_400, "height": 800}) as visitor:
        page = visitor.log_in(one.token, f"/ui/task/{task['id']}")
        page.wait_for_selector("#tab-frames")
        assert page.eval_on_selector("[role=tablist]", "each => each.scrollWidth <= each.clientWidth")
