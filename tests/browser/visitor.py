"""A person at a browser: logs in, looks, and acts. What a page must never do is noticed wherever it happens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from tests.waits import BOUND_S

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

BOUND_MS: Final = BOUND_S * 1_000
VIOLATIONS: Final = ("Content Security Policy", "Trusted", "violates")


@dataclass
class Visitor:
    """One browser profile at one daemon. Its pages are tabs of it."""

    context: Any
    url: str
    asked: list[str] = field(default_factory=list)
    """The addresses of all requests."""
    faults: list[str] = field(default_factory=list)
    """Errors of scripts, and what the content policy refused."""

    def tab(self) -> Page:
        page = self.context.new_page()
        page.on("request", lambda request: self.asked.append(request.url))
        page.on("pageerror", lambda error: self.faults.append(str(error)))
        page.on("console", self._listen)
        return page

    def _listen(self, message: Any) -> None:
        if message.type == "error" and any(word in message.text for word in VIOLATIONS):
            self.faults.append(message.text)

    def go(self, path: str) -> Page:
        page = self.tab()
        page.goto(f"{self.url}{path}")
        return page

    def log_in(self, token: str, path: str = "/ui/") -> Page:
        """Where a page leads who is not logged in, and back."""
        page = self.go(path)
        page.wait_for_url("**/ui/login**")
        page.fill("input[name=token]", token)
        page.click("main button[type=submit]")
        page.wait_for_url(f"**{path}")
        return page

    @property
    def foreign(self) -> list[str]:
        """Requests to another origin."""
        own = urlsplit(self.url).netloc
        return [url for url in self.asked if urlsplit(url).scheme in ("http", "https") and urlsplit(url).netloc != own]


@contextmanager
def open_visitor(browser: Browser, url: str, **given: Any) -> Iterator[Visitor]:
    """In the end there was no request to another origin, no error of a script, and nothing that the policy refused."""
    context = browser.new_context(**given)
    context.set_default_timeout(BOUND_MS)
    visitor = Visitor(context, url)
    try:
        yield visitor
    finally:
        context.close()
    assert visitor.foreign == []
    assert visitor.faults == []


def state(page: Page) -> str:
    """Of the task that a page is about, in words."""
    return str(page.inner_text("main dd[data-slot=state] .state"))


def wait_for_state(page: Page, words: str) -> None:
    """Without a reload: the page hears of it."""
    page.wait_for_selector(f"main dd[data-slot=state] .state:has-text('{words}')")
