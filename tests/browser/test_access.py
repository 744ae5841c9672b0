"""Everybody can use the pages: contrast, names and roles in light and dark, on a phone, and without a mouse."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import pytest

from tests.browser.visitor import open_visitor, wait_for_state
from tests.e2e.linked_daemons import LinkedDaemon, LinkedDaemons

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.browser

PAGES: Final = "tasks agents/default/relay inspector peers push tenants audit settings nodes".split()


def with_work(daemons: LinkedDaemons) -> tuple[LinkedDaemon, list[str]]:
    """A daemon with tasks in several states, and the addresses of its pages."""
    one = daemons.start("a")
    one.ask("relay", "echo hello")
    waits = one.send("asker", "one of them")["id"]
    one.send("slow", "x", wait=False)
    acts = ["/ui/act", f"/ui/act/cancel?task={waits}", f"/ui/act/answer?task={waits}"]
    return one, ["/ui/", *(f"/ui/{page}" for page in PAGES), f"/ui/task/{waits}", f"/ui/tree/{waits}", *acts]


def findings(page: Page) -> list[tuple[str, Any]]:
    from axe_playwright_python.sync_playwright import Axe  # noqa: PLC0415  (not installed where there is no browser)

    found = Axe().run(page, options={"runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "best-practice"]})
    return [
        (each["id"], [(node["html"][:200], node["failureSummary"][:300]) for node in each["nodes"][:3]])
        for each in found.response["violations"]
    ]


FILLED: Final = """() => [...document.querySelectorAll("h1, h2, h3")]
  .every((each) => each.textContent.trim() || !each.checkVisibility())"""
"""Whether what the page asked for has come: each heading that is shown has its words."""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing(chromium: Browser, daemons: LinkedDaemons, scheme: str) -> None:
    one, paths = with_work(daemons)
    # Axe is put into the page by the test, which the page's own policy would refuse.
    with open_visitor(chromium, one.daemon.url, color_scheme=scheme, bypass_csp=True) as visitor:
        page = visitor.go("/ui/login")
        broken = {"/ui/login": findings(page)}
        page = visitor.log_in(one.token)
        for path in paths:
            page.goto(f"{one.daemon.url}{path}")
            if "/act" not in path:
                page.wait_for_selector(".live[data-state=live]")
                page.wait_for_selector(".nav a")
                page.wait_for_function(FILLED)
            broken[path] = findings(page)
        page.goto(f"{one.daemon.url}{paths[-5]}")
        wait_for_state(page, "Waiting")
        page.click("#do-cancel")
        broken["dialog"] = findings(page)
    assert {path: found for path, found in broken.items() if found} == {}


WIDER: Final = """() => [document.documentElement, ...document.querySelectorAll("body *")]
  .filter((each) => ["auto", "scroll"].includes(getComputedStyle(each).overflowX) || each === document.documentElement)
  .filter((each) => each.scrollWidth > each.clientWidth + 1)
  .map((each) => `${each.tagName}.${each.className} ${each.scrollWidth}`)"""


def test_on_a_phone_no_page_nor_table_is_wider_than_the_screen(chromium: Browser, daemons: LinkedDaemons) -> None:
    one, paths = with_work(daemons)
    one.daemon.json("tenants", "add", "acme", "--live-tasks", "3", "--rate-per-min", "60")
    phone = {"viewport": {"width": 360, "height": 740}, "has_touch": True, "is_mobile": True}
    with open_visitor(chromium, one.daemon.url, **phone) as visitor:
        page = visitor.log_in(one.token)
        for path in paths:
            page.goto(f"{one.daemon.url}{path}")
            if "/act" not in path:
                page.wait_for_selector(".live[data-state=live]")
            if path in ("/ui/audit", "/ui/settings", "/ui/tenants", "/ui/tasks"):
                page.wait_for_selector("#rows tr")
            assert page.evaluate(WIDER) == [], path


def test_the_first_key_leads_past_the_links_and_focus_is_seen(chromium: Browser, daemons: LinkedDaemons) -> None:
    one = daemons.start("a")
    with open_visitor(chromium, one.daemon.url, reduced_motion="reduce") as visitor:
        page = visitor.log_in(one.token, "/ui/tasks")
        page.wait_for_selector(".nav a")
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
        page.keyboard.press("Enter")
        assert page.evaluate("document.activeElement.id") == "main"
        for _ in range(4):
            page.keyboard.press("Tab")
            shown = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
            assert shown == "solid", page.evaluate("document.activeElement.outerHTML")
