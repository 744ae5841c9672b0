"""Agents that raise what ends a program, and agents that block the loop while the daemon stops."""

import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.hostile.client import Answer, operator_token, request
from tests.hostile.conftest import StartDaemon
from tests.matrices import first_of
from tests.waits import until

AGENTS = """
import asyncio, sys, time
from pathlib import Path
from covenant import Agent

class Odd(BaseException):
    pass

RAISED = {"interrupt": KeyboardInterrupt, "exit": SystemExit, "odd": Odd}

plain, plain_stream, steps, stream, helper, echo, hog, slow = map(
    Agent, ("plain", "plain-stream", "steps", "stream", "helper", "echo", "hog", "slow")
)

@plain
def raises_in_a_thread(turn):
    raise RAISED[turn.text]

@plain_stream
def raises_in_a_generator(turn):
    yield "one"
    raise RAISED[turn.text]

@steps
async def raises_on_the_loop(turn):
    raise RAISED[turn.text]

@stream
async def raises_while_it_streams(turn):
    yield "one"
    raise RAISED[turn.text]

@helper
async def raises_in_a_task_of_its_own(turn):
    async def work():
        raise RAISED[turn.text]
    await asyncio.gather(work())

@echo
async def repeat(turn):
    return turn.text

@hog
async def blocks_the_loop(turn):
    (Path(__file__).parent / "begun").touch()
    time.sleep(600)

@slow
async def ignores_its_cancellation(turn):
    (Path(__file__).parent / "begun").touch()
    while True:
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            pass
"""


def send(url: str, token: str, agent: str, text: str) -> Answer:
    message = {"messageId": f"{agent}-{text}", "role": "ROLE_USER", "parts": [{"text": text}]}
    body = {"jsonrpc": "2.0", "id": 1, "method": "SendMessage", "params": {"message": message}}
    headers = {"a2a-version": "1.0"}
    return request(url, "POST", f"/v1/a2a/agents/{agent}", body=body, token=token, headers=headers)


def test_what_an_agent_raises_fails_its_task_and_ends_nothing_else(start_daemon: StartDaemon, short_path: Path) -> None:
    agents = short_path / "agents.py"
    agents.write_text(AGENTS)
    daemon = start_daemon(str(agents))
    token = operator_token(daemon.home)
    for agent in ("plain", "plain-stream", "steps", "stream", "helper"):
        for raised in ("interrupt", "exit", "odd"):
            state = send(daemon.url, token, agent, raised).json["result"]["task"]["status"]["state"]
            assert state == "TASK_STATE_FAILED", (agent, raised)
            assert b"TASK_STATE_COMPLETED" in send(daemon.url, token, "echo", f"{agent} {raised}").body
    assert daemon.process.poll() is None


@pytest.mark.parametrize("number", first_of([signal.SIGTERM, signal.SIGINT]))
def test_a_stop_ends_although_an_agent_blocks_the_loop(
    start_daemon: StartDaemon, short_path: Path, number: int
) -> None:
    agents = short_path / "agents.py"
    agents.write_text(AGENTS)
    daemon = start_daemon(
        str(agents),
        env={"COVENANT_DAEMON_GRACE_MS": "100"},
        constants={"covenant.daemon.lifecycle.BLOCKED_END_S": 0.5},
    )
    token = operator_token(daemon.home)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(send, daemon.url, token, "hog", "x")
        until((short_path / "begun").exists)
        assert daemon.stop(number) == 1, "and it does not wait for the agent"
        with pytest.raises(ConnectionError):
            asked.result()
    assert "daemon.held" in (short_path / "home.log").read_text()


def test_a_stop_that_is_slow_is_no_crash_while_the_loop_runs(start_daemon: StartDaemon, short_path: Path) -> None:
    agents = short_path / "agents.py"
    agents.write_text(AGENTS)
    daemon = start_daemon(
        str(agents),
        env={"COVENANT_DAEMON_GRACE_MS": "0"},
        constants={"covenant.daemon.lifecycle.BLOCKED_END_S": 1.5},  # the stop waits two seconds for the agent
    )
    token = operator_token(daemon.home)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(send, daemon.url, token, "slow", "x")
        until((short_path / "begun").exists)
        assert daemon.stop() == 0
    log = (short_path / "home.log").read_text()
    assert "daemon.held" not in log
    assert "daemon.abandoned agents=slow" in log
