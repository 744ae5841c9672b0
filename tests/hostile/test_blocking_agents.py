"""Agents that block, hang or die: the doors answer all the same, and the log says who it was."""

import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from uuid import uuid4

import pytest

from tests.cli.daemons import Daemon
from tests.hostile.client import Answer, RawConnection, operator_token, request
from tests.hostile.conftest import StartDaemon
from tests.waits import BOUND_S, until

READY = b"GET /readyz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
AGENTS = """
import ctypes, os, time
from pathlib import Path
from covenant import Agent

here = Path(__file__).parent

def block(name):
    (here / f"{name}.begun").write_text(str(os.getpid()))
    until = time.monotonic() + 200
    while not (here / f"{name}.end").exists() and time.monotonic() < until:
        time.sleep(0.02)

plain = Agent("plain")
@plain
def plain_function(turn):
    block("plain")
    return "done"

stream = Agent("stream")
@stream
def plain_generator(turn):
    yield "one "
    block("stream")
    yield "two"

loose = Agent("loose", timeout_ms=300)
@loose
def never_ends(turn):
    block("loose")

blocking = Agent("blocking")
@blocking
async def blocks_the_loop(turn):
    block("blocking")
    return "done"

isolated = Agent("isolated", isolate=True)
@isolated
async def blocks_its_own_process(turn):
    if turn.text == "segfault":
        ctypes.string_at(0)
    if turn.text == "exit":
        os._exit(3)
    block("isolated")
    return "done"

echo = Agent("echo")
@echo
async def repeat(turn):
    return turn.text
"""


class Blocked:
    """A daemon whose agents block until they are told to end: what is answered before that did not wait for them."""

    def __init__(self, daemon: Daemon, folder: Path, pool: ThreadPoolExecutor) -> None:
        self.daemon = daemon
        self._folder = folder
        self._pool = pool
        self._token = operator_token(daemon.home)

    def send(self, agent: str, text: str = "x", *, blocking: bool = True) -> Answer:
        message = {"messageId": str(uuid4()), "role": "ROLE_USER", "parts": [{"text": text}]}
        params = {"message": message, "configuration": {"returnImmediately": not blocking}}
        return request(
            self.daemon.url,
            "POST",
            f"/v1/a2a/agents/{agent}",
            token=self._token,
            body={"jsonrpc": "2.0", "id": 1, "method": "SendMessage", "params": params},
            headers={"A2A-Version": "1.0"},
        )

    def begin(self, agent: str) -> Future[Answer]:
        """Returns when the agent blocks."""
        asked = self._pool.submit(self.send, agent)
        until((self._folder / f"{agent}.begun").exists)
        return asked

    def pid_of(self, agent: str) -> int:
        path = self._folder / f"{agent}.begun"
        until(lambda: path.exists() and path.read_text() != "")
        return int(path.read_text())

    def end(self, agent: str) -> None:
        (self._folder / f"{agent}.end").touch()

    def get(self, path: str) -> Answer:
        return request(self.daemon.url, "GET", path, token=self._token)


def text_of(answer: Answer) -> str:
    return str(answer.json["result"]["task"]["status"]["message"]["parts"][0]["text"])


def metric(blocked: Blocked, name: str) -> float:
    lines = blocked.get("/metrics").body.decode().splitlines()
    return float(next(line.split()[1] for line in lines if line.startswith(f"{name} ")))


@pytest.fixture
def blocked(start_daemon: StartDaemon, tmp_path: Path) -> Iterator[Blocked]:
    path = tmp_path / "agents.py"
    path.write_text(AGENTS)
    with ThreadPoolExecutor(4) as pool:
        made = Blocked(start_daemon(str(path), "--daemon-grace-ms", "500"), tmp_path, pool)
        yield made
        for agent in ("plain", "stream", "loose", "blocking", "isolated"):
            made.end(agent)


def test_plain_functions_that_block_hold_up_no_door(blocked: Blocked) -> None:
    plain, stream = blocked.begin("plain"), blocked.begin("stream")
    assert blocked.get("/healthz").status == 200
    assert blocked.get("/a2a/queue").status == 200
    assert text_of(blocked.send("echo", "hello")) == "hello"
    assert not plain.done()
    assert not stream.done()
    blocked.end("plain")
    blocked.end("stream")
    assert text_of(plain.result(BOUND_S)) == "done"
    assert text_of(stream.result(BOUND_S)) == "one two"
    assert "plain@default" not in blocked.daemon.log


def test_a_plain_function_that_does_not_stop_is_counted(blocked: Blocked) -> None:
    answer = blocked.send("loose")
    assert answer.json["result"]["task"]["status"]["state"] == "TASK_STATE_FAILED"
    assert text_of(answer) == "Task timed out"
    until(lambda: metric(blocked, "covenant_agent_threads_abandoned") == 1)
    assert text_of(blocked.send("echo", "hello")) == "hello"
    blocked.end("loose")
    until(lambda: metric(blocked, "covenant_agent_threads_abandoned") == 0)


def test_health_is_answered_while_an_async_agent_holds_the_loop(blocked: Blocked) -> None:
    asked = blocked.begin("blocking")
    assert blocked.get("/healthz").status == 200
    until(lambda: "loop.held" in blocked.daemon.log)
    answer = blocked.get("/healthz")
    assert answer.status == 200
    told = answer.json
    assert (told["loop"], told["held_by"]) == ("held", "an agent")
    # Everybody else waits, and is served when the loop is free.
    with RawConnection(blocked.daemon.url) as kept, ThreadPoolExecutor(1) as pool:
        kept.send(READY)
        others = pool.submit(blocked.get, "/a2a/queue")
        assert blocked.get("/healthz").json["held_ms"] >= told["held_ms"]
        assert not others.done()
        blocked.end("blocking")
        assert others.result(BOUND_S).status == 200
        assert kept.read_answer().status == 200
        kept.send(READY)
        assert kept.read_answer().status == 200
    assert text_of(asked.result(BOUND_S)) == "done"
    until(lambda: blocked.get("/healthz").json == {"status": "ok"})
    until(lambda: metric(blocked, "covenant_loop_holds_total") >= 1)
    (line,) = (line for line in blocked.daemon.log.splitlines() if "loop.held" in line and "blocking@default" in line)
    assert "blocks_the_loop" in line
    assert "agents.py" in line
    assert "loop.freed" in blocked.daemon.log


@pytest.mark.parametrize("how", ["segfault", "exit"])
def test_an_isolated_agent_that_dies_fails_its_own_task_alone(blocked: Blocked, how: str) -> None:
    answer = blocked.send("isolated", how)
    assert answer.json["result"]["task"]["status"]["state"] == "TASK_STATE_FAILED"
    assert text_of(answer) in ("the agent's process was killed by signal 11", "the agent exited with status 3")
    assert text_of(blocked.send("echo", "hello")) == "hello"


def test_an_isolated_agent_that_blocks_holds_up_nobody_and_ends_with_the_daemon(blocked: Blocked) -> None:
    blocked.send("isolated", blocking=False)
    pid = blocked.pid_of("isolated")
    assert blocked.get("/healthz").status == 200
    assert text_of(blocked.send("echo", "hello")) == "hello"
    assert pid != blocked.daemon.process.pid
    blocked.daemon.stop(signal.SIGKILL)

    def gone() -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z"
        except FileNotFoundError:
            return True

    until(gone)
