"""The engine under the suites above the ledger: files in a folder, or PostgreSQL with `COVENANT_TEST_LEDGER=postgres`.

Each folder has a database of its own, which is there again when the folder is opened again.
"""

from __future__ import annotations

import asyncio
import atexit
import hashlib
import os
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any, Final, TypeVar

import asyncpg

from covenant.ledger.contract.ledger import Ledger
from covenant.ledger.embedded import open as embedded
from covenant.ledger.postgres.migrations import migrate
from covenant.ledger.postgres.open_postgres import open_postgres_ledger
from tests.ledger_contract.postgres_server import at, server

ON_POSTGRES: Final = os.environ.get("COVENANT_TEST_LEDGER") == "postgres"
TEMPLATE: Final = "covenant_made"

T = TypeVar("T")


async def open_ledger(folder: Path, **how: Any) -> Ledger:
    """As the embedded engine's, or a database for the folder."""
    if not ON_POSTGRES:
        return await embedded.open_ledger(folder, **how)
    return await open_postgres_ledger(database_of(folder), durability="os", **how)


def ledger_settings(folder: Path) -> dict[str, str]:
    """The settings of a daemon's ledger."""
    return {"url": database_of(folder), "durability": "os"} if ON_POSTGRES else {}


@cache
def database_of(folder: Path) -> str:
    name = f"covenant_{hashlib.sha256(str(folder).encode()).hexdigest()[:16]}"

    async def make(connection: asyncpg.Connection[Any]) -> None:
        await connection.execute(f"CREATE DATABASE {name} TEMPLATE {TEMPLATE}")

    _run(_server(), make)
    return at(_server(), name)


@cache
def _server() -> str:
    """The URL of a server that ends with this process. One database in it has the tables."""
    stack = ExitStack()
    atexit.register(stack.close)
    url = _apart(lambda: stack.enter_context(server()))

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
