"""`covenant drain`: nothing new is taken, what runs ends or is handed back, and nothing is lost by it."""

import json
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from tests.cli.daemons import COVENANT, Daemon, environment, started
from tests.ledger_contract.postgres_server import Databases
from tests.waits import BOUND_S

AGENTS = """
import asyncio
from pathlib import Path

from covenant import Agent, Turn

HERE = Path(__file__).parent
slow = Agent("slow", description="Ends when it may.", idempotent=True)
helper = Agent("helper", description="Helps at once.")
asks = Agent("asks", description="Asks first.")
once = Agent("once", description="Works until it is stopped, and must not be begun twice.")

@helper
async def help_(turn: Turn) -> str:
    return "help"

@asks
async def wonder(turn: Turn) -> object:
    return "thanks" if turn.turn > 1 else turn.need_input("may I?")

@once
async def go_on(turn: Turn) -> None:
    (HERE / "once.begun").touch()
    await asyncio.Event().wait()

@slow
async def work(turn: Turn) -> str:
    (HERE / "slow.begun").touch()
    while not (HERE / "go").exists():
        await asyncio.sleep(0.02)
    found = await turn.call("helper", "?")
    return f"done with {found.text}"
"""

Draining = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    """A stop waits for nothing: what has time here has it of the drain."""
    (tmp_path / "agents.py").write_text(AGENTS)
    running = Daemon(tmp_path / "home", str(tmp_path / "agents.py"), "--daemon-grace-ms", "0")
    yield running
    running.stop()


def post(
    daemon: Daemon, method: str, params: dict[str, Any], agent: str = "slow"
) -> tuple[int, dict[str, str], dict[str, Any]]:
    return ask(request(daemon, "", {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}, agent))


def request(daemon: Daemon, path: str, body: dict[str, Any], agent: str = "slow") -> Request:
    token = (daemon.home / "operator.token").read_text().strip()
    headers = {"authorization": f"Bearer {token}", "a2a-version": "1.0", "content-type": "application/json"}
    return Request(f"{daemon.url}/v1/a2a/agents/{agent}{path}", json.dumps(body).encode(), headers)


def ask(asked: Request | str) -> tuple[int, dict[str, str], dict[str, Any]]:
    try:
        with urlopen(asked, timeout=BOUND_S) as answer:
            return answer.status, dict(answer.headers), json.load(answer)
    except HTTPError as error:
        return error.code, dict(error.headers), json.load(error)


def send(daemon: Daemon, agent: str = "slow") -> tuple[int, dict[str, str], dict[str, Any]]:
    message = {"messageId": "m", "role": "ROLE_USER", "parts": [{"text": "hello"}]}
    return post(daemon, "SendMessage", {"message": message, "configuration": {"returnImmediately": True}}, agent)


def state(daemon: Daemon, task_id: str, agent: str = "slow") -> str:
    return str(post(daemon, "GetTask", {"id": task_id}, agent)[2]["result"]["status"]["state"])


def begin(daemon: Daemon, tmp_path: Path, agent: str = "slow") -> str:
    """A task that runs."""
    task_id = str(send(daemon, agent)[2]["result"]["task"]["id"])
    wait_for((tmp_path / f"{agent}.begun").exists)
    return task_id


def wait_for(found: Any) -> None:
    until_s = time.monotonic() + BOUND_S
    while not found():
        assert time.monotonic() < until_s
        time.sleep(0.02)


@pytest.fixture
def draining() -> Iterator[Draining]:
    """`covenant drain`. It may be over by the time this returns."""
    with ExitStack() as stack:

        def begin(daemon: Daemon, timeout_s: int | None, *more: str) -> "subprocess.Popen[str]":
            timeout = () if timeout_s is None else ("--timeout-s", str(timeout_s))
            words = [COVENANT, "drain", "--home", daemon.home, *timeout, *more]
            pipe = subprocess.PIPE
            return stack.enter_context(
                started(words, stdout=pipe, stderr=pipe, text=True, env=environment(COLUMNS="80"))
            )

        yield begin


def left_s(drain: "subprocess.Popen[str]") -> int:
    """What the command says first: how long running turns have."""
    assert drain.stderr is not None
    line = drain.stderr.readline()
    assert line.startswith("draining: 1 turn(s) run, "), line
    return int(line.split()[-3])


def test_new_work_is_refused_while_running_turns_end_and_reads_go_on(
    daemon: Daemon, tmp_path: Path, draining: Draining
) -> None:
    task_id = begin(daemon, tmp_path)
    drain = draining(daemon, 60)
    wait_for(lambda: ask(f"{daemon.url}/readyz")[2]["status"] == "draining")
    message = {"messageId": "m", "role": "ROLE_USER", "parts": [{"text": "hello"}]}
    status, headers, answer = ask(request(daemon, "/message:send", {"message": message}))
    assert status == 503, answer
    assert int({name.lower(): value for name, value in headers.items()}["retry-after"]) > 0
    assert "draining" in json.dumps(answer)
    status, _, answer = send(daemon)
    assert (status, answer["error"]["code"]) == (200, -32603)
    assert "draining" in json.dumps(answer["error"])
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


def test_what_runs_too_long_is_handed_back_and_done_after_the_next_start(
    daemon: Daemon, tmp_path: Path, draining: Draining
) -> None:
    task_id = begin(daemon, tmp_path)
    drain = draining(daemon, 1)
    out, err = drain.communicate(timeout=BOUND_S)
    assert drain.returncode == 0, err
    assert daemon.process.wait(BOUND_S) == 0
    assert out.splitlines() == [
        "drained and stopped; 1 turn(s) were handed back",
        "left for the next start: 0 leased, 1 queued, 0 parked, 0 results",
    ]
    (tmp_path / "go").touch()
    again = Daemon(daemon.home, str(tmp_path / "agents.py"))
    try:
        wait_for(lambda: state(again, task_id) == "TASK_STATE_COMPLETED")
    finally:
        again.stop()


def test_an_answer_to_a_parked_task_is_taken_and_waits_for_the_next_start(
    daemon: Daemon, tmp_path: Path, draining: Draining
) -> None:
    parked = str(send(daemon, "asks")[2]["result"]["task"]["id"])
    wait_for(lambda: state(daemon, parked, "asks") == "TASK_STATE_INPUT_REQUIRED")
    begin(daemon, tmp_path)
    drain = draining(daemon, 3_000)
    assert left_s(drain) > 60
    message = {"messageId": "a", "role": "ROLE_USER", "parts": [{"text": "yes"}], "taskId": parked}
    params = {"message": message, "configuration": {"returnImmediately": True}}
    assert "result" in post(daemon, "SendMessage", params, "asks")[2]
    (tmp_path / "go").touch()
    out, err = drain.communicate(timeout=BOUND_S)
    assert out.splitlines()[1] == "left for the next start: 0 leased, 1 queued, 0 parked, 0 results", err
    assert daemon.process.wait(BOUND_S) == 0
    again = Daemon(daemon.home, str(tmp_path / "agents.py"))
    try:
        wait_for(lambda: state(again, parked, "asks") == "TASK_STATE_COMPLETED")
    finally:
        again.stop()


def test_what_is_said_of_turns_is_what_the_ledger_has(daemon: Daemon, tmp_path: Path, draining: Draining) -> None:
    handed_back = begin(daemon, tmp_path, "slow")
    interrupted = begin(daemon, tmp_path, "once")
    drain = draining(daemon, 0, "--json")
    out, err = drain.communicate(timeout=BOUND_S)
    assert daemon.process.wait(BOUND_S) == 0, err
    told = json.loads(out)
    assert told == {"kind": "drained", "handed_back": 2, "leased": 1, "queued": 1, "parked": 0, "results": 0}
    assert "handed_back" in daemon.log
    again = Daemon(daemon.home)
    try:
        rows = again.json("a2a", "list")["tasks"]
        assert {row["task_id"]: row["state"] for row in rows} == {handed_back: "queued", interrupted: "in_flight"}
    finally:
        again.stop()


def test_a_time_out_is_not_stretched_by_the_grace_time_of_a_stop(tmp_path: Path, draining: Draining) -> None:
    """A grace time that no test would wait for."""
    (tmp_path / "agents.py").write_text(AGENTS)
    daemon = Daemon(tmp_path / "home", str(tmp_path / "agents.py"), "--daemon-grace-ms", "3600000")
    try:
        begin(daemon, tmp_path)
        out, err = draining(daemon, 0).communicate(timeout=BOUND_S)
        assert out.splitlines()[0] == "drained and stopped; 1 turn(s) were handed back", err
        assert daemon.process.wait(BOUND_S) == 0
    finally:
        daemon.process.kill()
        daemon.stop()


def test_a_second_drain_keeps_the_time_out_unless_it_names_one(
    daemon: Daemon, tmp_path: Path, draining: Draining
) -> None:
    begin(daemon, tmp_path)
    first = draining(daemon, 3_000)
    assert left_s(first) > 60
    second = draining(daemon, None)
    assert left_s(second) > 60
    third = draining(daemon, 0)
    for each in (first, second, third):
        out, err = each.communicate(timeout=BOUND_S)
        assert out.splitlines()[0] == "drained and stopped; 1 turn(s) were handed back", err


def test_a_drain_that_a_signal_cuts_short_says_so(daemon: Daemon, tmp_path: Path, draining: Draining) -> None:
    begin(daemon, tmp_path)
    drain = draining(daemon, 3_000)
    assert left_s(drain) > 60
    daemon.process.send_signal(signal.SIGTERM)
    (tmp_path / "go").touch()
    out, err = drain.communicate(timeout=BOUND_S)
    assert (drain.returncode, out) == (1, "")
    assert "the daemon stopped before the drain was over" in err


async def test_what_is_left_is_for_the_other_daemons_of_the_ledger(databases: Databases, short_path: Path) -> None:
    url = await databases.make()
    env = {"COVENANT_PASSPHRASE": "three words together", "COVENANT_LEDGER_DURABILITY": "os"}
    try:
        with ExitStack() as running:
            daemons = [Daemon(short_path / name, "--ledger", url, env=env) for name in "ab"]
            for daemon in daemons:
                running.callback(daemon.stop)
            ends = []
            for daemon in daemons:
                ends.append(daemon.run("drain").out.splitlines()[-1])
                daemon.process.wait(BOUND_S)  # it has left the ledger
            nothing = "0 leased, 0 queued, 0 parked, 0 results"
            assert ends == [
                f"left for the other daemons of the ledger (1): {nothing}",
                f"left for the next start: {nothing}",
            ]
    finally:
        await databases.drop(url)
