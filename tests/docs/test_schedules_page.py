"""What the page on schedules says to type is typed here, also through a kill."""

import re
import signal
from pathlib import Path

from covenant.daemon.environment import now_ms
from tests.cli.daemons import Daemon
from tests.docs.test_steps import said
from tests.waits import until

TEXT = (Path(__file__).parents[2] / "docs" / "schedules.md").read_text(encoding="utf-8")
(AGENTS,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
LATER, LIST, PAUSE, ADD = re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL)


def runs(daemon: Daemon, most: int = 10_000) -> list[str]:
    """The ids of the newest runs. There are more than a list shows unless told: the page lets a minute be caught up."""
    found = daemon.run("a2a", "list", "--agent", "report", "--limit", str(most), "--json").json["tasks"]
    return [task["task_id"] for task in found]


def moment(daemon: Daemon, task_id: str) -> int:
    metadata = daemon.run("a2a", "show", task_id, "--json").json["task"]["metadata"]
    found: int = metadata["schedule"]["moment_ms"]
    return found


def caught_up(daemon: Daemon, at_ms: int) -> bool:
    """Whether a moment after this one has its run. Moments are run in their order."""
    return any(moment(daemon, task_id) > at_ms for task_id in runs(daemon, 1))


def test_the_report_of_the_page_is_written_once_a_second_through_a_kill(short_path: Path) -> None:
    (short_path / "report.py").write_text(AGENTS)
    begun_ms = now_ms()
    daemon = Daemon(short_path / "home", str(short_path / "report.py"))
    until(lambda: caught_up(daemon, begun_ms))
    assert daemon.stop(signal.SIGKILL) == -signal.SIGKILL
    killed_ms = now_ms()
    daemon = Daemon(short_path / "home", str(short_path / "report.py"))
    try:
        until(lambda: caught_up(daemon, killed_ms + 2_000))
        told = said(daemon, LIST)
        assert "still here?" in told
        moments = sorted(moment(daemon, task_id) for task_id in runs(daemon))
        assert len(set(moments)) == len(moments)
        # Those that were missed while nobody was up were run, too.
        assert moments == list(range(moments[0], moments[-1] + 1, 1000))
        assert moments[0] <= begun_ms
    finally:
        assert daemon.stop() == 0


def test_a_schedule_is_paused_through_a_kill_and_added_and_removed_as_the_page_says(short_path: Path) -> None:
    (short_path / "report.py").write_text(AGENTS)
    daemon = Daemon(short_path / "home", str(short_path / "report.py"))
    look, paused, rest = PAUSE.partition("covenant schedules pause report often\n")
    told = said(daemon, look)
    assert re.search(r"weekdays .* Europe/Berlin .*T09:00:00\+0[12]:00", told), told
    assert len(re.findall(r"next: .*T09:00:00\+0[12]:00", told)) == 5
    said(daemon, paused)
    before = runs(daemon)
    assert daemon.stop(signal.SIGKILL) == -signal.SIGKILL
    daemon = Daemon(short_path / "home", str(short_path / "report.py"))
    try:
        resumed_ms = now_ms()
        told = said(daemon, rest)
        by_hand = told.splitlines()[0]
        assert "resumed report/often; next run: " in told

        def new() -> set[str]:
            return set(runs(daemon)) - set(before) - {by_hand}

        until(lambda: caught_up(daemon, resumed_ms + 2_000) and new())
        # The schedule would look back for a minute, but not into its pause.
        assert min(moment(daemon, task_id) for task_id in new()) > resumed_ms
        told = said(daemon, ADD)
        assert re.search(r"added probe/nightly; next run: .*T03:00:00\+0[12]:00", told), told
        assert "removed probe/nightly" in told
    finally:
        assert daemon.stop() == 0


def test_a_task_that_is_sent_for_later_is_queued_later(short_path: Path) -> None:
    daemon = Daemon(short_path / "home")
    try:
        told = said(daemon, LATER)
        task_id = told.split()[-1]
        assert daemon.run("a2a", "show", task_id, "--json").json["state"] == "parked"
        assert daemon.stop(signal.SIGKILL) == -signal.SIGKILL
        daemon = Daemon(short_path / "home")
        until(lambda: daemon.run("a2a", "show", task_id, "--json").json["state"] == "queued")
    finally:
        assert daemon.stop() == 0
