"""The list of tasks: what is shown stays whole, in order and up to date, however much of it was asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.browser.visitor import open_visitor
from tests.e2e.linked_daemons import LinkedDaemons
from tests.waits import until

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Request

pytestmark = pytest.mark.browser


def show_more(page: Page, shown: int) -> None:
    page.click("#more button")
    page.wait_for_selector(f"#shown:has-text('{shown} tasks shown')")


def listed(page: Page) -> list[str]:
    found: list[str] = page.eval_on_selector_all("#rows > *", "rows => rows.map((row) => row.dataset.key)")
    return found


def row(task_id: str) -> str:
    return f"#rows [data-key='{task_id}']"


def test_the_list_stays_whole_when_more_of_it_is_shown_and_tasks_come(
    chromium: Browser, daemons: LinkedDaemons
) -> None:
    one = daemons.start("a")
    oldest = one.send("gated", "oldest", wait=False)["id"]
    daemons.begun("a gated oldest")
    newest_first = [oldest]

    def send(count: int) -> None:
        for number in range(count):
            newest_first.insert(0, one.send("echo", f"n{number}")["id"])

    send(65)
    with open_visitor(chromium, one.daemon.url) as visitor:
        page = visitor.log_in(one.token, "/ui/tasks")
        page.wait_for_selector(".live[data-state=live]")
        page.wait_for_selector("#shown:has-text('30 tasks shown')")
        by_itself: list[bool] = []

        def listen(asked: Request) -> None:
            if "/a2a/tasks?" in asked.url:
                by_itself.append("covenant-reload" in asked.headers)

        page.on("request", listen)
        show_more(page, 60)
        assert False in by_itself
        by_itself.clear()
        send(10)
        page.wait_for_selector(row(newest_first[0]))
        assert set(by_itself) == {True}, "what the page reads by itself says so"
        until(lambda: listed(page) == newest_first[:60])
        page.wait_for_selector("#more")
        show_more(page, 76)
        until(lambda: listed(page) == newest_first)
        page.wait_for_selector("#more", state="hidden")
        daemons.open()
        page.wait_for_selector(f"{row(oldest)} .state:has-text('Completed')")


def test_a_task_that_leaves_the_list_is_not_selected_any_more(chromium: Browser, daemons: LinkedDaemons) -> None:
    one = daemons.start("a")
    leaves, stays = (one.send("slow", words, wait=False)["id"] for words in ("leaves", "stays"))
    daemons.ran(2)
    with open_visitor(chromium, one.daemon.url) as visitor:
        page = visitor.log_in(one.token, "/ui/tasks?state=in_flight")
        page.wait_for_selector(".live[data-state=live]")
        for task_id in (leaves, stays):
            page.check(f"{row(task_id)} input")
        page.wait_for_selector("#picked:has-text('2 tasks selected')")
        one.cancel("slow", leaves)
        page.wait_for_selector(row(leaves), state="detached")
        page.wait_for_selector("#picked:has-text('1 task selected')")
        assert page.is_checked(f"{row(stays)} input")


def test_a_long_name_leaves_room_for_the_request(chromium: Browser, daemons: LinkedDaemons) -> None:
    one = daemons.start("a")
    named = "an-agent-that-was-named-after-its-team-and-after-its-purpose"
    one.send(named, "3")
    with open_visitor(chromium, one.daemon.url, viewport={"width": 1600, "height": 800}) as visitor:
        page = visitor.log_in(one.token, "/ui/tasks")
        page.wait_for_selector("#rows tr")
        assert page.eval_on_selector("#table", "each => each.scrollWidth <= each.clientWidth")
        widths = page.eval_on_selector_all("#rows td", "cells => cells.map((cell) => cell.clientWidth)")
        assert widths[2] > widths[3], "the request has more room than the agent"
        page.wait_for_selector(f"#rows td[title='{named}@default'] >> nth=0")


def test_the_request_has_a_third_of_the_list_on_a_screen_of_usual_width(
    chromium: Browser, daemons: LinkedDaemons
) -> None:
    one = daemons.start("a")
    one.send("an-agent-that-was-named-after-its-team-and-after-its-purpose", "3")
    with open_visitor(chromium, one.daemon.url, viewport={"width": 1_400, "height": 800}) as visitor:
        page = visitor.log_in(one.token, "/ui/tasks")
        page.wait_for_selector("#rows tr")
        share = page.eval_on_selector(
            "#rows td:nth-child(3)", "cell => cell.clientWidth / cell.parentElement.clientWidth"
        )
        assert share > 1 / 3


def test_the_lanes_count_what_the_filters_leave_and_one_back_leaves_a_filter(
    chromium: Browser, daemons: LinkedDaemons
) -> None:
    one = daemons.start("a")
    with open_visitor(chromium, one.daemon.url) as visitor:
        page = visitor.log_in(one.token, "/ui/tasks")
        page.wait_for_selector("#none >> text=No task yet")
        assert not page.is_visible("text=No task matches")
        for number in range(3):
            one.send("echo", f"n{number}")
        one.send("fan", "many")
        page.wait_for_selector("#lanes a:has-text('All') b:has-text('4')")
        assert not page.is_visible("#all-match"), "a repair of many needs a filter"
        page.fill("[name=agent]", "echo")
        page.press("[name=agent]", "Enter")
        page.wait_for_selector("#lanes a:has-text('Done') b:has-text('3')")
        page.wait_for_selector("#lanes a:has-text('Failed') b:has-text('0')")
        page.wait_for_selector("#all-match:visible")
        page.go_back()
        page.wait_for_selector("#lanes a:has-text('All') b:has-text('4')")
        assert "agent" not in page.url
        page.click("#agents a:has-text('fan')")
        page.wait_for_selector("#shown:has-text('1 task shown')")
        until(lambda: page.input_value("[name=agent]") == "fan@default")
        page.fill("[name=text]", "nobody said this")
        page.press("[name=text]", "Enter")
        page.wait_for_selector("#none >> text=No task matches")
        assert "agent=fan" in page.url
        page.wait_for_selector("#lanes a:has-text('Failed') b:has-text('–')")
