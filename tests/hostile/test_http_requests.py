"""Requests that mean one thing to one reader and another to the next: refused, at every door."""

import pytest

from tests.cli.daemons import Daemon
from tests.hostile.client import RawConnection, operator_token

DOORS = (
    "GET /healthz",
    "GET /version",
    "GET /a2a/queue",
    "POST /a2a/tasks",
    "POST /a2a/tasks/send",
    "GET /.well-known/agent-card.json",
    "POST /v1/a2a/agents/x",
    "GET /v1/a2a/agents/x/tasks",
    "GET /v1/requests",
    "GET /api/v1/a2a/identity",
    "POST /api/v1/a2a/receive",
    "POST /mcp",
    "GET /there/is/nothing",
)
PAGE = b"GET /version HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


@pytest.mark.parametrize(
    "twice",
    [
        pytest.param(b"Host: 127.0.0.1\r\nHost: evil.example\r\n", id="host"),
        pytest.param(b"Host: 127.0.0.1\r\nHost: 127.0.0.1\r\n", id="the same host"),
        pytest.param(b"Host: 127.0.0.1\r\nAuthorization: Bearer a\r\nAuthorization: Bearer b\r\n", id="authorization"),
        pytest.param(b"HOST: 127.0.0.1\r\nx: y\r\nhost: evil.example\r\n", id="host in other letters"),
    ],
)
def test_a_header_that_counts_once_is_refused_twice_at_every_door(shared_daemon: Daemon, twice: bytes) -> None:
    for door in DOORS:
        with RawConnection(shared_daemon.url) as connection:
            connection.send(door.encode() + b" HTTP/1.1\r\n" + twice + b"\r\n" + PAGE)
            answer = connection.read_answer()
            assert (answer.status, answer.json["code"]) == (400, "repeated_header"), door
            assert connection.read_to_end() == b"", "nothing after it is read"


HEAD = b"POST /version HTTP/1.1\r\nHost: 127.0.0.1\r\n"
MALFORMED = {
    "two framings": HEAD + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "two framings the other way": HEAD + b"Transfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n0\r\n\r\n",
    "two lengths": HEAD + b"Content-Length: 1\r\nContent-Length: 1\r\n\r\na",
    "a list of lengths": HEAD + b"Content-Length: 1, 1\r\n\r\na",
    "a length with a sign": HEAD + b"Content-Length: +1\r\n\r\na",
    "a length below zero": HEAD + b"Content-Length: -1\r\n\r\n",
    "no length in its header": HEAD + b"Content-Length:\r\n\r\n",
    "a length without end": HEAD + b"Content-Length: 99999999999999999999999\r\n\r\n",
    "chunks that are not the last coding": HEAD + b"Transfer-Encoding: chunked, gzip\r\n\r\n",
    "a coding that nobody reads": HEAD + b"Transfer-Encoding: gzip\r\n\r\n",
    "two codings": HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "two coding headers": HEAD + b"Transfer-Encoding: identity\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "a blank before the colon": HEAD + b"Content-Length : 1\r\n\r\na",
    "a folded header": HEAD + b"X: a\r\n b\r\n\r\n",
    "a header without a name": HEAD + b": a\r\n\r\n",
    "a zero byte": HEAD + b"X: a\x00b\r\n\r\n",
    "a bare line feed": b"GET /version HTTP/1.1\nHost: 127.0.0.1\n\n",
    "a bare line feed in a header": HEAD + b"X: a\nY: b\r\n\r\n",
    "a bare line feed after a chunk": HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\na\n0\n\n",
    "a chunk size that overflows": HEAD + b"Transfer-Encoding: chunked\r\n\r\nfffffffffffffffffff\r\n",
    "a chunk size that is none": HEAD + b"Transfer-Encoding: chunked\r\n\r\nx\r\n",
    "a method that is none": b"FOO /version HTTP/1.1\r\n\r\n",
    "a version that is none": b"GET /version HTTP/1.2\r\n\r\n",
    "no version": b"GET /version\r\n\r\n",
    "another version": b"GET /version HTTP/2.0\r\n\r\n",
    "the preface of HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "a tunnel": b"CONNECT 127.0.0.1:1 HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    "the hello of TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "a URL that is none": b"GET http://127.0.0.1:99999/ HTTP/1.1\r\n\r\n",
}


@pytest.mark.parametrize("malformed", MALFORMED.values(), ids=MALFORMED)
def test_what_cannot_be_read_is_refused_and_nothing_after_it_is_read(shared_daemon: Daemon, malformed: bytes) -> None:
    with RawConnection(shared_daemon.url) as connection:
        connection.send(PAGE + malformed + PAGE)
        assert connection.read_answer().status == 200, "what came before is answered"
        answer = connection.read_answer()
        assert answer.status in (400, 501, 505)
        assert set(answer.json) == {"error", "code"}
        assert connection.read_to_end() == b""


@pytest.mark.parametrize("protocol", ["websocket", "h2c", "TLS/1.0"])
def test_an_upgrade_is_ignored_and_the_request_behind_it_is_answered(shared_daemon: Daemon, protocol: str) -> None:
    upgrade = f"Connection: Upgrade\r\nUpgrade: {protocol}\r\n".encode()
    body = b'{"jsonrpc":"2.0","id":7,"method":"GetTask","params":{"id":"x"}}'
    token = operator_token(shared_daemon.home).encode()
    call = b"POST /v1/a2a/agents/x HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer %b\r\n" % token
    with RawConnection(shared_daemon.url) as connection:
        connection.send(b"GET /version HTTP/1.1\r\nHost: 127.0.0.1\r\n" + upgrade + b"\r\n" + PAGE)
        assert [connection.read_answer().status for _ in range(2)] == [200, 200]
        connection.send(call + upgrade + b"Content-Length: %d\r\n\r\n" % len(body) + body + PAGE)
        answer = connection.read_answer()
        assert answer.json["id"] == 7, "its body was read as a body"
        assert connection.read_answer().status == 200
        chunks = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
        connection.send(call + b"Transfer-Encoding: chunked\r\n" + upgrade + b"\r\n" + chunks + PAGE)
        assert connection.read_answer().json["id"] == 7
        assert connection.read_answer().status == 200
