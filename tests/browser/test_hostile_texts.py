"""What agents and senders say is shown as text, whatever it looks like."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from tests.browser.visitor import open_visitor, wait_for_state
from tests.e2e.linked_daemons import LinkedDaemons

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = pytest.mark.browser

SCRIPT = "<img src=x onerror=\"document.title='pwned'\"><script>document.title='pwned'</script>{{7*7}}${7*7}"
BIDI = "invoice \u202egpj.exe\u202c \u2066\u200fabc\u2069\u061c \u0000\u0007 e\u0301"
LONG = "x" * 1_000_000
TURNS = "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"
TITLES = "[...document.querySelectorAll('[title]')].map((each) => each.title).join()"
TURNED = f"/[{TURNS}]/.test(document.body.innerText + document.title + {TITLES})"


@pytest.mark.parametrize("words", [SCRIPT, BIDI, LONG], ids=["script", "bidi", "one long line"])
def test_hostile_words_are_text_on_every_page(chromium: Browser, daemons: LinkedDaemons, words: str) -> None:
    one = daemons.start("a")
    task = one.send("echo", words)
    with open_visitor(chromium, one.daemon.url) as visitor:
        page = visitor.log_in(one.token, f"/ui/task/{task['id']}")
        wait_for_state(page, "Completed")
        said = page.locator("#said .said").all_inner_texts()
        begin = re.sub(f"[{TURNS}]", lambda found: f"⟨U+{ord(found[0]):04x}⟩", words[:40])
        begin = begin.replace("\x00", "\ufffd")
        assert len(said) == 2
        assert said[1].replace("\x00", "\ufffd").startswith(f"echo {begin}"[:40])
        for path in (f"/ui/act/cancel?task={task['id']}", "/ui/tasks", f"/ui/tree/{task['id']}", "/ui/"):
            page.goto(f"{one.daemon.url}{path}")
            if "/act/" not in path:
                page.wait_for_selector(".live[data-state=live]")
                if path != "/ui/":
                    page.wait_for_selector("#rows tr")
            # Nothing is wider than the window, and nothing of it became an element or ran.
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
            assert page.locator("main img, main script").count() == 0
            assert "pwned" not in page.title()
            assert not page.evaluate(TURNED), "what turns the direction of writing is written out"
