"""The schema's level: the first daemon migrates it to the newest; a newer one than this program knows is refused.

A level is a file, `level_N.sql`, applied in one transaction together with its number. Alterations by hand are found by
a comparison with new tables; an error that they cause names the column.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Sequence
from functools import wraps
from inspect import getmembers, iscoroutinefunction
from typing import Any, Final, NamedTuple, TypeVar

import asyncpg

from covenant.ledger.postgres.connections import Connections, fetch_rows
from covenant.ledger.postgres.database_errors import UNAVAILABLE, altered, lost_if_dropped
from covenant.ledger.postgres.sql import text
from covenant.model.errors import CovenantError

C = TypeVar("C")

LEVEL: Final = 14
MIGRATION_S: Final = 3_600.0
"""The time limit for one level: it may rewrite every task."""

LOST_ROW: Final = "somebody has deleted the row of the database's table registers"
LOST_ROW_FIX: Final = "restore a backup, and run `covenant ledger restored`"
LOST_TASKS_FIX: Final = f"{LOST_ROW_FIX}; without a backup, that command alone accepts the loss"
ENCODINGS: Final = frozenset({"UTF8", "SQL_ASCII"})
"""Those that take every text. (SQL_ASCII takes any bytes.)"""
ENCODING_FIX: Final = "make one with ENCODING 'UTF8', and name it in ledger.url"
ROWS_LOOKED_AT: Final = 10_000
"""How many rows of open tasks a start counts. So many wide rows take some 25 ms."""

_CREATE_LEVEL: Final = """
CREATE TABLE ledger_level (
    only_one boolean PRIMARY KEY DEFAULT true CHECK (only_one), level integer NOT NULL
)
"""
_FUNCTION_CALL: Final = re.compile(r"\b(readable)\(")
"""A function of the levels: a session's temporary one is found only by its qualified name."""


class WrongSchema(CovenantError):
    """The database holds something else, or a ledger that this program does not know."""


class NotDurable(CovenantError):
    """The database may lose acknowledged changes."""

    def __init__(self, what: str, fix: str) -> None:
        super().__init__(f"{what}; {fix}")
        self.what = what
        self.fix = fix


async def migrate(connection: asyncpg.Connection[Any], level: int = LEVEL) -> int:
    """Migrates the schema to `level`. Returns the level before."""
    if (narrow := await find_narrow_encoding(connection)) is not None:
        raise WrongSchema(f"{narrow}; {ENCODING_FIX}")
    async with connection.transaction():
        # If two daemons begin at once on an empty database, one creates the table, and the other waits and finds it.
        await connection.execute("SELECT pg_advisory_xact_lock(7021349055)")
        if await connection.fetchval("SELECT to_regclass('ledger_level')") is None:  # a role without CREATE may serve
            try:
                await connection.execute(_CREATE_LEVEL)
            except asyncpg.InsufficientPrivilegeError as error:
                raise WrongSchema(
                    f"the database has no ledger yet, and this role may not make one ({error}); run `covenant ledger "
                    "init` with a URL whose role may create tables"
                ) from error
        found: int = await connection.fetchval("SELECT coalesce(max(level), 0) FROM ledger_level")
        if found > LEVEL:
            raise WrongSchema(
                f"the ledger's schema is at level {found}, and this version of covenant knows level {LEVEL}; "
                "install the version that the other daemons have"
            )
        try:
            for number in range(found + 1, level + 1):
                await connection.execute(text(f"level_{number}"), timeout=MIGRATION_S)
                await connection.execute(
                    "INSERT INTO ledger_level (level) VALUES ($1) ON CONFLICT (only_one) DO UPDATE SET level = $1",
                    number,
                )
        except (asyncpg.DuplicateTableError, asyncpg.DuplicateObjectError, asyncpg.DuplicateFunctionError) as error:
            raise WrongSchema("; ".join(describe_foreign(found, str(error)))) from error
        except asyncpg.InsufficientPrivilegeError as error:
            raise WrongSchema(
                f"the ledger's schema is at level {found}, and this role may not raise it to {level} ({error}); run "
                "`covenant ledger migrate` with a URL whose role owns the tables"
            ) from error
    return found


async def find_narrow_encoding(connection: asyncpg.Connection[Any]) -> str | None:
    """What is wrong if the database cannot hold every text."""
    encoding: str = await connection.fetchval("SELECT current_setting('server_encoding')")
    return None if encoding in ENCODINGS else f"the database has the encoding {encoding}, which lacks most characters"


def describe_foreign(level: int, what: str) -> tuple[str, str]:
    """The trouble of a database with tables that the ledger has not made at this level, and the fix."""
    fix = "name an empty database in ledger.url" if level == 0 else "drop it"
    return (
        f"the database has something that the ledger has not made ({what}), and its schema is at level {level}",
        f"{fix}; if it is a ledger's, its table ledger_level was changed: put the level back",
    )


async def check_durability(connection: asyncpg.Connection[Any]) -> None:
    """Raises NotDurable for settings with which a crash of the database loses acknowledged changes."""
    has_standby = await connection.fetchval("SELECT current_setting('synchronous_standby_names') <> ''")
    for setting in ("fsync", "full_page_writes", "synchronous_commit"):
        value = await connection.fetchval("SELECT current_setting($1)", setting)
        if value == "off" or (value == "local" and has_standby):
            what = "a crash" if value == "off" else "a failover"
            raise NotDurable(
                f"the database has {setting} = {value}, so {what} of it can lose acknowledged tasks",
                f'set {setting} = on, or say that this is meant with ledger.durability = "os"',
            )


async def find_lost_tasks(connection: asyncpg.Connection[Any]) -> str | None:
    """The trouble if rows of open tasks are gone, as after `TRUNCATE live`; None if not.

    If more than ROWS_LOOKED_AT rows are left, missing ones are not noticed.
    """
    (row,) = await fetch_rows("nodes", connection, "live_rows", most=ROWS_LOOKED_AT)
    counted, found = row["counted"], row["found"]
    if found >= min(counted, ROWS_LOOKED_AT):
        return None
    return f"somebody has deleted rows of the database's table live: {counted} tasks are open, and {found} are there"


async def check_tasks(connection: asyncpg.Connection[Any]) -> None:
    """Raises WrongSchema if open tasks are gone."""
    if (lost := await find_lost_tasks(connection)) is not None:
        raise WrongSchema(f"{lost}; {LOST_TASKS_FIX}")


class _Schema(NamedTuple):
    columns: dict[tuple[str, str], str]
    """Their types, by table and name."""
    indexes: dict[tuple[str, str], str]
    """Their definitions, by table and name."""
    bounds: set[str]
    """Constraints, triggers and row security."""


class Altered(NamedTuple):
    """The differences between the tables and those that the migrations make, as text."""

    columns: list[str]
    problems: list[str]
    """Indexes, constraints and rights."""


async def find_foreign(connection: asyncpg.Connection[Any]) -> str | None:
    """A table that is there before the first level has made it, if any."""
    made = re.findall(r"CREATE (?:TABLE|SEQUENCE) (\w+)", text("level_1"))
    found: str | None = await connection.fetchval(
        "SELECT min(name) FROM unnest($1::text[]) AS u (name) WHERE to_regclass(name) IS NOT NULL", made
    )
    return found


async def find_altered(connection: asyncpg.Connection[Any]) -> Altered:
    """Differences from tables that are created for this session alone, in a transaction that is rolled back."""
    here = await connection.fetchval("SELECT current_schema()")
    trial = connection.transaction()
    await trial.start()
    try:
        await connection.execute("SET LOCAL search_path = pg_temp")
        for number in range(1, LEVEL + 1):
            await connection.execute(_FUNCTION_CALL.sub(r"pg_temp.\1(", text(f"level_{number}")))
        temporary = await connection.fetchval("SELECT pg_my_temp_schema()::regnamespace::text")
        tables = sorted({table for table, _ in (await _read_schema(connection, temporary, [])).columns})
        made, found = [await _read_schema(connection, schema, tables) for schema in (temporary, here)]
    finally:
        await trial.rollback()
    rights = await fetch_rows("nodes", connection, "rights_missing", schema=here, tables=tables)
    problems = [
        *_different(made.indexes, found.indexes, "the index "),
        *(f"{bound}, which is not of the ledger" for bound in sorted(found.bounds - made.bounds)),
        *(row["what"] for row in rights),
    ]
    return Altered(list(_different(made.columns, found.columns, "")), problems)


def _different(made: dict[tuple[str, str], str], found: dict[tuple[str, str], str], noun: str) -> Iterator[str]:
    for (table, name), what in sorted(made.items()):
        if found.get((table, name)) != what:
            yield f"{noun}{table}.{name} is {found.get((table, name), 'not there')}, and should be {what}"


async def _read_schema(connection: asyncpg.Connection[Any], schema: str, tables: Sequence[str]) -> _Schema:
    columns = await fetch_rows("nodes", connection, "columns", schema=schema)
    indexes = await fetch_rows("nodes", connection, "indexes", schema=schema)
    bounds = await fetch_rows("nodes", connection, "bounds", schema=schema, tables=tables)
    return _Schema(
        {(row["table_name"], row["column_name"]): row["data_type"] for row in columns},
        {(row["table_name"], row["name"]): row["definition"] for row in indexes},
        {row["what"] for row in bounds},
    )


class AlteredTables:
    """Finds out whether an error comes of a column that somebody altered. Callers at the same time share one look."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._looking: asyncio.Task[list[str]] | None = None

    async def explain(self, error: Exception) -> Exception:
        """A refusal that names the altered columns; the error itself if there are none."""
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look())
        found = await asyncio.shield(self._looking)
        return altered(found) if found else error

    async def _look(self) -> list[str]:
        try:
            with lost_if_dropped():
                connection = await self._connections.connect()
                try:
                    level = await connection.fetchval("SELECT level::integer FROM ledger_level")
                    return (await find_altered(connection)).columns if level == LEVEL else []
                finally:
                    await connection.close()
        except (*UNAVAILABLE, asyncpg.PostgresError):
            return []  # the first error is reported


def names_altered_columns(made: type[C]) -> type[C]:
    """For a class with `altered_tables`: explains errors of its public coroutines that are no refusals.

    A column of another type than it should have makes errors of all kinds, wherever its values are used.
    """
    for name, function in getmembers(made, iscoroutinefunction):
        if not name.startswith("_"):
            setattr(made, name, _explained(function))
    return made


def _explained(function: Any) -> Any:
    @wraps(function)
    async def explained(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return await function(self, *args, **kwargs)
        except CovenantError:
            raise
        except Exception as error:
            raise await self.altered_tables.explain(error) from error

    return explained
