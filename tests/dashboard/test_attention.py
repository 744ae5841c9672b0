"""What the first page and the page of settings are told."""

from pathlib import Path

from covenant.dashboard.attention import PARKED_MS
from tests.daemon_under_test import DaemonUnderTest, open_daemon_under_test
from tests.dashboard.browser import Browser, asking_agent, new_viewer, open_browser, send_task
from tests.ledger_contract.fake_clock import FakeClock


async def test_a_quiet_daemon_needs_nobody(operator: Browser) -> None:
    found = await operator.read("a2a/attention")
    assert (found["kind"], found["items"]) == ("a2a_attention", [])
    assert found["numbers"]["queued"] == 0
    assert len(found["sparks"]["settled"]) == len(found["sparks"]["failed"]) == 60


async def test_refused_logins_are_told_with_where_they_came_from(daemon: DaemonUnderTest, operator: Browser) -> None:
    async with open_browser(daemon) as stranger:
        for _ in range(3):
            await stranger.login("nonsense")
    (item,) = (await operator.read("a2a/attention"))["items"]
    assert (item["what"], item["act"]["href"]) == ("login_refused", "/ui/audit?type=authentication_failed")
    assert "127.0.0.1" in item["detail"]


async def test_a_task_that_waits_for_long_is_told_with_the_form_that_answers_it(short_path: Path) -> None:
    clock = FakeClock()
    async with open_daemon_under_test(short_path / "home", asking_agent(), clock=clock) as daemon:
        task = await send_task(daemon, "paint it")
        clock.advance(PARKED_MS + 1)
        async with open_browser(daemon, daemon.token) as browser:
            (item,) = (await browser.read("a2a/attention"))["items"]
            assert (item["what"], item["task_id"]) == ("parked_long", task["id"])
            assert (await browser.get(item["act"]["href"])).status_code == 200


async def test_viewers_look_too_and_tenants_do_not(daemon: DaemonUnderTest) -> None:
    async with open_browser(daemon, await new_viewer(daemon)) as viewer:
        await viewer.read("a2a/attention")
        await viewer.read("v1/admin/settings")
    async with open_browser(daemon, await daemon.add_tenant("acme")) as tenant:
        for path in ("a2a/attention", "v1/admin/settings"):
            assert (await tenant.api("GET", path)).status_code == 403


async def test_settings_are_shown_with_their_origin_and_without_passwords(short_path: Path) -> None:
    async with open_daemon_under_test(short_path / "home") as daemon, open_browser(daemon, daemon.token) as browser:
        shown = {each["name"]: each for each in (await browser.read("v1/admin/settings"))["settings"]}
        assert shown["http.bind_addr"]["value"] == "127.0.0.1"
        assert shown["ui.idle_ms"]["default"] == 3_600_000
        assert shown["http.bind_addr"]["source"] == "default"
