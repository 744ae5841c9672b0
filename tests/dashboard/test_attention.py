"""What the first page and the page of settings are told."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from covenant import Agent, Turn
from covenant.doors.operator_api.attention import BEHIND_MAX, LISTED_MAX, PARKED_MS, Need, count_needs, storage_needs
from covenant.ledger.contract.ledger import Counts
from tests.daemon_under_test import DaemonUnderTest, open_daemon_under_test
from tests.dashboard.browser import Browser, asking_agent, new_viewer, open_browser, send_task
from tests.ledger_contract.fake_clock import FakeClock
from tests.waits import eventually


async def test_a_quiet_daemon_needs_nobody(operator: Browser) -> None:
    found = await operator.read("a2a/attention")
    assert (found["kind"], found["needs"], found["items"]) == ("a2a_attention", 0, [])
    assert found["numbers"]["queued"] == 0
    rates = await operator.read("rates")
    assert len(rates["settled"]) == len(rates["failed"]) == 1, "the minute under way is the only one that it knows"


async def test_what_ended_in_the_minute_under_way_is_told_at_once_and_since_when_it_is_known(short_path: Path) -> None:
    clock = FakeClock()
    async with open_daemon_under_test(short_path / "home", asking_agent(), clock=clock) as daemon:
        dashboard = daemon.daemon.doors.dashboard
        assert dashboard is not None
        assert dashboard.sampler in daemon.daemon.schedulers, "the daemon looks once a minute"
        await dashboard.sampler.sample()
        # The daemon takes a first sample by itself, before or after this one.
        sampler = dashboard.sampler

        async def both_samples() -> bool:
            return len((await sampler.rates()).settled) == 2

        await eventually(both_samples)
        before, since_ms = 2, clock.now_ms
        clock.advance(60_000)
        await send_task(daemon, "blue")
        async with open_browser(daemon, daemon.token) as browser:
            rates = await browser.read("rates")
            assert (len(rates["settled"]), rates["settled"][-1], rates["since_ms"]) == (before, 1, since_ms)
            await dashboard.sampler.sample()
            assert (await browser.read("rates"))["settled"][-2:] == [1, 0]
            for _ in range(70):
                await dashboard.sampler.sample()
            assert (await browser.read("rates"))["settled"] == [0] * 60


async def test_refused_logins_are_told_with_where_they_came_from(daemon: DaemonUnderTest, operator: Browser) -> None:
    async with open_browser(daemon) as stranger:
        for _ in range(3):
            await stranger.login("nonsense")
    (item,) = (await operator.read("a2a/attention"))["items"]
    assert (item["what"], item["act"]["href"]) == ("login_refused", "/ui/audit?type=authentication_failed")
    assert "127.0.0.1" in item["detail"]
    assert item["title"] == "3 refused logins in the last hour"
    assert (await operator.read("a2a/attention"))["needs"] == 1, "one look mends it"


def test_each_kind_counts_as_often_as_it_is_listed_or_more_often_if_it_says_so() -> None:
    told = [("holder_lost", 70), ("holder_lost", 70), ("parked_long", 1), ("parked_long", 1), ("writer_failed", 1)]
    items = [Need(what=what, severity="bad", title="", detail="", count=count) for what, count in told]
    assert count_needs(items) == 73
    assert count_needs([]) == 0


async def test_one_refused_login_is_told_in_the_singular(daemon: DaemonUnderTest, operator: Browser) -> None:
    async with open_browser(daemon) as stranger:
        await stranger.login("nonsense")
    (item,) = (await operator.read("a2a/attention"))["items"]
    assert item["title"] == "1 refused login in the last hour"


async def test_a_task_that_waits_for_long_is_told_with_the_form_that_answers_it(short_path: Path) -> None:
    clock = FakeClock()
    async with open_daemon_under_test(short_path / "home", asking_agent(), clock=clock) as daemon:
        task = await send_task(daemon, "paint it")
        clock.advance(PARKED_MS + 1)
        async with open_browser(daemon, daemon.token) as browser:
            (item,) = (await browser.read("a2a/attention"))["items"]
            assert (item["what"], item["task_id"]) == ("parked_long", task["id"])
            assert item["command"] == f"covenant a2a show {task['id']}"
            assert (await browser.get(item["act"]["href"])).status_code == 200


def sleeping_agent() -> Agent:
    agent = Agent("sleeper", description="Sleeps for a month.")

    @agent
    async def sleep(turn: Turn) -> str:
        await turn.sleep(30 * 86_400)
        return "awake"

    return agent


async def test_tasks_that_sleep_hide_no_question_and_each_question_counts(short_path: Path) -> None:
    clock = FakeClock()
    async with open_daemon_under_test(short_path / "home", asking_agent(), sleeping_agent(), clock=clock) as daemon:
        for number in range(LISTED_MAX + 1):
            await send_task(daemon, f"sleep {number}", agent="sleeper", wait=False)
        ledger = daemon.ledger
        while True:
            moved = ledger.changes.next_change()
            if (await ledger.counts()).parked > LISTED_MAX:
                break
            await moved
        clock.advance(1_000)
        first, second = [await send_task(daemon, "paint it") for _ in range(2)]
        clock.advance(PARKED_MS + 1)
        await send_task(daemon, "paint it too")
        async with open_browser(daemon, daemon.token) as browser:
            found = await browser.read("a2a/attention")
            assert [item["task_id"] for item in found["items"]] == [first["id"], second["id"]]
            assert {item["count"] for item in found["items"]} == {2}
            assert found["needs"] == 2
            assert found["numbers"]["parked"] == LISTED_MAX + 4


CALM = Counts(
    queued=0,
    leased=0,
    parked=0,
    following=0,
    settled=0,
    cached=0,
    oldest_lease_age_ms=0,
    holders_lost=0,
    commits=0,
    failure=None,
    behind=BEHIND_MAX,
)


@pytest.mark.parametrize(
    ("counts", "what", "severity"),
    [
        ({"failure": "No space left on device"}, "writer_failed", "bad"),
        ({"history_failure": "disk I/O error"}, "archive_lag", "warn"),
        ({"behind": BEHIND_MAX + 1}, "archive_lag", "warn"),
        ({"rejected": 1}, "archive_lag", "warn"),
    ],
    ids=["writer", "archive", "behind", "set aside"],
)
def test_a_failed_writer_and_an_archive_that_lags_are_told_with_what_mends_them(
    counts: dict[str, Any], what: str, severity: str
) -> None:
    assert list(storage_needs(CALM, 1)) == []
    (need,) = storage_needs(msgspec.structs.replace(CALM, **counts), 1)
    assert (need.what, need.severity) == (what, severity)
    assert need.command is not None


async def test_viewers_look_too_and_tenants_do_not(daemon: DaemonUnderTest) -> None:
    async with open_browser(daemon, await new_viewer(daemon)) as viewer:
        await viewer.read("a2a/attention")
        await viewer.read("rates")
        await viewer.read("v1/admin/settings")
    async with open_browser(daemon, await daemon.add_tenant("acme")) as tenant:
        for path in ("a2a/attention", "rates", "v1/admin/settings"):
            assert (await tenant.api("GET", path)).status_code == 403


async def test_settings_are_shown_with_their_origin_and_without_passwords(short_path: Path) -> None:
    async with open_daemon_under_test(short_path / "home") as daemon, open_browser(daemon, daemon.token) as browser:
        shown = {each["name"]: each for each in (await browser.read("v1/admin/settings"))["settings"]}
        assert shown["http.bind_addr"]["value"] == "127.0.0.1"
        assert shown["ui.idle_ms"]["default"] == 3_600_000
        assert shown["http.bind_addr"]["source"] == "default"
