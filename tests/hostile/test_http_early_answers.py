"""Requests that are answered before their body has arrived: the rest is read over, or the connection is closed."""

import http.client
from urllib.parse import urlsplit

import pytest

from tests.cli.daemons import Daemon
from tests.hostile.client import RawConnection
from tests.hostile.conftest import StartDaemon
from tests.waits import BOUND_S

BODY = b" " * 7_000_000


@pytest.mark.parametrize("path", ["/a2a/tasks", "/v1/a2a/agents/x", "/v1/orchestrate", "/nothing"])
def test_a_client_that_sends_before_it_reads_hears_the_refusal(shared_daemon: Daemon, path: str) -> None:
    parts = urlsplit(shared_daemon.url)
    client = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=BOUND_S)
    try:
        client.request("POST", path, BODY)
        assert client.getresponse().status in (401, 404)
    finally:
        client.close()


def test_a_body_that_nobody_wants_has_a_deadline_however_large(start_daemon: StartDaemon) -> None:
    daemon = start_daemon(env={"COVENANT_HTTP_BODY_IDLE_MS": "500", "COVENANT_HTTP_BODY_MS": "1000"})
    with RawConnection(daemon.url, bound_s=BOUND_S) as connection:
        connection.send(
            b"POST /a2a/tasks HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 20000000\r\n\r\n" + BODY[:2_000_000]
        )
        assert b" 401 " in connection.read_to_end(), "and the connection is closed"
