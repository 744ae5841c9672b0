"""Connections to the database: one that writes, one for signals, and a few that read.

Each is opened anew when it breaks. Nothing is kept in a session, so that a transaction pooler may stand between.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

import asyncpg

from covenant.ledger.postgres.sql import Statement
from covenant.ledger.postgres.stored_task import Row
from covenant.model.errors import Unavailable

CONNECT_S: Final = 10.0
COMMAND_S: Final = 30.0
READERS_MAX: Final = 4

# A plan that was made while a table was empty must not be kept for when it is full: by index, always.
WRITER_SETTINGS: Final = {
    "application_name": "covenant",
    "jit": "off",
    "plan_cache_mode": "force_generic_plan",
    "enable_seqscan": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
    "enable_bitmapscan": "off",
    "lock_timeout": "10s",
    "idle_in_transaction_session_timeout": "15s",
}
SETTINGS: Final = {"application_name": "covenant", "jit": "off"}

BROKEN: Final = (
    OSError,
    TimeoutError,
    asyncpg.PostgresConnectionError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
    asyncpg.AdminShutdownError,
    asyncpg.CrashShutdownError,
    asyncpg.IdleInTransactionSessionTimeoutError,
)
"""What a connection that is gone raises."""
UNAVAILABLE: Final = (
    *BROKEN,
    asyncpg.InsufficientResourcesError,
    asyncpg.OperatorInterventionError,
    asyncpg.CannotConnectNowError,
)
"""What a database that cannot serve now raises."""


REFUSED: Final = (
    asyncpg.InsufficientPrivilegeError,
    asyncpg.InvalidAuthorizationSpecificationError,
    asyncpg.SyntaxOrAccessError,
)
"""What a database raises in which somebody has changed a table, a column or a privilege."""


def refused(error: BaseException) -> Unavailable:
    return Unavailable(
        "database_refused",
        f"the ledger's database refuses what the ledger needs ({error}); give its role back what it owned, or put back "
        "the table that was altered: `covenant doctor` compares both",
        retry_after_ms=5_000,
    )


def unavailable(error: BaseException) -> Unavailable:
    reason = str(error) or type(error).__name__
    return Unavailable(
        "database_unavailable",
        f"the ledger's database cannot be reached ({reason}); the request can be repeated",
        retry_after_ms=1_000,
    )


def fenced() -> Unavailable:
    return Unavailable(
        "ledger_fenced",
        "other daemons had declared this one lost, since they did not hear from it; it begins anew, and the request "
        "can be repeated",
        retry_after_ms=1_000,
    )


def outcome_unknown() -> Unavailable:
    return Unavailable(
        "outcome_unknown",
        "the ledger's database went away while this was being written; it may or may not have happened. "
        "Repeat the request under the same id",
    )


async def _reset(connection: asyncpg.Connection[Any]) -> None:
    """Nothing is left in a session but the transaction of somebody who was cancelled."""
    if connection.is_in_transaction():
        await connection.execute("ROLLBACK")


class Connections:
    """`dsn` names the database, as PostgreSQL's own programs take it.

    `pooler`: a transaction pooler stands between. Then no statement is kept, no setting is sent, and nobody listens.
    """

    def __init__(self, dsn: str, *, pooler: bool = False) -> None:
        self._dsn = dsn
        self.pooler = pooler
        self._readers: asyncpg.Pool[Any] | None = None

    async def connect(
        self, settings: dict[str, str] = SETTINGS, *, timeout_s: float = CONNECT_S
    ) -> asyncpg.Connection[Any]:
        return await asyncpg.connect(self._dsn, timeout=timeout_s, **self._options(settings))

    def _options(self, settings: dict[str, str]) -> dict[str, Any]:
        if self.pooler:
            return {"command_timeout": COMMAND_S, "statement_cache_size": 0}
        return {"command_timeout": COMMAND_S, "server_settings": settings}

    async def open(self) -> None:
        self._readers = await asyncpg.create_pool(
            self._dsn, min_size=1, max_size=READERS_MAX, timeout=CONNECT_S, reset=_reset, **self._options(SETTINGS)
        )

    async def fetch(self, asked: Statement, values: dict[str, Any]) -> Sequence[Row]:
        assert self._readers is not None
        try:
            rows: Sequence[Row] = await self._readers.fetch(asked.text, *asked.values(values))
        except UNAVAILABLE as error:
            raise unavailable(error) from error
        except REFUSED as error:
            raise refused(error) from error
        return rows

    async def execute(self, text: str, timeout_s: float) -> None:
        assert self._readers is not None
        try:
            await self._readers.execute(text, timeout=timeout_s)
        except UNAVAILABLE as error:
            raise unavailable(error) from error

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[asyncpg.Connection[Any]]:
        """What is done here becomes durable at once, or not at all."""
        assert self._readers is not None
        try:
            async with self._readers.acquire() as db, db.transaction():
                yield db
        except UNAVAILABLE as error:
            raise unavailable(error) from error
        except REFUSED as error:
            raise refused(error) from error

    @asynccontextmanager
    async def snapshot(self) -> AsyncIterator[asyncpg.Connection[Any]]:
        """Several questions about one moment."""
        assert self._readers is not None
        try:
            async with self._readers.acquire() as db, db.transaction(isolation="repeatable_read", readonly=True):
                yield db
        except UNAVAILABLE as error:
            raise unavailable(error) from error
        except REFUSED as error:
            raise refused(error) from error

    async def close(self) -> None:
        if self._readers is not None:
            try:
                await asyncio.wait_for(self._readers.close(), CONNECT_S)
            except TimeoutError:
                self._readers.terminate()

    def terminate(self) -> None:
        if self._readers is not None:
            self._readers.terminate()
