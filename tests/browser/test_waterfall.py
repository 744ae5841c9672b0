"""A task's story in time: which bars it has, from what the ledger knows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import pytest

from tests.browser.visitor import open_visitor, wait_for_state
from tests.e2e.linked_daemons import LinkedDaemons

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = pytest.mark.browser

READ: Final = """
async (shown) => {
  const { readTimeline } = await import("/ui/static/waterfall.js");
  const { bars } = readTimeline(shown, [], [], [], 100_000);
  return bars.map(({ kind, begins_ms, ends_ms }) => [kind, begins_ms, ends_ms]);
}
"""


def used(ts_ms: int, name: str, took_ms: int) -> dict[str, Any]:
    """A step that tells of a tool, as an agent that a model plays leaves it."""
    metadata = {"x-arbiter.tool_call": True, "x-arbiter.took_ms": took_ms}
    part = {"type": "json", "value": {"tool": name, "ok": True}, "metadata": metadata}
    return {"kind": "artifact", "ts_ms": ts_ms, "body": {"type": "artifact", "artifact_id": name, "parts": [part]}}


def said(ts_ms: int) -> dict[str, Any]:
    text = {"type": "text", "text": "x"}
    return {"kind": "artifact", "ts_ms": ts_ms, "body": {"type": "artifact", "artifact_id": "a", "parts": [text]}}


def test_calls_waits_and_pushes_are_bars_turns_are_bands_and_output_is_one_bar(
    chromium: Browser, daemons: LinkedDaemons
) -> None:
    home = daemons.folder / "a"
    home.mkdir(mode=0o700)
    (home / "settings.toml").write_text("[a2a]\npush_notifications = true\n")
    one = daemons.start("a")
    parent = one.send("relay", "echo hello")
    waits = one.send("asker", "one of them")
    hook = {"id": "hook", "url": "https://example.com/hook"}
    configuration = {"returnImmediately": True, "taskPushNotificationConfig": hook}
    message = {"messageId": "p", "role": "ROLE_USER", "parts": [{"text": "it"}]}
    pushed = one.rpc("held", "SendMessage", message=message, configuration=configuration)["task"]
    with open_visitor(chromium, one.daemon.url) as visitor:
        page = visitor.log_in(one.token, f"/ui/task/{parent['id']}")
        wait_for_state(page, "Completed")
        page.wait_for_selector("#fall a:has-text('echo')")
        assert page.locator("#fall .fall-row").count() >= 2
        page.goto(f"{one.daemon.url}/ui/task/{pushed['id']}")
        page.wait_for_selector("#fall .fall-row:has-text('Push to example.com')")
        page.goto(f"{one.daemon.url}/ui/task/{waits['id']}")
        page.wait_for_selector("#fall .fall-row:has-text('Waits for its sender')")
        page.fill("#answer textarea", "the second")
        page.press("#answer textarea", "Control+Enter")
        wait_for_state(page, "Completed")
        page.wait_for_selector("#fall .fall-row:has-text('Output')")
        first = page.locator("#fall .fall-row").first
        assert first.locator(".band").count() == 2, "a band for each turn"
        daemons.open()


def test_models_and_tools_are_bars_of_their_own_and_a_run_of_chunks_is_one(
    chromium: Browser, daemons: LinkedDaemons
) -> None:
    lease = {"lease_id": "l", "leased_at_ms": 1_000, "ended_at_ms": 30_000, "attempt": 1, "turn": 1}
    settled = {"kind": "settled", "ts_ms": 30_000, "body": {}}
    shown = {
        "created_at_ms": 0,
        "state": "done",
        "leases": [lease],
        "updates": [used(9_000, "search", 2_000), used(9_500, "fetch", 2_500), said(20_000), said(20_100), settled],
        "result": {"metadata": {"usage": {"tokens": 9, "requests": 2}}},
    }
    one = daemons.start("a")
    with open_visitor(chromium, one.daemon.url) as visitor:
        page = visitor.log_in(one.token, "/ui/tasks")
        assert page.evaluate(READ, shown) == [
            ["queued", 0, 1_000],
            ["attempt", 1_000, 30_000],
            ["model", 1_000, 7_000],
            ["tool", 7_000, 9_000],
            ["tool", 7_000, 9_500],
            ["model", 9_500, 30_000],
            ["chunks", 20_000, 20_100],
        ]
        spoken = {**shown, "result": {"metadata": {"usage": {"tokens": 9}}}}
        assert "model" not in [kind for kind, *_ in page.evaluate(READ, spoken)], "no model was asked"
