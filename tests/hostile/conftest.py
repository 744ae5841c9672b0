"""A real daemon in a process of its own, to be attacked."""

import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from tests.cli.daemons import Daemon
from tests.places import short_folder

StartDaemon = Callable[..., Daemon]


@pytest.fixture
def start_daemon(short_path: Path) -> Iterator[StartDaemon]:
    """Starts daemons by name, flags and environment; all of them are killed at the end of the test."""
    started: list[Daemon] = []

    def start(
        *flags: str,
        name: str = "home",
        env: dict[str, str] | None = None,
        constants: Mapping[str, float] | None = None,
    ) -> Daemon:
        daemon = Daemon(short_path / name, *flags, env=env, constants=constants)
        started.append(daemon)
        return daemon

    yield start
    for daemon in started:
        if daemon.process.poll() is None:
            daemon.stop(signal.SIGKILL)


@pytest.fixture(scope="module")
def shared_daemon() -> Iterator[Daemon]:
    """One daemon for all attacks of a module that leave it as it was."""
    with short_folder() as folder:
        daemon = Daemon(folder / "home")
        yield daemon
        daemon.stop(signal.SIGKILL)


@pytest.fixture
def daemon(start_daemon: StartDaemon) -> Daemon:
    """One daemon with default settings."""
    return start_daemon()
