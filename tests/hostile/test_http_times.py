"""Clients that are slow on purpose: each thing that the daemon waits for has its time, and then the client is gone."""

import time
from collections.abc import Iterator

import pytest

from tests.cli.daemons import Daemon
from tests.hostile.client import RawConnection, operator_token, request
from tests.places import short_folder

BOUND_MS = 600
LATE_S = 8.0
"""A busy machine may be late, but no client is kept longer than this."""
ENV = {
    "COVENANT_HTTP_HEAD_MS": str(BOUND_MS),
    "COVENANT_HTTP_BODY_IDLE_MS": str(BOUND_MS),
    "COVENANT_HTTP_BODY_MS": str(3 * BOUND_MS),
    "COVENANT_HTTP_KEEP_ALIVE_MS": str(BOUND_MS),
    "COVENANT_HTTP_UNREAD_MS": str(BOUND_MS),
}
POST = b"POST /a2a/tasks HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer %b\r\n"


@pytest.fixture(scope="module")
def hasty() -> Iterator[Daemon]:
    """A daemon that waits for half a second where others wait for half a minute."""
    with short_folder() as folder:
        daemon = Daemon(folder / "home", env=ENV)
        yield daemon
        daemon.stop()


def post(daemon: Daemon) -> bytes:
    return POST % operator_token(daemon.home).encode()


def test_a_silent_connection_is_closed(hasty: Daemon) -> None:
    with RawConnection(hasty.url, bound_s=LATE_S) as connection:
        assert connection.read_to_end() == b""


def test_a_head_that_drips_is_refused_however_often_a_byte_comes(hasty: Daemon) -> None:
    begun_s = time.monotonic()
    with RawConnection(hasty.url, bound_s=LATE_S) as connection:
        connection.send(b"GET /healthz HTTP/1.1\r\nx: ")
        connection.socket.settimeout(BOUND_MS / 1000 / 5)
        said = b""
        while not said:
            assert time.monotonic() - begun_s < LATE_S
            try:
                said = connection.socket.recv(65_536)
            except TimeoutError:
                connection.send(b"a")
        connection.socket.settimeout(LATE_S)
        said += connection.read_to_end()
        assert said.startswith(b"HTTP/1.1 408 ")
        assert b'"code":"request_timeout"' in said
    assert request(hasty.url, "GET", "/healthz").status == 200


def test_a_body_that_pauses_is_refused(hasty: Daemon) -> None:
    with RawConnection(hasty.url, bound_s=LATE_S) as connection:
        connection.send(post(hasty) + b"Content-Length: 100\r\n\r\n{")
        assert connection.read_answer().status == 408
        assert connection.read_to_end() == b""


def test_a_body_that_never_pauses_and_never_ends_is_refused(hasty: Daemon) -> None:
    begun_s = time.monotonic()
    with RawConnection(hasty.url, bound_s=LATE_S) as connection:
        connection.send(post(hasty) + b"Transfer-Encoding: chunked\r\n\r\n")
        connection.socket.settimeout(BOUND_MS / 1000 / 5)
        said = b""
        while not said:
            assert time.monotonic() - begun_s < LATE_S
            try:
                said = connection.socket.recv(65_536)
            except TimeoutError:
                connection.send(b"1\r\n \r\n")
        assert said.startswith(b"HTTP/1.1 408 ")
    assert time.monotonic() - begun_s >= 2 * BOUND_MS / 1000, "as long as its whole time, not as long as a pause"


def test_a_connection_that_asks_nothing_more_is_closed(hasty: Daemon) -> None:
    with RawConnection(hasty.url, bound_s=LATE_S) as connection:
        connection.send(b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        assert connection.read_answer().status == 200
        assert connection.read_to_end() == b""


def test_a_body_that_nobody_wants_is_not_waited_for(hasty: Daemon) -> None:
    with RawConnection(hasty.url, bound_s=LATE_S) as connection:
        connection.send(b"POST /a2a/tasks HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100\r\n\r\n")
        assert connection.read_answer().status == 401
        assert b"408" in connection.read_to_end()[:20]


def test_a_client_that_reads_nothing_is_cut_off(hasty: Daemon) -> None:
    wanted = 200
    page = len(request(hasty.url, "GET", "/openapi.json").body)
    assert wanted * page > 10_000_000, "more than the system buffers"
    with RawConnection(hasty.url, bound_s=LATE_S) as connection:
        connection.send(b"GET /openapi.json HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" * wanted)
        time.sleep(4 * BOUND_MS / 1000)  # the attack itself: to read nothing for longer than allowed
        assert len(connection.read_to_end()) < wanted * page
    assert request(hasty.url, "GET", "/healthz").status == 200


def test_a_long_wait_for_an_answer_is_no_silence(hasty: Daemon) -> None:
    waited_ms = 3 * BOUND_MS
    with RawConnection(hasty.url, bound_s=LATE_S) as connection:
        token = operator_token(hasty.home).encode()
        connection.send(
            b"GET /a2a/tasks/next?wait_ms=%d HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer %b\r\n\r\n"
            % (waited_ms, token)
        )
        assert connection.read_answer().status == 200
