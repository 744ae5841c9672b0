"""A system that allows few open files: connections go without one before the journal does."""

import resource
from contextlib import ExitStack
from pathlib import Path

from tests.cli.daemons import Daemon
from tests.hostile.client import RawConnection, operator_token, request

ALLOWED = 1_600


def test_silent_connections_leave_the_journal_its_files(short_path: Path) -> None:
    limit = ("prlimit", f"--nofile={ALLOWED}:{ALLOWED}")
    daemon = Daemon(short_path / "home", env={"COVENANT_LEDGER_SEGMENT_BYTES": "4096"}, inside=limit)
    try:
        assert "http.connections_lowered" in daemon.log
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8_192), hard))
        token = operator_token(daemon.home)
        with ExitStack() as open_:
            open_.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
            for _ in range(ALLOWED + 200):
                open_.enter_context(RawConnection(daemon.url))
            assert request(daemon.url, "GET", "/healthz").status == 200
            for number in range(60):  # more than a segment holds
                grant = {"action": f"a2a.send.someone{number}@there"}
                assert request(daemon.url, "POST", "/capabilities/grant", token=token, body=grant).status == 200
            assert request(daemon.url, "GET", "/readyz").status == 200
    finally:
        assert daemon.stop() == 0
