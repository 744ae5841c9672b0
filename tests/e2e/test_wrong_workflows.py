"""What authors and callers do wrong, through the doors of a real daemon: a clear error, and a state that is true."""

import signal
from pathlib import Path
from typing import Final

import pytest

from tests.agents.test_served_files import get, send
from tests.cli.daemons import Daemon
from tests.e2e.test_approval import state, text
from tests.e2e.test_steps import lines
from tests.waits import until

WRONG: Final = """
import pathlib
from covenant import Agent

odd, twice, bill, clerk = Agent("odd"), Agent("twice"), Agent("bill"), Agent("clerk")

def note(text):
    with open(pathlib.Path(__file__).parent / "notes", "a") as lines:
        lines.write(text + "\\n")

@odd
async def make(turn):
    await turn.step("make", lambda: object())

@twice
async def repeat(turn):
    await turn.step("same", lambda: note("same"))
    await turn.step("same", lambda: note("again"))

@bill
async def charge(turn):
    await turn.step("charge", lambda: note("charge"))
    await turn.wait_for("go")
    await turn.step("send", lambda: note("send"))
    return "sent"

@clerk
async def wait(turn):
    return str(await turn.wait_for("go"))
"""
CHANGED: Final = WRONG.replace('turn.step("charge"', 'turn.step("charge the card"')


@pytest.fixture
def file(short_path: Path) -> Path:
    path = short_path / "agents.py"
    path.write_text(WRONG)
    return path


def test_a_step_that_cannot_be_kept_fails_its_task_in_words_that_its_sender_reads(short_path: Path, file: Path) -> None:
    daemon = Daemon(short_path / "home", str(file))
    try:
        for agent, why in (("odd", "cannot be written as JSON"), ("twice", "step 'same' was asked for twice")):
            status = send(daemon, agent, "go")["status"]
            assert status["state"] == "TASK_STATE_FAILED"
            assert why in status["message"]["parts"][0]["text"]
        assert lines(file, "notes") == ["same"], "the second step of the name was not done"
    finally:
        assert daemon.stop() == 0


def test_a_function_that_was_changed_over_a_kill_holds_its_task_until_it_is_put_right(
    short_path: Path, file: Path
) -> None:
    daemon = Daemon(short_path / "home", str(file))
    task_id = send(daemon, "bill", "go", wait=False)["id"]
    until(lambda: '"signal":"go"' in daemon.run("a2a", "show", task_id, "--json").out)
    assert daemon.stop(signal.SIGKILL) == -signal.SIGKILL
    file.write_text(CHANGED)
    daemon = Daemon(short_path / "home", str(file))
    assert daemon.run("a2a", "signal", task_id, "go").code == 0
    until(lambda: "was changed" in text(daemon, "bill", task_id))
    assert state(daemon, "bill", task_id) == "TASK_STATE_WORKING"
    assert daemon.json("a2a", "show", task_id)["holder_lost"] is True, "it waits for an operator"
    assert lines(file, "notes") == ["charge"], "nothing was done by the changed function"
    assert daemon.stop(signal.SIGKILL) == -signal.SIGKILL
    file.write_text(WRONG)
    daemon = Daemon(short_path / "home", str(file))
    try:
        daemon.json("capabilities", "grant", "a2a.repair.requeue")
        why = ("--reason", "the function is right again", "--duplicate-risk", "operator-accepted")
        assert daemon.run("a2a", "requeue", task_id, *why).code == 0
        until(lambda: state(daemon, "bill", task_id) == "TASK_STATE_COMPLETED")
        assert lines(file, "notes") == ["charge", "send"]
    finally:
        assert daemon.stop() == 0


def test_an_approval_that_nobody_asked_for_and_a_schedule_that_makes_no_sense_are_refused(
    short_path: Path, file: Path
) -> None:
    daemon = Daemon(short_path / "home", str(file))
    try:
        task_id = send(daemon, "clerk", "go", wait=False)["id"]
        until(lambda: '"signal":"go"' in daemon.run("a2a", "show", task_id, "--json").out)
        before = get(daemon, "clerk", task_id)
        for verb in ("approve", "deny"):
            refused = daemon.run("a2a", verb, task_id, "--json")
            assert refused.code != 0
            assert refused.json["code"] == "not_asked", refused
        assert get(daemon, "clerk", task_id) == before
        assert daemon.run("agents", "add", "probe", "--command", "true").code == 0
        for flags, field in (
            (("--cron", "soon"), "cron"),
            (("--cron", "0 3 * * *", "--time-zone", "Mars/Olympus"), "time_zone"),
        ):
            refused = daemon.run("schedules", "add", "probe", "nightly", *flags)
            assert refused.code != 0
            assert field in refused.err, refused
        assert daemon.json("schedules", "list")["schedules"] == []
    finally:
        assert daemon.stop() == 0
