"""Many connections: nobody can take all places, and health is answered in any case."""

from contextlib import ExitStack

from tests.cli.daemons import Daemon
from tests.hostile.client import RawConnection, operator_token, request
from tests.hostile.conftest import StartDaemon
from tests.waits import BOUND_S

HEALTH = b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
PAGE = b"GET /version HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


def waiting(daemon: Daemon, stack: ExitStack, source: str = "127.0.0.1") -> RawConnection:
    """A connection at work: it waits for a task."""
    connection = stack.enter_context(RawConnection(daemon.url, source=source))
    token = operator_token(daemon.home).encode()
    connection.send(
        b"GET /a2a/tasks/next?wait_ms=30000 HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer %b\r\n\r\n" % token
    )
    return connection


def asked(daemon: Daemon, what: bytes, source: str = "127.0.0.1") -> tuple[int, bytes]:
    with RawConnection(daemon.url, source=source) as connection:
        connection.send(what)
        answer = connection.read_answer()
        return answer.status, answer.body


def test_silent_connections_lock_nobody_out(start_daemon: StartDaemon) -> None:
    most = 200
    env = {
        "COVENANT_HTTP_CONNECTIONS_MAX": str(most),
        "COVENANT_HTTP_CONNECTIONS_PER_ADDRESS_MAX": str(most * 10),
        "COVENANT_HTTP_HEAD_MS": "600000",
    }
    daemon = start_daemon(env=env)
    with ExitStack() as stack:
        silent = [stack.enter_context(RawConnection(daemon.url, bound_s=BOUND_S)) for _ in range(most + 50)]
        for _ in range(5):
            assert asked(daemon, HEALTH)[0] == 200
            assert request(daemon.url, "GET", "/a2a/queue", token=operator_token(daemon.home)).status == 200
        assert silent[0].read_to_end() == b"", "the longest silent one is closed"
        silent[-1].send(HEALTH)
        assert silent[-1].read_answer().status == 200, "the latest one is not"
    assert "http.crowded" in daemon.log


def test_where_everybody_is_at_work_others_are_told_so_and_health_is_answered(start_daemon: StartDaemon) -> None:
    daemon = start_daemon(env={"COVENANT_HTTP_CONNECTIONS_MAX": "8"})
    with ExitStack() as stack:
        first = [waiting(daemon, stack) for _ in range(8)]
        for _ in range(3):
            status, body = asked(daemon, PAGE)
            assert status == 503
            assert b"too_many_connections" in body
            assert asked(daemon, HEALTH)[0] == 200
        reserved = [stack.enter_context(RawConnection(daemon.url)) for _ in range(200)]
        assert asked(daemon, HEALTH)[0] == 200, "those that wait for a place do not stand in the way either"
        assert reserved[0].read_to_end() == b""
        first[0].close()
        first[1].socket.settimeout(0.2)
        assert _closed_or_silent(first[1]), "who is at work is left alone"


def _closed_or_silent(connection: RawConnection) -> bool:
    try:
        return connection.socket.recv(1) != b""
    except TimeoutError:
        return True


def test_one_address_cannot_take_the_places_of_others(start_daemon: StartDaemon) -> None:
    env = {
        "COVENANT_HTTP_CONNECTIONS_PER_ADDRESS_MAX": "4",
        "COVENANT_HTTP_TRUSTED_PROXIES": "127.0.0.3",
    }
    daemon = start_daemon(env=env)
    with ExitStack() as stack:
        for _ in range(4):
            waiting(daemon, stack)
        assert asked(daemon, PAGE)[0] == 503
        assert asked(daemon, HEALTH)[0] == 200
        assert asked(daemon, PAGE, "127.0.0.2")[0] == 200
        for _ in range(6):
            waiting(daemon, stack, "127.0.0.3")
        assert asked(daemon, PAGE, "127.0.0.3")[0] == 200, "a proxy brings many callers"


def test_an_address_at_its_bound_gives_up_its_own_silent_connections(start_daemon: StartDaemon) -> None:
    daemon = start_daemon(env={"COVENANT_HTTP_CONNECTIONS_PER_ADDRESS_MAX": "4", "COVENANT_HTTP_HEAD_MS": "600000"})
    with ExitStack() as stack:
        other = stack.enter_context(RawConnection(daemon.url, source="127.0.0.2"))
        silent = [stack.enter_context(RawConnection(daemon.url)) for _ in range(4)]
        assert asked(daemon, PAGE)[0] == 200
        assert silent[0].read_to_end() == b""
        other.send(HEALTH)
        assert other.read_answer().status == 200, "another's connection is left alone, though it is older"
