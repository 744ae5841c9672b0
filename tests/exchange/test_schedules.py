"""Schedules: each moment has one run, over restarts, clocks that are set, and beside another daemon."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime
from pathlib import Path
from zoneinfo import ZoneInfo

import asyncpg
import pytest

from covenant import Agent, Schedule, Turn
from covenant.daemon.home import KEY_NAME, TOKEN_NAME
from covenant.exchange.access.tenants import Caller
from covenant.exchange.schedules import FOLLOWER_DELAY_MS, ScheduleRunner, run_id
from covenant.exchange.tasks.writer import TaskWriter
from covenant.ledger.clock import PAUSE_MS
from covenant.model.errors import Conflict, Invalid, OverLimit
from tests.daemon_under_test import DaemonUnderTest, open_daemon_under_test
from tests.ledger_contract.fake_clock import FakeClock
from tests.ledger_contract.postgres_server import Databases
from tests.waits import BOUND_S, eventually

MINUTE_MS, HOUR_MS = 60_000, 3_600_000
NAME = ("default", "report", "hourly")


def reporter(worked: list[int] | None = None, **more: object) -> Agent:
    """`worked`: gets the moment of each run that is worked on."""
    given = {"cron": "0 * * * *", **more}
    agent = Agent("report", schedules=[Schedule(id="hourly", text="the report", **given)])  # type: ignore[arg-type]

    @agent
    async def report(turn: Turn) -> str:
        if worked is not None:
            worked.append((turn.task.metadata or {})["schedule"]["moment_ms"])
        return turn.text.upper()

    return agent


@asynccontextmanager
async def opened(
    home: Path, clock: FakeClock, *, url: str = "", **more: object
) -> AsyncIterator[tuple[DaemonUnderTest, ScheduleRunner]]:
    stored = {"url": url, "durability": "os"}
    async with open_daemon_under_test(home, reporter(None, **more), clock=clock, ledger=stored) as daemon:
        workers, ledger = daemon.daemon.agents.workers, daemon.daemon.base.storage.ledger
        yield daemon, ScheduleRunner(ledger, daemon.catalogue, TaskWriter(ledger, workers))


async def acting(daemon: DaemonUnderTest) -> Caller:
    base = daemon.daemon.base
    return await base.access.tenant_auth.tenancy.acting(base.storage.operator, "default")


async def pause(daemon: DaemonUnderTest, *, paused: bool) -> None:
    await daemon.daemon.agents.schedules.pause(await acting(daemon), "report", "hourly", paused=paused)


def next_hour(clock: FakeClock) -> int:
    return (clock() // HOUR_MS + 1) * HOUR_MS


async def test_each_moment_has_one_run_also_beside_another_runner_and_after_a_restart(tmp_path: Path) -> None:
    clock = FakeClock()
    async with opened(tmp_path / "home", clock) as (daemon, runner):
        assert await runner.step() == 0
        moment_ms = next_hour(clock)
        clock.advance(moment_ms - clock())
        assert await runner.step() == 1
        assert await runner.step() == 0
        beside = ScheduleRunner(
            daemon.ledger, daemon.catalogue, TaskWriter(daemon.ledger, daemon.daemon.agents.workers)
        )
        await beside.step()
        shown = await daemon.ledger.show(run_id(NAME, moment_ms), None, 100)
        assert shown is not None
        assert shown.task.intent_text == "the report"
        assert shown.task.metadata == {"schedule": {"id": "hourly", "moment_ms": moment_ms}}
    async with opened(tmp_path / "home", clock, catch_up_s=2 * 3600) as (daemon, runner):
        # The moment that had its run is submitted again, and is found.
        await runner.step()
        shown = await daemon.ledger.show(run_id(NAME, moment_ms), None, 100)
        assert shown is not None
        assert [update.kind for update in shown.updates].count("submitted") == 1


async def test_a_moment_is_left_for_a_while_to_the_daemon_that_leads(tmp_path: Path, databases: Databases) -> None:
    url, clock = await databases.make(), FakeClock()
    async with opened(tmp_path / "a", clock, url=url) as (first, leading):
        for name in (KEY_NAME, TOKEN_NAME):
            copy = tmp_path / "b" / name
            copy.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            shutil.copy2(tmp_path / "a" / name, copy)
        (tmp_path / "b").chmod(0o700)
        async with opened(tmp_path / "b", clock, url=url) as (_, other):

            async def leads() -> bool:
                return first.daemon.base.storage.ledger.leads("schedules")

            await eventually(leads)
            assert (await leading.step(), await other.step()) == (0, 0)
            clock.advance(next_hour(clock) - clock())
            assert (await other.step(), await leading.step()) == (0, 1)
            clock.advance(FOLLOWER_DELAY_MS)
            assert await other.step() == 1, "it would be submitted now if nobody had done so"
    await databases.drop(url)


async def test_a_moment_that_has_its_run_is_not_inserted_into_a_database_again(
    tmp_path: Path, databases: Databases
) -> None:
    url, clock, rollbacks = await databases.make(), FakeClock(), [0]
    database = await asyncpg.connect(url)
    alone = (
        "SELECT count(*) = 1 FROM pg_stat_activity WHERE datname = current_database() AND backend_type LIKE 'client%'"
    )
    counted = "SELECT xact_rollback FROM pg_stat_database WHERE datname = current_database()"
    for _ in range(2):
        async with opened(tmp_path, clock, url=url, catch_up_s=2 * 3600) as (_, runner):
            assert await runner.step() > 0
        clock.advance(1_000)
        await eventually(lambda: database.fetchval(alone))  # a session counts its rollbacks when it ends
        rollbacks.append(await database.fetchval(counted))
    assert rollbacks[2] - rollbacks[1] <= rollbacks[1] - rollbacks[0], "the second start inserts a task again"
    await database.close()
    await databases.drop(url)


@pytest.mark.parametrize(("catch_up_s", "runs"), [(0, 0), (3 * 3600, 3)])
async def test_moments_that_were_missed_are_run_as_the_schedule_says(
    tmp_path: Path, catch_up_s: int, runs: int
) -> None:
    clock = FakeClock()
    clock.advance(next_hour(clock) - clock() + HOUR_MS // 2)
    async with opened(tmp_path / "home", clock, catch_up_s=catch_up_s) as (_, runner):
        await runner.step()
        clock.advance(1_000)
        assert await runner.step() == 0
    clock.advance(5 * HOUR_MS)
    async with opened(tmp_path / "home", clock, catch_up_s=catch_up_s) as (_, runner):
        assert await runner.step() == runs


async def test_nothing_is_begun_in_the_pause_after_the_clock_was_set_and_no_moment_has_two_runs(
    tmp_path: Path,
) -> None:
    clock = FakeClock()
    async with opened(tmp_path / "home", clock) as (daemon, runner):
        await runner.step()
        moment_ms = next_hour(clock)
        clock.advance(moment_ms - clock())
        assert await runner.step() == 1
        clock.step(-HOUR_MS)
        assert await runner.step() == 0
        clock.advance(PAUSE_MS + 1_000)
        assert await runner.step() == 0
        clock.advance(moment_ms - clock())
        await runner.step()
        shown = await daemon.ledger.show(run_id(NAME, moment_ms), None, 100)
        assert shown is not None
        assert [update.kind for update in shown.updates].count("submitted") == 1
        clock.advance(HOUR_MS)
        assert await runner.step() == 1


@pytest.mark.parametrize(("step_ms", "runs"), [(2 * MINUTE_MS, 3), (20 * MINUTE_MS, 5), (0, 1), (-2 * MINUTE_MS, 1)])
async def test_moments_that_pass_while_the_clock_is_set_are_run_up_to_five_minutes_late(
    tmp_path: Path, step_ms: int, runs: int
) -> None:
    clock = FakeClock()
    clock.advance(next_hour(clock) - clock() + 30_000)
    async with opened(tmp_path / "home", clock, cron="* * * * *") as (_, runner):
        assert await runner.step() == 0
        if step_ms:
            clock.step(step_ms)
            assert await runner.step() == 0
        clock.advance(PAUSE_MS + 1_000)
        before = clock()
        assert await runner.step() == runs
        assert (await runner.step(), clock()) == (0, before)


async def test_after_a_clock_that_was_a_day_ahead_is_set_back_the_next_moment_is_run(tmp_path: Path) -> None:
    clock = FakeClock()
    clock.advance(next_hour(clock) - clock() + 30 * MINUTE_MS)
    async with opened(tmp_path / "home", clock) as (_, runner):
        assert await runner.step() == 0
        for step_ms in (24 * HOUR_MS, -24 * HOUR_MS):
            clock.step(step_ms)
            assert await runner.step() == 0
            clock.advance(PAUSE_MS + 1_000)
            assert await runner.step() == 0
        clock.advance(next_hour(clock) - clock())
        assert await runner.step() == 1


@pytest.mark.parametrize("restarted", [False, True])
async def test_after_a_clock_that_was_a_day_ahead_is_set_back_no_moment_is_skipped(
    tmp_path: Path, restarted: bool
) -> None:
    clock, home = FakeClock(), tmp_path / "home"
    clock.advance(next_hour(clock) - clock() + 30_000)
    right_ms = clock()
    clock.step(24 * HOUR_MS)
    async with opened(home, clock, cron="* * * * *") as (daemon, runner):
        assert await runner.step() == 0
        await pause(daemon, paused=False)  # a record from the future
        if not restarted:
            await check_no_moment_is_skipped(daemon, runner, clock, right_ms)
    if restarted:
        clock.step(-24 * HOUR_MS)
        async with opened(home, clock, cron="* * * * *") as (daemon, runner):
            await check_no_moment_is_skipped(daemon, runner, clock, right_ms)


async def check_no_moment_is_skipped(
    daemon: DaemonUnderTest, runner: ScheduleRunner, clock: FakeClock, right_ms: int
) -> None:
    """Sets the clock right, if it is not. The moments of the pause after that are run when it is over."""
    clock.step(right_ms - clock())
    assert await runner.step() == 0, "the clock was set just now"
    clock.advance(PAUSE_MS + 1_000)
    moment_ms = (right_ms // MINUTE_MS + 1) * MINUTE_MS
    assert await runner.step() == 1
    assert await daemon.ledger.show(run_id(NAME, moment_ms), None, 1) is not None
    clock.advance(MINUTE_MS)
    assert await runner.step() == 1


async def test_a_daemon_that_was_held_up_runs_each_moment_that_it_waited_for(tmp_path: Path) -> None:
    clock = FakeClock()
    clock.advance(next_hour(clock) - clock() + 30_000)
    async with opened(tmp_path / "home", clock, cron="* * * * *") as (_, runner):
        assert await runner.step() == 0
        clock.advance(3 * MINUTE_MS)
        assert await runner.step() == 3
        clock.advance(10 * MINUTE_MS)
        assert await runner.step() == 5


@pytest.mark.parametrize(
    ("day", "hours", "cron", "expected"),
    [
        ("2026-03-29", 23, "30 2 * * *", ["03:30+0200"]),
        (
            "2026-03-29",
            23,
            "30 * * * *",
            ["00:30+0100", "01:30+0100", *(f"{hour:02}:30+0200" for hour in range(3, 24))],
        ),
        ("2026-10-25", 25, "30 2 * * *", ["02:30+0200"]),
        (
            *("2026-10-25", 25, "30 * * * *"),
            [*(f"{hour:02}:30+0200" for hour in range(3)), *(f"{hour:02}:30+0100" for hour in range(2, 24))],
        ),
    ],
)
async def test_a_day_with_23_or_25_hours_has_each_run_once_over_a_restart_in_its_middle(
    tmp_path: Path, day: str, hours: int, cron: str, expected: list[str]
) -> None:
    zone, worked = ZoneInfo("Europe/Berlin"), list[int]()
    midnight_ms = int(datetime.fromisoformat(f"{day}T00:00").replace(tzinfo=zone).timestamp()) * 1000
    clock, steps = FakeClock(midnight_ms), hours * 4
    for part in (range(11), range(11, steps)):
        agent = reporter(worked, cron=cron, time_zone=zone.key, catch_up_s=2 * 3600)
        async with open_daemon_under_test(tmp_path / "home", agent, clock=clock) as daemon:
            workers = daemon.daemon.agents.workers
            runner = ScheduleRunner(daemon.ledger, daemon.catalogue, TaskWriter(daemon.ledger, workers))
            await runner.step()
            for _ in part:
                clock.advance(HOUR_MS // 4)
                await runner.step()
            await workers.idle()
    # What it looks back for at its first start is of the day before.
    of_day = sorted(moment for moment in worked if moment >= midnight_ms)
    assert [datetime.fromtimestamp(moment / 1000, zone).strftime("%H:%M%z") for moment in of_day] == expected


async def test_a_paused_schedule_has_no_runs_over_restarts_and_none_later_for_its_pause(tmp_path: Path) -> None:
    clock = FakeClock()
    clock.advance(next_hour(clock) - clock() + HOUR_MS // 2)
    look_back_s = 24 * 3600
    async with opened(tmp_path / "home", clock, catch_up_s=look_back_s) as (daemon, runner):
        await runner.step()
        await pause(daemon, paused=True)
        clock.advance(HOUR_MS)
        assert await runner.step() == 0
    async with opened(tmp_path / "home", clock, catch_up_s=look_back_s) as (daemon, runner):
        clock.advance(HOUR_MS)
        assert await runner.step() == 0
        await pause(daemon, paused=False)
        assert await runner.step() == 0
        clock.advance(HOUR_MS)
        assert await runner.step() == 1
    async with opened(tmp_path / "home", clock, catch_up_s=look_back_s) as (daemon, runner):
        # What is looked back at begins where the pause ended.
        assert await runner.step() == 1
        assert await daemon.ledger.show(run_id(NAME, next_hour(clock) - HOUR_MS), None, 1) is not None
        assert await daemon.ledger.show(run_id(NAME, next_hour(clock) - 2 * HOUR_MS), None, 1) is None


async def test_a_pause_holds_for_what_is_due_and_not_submitted_yet(tmp_path: Path) -> None:
    clock = FakeClock()
    async with opened(tmp_path / "home", clock) as (daemon, runner):
        await runner.step()
        clock.advance(next_hour(clock) - clock())
        await pause(daemon, paused=True)
        assert await runner.step() == 0


async def test_a_run_by_hand_that_is_refused_leaves_no_row_that_says_it_ran(tmp_path: Path) -> None:
    agent, begun = Agent("report", schedules=[Schedule(id="hourly", cron="0 * * * *")]), asyncio.Event()

    @agent
    async def wait(_: Turn) -> None:
        begun.set()
        await asyncio.Event().wait()

    at_once = {"grace_ms": 0}  # the turn goes on when the daemon stops
    async with open_daemon_under_test(tmp_path / "home", agent, tenants={"live_tasks": 1}, daemon=at_once) as daemon:
        schedules = daemon.daemon.agents.schedules
        ran = await schedules.run_now(await acting(daemon), "report", "hourly")
        await asyncio.wait_for(begun.wait(), BOUND_S)
        with pytest.raises(OverLimit):
            await schedules.run_now(await acting(daemon), "report", "hourly")
        events = (await daemon.ask("GET", "/audit/recent?type=schedule_run")).json()["events"]
        assert [event["kind"]["task_id"] for event in events] == [ran]


async def test_a_schedule_of_code_is_changed_in_the_code(tmp_path: Path) -> None:
    async with opened(tmp_path / "home", FakeClock()) as (daemon, _):
        with pytest.raises(Conflict, match="comes from code"):
            await daemon.daemon.agents.schedules.remove(await acting(daemon), "report", "hourly")


def test_a_schedule_that_cannot_be_read_is_told_to_its_author() -> None:
    with pytest.raises(Invalid, match="cron"):
        Agent("a", schedules=[Schedule(id="s", cron="soon")])
    with pytest.raises(Invalid, match="time_zone"):
        Agent("a", schedules=[Schedule(id="s", every_s=5, time_zone="Nowhere")])
