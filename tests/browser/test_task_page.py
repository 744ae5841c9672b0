"""What the pages of a task and of an agent show beside the story: the request for a shell, frames, and the card."""

from __future__ import annotations

import json
import os
import subprocess
from typing import TYPE_CHECKING

import pytest

from tests.browser.visitor import open_visitor, wait_for_state
from tests.e2e.linked_daemons import LinkedDaemons
from tests.waits import BOUND_S

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = pytest.mark.browser


def test_the_request_that_is_copied_sends_the_task_again(chromium: Browser, daemons: LinkedDaemons) -> None:
    one = daemons.start("a")
    task = one.send("echo", 'it\'s $HOME `x` \\ "quoted"')
    rights = ["clipboard-read", "clipboard-write"]
    with open_visitor(chromium, one.daemon.url, permissions=rights) as visitor:
        page = visitor.log_in(one.token, f"/ui/task/{task['id']}")
        wait_for_state(page, "Completed")
        page.click("#curl")
        page.wait_for_selector("#curl >> text=Copied")
        command = page.evaluate("navigator.clipboard.readText()")
    assert one.token not in command
    ran = subprocess.run(
        ("bash", "-c", command),
        env={**os.environ, "COVENANT_TOKEN": one.token},
        capture_output=True,
        check=True,
        timeout=BOUND_S,
    )
    again = json.loads(ran.stdout)["result"]["task"]
    assert again["id"] != task["id"]
    assert again["status"]["state"] == "TASK_STATE_COMPLETED"
    assert again["history"][0]["parts"] == task["history"][0]["parts"]


def test_the_frames_of_a_task_are_shown_where_they_are_kept(chromium: Browser, daemons: LinkedDaemons) -> None:
    one = daemons.start("a", "--log-frame-bytes-max", "1000000")
    task = one.send("echo", "<b>bold</b>")
    with open_visitor(chromium, one.daemon.url) as visitor:
        page = visitor.log_in(one.token, f"/ui/task/{task['id']}")
        page.click("#tab-frames")
        page.wait_for_selector("#frames [data-direction=in] >> text=<b>bold</b>")
        page.wait_for_selector("#frames [data-direction=out] >> text=TASK_STATE_COMPLETED")
        assert one.token not in page.inner_text("main")


def test_frames_are_not_offered_where_none_are_kept(chromium: Browser, daemons: LinkedDaemons) -> None:
    one = daemons.start("a")
    task = one.send("echo", "x")
    with open_visitor(chromium, one.daemon.url) as visitor:
        page = visitor.log_in(one.token, f"/ui/task/{task['id']}")
        wait_for_state(page, "Completed")
        assert not page.is_visible("#tab-frames")


def test_an_agents_card_is_shown_rendered_and_raw_with_its_signature(chromium: Browser, daemons: LinkedDaemons) -> None:
    one = daemons.start("a")
    one.send("echo", "something to see")
    with open_visitor(chromium, one.daemon.url) as visitor:
        page = visitor.log_in(one.token, "/ui/agents/default/echo")
        page.wait_for_selector("#one >> text=Signature holds")
        page.wait_for_selector("#one [data-slot=raw] >> text=supportedInterfaces")
        assert "function, from" in page.inner_text("[data-slot=made]")
        page.wait_for_selector("#recent >> text=something to see")
        page.click("#one [data-slot=inspect]")
        page.wait_for_url("**/ui/inspector?**")
        page.wait_for_selector("[name=target] option[value='default/echo']:checked", state="attached")
