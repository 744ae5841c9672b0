"""Connections to the database: single ones for the writer and the membership, and a pool of a few for reads.

Each is reopened when it breaks. No session holds state beyond a transaction, so a transaction pooler may be used.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit
from weakref import WeakSet

import asyncpg

from covenant.ledger.postgres.database_errors import UNAVAILABLE, standby_away, translated
from covenant.ledger.postgres.sql import Statement, statement
from covenant.ledger.postgres.stored_task import Row

T = TypeVar("T")

CONNECT_S: Final = 10.0
COMMAND_S: Final = 30.0
LOOK_S: Final = 3.0
"""After this time without an answer, the database is asked whether commits wait for a standby."""
READERS_MAX: Final = 4

# A plan that was made while a table was empty must not be kept for a full one: plans must use the indexes.
WRITER_SETTINGS: Final = {
    "application_name": "covenant",
    "jit": "off",
    "plan_cache_mode": "force_generic_plan",
    "enable_seqscan": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
    "enable_bitmapscan": "off",
    "lock_timeout": "10s",
    # Shorter than elsewhere, so that a daemon that stops within a transaction does not block the others for long.
    "idle_in_transaction_session_timeout": "5s",
}
# A machine that vanishes without closing its connections must not hold locks for ever.
SETTINGS: Final = {"application_name": "covenant", "jit": "off", "idle_in_transaction_session_timeout": "10s"}


async def fetch_rows(file: str, connection: asyncpg.Connection[Any], name: str, /, **values: Any) -> list[Any]:
    """The rows of a named statement of a file."""
    query = statement(file, name)
    rows: list[Any] = await connection.fetch(query.text, *query.values(values))
    return rows


async def fetch_value(file: str, connection: asyncpg.Connection[Any], name: str, /, **values: Any) -> Any:
    """The first column of the first row; None if there is no row."""
    query = statement(file, name)
    return await connection.fetchval(query.text, *query.values(values))


async def execute(file: str, connection: asyncpg.Connection[Any], name: str, /, **values: Any) -> None:
    query = statement(file, name)
    await connection.execute(query.text, *query.values(values))


async def connect_once(dsn: str, **options: Any) -> asyncpg.Connection[Any]:
    """A single connection. Raises ClientConfigurationError if an `@` in the password was taken for its end."""
    try:
        return await asyncpg.connect(dsn, **options)
    except OSError as error:
        unreachable = error
    if urlsplit(dsn).netloc.count("@") > 1:
        raise asyncpg.ClientConfigurationError("there is more than one @ before the database's name")
    raise unreachable


async def _reset(connection: asyncpg.Connection[Any]) -> None:
    """Rolls back the transaction of a cancelled caller, the only state that a session may have."""
    if connection.is_in_transaction():
        await connection.execute("ROLLBACK")


class Connections:
    """`dsn` names the database, as PostgreSQL's own programs take it.

    `pooler`: a transaction pooler is in between. Then no statement is prepared, no setting is sent, and nobody listens.
    `connect_s`: how long a connection may take to be made, once the ledger is open.
    """

    def __init__(self, dsn: str, *, pooler: bool = False, connect_s: float = CONNECT_S) -> None:
        self._dsn = dsn
        self.pooler = pooler
        self._connect_s = connect_s
        self._readers: asyncpg.Pool[Any] | None = None
        self._open_connections: WeakSet[asyncpg.Connection[Any]] = WeakSet()

    async def connect(
        self,
        settings: dict[str, str] = SETTINGS,
        *,
        connect_s: float | None = None,
        command_s: float | None = None,
    ) -> asyncpg.Connection[Any]:
        options = self._options(settings, command_s)
        connection = await connect_once(self._dsn, timeout=connect_s or self._connect_s, **options)
        await self._note(connection)
        return connection

    async def _note(self, connection: asyncpg.Connection[Any]) -> None:
        self._open_connections.add(connection)

    def _options(self, settings: dict[str, str], command_s: float | None = None) -> dict[str, Any]:
        options: dict[str, Any] = {"command_timeout": command_s or COMMAND_S}
        if self.pooler:
            return options | {"statement_cache_size": 0}
        # A batch with every kind of row is longer than what asyncpg keeps prepared unless it is told to.
        return options | {"server_settings": settings, "max_cacheable_statement_size": 0}

    async def open(self) -> None:
        # A pool with a least size logs each failure to keep connections that nobody uses.
        self._readers = await asyncpg.create_pool(
            self._dsn,
            min_size=0,
            max_size=READERS_MAX,
            timeout=self._connect_s,
            init=self._note,
            reset=_reset,
            **self._options(SETTINGS),
        )
        async with self._readers.acquire():
            pass

    def drop_all(self, but: asyncpg.Connection[Any] | None = None) -> None:
        """Ends every connection, also those that wait for an answer. New ones are opened when they are needed.

        After a silence of the network, an answer on an old connection may never come.
        """
        loop = asyncio.get_running_loop()
        for connection in tuple(self._open_connections):
            if connection is not but:
                # Soon, and not now: a caller whose statement was just prepared would find no protocol in it. Once the
                # caller waits for the answer, it gets the error of a lost connection.
                loop.call_soon(connection.terminate)

    async def watch_for_standby(self, call: Coroutine[Any, Any, T], look_s: float = LOOK_S) -> T:
        """Awaits a call. Raises Unavailable if it takes longer than `look_s` and commits wait for a standby.

        The database is asked while the call still waits: its cancel would end the only commit that waits.
        """
        task = asyncio.create_task(call)
        try:
            await asyncio.wait((task,), timeout=look_s)
            if not task.done() and await self._standby_away(look_s):
                raise standby_away()
            return await task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _standby_away(self, within_s: float) -> bool:
        with suppress(*UNAVAILABLE, asyncpg.PostgresError):
            connection = await self.connect(connect_s=within_s, command_s=within_s)
            try:
                return bool(await fetch_value("nodes", connection, "waiting_for_standby"))
            finally:
                connection.terminate()
        return False

    @property
    def _pool(self) -> asyncpg.Pool[Any]:
        assert self._readers is not None
        return self._readers

    async def fetch(self, query: Statement, values: dict[str, Any]) -> Sequence[Row]:
        with translated():
            rows: Sequence[Row] = await self._pool.fetch(query.text, *query.values(values))
        return rows

    async def rows(self, file: str, name: str, /, **values: Any) -> Sequence[Row]:
        """The rows of a named statement of a file."""
        return await self.fetch(statement(file, name), values)

    async def value(self, file: str, name: str, /, **values: Any) -> Any:
        """The first column of the first row; None if there is no row."""
        found = await self.rows(file, name, **values)
        return next(iter(found[0].values())) if found else None

    async def execute(self, text: str, timeout_s: float) -> None:
        with translated():
            await self._pool.execute(text, timeout=timeout_s)

    @asynccontextmanager
    async def transaction(self, **options: Any) -> AsyncIterator[asyncpg.Connection[Any]]:
        """A transaction: its changes become durable together, or not at all."""
        with translated():
            async with self._pool.acquire() as db, db.transaction(**options):
                yield db

    def snapshot(self) -> AbstractAsyncContextManager[asyncpg.Connection[Any]]:
        """A read-only snapshot for several queries."""
        return self.transaction(isolation="repeatable_read", readonly=True)

    async def close(self) -> None:
        if self._readers is not None:
            try:
                await asyncio.wait_for(self._readers.close(), CONNECT_S)
            except TimeoutError:
                self._readers.terminate()

    def terminate(self) -> None:
        if self._readers is not None:
            self._readers.terminate()
