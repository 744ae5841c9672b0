"""The engine under the suites above the ledger: files in a folder, or PostgreSQL with `COVENANT_TEST_LEDGER=postgres`.

Each folder has a database of its own, which is there again when the folder is opened again.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import subprocess
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

import asyncpg

from covenant.ledger.contract.ledger import Ledger
from covenant.ledger.embedded import open as embedded
from covenant.ledger.postgres.migrations import migrate
from covenant.ledger.postgres.open_postgres import open_postgres_ledger
from tests.ledger_contract.postgres_server import at, programs, server

ON_POSTGRES: Final = os.environ.get("COVENANT_TEST_LEDGER") == "postgres"
TEMPLATE: Final = "covenant_made"
LEASE_MS: Final = 15_000
"""These suites have one daemon a ledger, and a busy machine must not make it refuse or repeat anything."""

T = TypeVar("T")

_running: Final = ExitStack()
stop_server: Final = _running.close
"""Called when the tests are over, and not when the interpreter ends: a process that runs a part of the tests is killed
then, while gigabytes are being removed."""


async def open_ledger(folder: Path, **how: Any) -> Ledger:
    """As the embedded engine's, or a database for the folder."""
    if not ON_POSTGRES:
        return await embedded.open_ledger(folder, **how)
    return await open_postgres_ledger(database_of(folder), durability="os", **({"lease_ms": LEASE_MS} | how))


def ledger_settings(folder: Path) -> dict[str, Any]:
    """The settings of a daemon's ledger."""
    return {"url": database_of(folder), "durability": "os", "node_lease_ms": LEASE_MS} if ON_POSTGRES else {}


@cache
def database_of(folder: Path) -> str:
    name = f"covenant_{hashlib.sha256(str(folder).encode()).hexdigest()[:16]}"

    async def make(connection: asyncpg.Connection[Any]) -> None:
        await connection.execute(f"CREATE DATABASE {name} TEMPLATE {TEMPLATE}")

    _run(_server(), make)
    return at(_server(), name)


def shared_secret(folder: Path, name: str) -> str:
    """What a daemon has left in the folder's database for all daemons on it, locked as it is there."""

    async def read(connection: asyncpg.Connection[Any]) -> str:
        return str(await connection.fetchval("SELECT body FROM secrets WHERE name = $1", name))

    return _run(database_of(folder), read)


def dump(folder: Path, file: Path) -> None:
    """The folder's database as it is now, in one file."""
    subprocess.run([programs() / "pg_dump", "-Fc", "-f", file, database_of(folder)], check=True, capture_output=True)


def restore_dump(folder: Path, file: Path) -> None:
    """Everything since is lost. Whoever is connected is cut off."""
    url = database_of(folder)
    name = urlsplit(url).path.removeprefix("/")

    async def make(connection: asyncpg.Connection[Any]) -> None:
        await connection.execute(f"DROP DATABASE {name} WITH (FORCE)")
        await connection.execute(f"CREATE DATABASE {name}")

    _run(_server(), make)
    subprocess.run([programs() / "pg_restore", "-d", url, file], check=True, capture_output=True)


@cache
def _server() -> str:
    """The URL of a server that ends with the tests of this process. One database in it has the tables."""
    url = _apart(lambda: _running.enter_context(server()))

    async def make(connection: asyncpg.Connection[Any]) -> None:
        await connection.execute(f"CREATE DATABASE {TEMPLATE}")

    _run(url, make)
    _run(at(url, TEMPLATE), migrate)
    return url


def _run(url: str, use: Callable[[asyncpg.Connection[Any]], Awaitable[T]]) -> T:
    async def connected() -> T:
        connection = await asyncpg.connect(url)
        try:
            return await use(connection)
        finally:
            await connection.close()

    return _apart(lambda: asyncio.run(connected()))


def _apart(do: Callable[[], T]) -> T:
    """In a thread of its own: the caller may have a loop."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(do).result()
