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


def test_the_page_of_a_short_id_follows_its_task(chromium: Browser, daemons: LinkedDaemons) -> None:
    one = daemons.start("a")
    task = one.send("gated", "it", wait=False)
    daemons.begun("a gated it")
    with open_visitor(chromium, one.daemon.url) as visitor:
        page = visitor.log_in(one.token, f"/ui/task/{task['id'][:8]}")
        wait_for_state(page, "Leased")
        page.wait_for_selector(".live[data-state=live]")
        daemons.open()
        wait_for_state(page, "Completed")


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
        page.wait_for_selector("[data-slot=made]:has-text('function, from')")
        page.wait_for_selector("#recent >> text=something to see")
        page.click("#one [data-slot=inspect]")
        page.wait_for_url("**/ui/inspector?**")
        page.wait_for_selector("[name=target] option[value='default/echo']:checked", state="attached")


def test_the_log_says_why_an_agent_failed(chromium: Browser, daemons: LinkedDaemons) -> None:
    one = daemons.start("a")
    task = one.send("fan", "not a number")
    with open_visitor(chromium, one.daemon.url) as visitor:
        page = visitor.log_in(one.token, f"/ui/task/{task['id']}")
        page.wait_for_selector("#tab-log")
        page.click("#tab-log")
        page.wait_for_selector("#log >> text=ValueError: invalid literal for int()")


def test_a_page_that_leaves_steps_out_says_so(chromium: Browser, daemons: LinkedDaemons) -> None:
    one = daemons.start("a")
    agent = "an-agent-that-was-named-after-its-team-and-after-its-purpose"
    short, long = (one.send(agent, count)["id"] for count in ("20", "1500"))
    with open_visitor(chromium, one.daemon.url) as visitor:
        page = visitor.log_in(one.token, f"/ui/task/{long}")
        page.wait_for_selector("#fall >> text=A part of this task is not shown")
        page.goto(f"{one.daemon.url}/ui/task/{short}")
        page.wait_for_selector("#fall .fall-row")
        assert not page.is_visible("text=A part of this task is not shown")
