"""Two daemons as processes on one PostgreSQL: what waits goes on at the other when the one that began it is killed."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import AsyncIterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import pytest

from covenant.daemon.environment import now_ms
from covenant.exchange.schedules import run_id
from tests.agents.test_served_files import get, send
from tests.cli.daemons import Daemon
from tests.e2e.test_retries import waits_for
from tests.e2e.test_steps import ended, lines
from tests.e2e.test_stopped_node import LEASE_MS, give_keys, in_thread, nodes
from tests.ledger_contract.postgres_server import Databases
from tests.waits import until

PAUSE_S: Final = 4.0
WAITS: Final = f"""
import asyncio, os, pathlib, time
from covenant import Agent, Backoff

HERE = pathlib.Path(__file__).parent
pauses = Backoff({PAUSE_S}, {PAUSE_S}, jitter=0)
again = Agent("again", idempotent=True, on_lost="requeue", attempts=4, retry_on=(OSError,), backoff=pauses)
nap = Agent("nap", idempotent=True, on_lost="requeue")

def note(file, text):
    with open(HERE / file, "a") as lines:
        lines.write(f"{{text}} {{time.time()}} {{os.environ['COVENANT_DAEMON_NODE']}}\\n")

@again
async def work(turn):
    note("again", turn.attempt)
    if turn.attempt < 3:
        raise OSError
    return f"attempt {{turn.attempt}}"

@nap
async def doze(turn):
    await turn.step("before", lambda: note("nap", "before"))
    await turn.sleep({PAUSE_S})
    await turn.step("after", lambda: note("nap", "after"))
    return "awake"
"""
SCHEDULED: Final = """
import pathlib
from covenant import Agent, Schedule

report = Agent("report", schedules=[Schedule(id="often", every_s=1, text="now", catch_up_s=60)])

@report
async def write(turn):
    with open(pathlib.Path(__file__).parent / "report", "a") as lines:
        lines.write(turn.task_id + "\\n")
    return turn.text
"""


@pytest.fixture
async def url(databases: Databases) -> AsyncIterator[str]:
    url = await databases.make()
    yield url
    await databases.drop(url)


def start(folder: Path, url: str, name: str) -> Daemon:
    variables = {
        "COVENANT_LEDGER_URL": url,
        "COVENANT_LEDGER_DURABILITY": "os",
        "COVENANT_LEDGER_NODE_LEASE_MS": str(LEASE_MS),
        "COVENANT_DAEMON_NODE": name,
    }
    give_keys(folder, folder / name)
    return Daemon(folder / name, str(folder / "agents.py"), env=variables)


def sleeps(daemon: Daemon, task_id: str) -> bool:
    return "sleep" in daemon.run("a2a", "show", task_id, "--json").out


def completed(daemon: Daemon, agent: str, task_id: str) -> dict[str, Any]:
    until(partial(ended, daemon, agent, task_id))
    task = get(daemon, agent, task_id)
    assert task["status"]["state"] == "TASK_STATE_COMPLETED", task["status"]
    return task


def outlive(folder: Path, url: str) -> None:
    (folder / "agents.py").write_text(WAITS)
    a = start(folder, url, "a")
    retried, asleep = (send(a, agent, "go", wait=False)["id"] for agent in ("again", "nap"))
    until(partial(waits_for, a, retried, 2))
    until(partial(sleeps, a, asleep))
    # Whatever was begun was begun here: there was nobody else.
    assert a.stop(signal.SIGKILL) == -signal.SIGKILL
    b = start(folder, url, "b")
    c = start(folder, url, "c")
    try:
        until(partial(waits_for, b, retried, 3))
        # Killed in the second pause, too; the third daemon does the rest.
        assert b.stop(signal.SIGKILL) == -signal.SIGKILL
        task = completed(c, "again", retried)
        assert task["status"]["message"]["parts"] == [{"text": "attempt 3"}]
        completed(c, "nap", asleep)
        tried = [line.split() for line in lines(folder / "agents.py", "again")]
        assert [attempt for attempt, _, _ in tried] == ["1", "2", "3"]
        assert all(float(after[1]) - float(before[1]) >= PAUSE_S * 0.99 for before, after in pairwise(tried))
        leases = c.json("a2a", "show", retried)["leases"]
        assert [lease["attempt"] for lease in leases] == [1, 2, 3]
        woken = [line.split() for line in lines(folder / "agents.py", "nap")]
        assert [what for what, _, _ in woken] == ["before", "after"]
        assert float(woken[1][1]) - float(woken[0][1]) >= PAUSE_S * 0.99
        assert (woken[0][2], tried[0][2], tried[2][2]) == ("a", "a", "c")
    finally:
        assert c.stop() == 0


async def test_the_pause_of_a_retry_and_a_sleep_outlive_the_daemons_that_began_them(short_path: Path, url: str) -> None:
    await in_thread(outlive, short_path, url)


def ran(daemon: Daemon) -> set[str]:
    """The tasks of the schedule."""
    found = daemon.run("a2a", "list", "--agent", "report", "--limit", "10000", "--json").json["tasks"]
    ids = [task["task_id"] for task in found]
    assert len(set(ids)) == len(ids)
    return set(ids)


def runs_of(since_ms: int, until_ms: int) -> list[str]:
    """The tasks of the moments after the first and up to the second."""
    begin_ms = since_ms // 1000 * 1000 + 1000
    return [run_id(("default", "report", "often"), at_ms) for at_ms in range(begin_ms, until_ms + 1, 1000)]


def run_each_moment(folder: Path, url: str) -> None:
    (folder / "agents.py").write_text(SCHEDULED)
    a, b = start(folder, url, "a"), start(folder, url, "b")
    begun_ms = now_ms()

    def goes_on(since_ms: int) -> bool:
        return not ran(b).isdisjoint(runs_of(since_ms + 1_000, now_ms()))

    until(partial(goes_on, begun_ms))
    assert a.stop(signal.SIGKILL) == -signal.SIGKILL
    try:
        until(partial(goes_on, now_ms()))
        until(lambda: not nodes(b)["a"]["alive"])
        a = start(folder, url, "a")
        back_ms = now_ms()
        until(partial(goes_on, back_ms))
        assert a.stop() == 0
        assert set(runs_of(begun_ms, back_ms)) <= ran(b), "a moment is left out"
        worked = Counter(lines(folder / "agents.py", "report"))
        assert set(worked.values()) == {1}
        assert set(worked) <= set(runs_of(begun_ms - 120_000, now_ms())), "a task of no moment"
    finally:
        assert b.stop() == 0


async def test_a_schedule_of_two_daemons_has_one_run_a_moment_through_a_kill_of_either(
    short_path: Path, url: str
) -> None:
    await in_thread(run_each_moment, short_path, url)
