"""The schema's level: brought to the newest by whoever comes first, and refused if it is newer than this program.

A level is a file, `level_N.sql`, applied in one transaction together with its number.
"""

from __future__ import annotations

from typing import Any, Final

import asyncpg

from covenant.ledger.postgres.sql import text
from covenant.model.errors import CovenantError

LEVEL: Final = 8
MIGRATION_S: Final = 3_600.0
"""How long one level may take: it may rewrite every task."""

_MADE: Final = """
CREATE TABLE IF NOT EXISTS ledger_level (
    only_one boolean PRIMARY KEY DEFAULT true CHECK (only_one), level integer NOT NULL
)
"""


class WrongSchema(CovenantError):
    """The database holds something else, or a ledger that this program does not know."""


class NotDurable(CovenantError):
    """The database may lose what it has acknowledged."""


async def migrate(connection: asyncpg.Connection[Any], level: int = LEVEL) -> int:
    """Bring the schema to `level`; the level it had."""
    async with connection.transaction():
        # Two that begin at once on an empty database: one makes the table, the other waits and finds it made.
        await connection.execute("SELECT pg_advisory_xact_lock(7021349055)")
        await connection.execute(_MADE)
        found: int = await connection.fetchval("SELECT coalesce(max(level), 0) FROM ledger_level")
        if found > LEVEL:
            raise WrongSchema(
                f"the ledger's schema is at level {found}, and this version of covenant knows level {LEVEL}; "
                "install the version that the other daemons have"
            )
        for number in range(found + 1, level + 1):
            await connection.execute(text(f"level_{number}"), timeout=MIGRATION_S)
            await connection.execute(
                "INSERT INTO ledger_level (level) VALUES ($1) ON CONFLICT (only_one) DO UPDATE SET level = $1", number
            )
    return found


async def check_durability(connection: asyncpg.Connection[Any]) -> None:
    """Raise NotDurable for settings with which a crash of the database loses what was acknowledged."""
    for setting in ("fsync", "full_page_writes", "synchronous_commit"):
        value = await connection.fetchval("SELECT current_setting($1)", setting)
        if value == "off":
            raise NotDurable(
                f"the database has {setting} = off, so a crash of it can lose acknowledged tasks; "
                f'set {setting} = on, or say that this is meant with ledger.durability = "os"'
            )
