"""A start that fails says why and what to do, in one message, and leaves nothing behind: no warning and no lock."""

import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from covenant.ledger.embedded.journal.recovery import lock_home
from covenant.ledger.embedded.journal.segments import list_segments
from tests.cli.daemons import COVENANT, Daemon, Ran, environment
from tests.matrices import first_rows_of
from tests.waits import BOUND_S

STRICT = (sys.executable, "-X", "dev", "-W", "error")
"""What is never awaited or never closed is said, at the latest when the interpreter ends."""
UNCLEAN = (
    "never awaited",
    "never retrieved",
    "Exception ignored",
    "ResourceWarning",
    "was destroyed but it is pending",
)


def serve(home: Path, *words: str, **variables: str) -> Ran:
    done = subprocess.run(
        [*STRICT, str(COVENANT), "serve", "--home", str(home), *words],
        capture_output=True,
        text=True,
        env=environment(**variables),
        timeout=BOUND_S,
        check=False,
    )
    return Ran(done.returncode, done.stdout, done.stderr)


def served_once(home: Path) -> Path:
    assert Daemon(home).stop() == 0
    return home


@contextmanager
def taken_port() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield str(listener.getsockname()[1])


def port_in_use(home: Path) -> Ran:
    with taken_port() as port:
        return serve(home, "--http-port", port)


def grpc_port_in_use(home: Path) -> Ran:
    with taken_port() as port:
        return serve(home, "--http-port", "0", COVENANT_GRPC_ENABLED="true", COVENANT_GRPC_PORT=port)


def socket_path_too_long(home: Path) -> Ran:
    return serve(home / ("x" * 100), "--http-port", "0")


def address_file_in_the_way(home: Path) -> Ran:
    (home / "http.url").mkdir(parents=True)
    home.chmod(0o700)
    return serve(home, "--http-port", "0")


def home_is_a_file(home: Path) -> Ran:
    home.touch()
    return serve(home, "--http-port", "0")


def agents_file_broken(home: Path) -> Ran:
    broken = home.with_suffix(".py")
    broken.write_text("import nothing_of_this_name\n")
    return serve(home, "--http-port", "0", str(broken))


def journal_damaged(home: Path) -> Ran:
    segment = list_segments(served_once(home) / "journal")[0].path
    data = bytearray(segment.read_bytes())
    data[40] ^= 1
    segment.write_bytes(data)
    return serve(home, "--http-port", "0")


def archive_damaged(home: Path) -> Ran:
    archive = served_once(home) / "archive.db"
    archive.write_bytes(b"x" * 4_096)
    return serve(home, "--http-port", "0")


def key_missing(home: Path) -> Ran:
    (served_once(home) / "identity" / "local.key").unlink()
    return serve(home, "--http-port", "0")


@pytest.mark.parametrize(
    ("fail", "fix"),
    first_rows_of(
        [
            (port_in_use, "--http-port"),
            (grpc_port_in_use, "--grpc-port"),
            (socket_path_too_long, "choose a shorter home"),
            (address_file_in_the_way, "remove what is there"),
            (home_is_a_file, "--home"),
            (agents_file_broken, "correct it"),
            (journal_damaged, "covenant doctor"),
            (archive_damaged, "covenant doctor"),
            (key_missing, "backup"),
        ],
        3,
    ),
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_start_that_fails_ends_cleanly_and_names_the_fix(
    short_path: Path, fail: Callable[[Path], Ran], fix: str
) -> None:
    home = short_path / "home"
    ran = fail(home)
    assert (ran.code, ran.out) == (1, ""), ran
    (message,) = [part for part in ran.err.split("covenant: ")[1:] if part]
    assert fix in message
    assert [word for word in UNCLEAN if word in ran.err] == []
    if fail is not agents_file_broken:
        assert "Traceback" not in ran.err
    else:
        assert "importlib" not in ran.err
    if home.is_dir():
        lock_home(home).close()
    assert not (home / "sock").exists()


def test_a_home_whose_first_start_failed_is_served_by_the_next_one(short_path: Path) -> None:
    home = short_path / "home"
    assert port_in_use(home).code == 1
    assert Daemon(home).stop() == 0
