"""A real daemon, killed at every boundary of a workflow: each step that was completed is done once."""

import signal
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest

from tests.agents.test_served_files import call, get, send
from tests.cli.daemons import Daemon
from tests.waits import until

STEPS: Final = 10
AGENTS: Final = """
import os, pathlib, signal
from covenant import Agent

HERE = pathlib.Path(__file__).parent
flow = Agent("flow", idempotent=True, on_lost="requeue")
nap = Agent("nap", idempotent=True, on_lost="requeue")

def note(file, text):
    with open(HERE / file, "a") as lines:
        lines.write(text + "\\n")

def die_once(name):
    mark = HERE / f"died-{name}"
    if not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)

@flow
async def work(turn):
    killed, place = turn.text.split()
    for number in range(1, 11):
        def do(number=number):
            note(turn.task_id, f"{number} {turn.interrupted}")
            if place == "within" and number == int(killed):
                die_once(turn.text.replace(" ", "-"))
            return number * number
        assert await turn.step(f"step {number}", do) == number * number
        if place == "between" and number == int(killed):
            die_once(turn.text.replace(" ", "-"))
    yield f"done in attempt {turn.attempt}"

@nap
async def doze(turn):
    await turn.step("before", lambda: note("nap", "before"))
    await turn.sleep(float(turn.text))
    await turn.step("after", lambda: note("nap", "after"))
    value = await turn.wait_for("coffee")
    return f"woken with {value['sort']} in attempt {turn.attempt}"
"""


@pytest.fixture
def file(short_path: Path) -> Path:
    path = short_path / "agents.py"
    path.write_text(AGENTS)
    return path


def lines(file: Path, name: str) -> list[str]:
    path = file.parent / name
    return path.read_text().splitlines() if path.exists() else []


def ended(daemon: Daemon, agent: str, task_id: str) -> bool:
    return bool(get(daemon, agent, task_id)["status"]["state"] != "TASK_STATE_WORKING")


@pytest.mark.matrix
@pytest.mark.timeout(600)
def test_a_workflow_that_is_killed_at_each_boundary_does_each_completed_step_once(short_path: Path, file: Path) -> None:
    daemon = Daemon(short_path / "home", str(file))
    for number in range(1, STEPS + 1):
        for place in ("between", "within"):
            task_id = send(daemon, "flow", f"{number} {place}", wait=False)["id"]
            assert daemon.process.wait(100) == -signal.SIGKILL
            daemon.stop()
            daemon = Daemon(short_path / "home", str(file))
            until(partial(ended, daemon, "flow", task_id))
            task = get(daemon, "flow", task_id)
            assert task["status"]["state"] == "TASK_STATE_COMPLETED"
            assert task["status"]["message"]["parts"] == [{"text": "done in attempt 2"}]
            told = [line.split() for line in lines(file, task_id)]
            times = Counter(int(line[0]) for line in told)
            # The step that was under way may have happened, and is told so. All others were done once.
            under_way = {number} if place == "within" else set()
            assert times == {each: 2 if each in under_way else 1 for each in range(1, STEPS + 1)}
            maybe = [int(step) for step, interrupted in told if interrupted == "True"]
            assert maybe == [number if place == "within" else number + 1][: STEPS + 1 - number or None] or (
                maybe == [] and place == "between" and number == STEPS
            )
    assert daemon.stop() == 0


def test_a_message_for_later_is_begun_later_and_a_moment_that_is_none_is_refused(short_path: Path, file: Path) -> None:
    daemon = Daemon(short_path / "home", str(file))
    message = {"messageId": "m", "role": "ROLE_USER", "parts": [{"text": "0"}]}
    configuration = {"returnImmediately": True}

    def ask(moment: object) -> dict[str, Any]:
        metadata = {"covenant.not_before_ms": moment}
        return call(daemon, "nap", "SendMessage", message=message, configuration=configuration, metadata=metadata)

    try:
        for wrong in ("soon", -1, 1.5, True, 1 << 60):
            assert "error" in ask(wrong), wrong
        later_ms = time.time_ns() // 1_000_000 + 2_000
        task = ask(later_ms)["result"]["task"]
        assert task["status"]["state"] == "TASK_STATE_SUBMITTED"
        assert daemon.stop(signal.SIGKILL) == -signal.SIGKILL
        daemon = Daemon(short_path / "home", str(file))
        until(lambda: "after" in lines(file, "nap"))
        assert time.time_ns() // 1_000_000 >= later_ms
    finally:
        assert daemon.stop() == 0


def test_a_sleep_over_three_restarts_wakes_once_and_a_signal_is_heard_after_a_kill(
    short_path: Path, file: Path
) -> None:
    daemon = Daemon(short_path / "home", str(file))
    task_id = send(daemon, "nap", "3", wait=False)["id"]
    until(lambda: "sleep" in daemon.run("a2a", "show", task_id, "--json").out)
    for _ in range(3):
        assert daemon.stop(signal.SIGKILL) == -signal.SIGKILL
        daemon = Daemon(short_path / "home", str(file))
    # It waits for the signal only after the ledger has its last step: one that was killed before that is done again.
    until(lambda: "coffee" in daemon.run("a2a", "show", task_id, "--json").out)
    assert lines(file, "nap") == ["before", "after"]
    assert daemon.stop(signal.SIGKILL) == -signal.SIGKILL
    daemon = Daemon(short_path / "home", str(file))
    try:
        words = ("a2a", "signal", task_id, "coffee", '{"sort": "black"}', "--signal-id", "one")
        ran = daemon.run(*words)
        assert ran.code == 0, ran
        until(lambda: ended(daemon, "nap", task_id))
        status = get(daemon, "nap", task_id)["status"]
        assert status["state"] == "TASK_STATE_COMPLETED", status
        assert status["message"]["parts"][0]["text"].startswith("woken with black in attempt ")
        assert lines(file, "nap") == ["before", "after"]
        assert daemon.run("a2a", "signal", task_id, "coffee").code != 0
        assert "result" not in call(daemon, "nap", "GetTask", id="nobody")
    finally:
        assert daemon.stop() == 0
