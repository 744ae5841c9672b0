"""What a person does to a task on its page, and how the page goes on by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.browser.visitor import open_visitor, wait_for_state
from tests.e2e.linked_daemons import LinkedDaemons

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = pytest.mark.browser


def test_a_stuck_task_is_seen_requeued_with_a_reason_and_finishes_live(
    chromium: Browser, daemons: LinkedDaemons
) -> None:
    one = daemons.start("a")
    task = one.send("held", "it", wait=False)
    daemons.begun("a held it")
    one.kill()
    one.again()
    with open_visitor(chromium, one.daemon.url) as visitor:
        page = visitor.log_in(one.token, "/ui/tasks?state=in_flight")
        page.wait_for_selector("#rows .state:has-text('Holder lost')")
        page.click("#rows a.row")
        wait_for_state(page, "Holder lost")
        assert task["id"] in page.url
        page.click("#do-repair")
        page.fill("#repair [name=reason]", "its host went down")
        page.check("#repair [value=operator_accepted]")
        page.click("#repair button.primary")
        page.click("text=Grant a2a.repair.requeue")
        page.wait_for_selector("#repair-told.done")
        page.click("#repair button.primary")
        page.wait_for_selector("#repair", state="hidden")
        daemons.begun("a held it", 2)
        daemons.open()
        wait_for_state(page, "Completed")
        page.wait_for_selector("#said >> text=begun ended")
        page.click("#tab-mended")
        page.wait_for_selector("#repairs >> text=its host went down")
        page.wait_for_selector("#repairs >> text=requeue by operator@local, accepting that it may run twice")
    kinds = [event["kind"] for event in one.daemon.json("audit", "recent", "--limit", "50")["events"]]
    assert any("its host went down" in str(kind) for kind in kinds)


def test_a_task_that_waits_is_answered_where_it_asks(chromium: Browser, daemons: LinkedDaemons) -> None:
    one = daemons.start("a")
    task = one.send("asker", "one of them")
    with open_visitor(chromium, one.daemon.url) as visitor:
        page = visitor.log_in(one.token, f"/ui/task/{task['id']}")
        wait_for_state(page, "Waiting")
        page.wait_for_selector("#said .asks >> text=which one?")
        page.fill("#answer textarea", "the second")
        page.press("#answer textarea", "Control+Enter")
        wait_for_state(page, "Completed")
        page.wait_for_selector("#said >> text=so it is the second")
        assert not page.is_visible("#answer")


def test_a_task_is_canceled_by_keyboard_alone(chromium: Browser, daemons: LinkedDaemons) -> None:
    one = daemons.start("a")
    task = one.send("slow", "x", wait=False)
    daemons.begun("a slow x")
    with open_visitor(chromium, one.daemon.url) as visitor:
        page = visitor.log_in(one.token, f"/ui/task/{task['id']}")
        wait_for_state(page, "Leased")
        page.focus("#do-cancel")
        page.keyboard.press("Enter")
        page.wait_for_selector("#repair[open]")
        page.focus("#repair [name=reason]")
        page.keyboard.type("not wanted any more")
        page.keyboard.press("Enter")
        wait_for_state(page, "Canceled")


def test_many_are_repaired_after_a_dry_run_that_says_what_becomes_of_each(
    chromium: Browser, daemons: LinkedDaemons
) -> None:
    one = daemons.start("a")
    for word in ("p", "q"):
        one.send("slow", word, wait=False)
    daemons.ran(2)
    one.daemon.json("capabilities", "grant", "a2a.repair.force_error")
    with open_visitor(chromium, one.daemon.url) as visitor:
        page = visitor.log_in(one.token, "/ui/tasks?state=in_flight")
        page.wait_for_selector("#rows tr >> nth=1")
        page.check("#pick-all")
        page.click("#bulk button[value=force_error]")
        page.fill("#bulk-dialog [name=reason]", "stop them")
        page.fill("#bulk-dialog [name=message]", "the work was stopped")
        assert page.is_disabled("#bulk-apply")
        page.click("#bulk-dry")
        page.wait_for_selector("#bulk-told >> text=2 would be changed")
        page.click("#bulk-apply")
        page.wait_for_selector("#bulk-told.done")
        assert page.locator("#bulk-outcomes .state:has-text('applied')").count() == 2
        page.click("#bulk-dialog [value=close]")
        page.wait_for_selector("#none:visible")
        page.click("#lanes a:has-text('Failed')")
        page.wait_for_selector("#rows tr >> nth=1")
        assert "outcome=failed" in page.url
        page.reload()
        page.wait_for_selector("#rows tr >> nth=1")
        assert "the work was stopped" in page.inner_text("#rows")


def test_the_first_page_lists_a_lost_holder_and_leads_to_its_repair(chromium: Browser, daemons: LinkedDaemons) -> None:
    one = daemons.start("a")
    with open_visitor(chromium, one.daemon.url) as visitor:
        page = visitor.log_in(one.token)
        page.wait_for_selector("text=Nothing needs you")
    task = one.send("held", "it", wait=False)
    daemons.begun("a held it")
    one.kill()
    one.again()
    with open_visitor(chromium, one.daemon.url) as visitor:
        page = visitor.log_in(one.token)
        page.click("#rows li .button")
        page.wait_for_url("**/ui/act/repair**")
        assert task["id"] in page.inner_text("main")
