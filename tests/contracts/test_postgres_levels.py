"""A database of an earlier level: opened, it has the indexes and counts of today."""

from __future__ import annotations

import re
from typing import Any

import asyncpg
import pytest

from covenant.ledger.contract.task_query import TaskQuery
from covenant.ledger.postgres.database_admin import find_troubles
from covenant.ledger.postgres.migrations import LEVEL, WrongSchema, migrate
from covenant.ledger.postgres.postgres_ledger import PostgresLedger
from covenant.ledger.postgres.sql import text
from tests.ledger_contract.driver import LedgerDriver
from tests.ledger_contract.postgres_engine import PostgresEngine
from tests.ledger_contract.postgres_server import Databases, at
from tests.ledger_contract.samples import CAROL, make_task, ok, unsafe
from tests.ledger_contract.searches import course

UNDONE = {
    3: "ALTER TABLE nodes DROP COLUMN started_ms",
    4: "DROP TABLE secrets, singletons",
    6: "ALTER TABLE registers DROP COLUMN restored_at_ms",
    7: "DROP TABLE peer_usage",
    8: "DROP TABLE blob_reference, blob, blob_chunk, blob_upload",
    9: "DROP TABLE moves",
    10: "DROP TABLE notes",
    13: """
        INSERT INTO lane_counts SELECT kind, lane, -2, sum(n) FROM counts GROUP BY kind, lane;
        DELETE FROM lane_counts WHERE writer <> -2; DROP VIEW counts; DROP TABLE counted
    """,
    11: "ALTER TABLE writers DROP COLUMN part; ALTER TABLE ids ADD PRIMARY KEY (task_id); DROP INDEX ids_by_id",
}
"""How to take back what a later level brought."""
COLUMNS = (
    "sender_display recipient_display task_kind idempotency_key remote cause error_message intent size".split(),
    "sender_display recipient_display task_kind idempotency_key deadline_ms remote cause intent size".split(),
)


async def test_the_tasks_of_level_1_are_found_counted_and_measured_when_the_level_is_raised(
    databases: Databases,
) -> None:
    url = await databases.make()
    engine = PostgresEngine(url)
    ledger = await engine.open()
    driver = LedgerDriver(ledger, engine.clock)
    await course(driver)
    odd = "a\x00b\x01 \\\\u0000 \\u0000"
    task = make_task(11, task_kind=odd, idempotency=unsafe(odd), intent_text=odd, recipient=CAROL)
    await driver.finish(await driver.taken(task), ok(task.id))
    await driver.drain()
    before = await _told(ledger)
    await engine.close()
    connection = await asyncpg.connect(url)
    try:
        await _lower(connection)
        assert await migrate(connection) == 1
        found = await connection.fetch("SELECT indexname FROM pg_indexes WHERE schemaname = 'public'")
        made = {name for level in ("level_2", "level_5") for name in re.findall(r"CREATE INDEX (\w+)", text(level))}
        assert {row["indexname"] for row in found} >= made - {"ids_by_prefix", "tasks_by_context"}  # gone in level 11
        assert await connection.fetchval("SELECT level FROM ledger_level") == LEVEL
    finally:
        await connection.close()
    again = PostgresEngine(url)
    after = await _told(await again.open())
    await again.close()
    await databases.drop(url)
    assert after == before


async def test_a_database_whose_encoding_lacks_characters_is_refused(databases: Databases) -> None:
    database = await asyncpg.connect(databases.url)
    await database.execute("CREATE DATABASE narrow ENCODING 'LATIN1' LOCALE 'C' TEMPLATE template0")
    narrow = await asyncpg.connect(url := at(databases.url, "narrow"))
    with pytest.raises(WrongSchema, match=r"encoding LATIN1.*; make one with ENCODING 'UTF8'"):
        await migrate(narrow)
    await narrow.close()
    _, troubles = await find_troubles(url, durable=False)
    assert [each.fix for each in troubles] == ["make one with ENCODING 'UTF8', and name it in ledger.url"]
    await database.execute("DROP DATABASE narrow")
    await database.close()


async def _told(ledger: PostgresLedger) -> list[Any]:
    counts = await ledger.count_lanes(TaskQuery())
    kept = await ledger.tenant_sizes([""])  # what retention goes by
    return [counts.lanes, counts.by_agent, await ledger.find(TaskQuery(limit=200)), kept]


async def _lower(connection: asyncpg.Connection[Any]) -> None:
    """As level 1 left the database."""
    for level in ("level_2", "level_5"):
        for name in re.findall(r"CREATE INDEX (\w+)", text(level)):
            await connection.execute(f"DROP INDEX IF EXISTS {name}")
    for table, columns in zip(("live", "tasks"), COLUMNS, strict=True):
        for each in columns:
            await connection.execute(f"ALTER TABLE {table} DROP {each}")
    await connection.execute("DROP FUNCTION readable")
    for undo in UNDONE.values():
        await connection.execute(undo)
    await connection.execute(
        "CREATE INDEX tasks_by_context ON tasks (recipient, context_id, updated_at_ms, no) WHERE tenant IS NOT NULL"
    )
    await connection.execute("DELETE FROM lane_counts WHERE kind IN ('lane', 'kept')")
    await connection.execute("UPDATE ledger_level SET level = 1")
