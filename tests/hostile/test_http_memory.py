"""Endless requests: a client cannot make the daemon keep what it sends, or what it does not read."""

import json
import select
import socket
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.cli.daemons import Daemon
from tests.hostile.client import RawConnection, operator_token, request, resident_bytes
from tests.hostile.conftest import StartDaemon
from tests.waits import BOUND_S

MIB = 1024 * 1024
FLOOD_BYTES = 12 * MIB
GROWTH_BYTES_MAX = 40 * MIB
PAGE = b"GET /version HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
LOUD = """
from covenant import Agent

loud = Agent("loud")


@loud
async def shout(turn):
    return turn.text * 3
"""
CHUNKED = b"POST %b HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer %b\r\nTransfer-Encoding: chunked\r\n\r\n"


def flood(connection: RawConnection, data: bytes, bytes_max: int = FLOOD_BYTES) -> int:
    """Send this again and again, until so much is sent, or nothing more is taken. How much was sent."""
    connection.socket.settimeout(1.0)
    sent = 0
    try:
        while sent < bytes_max:
            sent += connection.socket.send(data)
    except (TimeoutError, ConnectionError):
        return sent
    return sent


def held(daemon: Daemon, before: int) -> int:
    return resident_bytes(daemon.process.pid) - before


@pytest.fixture
def warm(shared_daemon: Daemon) -> Daemon:
    """A daemon that has answered already: what that takes is there."""
    for _ in range(50):
        assert request(shared_daemon.url, "GET", "/version").status == 200
    return shared_daemon


def test_pipelined_requests_whose_answers_nobody_reads_are_not_kept(warm: Daemon) -> None:
    before = resident_bytes(warm.process.pid)
    with RawConnection(warm.url) as connection:
        flood(connection, PAGE * 5_000)
        assert held(warm, before) < GROWTH_BYTES_MAX
        assert request(warm.url, "GET", "/version").status == 200
    assert held(warm, before) < GROWTH_BYTES_MAX


def test_pipelined_requests_behind_one_that_waits_are_not_read(warm: Daemon) -> None:
    before = resident_bytes(warm.process.pid)
    token = operator_token(warm.home).encode()
    with RawConnection(warm.url) as connection:
        connection.send(
            b"GET /a2a/tasks/next?wait_ms=20000 HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer %b\r\n\r\n" % token
        )
        assert flood(connection, PAGE * 5_000, 64 * MIB) < 64 * MIB, "the client is held back"
        assert held(warm, before) < GROWTH_BYTES_MAX
        assert request(warm.url, "GET", "/version").status == 200
    assert held(warm, before) < GROWTH_BYTES_MAX


def test_every_pipelined_request_is_answered_to_who_reads(warm: Daemon) -> None:
    count = 500
    with RawConnection(warm.url) as connection:
        connection.send(PAGE * count)
        connection.send(b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
        said = connection.read_to_end()
    assert said.count(b"HTTP/1.1 200 OK\r\n") == count + 1


@pytest.mark.parametrize(
    "endless",
    [
        pytest.param(b"0\r\nx: " + b"a" * 1000, id="a trailer"),
        pytest.param(b"0\r\n" + b"x: y\r\n" * 100, id="trailers"),
        pytest.param(b"1;x=" + b"a" * 1000, id="a chunk extension"),
        pytest.param(b"1" + b";x=y" * 200, id="chunk extensions"),
    ],
)
def test_what_stands_beside_the_data_of_a_body_is_bounded(warm: Daemon, endless: bytes) -> None:
    before = resident_bytes(warm.process.pid)
    begins, goes_on = endless[:3], endless[3:]
    for path in (b"/a2a/tasks", b"/v1/a2a/agents/x"):
        with RawConnection(warm.url) as connection:
            connection.send(CHUNKED % (path, operator_token(warm.home).encode()) + begins)
            assert flood(connection, goes_on) < FLOOD_BYTES
            assert held(warm, before) < GROWTH_BYTES_MAX
    assert request(warm.url, "GET", "/healthz").status == 200


def test_trailers_within_the_bound_are_read_over(warm: Daemon) -> None:
    with RawConnection(warm.url) as connection:
        head = CHUNKED % (b"/a2a/tasks", operator_token(warm.home).encode())
        connection.send(head + b"2\r\n{}\r\n0\r\nx: " + b"a" * 4_000 + b"\r\n\r\n" + PAGE)
        assert connection.read_answer().status == 400, "an empty task is none"
        assert connection.read_answer().status == 200


def test_trailers_above_the_bound_are_refused(warm: Daemon) -> None:
    with RawConnection(warm.url) as connection:
        head = CHUNKED % (b"/a2a/tasks", operator_token(warm.home).encode())
        connection.send(head + b"2\r\n{}\r\n0\r\n" + b"x: %b\r\n" % (b"a" * 1_000) * 9 + b"\r\n" + PAGE)
        answer = connection.read_answer()
        assert (answer.status, answer.json["code"]) == (431, "trailers_too_large")
        assert connection.read_to_end() == b""


@pytest.mark.parametrize("line", [b"x: %b\r\n" % (b"a" * 890), b"a" * 890], ids=["many", "one long"])
def test_trailers_are_counted_once_however_they_are_cut(warm: Daemon, line: bytes) -> None:
    with RawConnection(warm.url) as connection:
        head = CHUNKED % (b"/a2a/tasks", operator_token(warm.home).encode())
        connection.send(head + b"2\r\n{}\r\n0\r\nx: ")
        connection.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(8):  # 7.1 KB of 8 KiB
            connection.send(line[:200])
            connection.send(line[200:])
        connection.send(b"\r\n\r\n")
        assert connection.read_answer().status == 400, "an empty task is none"


def test_trailers_that_come_with_data_count_too(warm: Daemon) -> None:
    trailers = b"x: %b\r\n" % (b"a" * 890) * 5
    with RawConnection(warm.url) as connection:
        head = CHUNKED % (b"/a2a/tasks", operator_token(warm.home).encode())
        connection.send(head + b"2\r\n{}\r\n0\r\n" + trailers)
        connection.send(trailers + b"\r\n")
        assert connection.read_answer().json["code"] == "trailers_too_large"


def test_a_body_of_single_bytes_costs_no_more_than_its_bytes(warm: Daemon) -> None:
    with RawConnection(warm.url) as connection:
        connection.send(CHUNKED % (b"/a2a/tasks", operator_token(warm.home).encode()))
        connection.send(b"1\r\n \r\n" * 200_000 + b"0\r\n\r\n")
        assert connection.read_answer().status == 400


def test_a_head_without_end_is_refused(warm: Daemon) -> None:
    with RawConnection(warm.url) as connection:
        connection.send(b"GET /" + b"a" * 70_000)
        answer = connection.read_answer()
        assert (answer.status, answer.json["code"]) == (431, "head_too_large")
        assert connection.read_to_end() == b""


def test_large_answers_that_nobody_reads_on_many_connections_are_not_kept(
    start_daemon: StartDaemon, short_path: Path
) -> None:
    """A stranger at an open agent: one task with an answer of some 10 MB, asked for on sixty connections."""
    agents = short_path / "agents.py"
    agents.write_text(LOUD)
    settings = {"COVENANT_A2A_PUBLISH": "loud", "COVENANT_A2A_PUBLISH_ANONYMOUS": "anywhere"}
    daemon = start_daemon(str(agents), env=settings)
    path = "/v1/a2a/agents/loud"
    message = {"messageId": "m", "role": "ROLE_USER", "parts": [{"text": "z" * 900_000}]}
    call = {"jsonrpc": "2.0", "id": 1, "method": "SendMessage", "params": {"message": message}}
    task = request(daemon.url, "POST", path, body=call).json["result"]["task"]
    body = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "GetTask", "params": {"id": task["id"]}}).encode()
    answer_bytes = len(request(daemon.url, "POST", path, body=body).body)
    assert answer_bytes > 8 * MIB
    before = resident_bytes(daemon.process.pid)
    head = b"POST %b HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: %d\r\n\r\n" % (path.encode(), len(body))
    with ExitStack() as open_:
        unread = [open_.enter_context(RawConnection(daemon.url)) for _ in range(60)]
        for connection in unread:
            connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
            connection.send(head + body)
        for connection in unread:  # until each answer was begun
            assert select.select((connection.socket,), (), (), BOUND_S)[0]
        assert "http.unread" in daemon.log
        # One address may leave 64 MiB unread. Answers that are made at the same moment come on top: the more, the
        # busier the machine is.
        assert held(daemon, before) < len(unread) * answer_bytes * 3 / 4
    assert request(daemon.url, "POST", path, body=body).status == 200


def test_heads_of_many_short_headers_are_refused_and_not_kept(warm: Daemon) -> None:
    before = resident_bytes(warm.process.pid)
    with ExitStack() as open_:
        for _ in range(100):
            connection = open_.enter_context(RawConnection(warm.url))
            connection.send(b"GET /version HTTP/1.1\r\nHost: 127.0.0.1\r\n" + b"ab:\r\n" * 12_000)
            assert connection.read_answer().status == 431
        assert held(warm, before) < GROWTH_BYTES_MAX
