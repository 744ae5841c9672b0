"""What an operator does to the database itself, without a daemon: raise its schema, and say that it was restored."""

from __future__ import annotations

import asyncpg

from covenant.ledger.postgres.connections import UNAVAILABLE, Connections
from covenant.ledger.postgres.migrations import LEVEL, migrate
from covenant.ledger.postgres.open_postgres import unusable
from covenant.ledger.postgres.sql import statement


async def migrate_database(dsn: str) -> tuple[int, int]:
    """The level that the schema had, and the one that it has. Raises DatabaseUnusable and WrongSchema."""
    try:
        connection = await Connections(dsn).connect()
        try:
            return await migrate(connection), LEVEL
        finally:
            await connection.close()
    except (*UNAVAILABLE, asyncpg.PostgresError, ValueError) as error:
        raise unusable(error) from error


async def mark_restored(dsn: str) -> int:
    """Fence every run of every node, since what they know may be of a later moment; how many there were.

    A daemon that still runs begins anew with what the database has. Raises DatabaseUnusable.
    """
    try:
        connection = await Connections(dsn).connect()
        try:
            async with connection.transaction():
                await connection.execute(statement("nodes", "restored").text)
                await connection.execute(statement("nodes", "fence_writers").text)
                fenced: int = await connection.fetchval(statement("nodes", "fence_nodes").text)
            return fenced
        finally:
            await connection.close()
    except (*UNAVAILABLE, asyncpg.PostgresError, ValueError) as error:
        raise unusable(error) from error
