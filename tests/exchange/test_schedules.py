"""Schedules: each moment has one run, over restarts, clocks that are set, and beside another daemon."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from covenant import Agent, Schedule, Turn
from covenant.exchange.schedules import ScheduleRunner, run_id
from covenant.exchange.tasks.writer import TaskWriter
from covenant.ledger.clock import PAUSE_MS
from covenant.model.errors import Invalid
from tests.daemon_under_test import DaemonUnderTest, open_daemon_under_test
from tests.ledger_contract.fake_clock import FakeClock

HOUR_MS = 3_600_000
NAME = ("default", "report", "hourly")


def reporter(**more: object) -> Agent:
    agent = Agent("report", schedules=[Schedule(id="hourly", cron="0 * * * *", text="the report", **more)])  # type: ignore[arg-type]

    @agent
    async def report(turn: Turn) -> str:
        return turn.text.upper()

    return agent


@asynccontextmanager
async def opened(home: Path, clock: FakeClock, **more: object) -> AsyncIterator[tuple[DaemonUnderTest, ScheduleRunner]]:
    async with open_daemon_under_test(home, reporter(**more), clock=clock) as daemon:
        workers = daemon.daemon.agents.workers
        yield daemon, ScheduleRunner(daemon.ledger, daemon.catalogue, TaskWriter(daemon.ledger, workers))


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


def test_a_schedule_that_cannot_be_read_is_told_to_its_author() -> None:
    with pytest.raises(Invalid, match="cron"):
        Agent("a", schedules=[Schedule(id="s", cron="soon")])
    with pytest.raises(Invalid, match="time_zone"):
        Agent("a", schedules=[Schedule(id="s", every_s=5, time_zone="Nowhere")])
