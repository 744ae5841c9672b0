"""A hundred thousand tasks: the first row comes with few bytes, however many there are."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from covenant.mailbox import Mailbox, local_agent
from tests.browser.visitor import open_visitor
from tests.e2e.linked_daemons import LinkedDaemons

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = [pytest.mark.browser, pytest.mark.slow]

TASKS: Final = 100_000
BYTES_MAX: Final = 60_000
RECIPIENTS: Final = 100
AT_ONCE: Final = 500
LOADS: Final = 5


async def _fill(home: Path) -> None:
    async with Mailbox.open(home, durability="os") as mailbox:
        sender = local_agent("sender@host")
        recipients = [local_agent(f"worker{number}@host") for number in range(RECIPIENTS)]
        for begun in range(0, TASKS, AT_ONCE):
            tasks = [
                Mailbox.new_task(sender, recipients[number % RECIPIENTS], f"Reconcile invoice {number} with the bank")
                for number in range(begun, begun + AT_ONCE)
            ]
            await asyncio.gather(*map(mailbox.send_task, tasks))


def _run_apart(work: Coroutine[Any, Any, None]) -> None:
    """In a thread: the browser's driver has a loop in this one."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(asyncio.run, work).result()


FIRST_ROW: Final = """
new MutationObserver((_, observer) => {
  if (!document.querySelector("#rows tr")) return;
  window.firstRowMs = performance.now();
  observer.disconnect();
}).observe(document, { childList: true, subtree: true });
"""


CAME: Final = """
[firstRowMs, ["navigation", "resource"]
  .flatMap((kind) => performance.getEntriesByType(kind))
  .filter((entry) => entry.responseEnd <= firstRowMs)
  .reduce((sum, entry) => sum + entry.transferSize, 0)]
"""
"""When the first row was there, and the bytes that had come by then."""


def test_the_first_row_of_very_many_tasks_comes_with_few_bytes(
    chromium: Browser, daemons: LinkedDaemons, record_property: Callable[[str, object], None]
) -> None:
    _run_apart(_fill(daemons.folder / "a"))
    one = daemons.start("a")
    with open_visitor(chromium, one.daemon.url) as visitor:
        visitor.context.add_init_script(FIRST_ROW)
        page = visitor.log_in(one.token, "/ui/tasks")
        page.wait_for_selector("#rows tr")
        watcher = visitor.context.new_cdp_session(page)
        watcher.send("Network.enable")
        for browser in ("warm", "cold"):
            watcher.send("Network.setCacheDisabled", {"cacheDisabled": browser == "cold"})
            took_ms: list[float] = []
            came = 0
            for _ in range(LOADS):
                page.reload()
                page.wait_for_selector(f"#lanes a:has-text('Queued') b:has-text('{TASKS:,}')")
                first_ms, came = page.evaluate(CAME)
                took_ms.append(first_ms)
                # The machine's speed is told, and asserted nowhere.
                assert came <= BYTES_MAX
            told = f"{min(took_ms):.0f} ms at best of {LOADS}, {sorted(took_ms)[LOADS // 2]:.0f} in the middle"
            record_property("measured", f"first row of {TASKS} tasks, {browser} browser: {told}, {came} bytes")
