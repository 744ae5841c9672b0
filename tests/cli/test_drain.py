"""`covenant drain`: nothing new is taken, what runs ends or is handed back, and nothing is lost by it."""

import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from tests.cli.daemons import COVENANT, Daemon, environment
from tests.waits import BOUND_S

AGENTS = """
import asyncio
from pathlib import Path

from covenant import Agent, Turn

HERE = Path(__file__).parent
slow = Agent("slow", description="Ends when it may.", idempotent=True)
helper = Agent("helper", description="Helps at once.")

@helper
async def help_(turn: Turn) -> str:
    return "help"

@slow
async def work(turn: Turn) -> str:
    (HERE / "begun").touch()
    while not (HERE / "go").exists():
        await asyncio.sleep(0.02)
    found = await turn.call("helper", "?")
    return f"done with {found.text}"
"""


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    (tmp_path / "agents.py").write_text(AGENTS)
    running = Daemon(tmp_path / "home", str(tmp_path / "agents.py"))
    yield running
    running.stop()


def post(daemon: Daemon, method: str, params: dict[str, Any]) -> tuple[int, dict[str, str], dict[str, Any]]:
    return ask(request(daemon, "", {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}))


def request(daemon: Daemon, path: str, body: dict[str, Any]) -> Request:
    token = (daemon.home / "operator.token").read_text().strip()
    headers = {"authorization": f"Bearer {token}", "a2a-version": "1.0", "content-type": "application/json"}
    return Request(f"{daemon.url}/v1/a2a/agents/slow{path}", json.dumps(body).encode(), headers)


def ask(asked: Request | str) -> tuple[int, dict[str, str], dict[str, Any]]:
    try:
        with urlopen(asked, timeout=BOUND_S) as answer:
            return answer.status, dict(answer.headers), json.load(answer)
    except HTTPError as error:
        return error.code, dict(error.headers), json.load(error)


def send(daemon: Daemon) -> tuple[int, dict[str, str], dict[str, Any]]:
    message = {"messageId": "m", "role": "ROLE_USER", "parts": [{"text": "hello"}]}
    return post(daemon, "SendMessage", {"message": message, "configuration": {"returnImmediately": True}})


def state(daemon: Daemon, task_id: str) -> str:
    return str(post(daemon, "GetTask", {"id": task_id})[2]["result"]["status"]["state"])


def begin(daemon: Daemon, tmp_path: Path) -> str:
    """A task that runs."""
    task_id = str(send(daemon)[2]["result"]["task"]["id"])
    wait_for((tmp_path / "begun").exists)
    return task_id


def wait_for(found: Any) -> None:
    until_s = time.monotonic() + BOUND_S
    while not found():
        assert time.monotonic() < until_s
        time.sleep(0.02)


def draining(daemon: Daemon, timeout_s: int) -> "subprocess.Popen[str]":
    words = [str(COVENANT), "drain", "--home", str(daemon.home), "--timeout-s", str(timeout_s)]
    process = subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(COLUMNS="80")
    )
    wait_for(lambda: ask(f"{daemon.url}/readyz")[2]["status"] == "draining")
    return process


def test_new_work_is_refused_while_running_turns_end_and_reads_go_on(daemon: Daemon, tmp_path: Path) -> None:
    task_id = begin(daemon, tmp_path)
    drain = draining(daemon, 60)
    message = {"messageId": "m", "role": "ROLE_USER", "parts": [{"text": "hello"}]}
    status, headers, answer = ask(request(daemon, "/message:send", {"message": message}))
    assert status == 503, answer
    assert int({name.lower(): value for name, value in headers.items()}["retry-after"]) > 0
    assert "draining" in json.dumps(answer)
    assert "draining" in json.dumps(send(daemon)[2]["error"])
    code, _, ready = ask(f"{daemon.url}/readyz")
    assert (code, ready["status"], ready["reasons"]) == (503, "draining", ["the daemon is draining; 1 turn(s) run"])
    refused = daemon.run("a2a", "next")
    assert refused.code != 0
    assert "draining" in refused.err
    assert state(daemon, task_id) == "TASK_STATE_WORKING"
    (tmp_path / "go").touch()
    out, err = drain.communicate(timeout=BOUND_S)
    assert drain.returncode == 0, err
    assert "draining: 1 turn(s) run" in err
    assert out.splitlines()[0] == "drained and stopped"
    assert daemon.process.wait(BOUND_S) == 0
    again = Daemon(daemon.home, str(tmp_path / "agents.py"))
    try:
        assert state(again, task_id) == "TASK_STATE_COMPLETED"
        assert send(again)[0] == 200
    finally:
        again.stop()


def test_what_runs_too_long_is_handed_back_and_done_after_the_next_start(daemon: Daemon, tmp_path: Path) -> None:
    task_id = begin(daemon, tmp_path)
    drain = draining(daemon, 1)
    out, err = drain.communicate(timeout=BOUND_S)
    assert drain.returncode == 0, err
    assert daemon.process.wait(BOUND_S) == 0
    assert out.splitlines()[0] == "drained and stopped; 1 turn(s) were handed back"
    (tmp_path / "go").touch()
    again = Daemon(daemon.home, str(tmp_path / "agents.py"))
    try:
        wait_for(lambda: state(again, task_id) == "TASK_STATE_COMPLETED")
    finally:
        again.stop()
