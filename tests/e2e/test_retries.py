"""A real daemon, killed in the pauses of retries and in an attempt: each attempt is begun once, and none is lost."""

import json
import signal
import sys
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Final

import pytest

from tests.agents.test_served_files import get, send
from tests.cli.daemons import Daemon
from tests.e2e.test_steps import ended, lines
from tests.matrices import first_of
from tests.waits import until

PAUSE_S: Final = 3.0
AGENTS: Final = f"""
import asyncio, pathlib, time
from covenant import Agent, Backoff

HERE = pathlib.Path(__file__).parent
pauses = Backoff({PAUSE_S}, {PAUSE_S})
again = Agent("again", idempotent=True, on_lost="requeue", attempts=4, retry_on=(OSError,), backoff=pauses)

@again
async def work(turn):
    with open(HERE / "again", "a") as lines:
        lines.write(f"{{turn.attempt}} {{time.time()}}\\n")
    if turn.attempt == 2:
        await asyncio.Event().wait()
    if turn.attempt < 4:
        raise OSError
    return f"attempt {{turn.attempt}}"
"""
PROGRAM: Final = """
import json, sys, time
turn = json.load(sys.stdin)
with open(sys.argv[1], "a") as lines:
    lines.write(f"{turn['attempt']} {time.time()}\\n")
if turn["attempt"] < 3:
    sys.exit(3)
print(json.dumps({"type": "result", "text": f"attempt {turn['attempt']}"}))
"""


def waits_for(daemon: Daemon, task_id: str, attempt: int) -> bool:
    return f"attempt {attempt} begins in" in daemon.run("a2a", "show", task_id, "--json").out


def check(noted: list[str], attempts: int, paused: tuple[int, ...]) -> None:
    """Each attempt once, in order; and no pause was cut short by a kill."""
    assert [line.split()[0] for line in noted] == [str(number) for number in range(1, attempts + 1)]
    between = list(pairwise(float(line.split()[1]) for line in noted))
    for before, after in (between[place] for place in paused):
        assert after - before >= PAUSE_S * 0.99


@pytest.mark.parametrize("name", first_of(["again", "program"]))
def test_the_pauses_outlive_kills_and_each_attempt_is_begun_once(short_path: Path, name: str) -> None:
    home, file = short_path / "home", short_path / "agents.py"
    file.write_text(AGENTS)
    (short_path / "program.py").write_text(PROGRAM)
    folder = home / "agents"
    folder.mkdir(parents=True, mode=0o700)
    home.chmod(0o700)
    declared = {
        "kind": "process",
        "command": [sys.executable, str(short_path / "program.py"), str(short_path / "program")],
        "idempotent": True,
        "retries": {"attempts": 3, "backoff": {"first": PAUSE_S, "factor": 1, "jitter": 0}, "retry_on": ["exited"]},
    }
    (folder / "program.json").write_text(json.dumps(declared))
    daemon = Daemon(home, str(file))
    try:
        until(lambda: daemon.run("agents", "show", name).code == 0)
        task_id = send(daemon, name, "go", wait=False)["id"]
        for attempt in (2, 3) if name == "program" else (2, 4):
            until(partial(waits_for, daemon, task_id, attempt))
            assert daemon.stop(signal.SIGKILL) == -signal.SIGKILL
            daemon = Daemon(home, str(file))
            if name == "again" and attempt == 2:
                # Killed in the second attempt, which counts: it is lost, and the third begins at once.
                until(lambda: len(lines(file, name)) == 2)
                assert daemon.stop(signal.SIGKILL) == -signal.SIGKILL
                daemon = Daemon(home, str(file))
        until(partial(ended, daemon, name, task_id))
        attempts = 4 if name == "again" else 3
        task = get(daemon, name, task_id)
        assert task["status"]["state"] == "TASK_STATE_COMPLETED", task["status"]
        assert task["status"]["message"]["parts"] == [{"text": f"attempt {attempts}"}]
        check(lines(file, name), attempts, (0, 2) if name == "again" else (0, 1))
        leases = daemon.json("a2a", "show", task_id)["leases"]
        assert [lease["attempt"] for lease in leases] == list(range(1, attempts + 1))
        assert len(lines(file, name)) == attempts
    finally:
        daemon.stop()
