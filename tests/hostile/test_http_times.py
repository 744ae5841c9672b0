"""Clients that are slow on purpose: each thing that the daemon waits for has its time, and then the client is gone."""

import time
from collections.abc import Iterator

import pytest

from tests.cli.daemons import Daemon
from tests.hostile.client import RawConnection, operator_token, request
from tests.places import short_folder

BOUND_MS = 600
NEVER_MS = 600_000
"""Longer than any test waits: what happens within it did not come from this bound."""
POST = b"POST /a2a/tasks HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer %b\r\n"


def bounds(**of: int) -> dict[str, str]:
    """All bounds on time are far away but for these."""
    names = ("head_ms", "body_idle_ms", "body_ms", "keep_alive_ms", "unread_ms")
    return {f"COVENANT_HTTP_{name.upper()}": str(of.get(name, NEVER_MS)) for name in names}


@pytest.fixture(scope="module")
def hasty() -> Iterator[Daemon]:
    """A daemon that waits for half a second where a client says nothing, or reads nothing."""
    env = bounds(body_idle_ms=BOUND_MS, keep_alive_ms=BOUND_MS, unread_ms=BOUND_MS)
    with short_folder() as folder:
        daemon = Daemon(folder / "home", env=env)
        yield daemon
        daemon.stop()


@pytest.fixture(scope="module")
def strict() -> Iterator[Daemon]:
    """A daemon that waits for half a second until a head, or a body, is whole."""
    with short_folder() as folder:
        daemon = Daemon(folder / "home", env=bounds(head_ms=BOUND_MS, body_ms=BOUND_MS))
        yield daemon
        daemon.stop()


def drip(connection: RawConnection, data: bytes) -> bytes:
    """Send this again and again until something is said: that."""
    connection.socket.settimeout(BOUND_MS / 1000 / 5)
    while True:
        try:
            return connection.socket.recv(65_536)
        except TimeoutError:
            connection.send(data)


def post(daemon: Daemon) -> bytes:
    return POST % operator_token(daemon.home).encode()


def test_a_silent_connection_is_closed(strict: Daemon) -> None:
    with RawConnection(strict.url) as connection:
        assert connection.read_to_end() == b""


def test_a_head_that_drips_is_refused_however_often_a_byte_comes(strict: Daemon) -> None:
    with RawConnection(strict.url) as connection:
        connection.send(b"GET /healthz HTTP/1.1\r\nx: ")
        said = drip(connection, b"a")
        assert said.startswith(b"HTTP/1.1 408 ")
        assert b'"code":"request_timeout"' in said


def test_a_body_that_pauses_is_refused(hasty: Daemon) -> None:
    with RawConnection(hasty.url) as connection:
        connection.send(post(hasty) + b"Content-Length: 100\r\n\r\n{")
        assert connection.read_answer().status == 408
        assert connection.read_to_end() == b""


def test_a_body_that_never_pauses_and_never_ends_is_refused(strict: Daemon) -> None:
    """However late its pieces are: a pause may be long here."""
    with RawConnection(strict.url) as connection:
        connection.send(post(strict) + b"Transfer-Encoding: chunked\r\n\r\n")
        assert drip(connection, b"1\r\n \r\n").startswith(b"HTTP/1.1 408 ")


def test_a_connection_that_asks_nothing_more_is_closed(hasty: Daemon) -> None:
    with RawConnection(hasty.url) as connection:
        connection.send(b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        assert connection.read_answer().status == 200
        assert connection.read_to_end() == b""


def test_a_body_that_nobody_wants_is_not_waited_for(hasty: Daemon) -> None:
    with RawConnection(hasty.url) as connection:
        connection.send(b"POST /a2a/tasks HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100\r\n\r\n")
        assert connection.read_answer().status == 401
        assert b"408" in connection.read_to_end()[:20]


def test_a_client_that_reads_nothing_is_cut_off(hasty: Daemon) -> None:
    wanted = 200
    page = len(request(hasty.url, "GET", "/openapi.json").body)
    assert wanted * page > 10_000_000, "more than the system buffers"

    def cut_off_after(silence_s: float) -> bool:
        with RawConnection(hasty.url) as connection:
            connection.send(b"GET /openapi.json HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" * wanted)
            time.sleep(silence_s)  # the attack itself: to read nothing for longer than allowed
            return len(connection.read_to_end()) < wanted * page

    # A busy daemon takes longer to write what is not read.
    assert any(cut_off_after(times * BOUND_MS / 1000) for times in (3, 10, 30))
    assert request(hasty.url, "GET", "/healthz").status == 200


def test_a_long_wait_for_an_answer_is_no_silence(hasty: Daemon) -> None:
    waited_ms = 3 * BOUND_MS
    with RawConnection(hasty.url) as connection:
        token = operator_token(hasty.home).encode()
        connection.send(
            b"GET /a2a/tasks/next?wait_ms=%d HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer %b\r\n\r\n"
            % (waited_ms, token)
        )
        assert connection.read_answer().status == 200
