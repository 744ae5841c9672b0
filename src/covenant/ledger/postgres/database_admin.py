"""What an operator does to the database itself, without a daemon: raise its schema, and say that it was restored."""

from __future__ import annotations

from typing import Any, Final

import asyncpg

from covenant.ledger.postgres.connections import UNAVAILABLE, Connections
from covenant.ledger.postgres.migrations import LEVEL, NotDurable, check_durability, migrate
from covenant.ledger.postgres.open_postgres import unusable
from covenant.ledger.postgres.sql import statement, text


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


COMPARED: Final = "covenant_compared"


async def find_troubles(dsn: str, *, durable: bool = True) -> tuple[int, list[str]]:
    """The level of the schema, and what a daemon would stumble over. Changes nothing. Raises DatabaseUnusable."""
    try:
        connection = await Connections(dsn).connect()
        try:
            troubles = []
            if durable:
                try:
                    await check_durability(connection)
                except NotDurable as trouble:
                    troubles.append(str(trouble))
            if await connection.fetchval("SELECT to_regclass('ledger_level')") is None:
                return 0, troubles
            level: int = await connection.fetchval("SELECT level FROM ledger_level")
            if level == LEVEL:
                troubles += await _altered(connection)
            return level, troubles
        finally:
            await connection.close()
    except (*UNAVAILABLE, asyncpg.PostgresError, ValueError) as error:
        raise unusable(error) from error


async def _altered(connection: asyncpg.Connection[Any]) -> list[str]:
    """What differs from a schema that was made anew, beside it, in a transaction that comes to nothing."""
    asked = statement("nodes", "columns")
    here = await connection.fetchval("SELECT current_schema()")
    making = connection.transaction()
    await making.start()
    try:
        await connection.execute(f"CREATE SCHEMA {COMPARED}")
        await connection.execute(f"SET LOCAL search_path = {COMPARED}")
        for number in range(1, LEVEL + 1):
            await connection.execute(text(f"level_{number}"))
        found, made = [
            {
                (row["table_name"], row["column_name"]): row["data_type"]
                for row in await connection.fetch(asked.text, schema)
            }
            for schema in (here, COMPARED)
        ]
    finally:
        await making.rollback()
    rights = await connection.fetch(statement("nodes", "rights_missing").text, here)
    return [
        *(
            f"{table}.{column} is {found.get((table, column), 'not there')}, and should be {kind}"
            for (table, column), kind in sorted(made.items())
            if found.get((table, column)) != kind
        ),
        *(f"this role may not change the table {row['table_name']}" for row in rights),
    ]
