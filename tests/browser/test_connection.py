"""The feed: one connection for all tabs, told when it is lost, and resumed after a restart."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.browser.visitor import open_visitor, wait_for_state
from tests.e2e.linked_daemons import LinkedDaemons
from tests.waits import until

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Route

pytestmark = pytest.mark.browser


def test_a_page_that_is_open_says_that_the_daemon_was_killed_and_goes_on_after_its_restart(
    chromium: Browser, daemons: LinkedDaemons
) -> None:
    one = daemons.start("a")
    task = one.send("gated", "it", wait=False)
    daemons.begun("a gated it")
    with open_visitor(chromium, one.daemon.url) as visitor:
        page = visitor.log_in(one.token, f"/ui/task/{task['id']}")
        wait_for_state(page, "Leased")
        page.wait_for_selector(".live[data-state=live]")
        one.kill()
        page.wait_for_selector(".banner >> text=Connection lost, trying again")
        wait_for_state(page, "Leased")
        one.again()
        # The session ended with the process that had it.
        page.wait_for_url("**/ui/login**")
        page.wait_for_selector("text=Your session has ended. Log in again to go on where you were.")
        page.fill("input[name=token]", one.token)
        page.click("main button[type=submit]")
        page.wait_for_url(f"**/ui/task/{task['id']}")
        page.wait_for_selector(".live[data-state=live]")
        daemons.open()
        wait_for_state(page, "Completed")
        page.wait_for_selector(".banner", state="detached")


def test_a_page_whose_first_question_is_lost_asks_again_and_says_so(chromium: Browser, daemons: LinkedDaemons) -> None:
    one = daemons.start("a")
    with open_visitor(chromium, one.daemon.url) as visitor:
        page = visitor.log_in(one.token, "/ui/tasks")
        page.wait_for_selector(".live[data-state=live]")
        lost: list[str] = []

        def lose(route: Route) -> None:
            if len(lost) < 2:
                lost.append(route.request.url)
                route.abort()
            else:
                route.continue_()

        page.route("**/ui/api/session", lose)
        page.goto(f"{one.daemon.url}/ui/tasks")
        page.wait_for_selector(".banner >> text=Connection lost, trying again")
        page.wait_for_selector(".live[data-state=live]")
        page.wait_for_selector("nav a >> text=Tasks")
        page.wait_for_selector(".banner", state="detached")
        assert len(lost) == 2


def test_all_tabs_share_one_connection_and_the_next_takes_over(chromium: Browser, daemons: LinkedDaemons) -> None:
    one = daemons.start("a")
    with open_visitor(chromium, one.daemon.url) as visitor:
        first = visitor.log_in(one.token, "/ui/tasks")
        first.wait_for_selector(".live[data-state=live]")
        others = [visitor.go("/ui/tasks") for _ in range(3)]
        for page in others:
            page.wait_for_selector(".live[data-state=live]")
        feeds = [url for url in visitor.asked if url.endswith("/ui/feed")]
        assert len(feeds) == 1
        task = one.send("asker", "told to every tab")
        for page in (first, *others):
            page.bring_to_front()
            page.wait_for_selector(f"#rows tr[data-key='{task['id']}']")
        first.close()
        until(lambda: others[0].evaluate("1") and len([url for url in visitor.asked if url.endswith("/ui/feed")]) == 2)
        later = one.send("asker", "told by the next")
        others[0].bring_to_front()
        others[0].wait_for_selector(f"#rows tr[data-key='{later['id']}']")


def test_the_tab_that_takes_over_has_every_tab_read_anew_and_keeps_the_counts(
    chromium: Browser, daemons: LinkedDaemons
) -> None:
    one = daemons.start("a")
    one.send("echo", "ended")
    with open_visitor(chromium, one.daemon.url) as visitor:
        first = visitor.log_in(one.token)
        first.wait_for_selector(".live[data-state=live]")
        waiting = one.send("asker", "counted by the feed")
        page = visitor.go("/ui/tasks")
        page.wait_for_selector(".live[data-state=live]")
        page.wait_for_selector(f"#rows tr[data-key='{waiting['id']}']")
        page.wait_for_selector("#lanes a:has-text('Done') >> text=1")
        page.wait_for_selector("#lanes a:has-text('All') >> text=2")
        told = """() => { window.told = []; const channel = new BroadcastChannel("covenant.feed");
          channel.onmessage = ({ data }) => window.told.push(data.kind); }"""
        page.evaluate(told)
        other = visitor.go("/ui/agents")
        other.wait_for_selector(".live[data-state=live]")
        other.evaluate(told)
        page.bring_to_front()
        before = len(visitor.asked)
        first.close()
        until(lambda: page.evaluate("told.includes('hello')"))
        until(lambda: page.evaluate("1") and any(url.endswith("/a2a/tasks/counts") for url in visitor.asked[before:]))
        until(lambda: other.evaluate("told.includes('resync')"))
        page.wait_for_selector("#lanes a:has-text('Done') >> text=1")
        page.wait_for_selector("#lanes a:has-text('All') >> text=2")


def test_a_tab_that_waits_takes_over_with_a_resync_though_it_never_heard_of_the_one_before(
    chromium: Browser, daemons: LinkedDaemons
) -> None:
    one = daemons.start("a")
    with open_visitor(chromium, one.daemon.url) as visitor:
        page = visitor.log_in(one.token, "/ui/act")
        # A tab that leads, and says nothing to those who ask: as one that dies before it answers.
        held = "navigator.locks.request('covenant.feed', () => new Promise((free) => (window.free = free)))"
        page.evaluate(f"() => {{ {held}; }}")
        waiting = visitor.go("/ui/tasks")
        waiting.wait_for_selector("#lanes a")
        waiting.evaluate("""() => { window.told = []; const channel = new BroadcastChannel("covenant.feed");
          channel.onmessage = ({ data }) => window.told.push(data.kind); }""")
        until(lambda: waiting.evaluate("navigator.locks.query().then(({ pending }) => pending.length)") == 1)
        page.evaluate("window.free()")
        waiting.wait_for_selector(".live[data-state=live]")
        until(lambda: waiting.evaluate("told.includes('resync')"))


def test_what_the_feed_counts_leaves_the_tasks_that_have_ended(chromium: Browser, daemons: LinkedDaemons) -> None:
    one = daemons.start("a")
    one.send("echo", "ended")
    with open_visitor(chromium, one.daemon.url) as visitor:
        page = visitor.log_in(one.token, "/ui/tasks")
        page.wait_for_selector(".live[data-state=live]")
        page.wait_for_selector("#lanes a:has-text('Done') >> text=1")
        tile = "document.querySelector('#lanes a:last-child [data-slot=count]')"
        page.evaluate(f"""() => {{ window.seen = new Set();
          new MutationObserver(() => seen.add({tile}.textContent)).observe(document.querySelector("#lanes"),
            {{ childList: true, characterData: true, subtree: true }}); }}""")
        one.send("slow", "x", wait=False)
        page.wait_for_selector("#lanes a:has-text('Leased') >> text=1")
        page.wait_for_selector("#lanes a:has-text('All') >> text=2")
        assert page.evaluate("[...seen]") in ([], ["1"])
