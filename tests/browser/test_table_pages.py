"""Pages that are one table: of webhooks given up none is to come, and a refused login is not the operator's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pytest

from tests.browser.visitor import BOUND_MS, open_visitor
from tests.e2e.linked_daemons import LinkedDaemons
from tests.waits import until

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = pytest.mark.browser

IN_VIEW: Final = """(element, bound_ms) => new Promise((seen, fail) => {
  new IntersectionObserver((entries) => entries.some((entry) => entry.isIntersecting) && seen()).observe(element);
  setTimeout(() => fail(new Error("the element did not come into view")), bound_ms);
})"""
"""Not by `wait_for_function`, which evaluates texts in the page: the page's policy forbids that."""


def test_webhooks_given_up_are_not_counted_among_those_to_come(chromium: Browser, daemons: LinkedDaemons) -> None:
    home = daemons.folder / "a"
    home.mkdir(mode=0o700)
    (home / "settings.toml").write_text("[a2a]\npush_notifications = true\n\n[push]\nattempts_max = 1\n")
    one = daemons.start("a")
    configuration = {"taskPushNotificationConfig": {"id": "hook", "url": "https://no-such-host.invalid/hook"}}
    message = {"messageId": "p", "role": "ROLE_USER", "parts": [{"text": "it"}]}
    one.rpc("echo", "SendMessage", message=message, configuration=configuration)
    with open_visitor(chromium, one.daemon.url) as visitor:
        page = visitor.log_in(one.token, "/ui/push")
        page.wait_for_selector("#rows .state:has-text('Given up')")
        page.wait_for_selector("text=0 webhooks still to be called, 1 given up")


def test_a_refused_login_is_told_of_its_address(chromium: Browser, daemons: LinkedDaemons) -> None:
    one = daemons.start("a")
    with open_visitor(chromium, one.daemon.url) as visitor:
        page = visitor.go("/ui/login")
        page.fill("input[name=token]", "atr_of-nobody")
        page.click("main button[type=submit]")
        page.wait_for_selector("main .refused")
        page = visitor.log_in(one.token, "/ui/audit")
        badge = "[data-page=attention] .count:has-text('1')"
        page.wait_for_selector(badge)
        refused = lambda route: route.fulfill(status=503, json={"code": "busy", "message": "later"})  # noqa: E731
        page.route("**/ui/api/a2a/attention", refused)
        with page.expect_response("**/ui/api/a2a/attention"):
            one.send("echo", "something to count")
        assert page.is_visible(badge), "it is not known that nothing needs a person"
        row = page.locator("#rows tr:has-text('authentication failed')")
        row.wait_for()
        until(lambda: row.locator("[data-slot=issuer]").inner_text() == "127.0.0.1")


def test_a_tenants_name_stands_in_one_line(chromium: Browser, daemons: LinkedDaemons) -> None:
    one = daemons.start("a")
    one.daemon.run("tenants", "limit", "default", "--concurrency", "250", "--live-tasks", "90000", "--streams", "900")
    one.send("held", "it", wait=False)
    daemons.begun("a held it")
    with open_visitor(chromium, one.daemon.url, viewport={"width": 1300, "height": 800}) as visitor:
        page = visitor.log_in(one.token, "/ui/tenants")
        page.wait_for_selector("#rows .tag >> nth=3")
        name = page.locator("#rows a.row")
        until(lambda: name.inner_text() == "default")
        until(lambda: name.evaluate("each => each.getClientRects().length") == 1)


def test_the_first_minute_is_drawn(chromium: Browser, daemons: LinkedDaemons) -> None:
    one = daemons.start("a")
    with open_visitor(chromium, one.daemon.url) as visitor:
        page = visitor.log_in(one.token, "/ui/")
        one.send("echo", "it")
        page.wait_for_selector("#settled b:has-text('1')")
        # A point alone draws nothing.
        until(lambda: "L" in (page.get_attribute("#settled svg path:not(.area)", "d") or ""))


def test_the_waiting_tasks_of_an_agent_are_counted_and_a_link_to_it_leads_to_its_card(
    chromium: Browser, daemons: LinkedDaemons
) -> None:
    one = daemons.start("a")
    one.send("asker", "it")
    with open_visitor(chromium, one.daemon.url, viewport={"width": 400, "height": 600}) as visitor:
        page = visitor.log_in(one.token, "/ui/agents/default/asker")
        page.locator("#rows tr[data-key='default/asker'] td[data-label='Waiting']:text-is('1')").wait_for(
            state="attached"
        )
        page.locator("#one [data-slot=title]").evaluate(IN_VIEW, BOUND_MS)
