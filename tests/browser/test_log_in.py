"""A person gets in by a code or a token, and neither stays where somebody else could find it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.browser.visitor import open_visitor
from tests.e2e.linked_daemons import LinkedDaemons

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


def test_a_token_opens_the_page_that_was_wanted(chromium: Browser, daemons: LinkedDaemons) -> None:
    one = daemons.start("a")
    with open_visitor(chromium, one.daemon.url) as visitor:
        page = visitor.log_in(one.token, "/ui/tasks?state=queued")
        page.wait_for_selector("#lanes a[aria-current]:has-text('Queued')")
        page.click("text=Log out")
        page.wait_for_url("**/ui/login**")
        page.goto(f"{one.daemon.url}/ui/tasks")
        page.wait_for_url("**/ui/login**")


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
        page.wait_for_selector("#none:visible")
        assert page.locator(".nav a").all_inner_texts() == ["Tasks"]
        assert page.locator("text=not for acme").count() == 0
