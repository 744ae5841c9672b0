"""Opening the ledger on a database: its schema, this node's place in it, and a ledger on top."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Literal

import asyncpg

from covenant.ledger.clock import PAUSE_MS, Clock, Uuids
from covenant.ledger.postgres.blob_rows import BlobRows, UploadBytes
from covenant.ledger.postgres.connections import UNAVAILABLE, Connections
from covenant.ledger.postgres.migrations import check_durability, migrate
from covenant.ledger.postgres.nodes import LEASE_MS, join
from covenant.ledger.postgres.postgres_ledger import PostgresLedger
from covenant.model.errors import CovenantError
from covenant.model.settings import Limits

NODE: Final = "local"


class DatabaseUnusable(CovenantError):
    """The database cannot be reached, or refuses this program."""


def unusable(error: BaseException) -> DatabaseUnusable:
    return DatabaseUnusable(f"the ledger's database cannot be used: {str(error) or type(error).__name__}")


async def open_postgres_ledger(
    dsn: str,
    *,
    clock: Callable[[], int],
    monotonic_ms: Callable[[], int] | None = None,
    clock_pause_ms: int = PAUSE_MS,
    new_id: Callable[[], str] | None = None,
    limits: Limits | None = None,
    durability: Literal["fsync", "os"] = "fsync",
    node: str = NODE,
    boot: str | None = None,
    lease_ms: int = LEASE_MS,
    pooler: bool = False,
) -> PostgresLedger:
    """The ledger in the database that `dsn` names; its tables are made if they are not there.

    `node` names this daemon for ever, and no two that run at the same time: an earlier run of it is fenced here.
    `lease_ms`: how long it may be silent before the others declare it lost. `pooler`: a transaction pooler stands
    before the database.

    Raises DatabaseUnusable, WrongSchema or NotDurable.
    """
    new_id = new_id or Uuids()
    boot = boot or new_id()
    connections = Connections(dsn, pooler=pooler)
    try:
        connection = await connections.connect()
        try:
            if durability == "fsync":
                await check_durability(connection)
            await migrate(connection)
            joined = await join(connection, node=node, boot=boot, lease_ms=lease_ms)
        finally:
            await connection.close()
        await connections.open()
    except (*UNAVAILABLE, asyncpg.PostgresError, ValueError) as error:
        raise unusable(error) from error
    ledger = PostgresLedger(
        connections,
        joined=joined,
        lease_ms=lease_ms,
        node=node,
        clock=Clock(clock, monotonic_ms or clock, pause_ms=clock_pause_ms),
        new_id=new_id,
        limits=limits or Limits(),
    )
    try:
        await ledger.begin()
    except (*UNAVAILABLE, asyncpg.PostgresError) as error:
        await ledger.abort()
        raise unusable(error) from error
    except BaseException:
        await ledger.abort()
        raise
    return ledger


async def open_blob_rows(dsn: str, *, pooler: bool = False, kept: UploadBytes | None = None) -> BlobRows:
    """The blob store of a ledger that is open. `kept`: where bytes are, if not there. Raises DatabaseUnusable."""
    connections = Connections(dsn, pooler=pooler)
    try:
        await connections.open()
    except (*UNAVAILABLE, asyncpg.PostgresError, ValueError) as error:
        raise unusable(error) from error
    return BlobRows(connections, kept)
