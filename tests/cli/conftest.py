"""One daemon for all tests of a module, with an identity to send to."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.daemons import Daemon


@pytest.fixture(scope="module")
def short_path() -> Iterator[Path]:
    """A folder whose name leaves room for a socket's path, which systems keep short."""
    folder = Path(tempfile.mkdtemp(prefix="cov-"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def daemon(short_path: Path) -> Iterator[Daemon]:
    """Bob is enrolled and may answer; the operator may send to bob, and repair."""
    started = Daemon(short_path / "home")
    token = started.json("identities", "enroll", "bob@host", "--grant", "a2a.respond.operator@local")["token_b58"]
    bob = started.home / "bob.token"
    bob.write_text(token)
    for action in ("a2a.send.bob@host", "a2a.repair.requeue", "a2a.repair.force_error", "a2a.compact"):
        started.json("capabilities", "grant", action)
    yield started
    assert started.stop() == 0
