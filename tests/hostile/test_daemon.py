"""The attacked daemon answers before it is attacked; otherwise no attack below shows anything."""

from tests.cli.daemons import Daemon
from tests.hostile.client import RawConnection, operator_token, request


def test_an_unattacked_daemon_answers_plain_and_raw_requests(daemon: Daemon) -> None:
    assert request(daemon.url, "GET", "/readyz").status == 200
    assert request(daemon.url, "GET", "/a2a/queue", token=operator_token(daemon.home)).status == 200
    with RawConnection(daemon.url) as connection:
        connection.send(b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        assert connection.read_answer().status == 200
