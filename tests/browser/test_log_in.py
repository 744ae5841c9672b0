"""A person gets in by a code or a token, and neither stays where somebody else could find it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.browser.visitor import open_visitor
from tests.e2e.linked_daemons import LinkedDaemons
from tests.waits import until

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = pytest.mark.browser


def test_a_code_opens_the_page_once_and_leaves_no_trace(chromium: Browser, daemons: LinkedDaemons) -> None:
    one = daemons.start("a")
    url = one.daemon.json("ui")["url"]
    code = url.partition("#")[2]
    assert code
    assert one.token not in url
    with open_visitor(chromium, one.daemon.url) as visitor:
        page = visitor.tab()
        page.goto(url)
        page.wait_for_selector("h1:has-text('Attention')")
        page.wait_for_selector(".live[data-state=live]")
        assert page.url == f"{one.daemon.url}/ui/"
        assert not [asked for asked in visitor.asked if code in asked or one.token in asked]
        assert page.evaluate("[localStorage.length, sessionStorage.length]") == [0, 0]
        assert page.evaluate("document.cookie") == ""
        (cookie,) = visitor.context.cookies()
        assert (cookie["httpOnly"], cookie["sameSite"], cookie["path"]) == (True, "Strict", "/ui")
        page.go_back()
        assert code not in page.url
    with open_visitor(chromium, one.daemon.url) as other:
        page = other.tab()
        page.goto(url)
        page.wait_for_selector(".refused")
        assert other.context.cookies() == []


def test_a_code_that_would_replace_a_session_is_sent_by_a_click(chromium: Browser, daemons: LinkedDaemons) -> None:
    one = daemons.start("a")
    with open_visitor(chromium, one.daemon.url) as visitor:
        page = visitor.log_in(one.token, "/ui/tasks")
        page.wait_for_selector("#lanes a")
        (before,) = visitor.context.cookies()
        page = visitor.tab()
        page.goto(one.daemon.json("ui")["url"])
        page.wait_for_selector("main >> text=it may belong to somebody else")
        until(lambda: page.input_value("input[name=code]"))
        assert "#" not in page.url
        assert visitor.context.cookies() == [before]
        page.click("main button[type=submit]")
        page.wait_for_selector("h1:has-text('Attention')")
        assert visitor.context.cookies() != [before]


def test_a_token_opens_the_page_that_was_wanted(chromium: Browser, daemons: LinkedDaemons) -> None:
    one = daemons.start("a")
    with open_visitor(chromium, one.daemon.url) as visitor:
        page = visitor.log_in(one.token, "/ui/tasks?state=queued")
        page.wait_for_selector("#lanes a[aria-current]:has-text('Queued')")
        page.click("text=Log out")
        page.wait_for_url("**/ui/login**")
        page.goto(f"{one.daemon.url}/ui/tasks")
        page.wait_for_url("**/ui/login**")


def test_a_viewer_is_offered_no_call_of_an_agent(chromium: Browser, daemons: LinkedDaemons) -> None:
    one = daemons.start("a")
    enrolled = one.daemon.json("identities", "enroll", "viewer@local")
    one.daemon.json("capabilities", "grant", "ui.view", "--to", "viewer@local")
    with open_visitor(chromium, one.daemon.url) as visitor:
        page = visitor.log_in(enrolled["token_b58"], "/ui/inspector")
        page.wait_for_selector("text=Only the operator may call agents")
        assert page.locator("button[value=send]").count() == 0
        page.goto(f"{one.daemon.url}/ui/agents")
        page.wait_for_selector("#rows tr")
        assert not page.is_visible("text=Inspect any agent")
        page.goto(f"{one.daemon.url}/ui/act")
        assert page.locator("main form").count() == 0


def test_without_scripts_no_page_shows_what_it_does_not_know_and_an_act_says_what_was_done(
    chromium: Browser, daemons: LinkedDaemons
) -> None:
    one = daemons.start("a")
    task = one.send("asker", "it")
    with open_visitor(chromium, one.daemon.url, java_script_enabled=False) as visitor:
        page = visitor.go("/ui/login")
        page.fill("input[name=token]", one.token)
        page.click("main button[type=submit]")
        page.wait_for_url("**/ui/")
        assert page.inner_text("main").split("\n")[-1].startswith("Lists need JavaScript")
        page.goto(f"{one.daemon.url}/ui/act/cancel?task={task['id'][:8]}")
        page.fill("textarea[name=reason]", "not needed")
        page.click("main button[type=submit]")
        page.wait_for_selector(f"text=Task {task['id']} is canceled.")
        page.click("main a >> text=All forms")
        page.wait_for_url("**/ui/act")


def test_a_tenant_sees_its_own_tasks_and_a_way_to_nothing_else(chromium: Browser, daemons: LinkedDaemons) -> None:
    one = daemons.start("a")
    token = one.daemon.json("tenants", "add", "acme")["token"]
    one.send("echo", "not for acme")
    with open_visitor(chromium, one.daemon.url) as visitor:
        page = visitor.go("/ui/login")
        page.fill("input[name=token]", token)
        page.click("main button[type=submit]")
        page.wait_for_url("**/ui/tasks")
        page.wait_for_selector("#none:visible")
        page.click("a.brand")
        page.wait_for_url("**/ui/tasks")
        page.goto(f"{one.daemon.url}/ui/attention/deeper")
        page.wait_for_url(f"{one.daemon.url}/ui/tasks")
        page.goto(f"{one.daemon.url}/ui/inspector")
        page.wait_for_selector("text=Only the operator may call agents")
        page.goto(f"{one.daemon.url}/ui/tasks")
        page.wait_for_selector("#none:visible")
        until(lambda: page.locator(".nav a").all_inner_texts() == ["Tasks"])
        assert page.locator("text=not for acme").count() == 0
