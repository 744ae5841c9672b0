"""The feed: what it tells, to whom, how a reader goes on where it was, and how it ends."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from covenant.dashboard.feed import (
    PER_SESSION_MAX,
    RING_ROUNDS_MAX,
    FeedCollector,
    FeedRing,
    FeedRound,
    FeedRow,
    OwnChanges,
    write_all_frames,
)
from covenant.dashboard.sessions import Role, UiSession
from covenant.exchange.access.principals import Principal
from covenant.exchange.access.tenants import Caller
from covenant.ledger.change_log import LATEST_MAX, TaskChange
from covenant.ledger.embedded.open import open_ledger
from covenant.ledger.machine.commands import Accept
from covenant.ledger.machine.states import QUEUED
from covenant.model.errors import Unavailable
from covenant.model.ids import TaskId
from covenant.model.tenants import Tenant
from tests.daemon_under_test import DaemonUnderTest, open_daemon_under_test
from tests.dashboard.browser import OUR_PAGE, Browser, asking_agent, leave_stuck, new_viewer, open_browser, send_task
from tests.ledger.embedded.recorded import ALICE
from tests.ledger.embedded.recorded import task as new_task
from tests.ledger_contract.fake_clock import FakeClock
from tests.waits import BOUND_S, eventually

MINUTE_MS = 60_000
ENDED = "end", {"why": "logged_out"}
CHANGE = TaskChange(QUEUED, 0)


class Feed:
    """Reads events as a browser does."""

    def __init__(self, lines: AsyncIterator[str]) -> None:
        self._lines = lines
        self.seen = ""

    async def next(self, kind: str | None = None) -> tuple[str, Any]:
        """The next event, or the next of a kind."""
        event, data = "", ""
        async for line in self._lines:
            name, _, value = line.partition(": ")
            if name == "event":
                event = value
            elif name == "data":
                data = value
            elif name == "id":
                self.seen = value
            elif not line and event:
                if kind in (None, event):
                    return event, json.loads(data)
                event = ""
        raise EOFError


@asynccontextmanager
async def follow(browser: Browser, seen: str | None = None) -> AsyncIterator[Feed]:
    headers = {**OUR_PAGE, **({"last-event-id": seen} if seen is not None else {})}
    async with browser.http.stream("GET", "/ui/feed", headers=headers) as answer:
        assert answer.status_code == 200, await answer.aread()
        assert answer.headers["content-type"] == "text/event-stream"
        feed = Feed(answer.aiter_lines())
        assert (await feed.next())[0] == "hello"
        yield feed


async def until_told(feed: Feed, task_id: str, state: str) -> dict[str, Any]:
    while True:
        _, told = await feed.next("tasks")
        for task in told["tasks"]:
            if (task["task_id"], task["state"]) == (task_id, state):
                found: dict[str, Any] = task
                return found


async def test_a_change_of_a_task_is_told_with_its_state_and_the_counts(
    daemon: DaemonUnderTest, operator: Browser
) -> None:
    async with follow(operator) as feed:
        stuck = await leave_stuck(daemon)
        told = await until_told(feed, stuck.task_id, "in_flight")
        assert told["agent"].startswith("worker")
        await daemon.ask("POST", f"/a2a/tasks/{stuck.task_id}/cancel", json={"reason": "r"})
        await until_told(feed, stuck.task_id, "result_pending")
        while (await feed.next("counts"))[1]["lanes"]["result_pending"] != 1:
            pass


async def test_every_change_is_counted_though_nothing_follows_it(tmp_path: Path) -> None:
    ledger = await open_ledger(tmp_path, clock=lambda: 1_000)
    try:
        collector = FeedCollector(ledger, followers_max=1)
        ledger.changes.begin()
        await collector.run_round(counting=True)
        assert collector.counts["queued"] == 0
        await ledger.commit(Accept(task=new_task(1), digest="d" * 64, minted=True))
        await collector.run_round(counting=False)
        position, counted = collector.ring.position, collector.counted
        assert collector.counts["queued"] == 0, "this round does not count"
        told = asyncio.create_task(collector.wait_for_change(position, counted, BOUND_S))
        await asyncio.sleep(0)
        await collector.run_round(counting=True)
        assert collector.counts["queued"] == 1
        assert collector.ring.position == position
        assert await told, "whoever follows hears of counts alone"
    finally:
        await ledger.close()


async def test_a_task_that_begins_and_ends_between_two_counts_is_told(short_path: Path) -> None:
    async with open_daemon_under_test(short_path / "home", asking_agent()) as daemon:

        async def archived() -> bool:
            return (await daemon.ledger.counts()).behind == 0

        collector = FeedCollector(daemon.ledger, followers_max=1)
        daemon.ledger.changes.begin()
        await eventually(archived)
        await collector.run_round(counting=True)
        before = collector.counted
        assert (await send_task(daemon, "no time"))["status"]["state"] == "TASK_STATE_COMPLETED"
        await eventually(archived)
        await collector.run_round(counting=True)
        assert collector.counted == before + 1


async def test_the_feed_goes_on_for_who_reads_it_after_the_ledger_was_away(
    short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("covenant.daemon.lifecycle.RESTART_S", 0.01)
    async with (
        open_daemon_under_test(short_path / "home", asking_agent()) as daemon,
        open_browser(daemon, daemon.token) as browser,
        follow(browser) as feed,
    ):
        was_away = asyncio.Event()

        async def away() -> Any:
            monkeypatch.setattr(daemon.ledger, "counts", counts)
            was_away.set()
            raise Unavailable("database_unavailable", "the database is away")

        counts = daemon.ledger.counts
        monkeypatch.setattr(daemon.ledger, "counts", away)
        await send_task(daemon, "paint")
        await asyncio.wait_for(was_away.wait(), BOUND_S)
        task = await send_task(daemon, "paint")
        while task["id"] not in str(told := await feed.next()) and told[0] != "resync":
            pass
        task = await send_task(daemon, "paint")
        await until_told(feed, task["id"], "parked")


async def test_whoever_connects_is_told_the_counts_of_now(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("covenant.dashboard.feed.LINGER_S", 0.0)
    async with open_daemon_under_test(short_path / "home") as daemon, open_browser(daemon, daemon.token) as operator:
        async with follow(operator) as feed:
            assert (await feed.next("counts"))[1]["lanes"]["in_flight"] == 0
        assert not daemon.ledger.changes.enabled, "nobody looks, as a minute after the last reader left"
        await leave_stuck(daemon)
        async with follow(operator) as feed:
            assert (await feed.next("counts"))[1]["lanes"]["in_flight"] == 1


async def test_a_reader_goes_on_where_it_was(daemon: DaemonUnderTest, operator: Browser) -> None:
    async with follow(operator) as feed:
        first = await leave_stuck(daemon, "one")
        await until_told(feed, first.task_id, "in_flight")
        seen = feed.seen
    second = await leave_stuck(daemon, "second")
    async with follow(operator, seen) as feed:
        told = await until_told(feed, second.task_id, "in_flight")
        assert told["task_id"] == second.task_id


@pytest.mark.parametrize("seen", ["0", "999999999999", "nonsense"])
async def test_a_reader_whose_place_is_not_known_reads_everything_anew(operator: Browser, seen: str) -> None:
    async with follow(operator, seen) as feed:
        assert (await feed.next())[0] == "resync"


async def test_a_place_in_another_run_is_not_known(daemon: DaemonUnderTest, operator: Browser) -> None:
    async with follow(operator) as feed:
        stuck = await leave_stuck(daemon)
        await until_told(feed, stuck.task_id, "in_flight")
        position = feed.seen.partition(".")[2]
    async with follow(operator, f"00000000.{position}") as feed:
        assert (await feed.next())[0] == "resync"


async def test_after_a_restart_a_reader_reads_everything_anew(short_path: Path) -> None:
    async with (
        open_daemon_under_test(short_path / "home") as daemon,
        open_browser(daemon, daemon.token) as browser,
        follow(browser) as feed,
    ):
        stuck = await leave_stuck(daemon)
        await until_told(feed, stuck.task_id, "in_flight")
        seen = feed.seen
    async with open_daemon_under_test(short_path / "home") as daemon, open_browser(daemon, daemon.token) as browser:
        await leave_stuck(daemon, "another")
        async with follow(browser, seen) as feed:
            assert (await feed.next())[0] == "resync"


async def test_a_tenant_is_told_of_its_own_tasks_alone(short_path: Path) -> None:
    async with open_daemon_under_test(short_path / "home", asking_agent()) as daemon:
        token = await daemon.add_tenant("acme", asking_agent())
        async with open_browser(daemon, token) as browser, follow(browser) as feed:
            other = await send_task(daemon, "paint")
            own = await send_task(daemon, "paint", token=token)
            told: list[Any] = []
            while not any(task["task_id"] == own["id"] for event in told for task in event[1].get("tasks", ())):
                told.append(await feed.next())
            assert {event for event, _ in told} == {"tasks"}
            assert other["id"] not in str(told)


async def test_the_ids_of_a_tenants_events_count_nothing_and_resume_for_that_tenant_alone(short_path: Path) -> None:
    async with open_daemon_under_test(short_path / "home", asking_agent()) as daemon:
        acme, globex = [await daemon.add_tenant(name, asking_agent()) for name in ("acme", "globex")]
        async with open_browser(daemon, acme) as browser, open_browser(daemon, globex) as other:
            async with follow(browser) as feed:
                first = await send_task(daemon, "paint", token=acme)
                await until_told(feed, first["id"], "parked")
                seen = feed.seen
            assert not seen.isdigit()
            second = await send_task(daemon, "paint", token=acme)
            async with follow(browser, seen) as feed:
                event, told = await feed.next()
                assert (event, [each["task_id"] for each in told["tasks"]]) == ("tasks", [second["id"]])
            for one, given in ((other, seen), (browser, "1")):
                async with follow(one, given) as feed:
                    assert await feed.next() == ("resync", {})


async def test_audit_rows_are_told(daemon: DaemonUnderTest, operator: Browser) -> None:
    async with follow(operator) as feed:
        await new_viewer(daemon)
        assert (await feed.next("audit"))[1]["count"] > 0


async def test_the_feed_ends_with_its_session(daemon: DaemonUnderTest, operator: Browser) -> None:
    async with follow(operator) as feed:
        await daemon.identities.rotate(daemon.operator, None)
        assert await feed.next("end") == ENDED
        with pytest.raises(EOFError):
            await feed.next()


@pytest.mark.parametrize("limit", ["idle_ms", "session_ms"])
async def test_on_a_busy_daemon_the_feed_ends_when_its_session_is_over(short_path: Path, limit: str) -> None:
    clock = FakeClock()
    async with open_daemon_under_test(
        short_path / "home", asking_agent(), clock=clock, ui={limit: MINUTE_MS}
    ) as daemon:
        token = await daemon.add_tenant("acme")
        async with open_browser(daemon, daemon.token) as one, open_browser(daemon, token) as two:
            async with follow(one) as operators, follow(two) as tenants:
                await operators.next("counts")
                clock.advance(MINUTE_MS)
                await send_task(daemon, "paint")
                assert await operators.next() == ENDED, "nothing more is told"
                assert await tenants.next() == ENDED, "though nothing of its own happened"
            assert (await one.http.get("/ui/feed", headers=OUR_PAGE)).status_code == 401


async def test_the_feed_ends_with_the_grant_of_its_viewer(daemon: DaemonUnderTest) -> None:
    token = await new_viewer(daemon)
    async with open_browser(daemon, token) as browser, follow(browser) as feed:
        await feed.next("counts")
        (grant,) = [each for each in await daemon.identities.grants(daemon.operator, 10) if each.action == "ui.view"]
        await daemon.identities.revoke_grant(daemon.operator, grant.signature_b58)
        assert await feed.next() == ENDED, "not even the audit of it is told"


async def test_the_feed_needs_a_session_and_its_readers_are_bounded(short_path: Path) -> None:
    async with open_daemon_under_test(short_path / "home", ui={"feeds_max": 1}) as daemon:
        async with open_browser(daemon) as browser:
            assert (await browser.http.get("/ui/feed", headers=OUR_PAGE)).status_code == 401
        async with open_browser(daemon, daemon.token) as one, open_browser(daemon, daemon.token) as two:
            cross = await one.http.get("/ui/feed", headers={"sec-fetch-site": "cross-site"})
            assert cross.status_code == 403
            async with follow(one):
                assert (await two.http.get("/ui/feed", headers=OUR_PAGE)).status_code == 429
    assert PER_SESSION_MAX > 0


def row(task_id: str, tenant: str = "default") -> FeedRow:
    return FeedRow(TaskId(task_id), "queued", "a@default", tenant, 0)


def test_the_ring_tells_what_came_after_a_position_the_newest_first() -> None:
    ring = FeedRing(10)
    for position in (12, 15, 20):
        ring.add(FeedRound(position=position))
    assert [each.position for each in ring.since(12) or ()] == [20, 15]
    assert ring.since(20) == []
    assert ring.since(9) is None
    assert ring.since(21) is None


def test_the_ring_is_bounded_and_knows_from_where_on_it_is_whole() -> None:
    ring = FeedRing(0)
    for position in range(1, RING_ROUNDS_MAX + 2):
        ring.add(FeedRound(position=position))
    assert ring.since(0) is None
    assert len(ring.since(1) or ()) == RING_ROUNDS_MAX
    ring.clear(9_999)
    assert ring.since(3) is None
    assert ring.since(9_999) == []


def test_whoever_was_away_for_long_is_told_of_few_tasks_each_once() -> None:
    rounds = [
        FeedRound(position=each, tasks=[row("same"), *(row(f"t{each}-{n}") for n in range(4))], more=7)
        for each in (9, 8)
    ]
    event, data = write_all_frames(rounds, "place").decode().splitlines()[1:3]
    told = json.loads(data.removeprefix("data: "))
    assert event == "event: tasks"
    assert [each["task_id"] for each in told["tasks"]] == ["same", "t9-0", "t9-1", "t9-2", "t9-3"]
    assert told["more"] == 7 + 7 + 4
    assert LATEST_MAX * 4 <= 20


def tenants_session(name: str) -> UiSession:
    tenant = Tenant(name=name)
    client = Principal(ALICE, operator=False, token_sha256=name, tenant=name)
    return UiSession(name, Role.TENANT, client, Caller(tenant, name, operator=False, name=name), 0)


async def test_a_tenant_is_told_how_many_more_of_its_own_tasks_changed_and_nothing_of_others(tmp_path: Path) -> None:
    changes = {TaskId(f"own-{number}"): TaskChange(QUEUED, 0, "a@acme", "acme") for number in range(LATEST_MAX)}
    rounds = [
        FeedRound(position=9, tasks=[row("other")], more=312, own={"acme": OwnChanges(changes, more=2)}),
        FeedRound(position=8, tasks=[row("own-9", "acme")], own={"acme": OwnChanges({TaskId("own-9"): CHANGE})}),
        FeedRound(position=7, tasks=[row("other")], more=312, audited=3),
    ]
    ledger = await open_ledger(tmp_path, clock=lambda: 1_000)
    try:
        collector = FeedCollector(ledger, followers_max=1)
        rows, more = await collector.tenant_tasks(rounds, "acme")
        assert ([each.task_id for each in rows], more) == ([*changes], 3)
        assert await collector.tenant_tasks(rounds[2:], "acme") == ([], 0)
    finally:
        await ledger.close()


async def test_the_tasks_of_others_take_no_place_of_a_tenants_own(tmp_path: Path) -> None:
    """Otherwise a tenant would see how busy the others are: its own task would be counted, and not named."""
    ledger = await open_ledger(tmp_path, clock=lambda: 1_000)
    try:
        collector = FeedCollector(ledger, followers_max=2)
        with collector.following(tenants_session("acme")), collector.following(tenants_session("idle")):
            names = ("acme", *["globex"] * (2 * LATEST_MAX), "acme", *["globex"] * (LATEST_MAX + 1))
            tasks = [new_task(number, tenant=name) for number, name in enumerate(names)]
            for task in tasks:
                await ledger.commit(Accept(task=task, digest="d" * 64, minted=True))
            await collector.run_round(counting=False)
            rounds = collector.ring.since(collector.ring.start) or ()
            rows, more = await collector.tenant_tasks(rounds, "acme")
            own = [task.id for task in reversed(tasks) if task.tenant == "acme"]
            assert ([each.task_id for each in rows], {each.state for each in rows}, more) == (own, {"queued"}, 0)
            assert await collector.tenant_tasks(rounds, "idle") == ([], 0)
            assert [*rounds[0].own] == ["acme"], "what the others do is kept for readers alone"
    finally:
        await ledger.close()


async def test_a_tenant_is_told_nothing_while_many_tasks_of_others_change(short_path: Path) -> None:
    async with open_daemon_under_test(short_path / "home", asking_agent()) as daemon:
        acme, globex = [await daemon.add_tenant(name, asking_agent()) for name in ("acme", "globex")]
        earlier = [await send_task(daemon, "paint", token=acme) for _ in range(LATEST_MAX)]
        async with (
            open_browser(daemon, daemon.token) as admin,
            open_browser(daemon, acme) as browser,
            follow(admin) as everything,
            follow(browser) as feed,
        ):
            more = 0
            while not more:
                many = [send_task(daemon, "paint", token=globex) for _ in range(4 * LATEST_MAX)]
                await asyncio.gather(*many)
                more = (await everything.next("tasks"))[1]["more"]
            own = await send_task(daemon, "paint", token=acme)
            assert [each["task_id"] for each in (await feed.next())[1]["tasks"]] == [own["id"]]

            async def cancel(task: dict[str, Any]) -> None:
                await daemon.ask("POST", f"/a2a/tasks/{task['id']}/cancel", json={"reason": "r"})

            await asyncio.gather(*(cancel(each) for each in (*earlier, own)))
            told, more = set[str](), 0
            while len(told) + more < len(earlier) + 1:
                _, news = await feed.next("tasks")
                more += news["more"]
                told |= {each["task_id"] for each in news["tasks"] if each["state"] != "parked"}


async def test_a_tenants_place_tells_nothing_and_is_none_once_nobody_counted_for_tenants(
    short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("covenant.dashboard.feed.LINGER_S", 0.0)
    async with open_daemon_under_test(short_path / "home", asking_agent()) as daemon:
        token = await daemon.add_tenant("acme", asking_agent())
        async with (
            open_browser(daemon, daemon.token) as admin,
            open_browser(daemon, token) as browser,
            follow(admin),
        ):
            async with follow(browser) as feed, follow(browser) as again:
                seen = feed.seen
                assert again.seen != seen, "though nothing happened meanwhile"
            async with follow(browser, seen) as feed:
                assert await feed.next() == ("resync", {}), "though nothing happened meanwhile"


async def test_the_look_ups_of_a_round_do_not_grow_with_what_changed(tmp_path: Path) -> None:
    """At thousands of tasks a second, a few of them are looked up, once for all readers."""
    ledger = await open_ledger(tmp_path, clock=lambda: 1_000)
    try:
        collector = FeedCollector(ledger, followers_max=1)
        ledger.changes.begin()
        sent = [new_task(number) for number in range(200)]
        await asyncio.gather(*(ledger.commit(Accept(task=each, digest="d" * 64, minted=True)) for each in sent))
        await collector.run_round(counting=True)
        (only,) = collector.ring.since(collector.ring.start) or ()
        assert len(only.tasks) == LATEST_MAX
        assert only.more == len(sent) - LATEST_MAX
        assert {each.state for each in only.tasks} == {"queued"}
        assert [each.task_id for each in only.tasks] == [each.id for each in reversed(sent)][:LATEST_MAX]
        assert collector.counts["queued"] == len(sent)
    finally:
        await ledger.close()
