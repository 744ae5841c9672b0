"""What a person does to a task on its page, and how the page goes on by itself."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.browser.visitor import open_visitor, wait_for_state
from tests.e2e.linked_daemons import LinkedDaemons
from tests.waits import until

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Route

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
        page.wait_for_selector("#repair .told.done")
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
        page.wait_for_selector("#answer", state="hidden")


def test_an_approval_is_given_or_denied_by_a_button_and_a_refusal_is_in_sight(
    chromium: Browser, daemons: LinkedDaemons
) -> None:
    one = daemons.start("a")
    paid, kept = (one.send("judge", each)["id"] for each in ("ten", "a hundred"))
    with open_visitor(chromium, one.daemon.url, viewport={"width": 400, "height": 500}) as visitor:
        page = visitor.log_in(one.token, f"/ui/task/{paid}")
        page.wait_for_selector("#answer >> text=The task waits for an approval")
        assert page.eval_on_selector_all(
            "#answer button", "all => all.filter((each) => each.offsetParent).map((each) => each.innerText)"
        ) == ["Approve", "Deny"]
        page.click("#answer button:has-text('Approve')")
        wait_for_state(page, "Completed")
        page.wait_for_selector("#said >> text=approved=True")
        page.goto(f"{one.daemon.url}/ui/task/{kept}")
        page.fill("#answer textarea", "too much")
        page.click("#answer button:has-text('Deny')")
        wait_for_state(page, "Completed")
        page.wait_for_selector("#said >> text=approved=False too much")
        asked = one.send("asker", "one of them")["id"]
        page.goto(f"{one.daemon.url}/ui/task/{asked}")
        page.fill("#answer textarea", "the second")
        page.route("**/answer", lambda route: route.continue_(post_data='{"text": 2}'))
        page.click("#answer button:has-text('Answer')")
        page.wait_for_selector("#refused")
        until(lambda: page.evaluate("scrollY") > 0)
        page.wait_for_function(
            """() => { const box = document.querySelector("#refused").getBoundingClientRect();
            return box.top >= 0 && box.bottom < 500; }"""
        )


def test_a_task_that_sleeps_or_waits_for_a_signal_says_so_and_asks_for_no_answer(
    chromium: Browser, daemons: LinkedDaemons
) -> None:
    one = daemons.start("a")
    sleeps, waits = (one.send(agent, "x", wait=False)["id"] for agent in ("sleeper", "payee"))
    with open_visitor(chromium, one.daemon.url) as visitor:
        page = visitor.log_in(one.token, f"/ui/task/{sleeps}")
        wait_for_state(page, "Suspended")
        page.wait_for_selector("main dd[data-slot=state] >> text=Sleeps, until")
        page.wait_for_selector("#fall .fall-row:has-text('Sleeps')")
        page.wait_for_selector("#answer", state="hidden")
        page.goto(f"{one.daemon.url}/ui/task/{waits}")
        wait_for_state(page, "Suspended")
        page.wait_for_selector("main dd[data-slot=state] >> text=Waits for the signal paid")
        page.wait_for_selector("#answer", state="hidden")
        one.daemon.json("a2a", "signal", waits, "paid", '"card"')
        wait_for_state(page, "Completed")
        page.wait_for_selector("#fall .fall-row:has-text('Waits for the signal paid')")
        page.goto(f"{one.daemon.url}/ui/tasks?state=parked")
        page.wait_for_selector(f"#rows [data-key='{sleeps}'] .state:has-text('Suspended')")
        page.wait_for_selector("#lanes a:has-text('Waiting')[title='waits for its sender, a signal or a moment']")


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
        page.wait_for_selector("#bulk-dialog .told >> text=2 would be changed")
        page.click("#bulk-apply")
        page.wait_for_selector("#bulk-dialog .told.done")
        until(lambda: page.locator("#bulk-outcomes .state:has-text('applied')").count() == 2)
        page.click("#bulk-dialog [value=close]")
        page.wait_for_selector("#none:visible")
        page.click("#lanes a:has-text('Failed')")
        page.wait_for_selector("#rows tr >> nth=1")
        assert "outcome=failed" in page.url
        page.reload()
        page.wait_for_selector("#rows tr >> nth=1")
        page.wait_for_selector("#rows >> text=the work was stopped")


def test_what_was_applied_before_one_is_refused_is_shown(chromium: Browser, daemons: LinkedDaemons) -> None:
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
        page.click("#bulk-dry")
        page.wait_for_selector("#bulk-dialog .told >> text=2 would be changed")
        # The second of the two is refused by the daemon: its filter is changed on the way.
        asked: list[str] = []

        def spoil(route: Route) -> None:
            asked.append(route.request.post_data or "")
            route.continue_(post_data="{}" if len(asked) == 2 else asked[-1])

        page.route("**/a2a/repair/bulk", spoil)
        page.click("#bulk-apply")
        page.wait_for_selector("#bulk-dialog .told.refused")
        until(lambda: page.locator("#bulk-outcomes .state:has-text('applied')").count() == 1)


def test_the_dialog_shows_the_lease_that_there_is_after_a_refusal(chromium: Browser, daemons: LinkedDaemons) -> None:
    one = daemons.start("a")
    task = one.send("held", "it", wait=False)
    daemons.begun("a held it")
    one.kill()
    one.again()
    one.daemon.json("capabilities", "grant", "a2a.repair.requeue")
    with open_visitor(chromium, one.daemon.url) as visitor:
        page = visitor.log_in(one.token, f"/ui/task/{task['id']}")
        page.click("#do-repair")
        page.check("#repair [value=idempotent]")
        page.fill("#repair [name=reason]", "its holder is gone")
        # The guard that goes along is that of a lease which is not there any more.
        page.route("**/a2a/repair", lambda route: route.continue_(post_data=outdated(route.request.post_data or "")))
        page.click("#repair [value=do]")
        page.wait_for_selector("#repair .told.refused >> text=lease mismatch")
        page.unroute("**/a2a/repair")
        page.click("#repair [value=do]")
        page.wait_for_selector("#repair", state="hidden")


def outdated(body: str) -> str:
    asked = json.loads(body)
    return json.dumps({**asked, "command": {**asked["command"], "lease_id": "00000000-0000-4000-8000-000000000000"}})


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
        page.wait_for_selector(f"main:has-text('{task['id']}')")


def test_the_refusal_of_an_act_outlives_what_the_page_reads_by_itself(
    chromium: Browser, daemons: LinkedDaemons
) -> None:
    one = daemons.start("a")
    asked = one.send("asker", "one of them")["id"]
    with open_visitor(chromium, one.daemon.url) as visitor:
        page = visitor.log_in(one.token, f"/ui/task/{asked}")
        page.fill("#answer textarea", "the second")

        def cancel_first(route: Route) -> None:
            one.cancel("asker", asked)
            route.continue_()

        page.route("**/answer", cancel_first)
        page.click("#answer button:has-text('Answer')")
        wait_for_state(page, "Canceled")
        page.wait_for_selector("#refused:has-text('does not wait for its sender')")
