"""The examples do what they say, as programs of their own against a real daemon."""

import subprocess
import sys
from pathlib import Path

from tests.cli.daemons import Daemon, environment, started
from tests.waits import BOUND_S

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_the_echo_worker_answers_the_tasks_that_are_sent_to_it(daemon: Daemon) -> None:
    command: list[str | Path] = [sys.executable, EXAMPLES / "echo_worker.py", "--url", daemon.url]
    command += ["--token-file", daemon.home / "bob.token", "--tasks-max", "2"]
    with started(command, stdout=subprocess.PIPE, text=True, env=environment()) as worker:
        for words in ("hello", "again"):
            ran = daemon.run("a2a", "send", "--to", "bob@host", "--wait", "--timeout", f"{int(BOUND_S)}s", words)
            assert (ran.code, ran.out) == (0, f"echo: {words}\n")
        out, _ = worker.communicate(timeout=BOUND_S)
        assert worker.returncode == 0
    assert [line.partition(" ")[2] for line in out.splitlines()] == ["attempt 1: hello", "attempt 1: again"]
