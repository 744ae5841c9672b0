"""A daemon that stops: whoever waits for an answer hears so, in the form of the door that was asked."""

import signal
from pathlib import Path

import pytest

from tests.hostile.client import RawConnection, operator_token
from tests.hostile.conftest import StartDaemon
from tests.waits import BOUND_S, until

AGENT = """
import asyncio
from covenant import Agent, Turn

stuck = Agent("stuck", description="Never ends")

@stuck
async def wait(turn: Turn) -> str:
    open({begun!r}, "w").close()
    await asyncio.sleep(600)
    return "late"
"""
CALL = b'{"jsonrpc":"2.0","id":1,"method":"SendMessage","params":{"message":%b}}'
MESSAGE = b'{"messageId":"m","role":"ROLE_USER","parts":[{"text":"hi"}]}'


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/a2a/agents/stuck", CALL % MESSAGE), ("/v1/a2a/agents/stuck/message:send", b'{"message":%b}' % MESSAGE)],
    ids=["JSON-RPC", "plain HTTP"],
)
def test_a_request_that_outlives_the_stop_is_told_that_the_daemon_is_stopping(
    start_daemon: StartDaemon, short_path: Path, path: str, body: bytes
) -> None:
    begun, agent = short_path / "begun", short_path / "agent.py"
    agent.write_text(AGENT.format(begun=str(begun)))
    daemon = start_daemon(str(agent), env={"COVENANT_DAEMON_GRACE_MS": "500"})
    with RawConnection(daemon.url) as connection:
        head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nA2A-Version: 1.0\r\nContent-Length: {len(body)}\r\n"
        token = operator_token(daemon.home)
        connection.send(f"{head}Authorization: Bearer {token}\r\n\r\n".encode() + body)
        until(begun.exists)
        daemon.process.send_signal(signal.SIGTERM)
        answer = connection.read_answer()
        assert answer.status == 503
        assert answer.headers["content-type"] == "application/json"
        assert "stopping" in str(answer.json).lower()
        assert connection.read_to_end() == b""
    assert daemon.process.wait(BOUND_S) == 0
    assert "http.failed" not in daemon.log
    assert "Traceback" not in daemon.log
    daemon.stop()


@pytest.mark.parametrize("path", ["/a2a/queue", "/v1/requests"])
def test_a_request_that_arrives_in_the_stop_is_told_so(start_daemon: StartDaemon, path: str) -> None:
    daemon = start_daemon(env={"COVENANT_DAEMON_GRACE_MS": "600000", "COVENANT_HTTP_HEAD_MS": "600000"})
    with RawConnection(daemon.url) as connection, RawConnection(daemon.url) as idle:
        connection.send(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nx: ".encode())
        idle.send(b"GET /version HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        assert idle.read_answer().status == 200
        daemon.process.send_signal(signal.SIGTERM)
        assert idle.read_to_end() == b"", "the server has begun to stop"
        connection.send(b"y\r\n\r\n")
        answer = connection.read_answer()
        assert (answer.status, answer.json["code"]) == (503, "stopping")
        assert connection.read_to_end() == b""
    assert daemon.stop() == 0
