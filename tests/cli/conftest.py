"""One daemon for all tests of a module, with an identity to send to."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.daemons import Daemon
from tests.places import short_folder


@pytest.fixture(scope="module")
def short_path() -> Iterator[Path]:
    with short_folder() as folder:
        yield folder


@pytest.fixture(scope="module")
def daemon(short_path: Path) -> Iterator[Daemon]:
    """Bob is enrolled and may answer; the operator may send to bob, and repair."""
    started = Daemon(short_path / "home", env={"COVENANT_A2A_PUSH_NOTIFICATIONS": "on"})
    token = started.json("identities", "enroll", "bob@host", "--grant", "a2a.respond.operator@local")["token_b58"]
    bob = started.home / "bob.token"
    bob.write_text(token)
    for action in ("a2a.send.bob@host", "a2a.repair.requeue", "a2a.repair.force_error", "a2a.compact"):
        started.json("capabilities", "grant", action)
    yield started
    assert started.stop() == 0
