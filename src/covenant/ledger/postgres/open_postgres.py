"""Opening the ledger on a database: its schema, this node's place in it, and a ledger on top."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Literal

import asyncpg

from covenant.ledger.clock import PAUSE_MS, Clock, Uuids
from covenant.ledger.postgres.connections import UNAVAILABLE, Connections
from covenant.ledger.postgres.migrations import LEVEL, check_durability, migrate
from covenant.ledger.postgres.nodes import LEASE_MS
from covenant.ledger.postgres.postgres_ledger import PostgresLedger
from covenant.ledger.postgres.sql import statement
from covenant.model.errors import CovenantError
from covenant.model.grant import GENESIS
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
) -> PostgresLedger:
    """The ledger in the database that `dsn` names; its tables are made if they are not there.

    `node` names this daemon for ever, and no two that run at the same time: an earlier run of it is fenced here.

    Raises DatabaseUnusable, WrongSchema or NotDurable.
    """
    new_id = new_id or Uuids()
    boot = boot or new_id()
    connections = Connections(dsn)
    try:
        connection = await connections.connect()
        try:
            if durability == "fsync":
                await check_durability(connection)
            await migrate(connection)
            async with connection.transaction():
                made, joined = statement("nodes", "new_writer"), statement("nodes", "join")
                writer = await connection.fetchrow(
                    made.text, *made.values({"node": node, "boot": boot, "genesis": GENESIS.chain_hash})
                )
                assert writer is not None
                await connection.execute(
                    joined.text,
                    *joined.values({"node": node, "boot": boot, "lease_ms": LEASE_MS, "level": LEVEL}),
                )
        finally:
            await connection.close()
        await connections.open()
    except (*UNAVAILABLE, asyncpg.PostgresError, ValueError) as error:
        raise unusable(error) from error
    ledger = PostgresLedger(
        connections,
        writer=writer["writer"],
        seq=writer["seq"],
        node=node,
        boot=boot,
        clock=Clock(clock, monotonic_ms or clock, pause_ms=clock_pause_ms),
        new_id=new_id,
        limits=limits or Limits(),
    )
    try:
        await ledger.begin()
    except BaseException:
        await ledger.abort()
        raise
    return ledger
