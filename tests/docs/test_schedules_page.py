"""What the page on schedules says to type is typed here, also through a kill."""

import re
import signal
from pathlib import Path
from typing import Any

from tests.cli.daemons import Daemon
from tests.docs.test_steps import begin
from tests.waits import BOUND_S, until

TEXT = (Path(__file__).parents[2] / "docs" / "schedules.md").read_text(encoding="utf-8")
(AGENTS,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
LATER, LIST = re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL)


def runs(daemon: Daemon) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = daemon.run("a2a", "list", "--agent", "report", "--json").json["tasks"]
    return found


def moment(daemon: Daemon, task_id: str) -> int:
    metadata = daemon.run("a2a", "show", task_id, "--json").json["task"]["metadata"]
    found: int = metadata["schedule"]["moment_ms"]
    return found


def test_the_report_of_the_page_is_written_once_a_second_through_a_kill(short_path: Path) -> None:
    (short_path / "report.py").write_text(AGENTS)
    daemon = Daemon(short_path / "home", str(short_path / "report.py"))
    until(lambda: len(runs(daemon)) >= 3)
    assert daemon.stop(signal.SIGKILL) == -signal.SIGKILL
    daemon = Daemon(short_path / "home", str(short_path / "report.py"))
    try:
        before = len(runs(daemon))
        until(lambda: len(runs(daemon)) >= before + 3)
        said, _ = begin(daemon, LIST).communicate(timeout=BOUND_S)
        assert "still here?" in said
        moments = sorted(moment(daemon, task["task_id"]) for task in runs(daemon))
        assert len(set(moments)) == len(moments)
        # Those that were missed while nobody was up were run, too.
        assert moments == list(range(moments[0], moments[-1] + 1, 1000))
    finally:
        assert daemon.stop() == 0


def test_a_task_that_is_sent_for_later_is_queued_later(short_path: Path) -> None:
    daemon = Daemon(short_path / "home")
    try:
        said, _ = begin(daemon, LATER).communicate(timeout=BOUND_S)
        task_id = said.split()[-1]
        assert daemon.run("a2a", "show", task_id, "--json").json["state"] == "parked"
        assert daemon.stop(signal.SIGKILL) == -signal.SIGKILL
        daemon = Daemon(short_path / "home")
        until(lambda: daemon.run("a2a", "show", task_id, "--json").json["state"] == "queued")
    finally:
        assert daemon.stop() == 0
