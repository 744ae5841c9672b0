"""A database of an earlier level: opened, it has the indexes and counts of today."""

import re

import asyncpg

from covenant.ledger.contract.task_query import TaskQuery
from covenant.ledger.postgres.migrations import LEVEL, migrate
from covenant.ledger.postgres.sql import text
from tests.ledger_contract.driver import LedgerDriver
from tests.ledger_contract.postgres_engine import PostgresEngine
from tests.ledger_contract.postgres_server import Databases, databases
from tests.ledger_contract.searches import course

__all__ = ["databases"]

UNDONE = {3: "ALTER TABLE nodes DROP COLUMN started_ms", 4: "DROP TABLE secrets, singletons"}
"""How to take back what a later level brought."""


async def test_the_tasks_of_level_1_are_counted_by_lane_when_the_level_is_raised(databases: Databases) -> None:
    url = await databases.make()
    engine = PostgresEngine(url)
    ledger = await engine.open()
    await course(LedgerDriver(ledger, engine.clock))
    before = await ledger.count_lanes(TaskQuery())
    await engine.close()
    made = re.findall(r"CREATE INDEX (\w+)", text("level_2"))
    connection = await asyncpg.connect(url)
    try:
        for name in made:
            await connection.execute(f"DROP INDEX {name}")
        for undo in UNDONE.values():
            await connection.execute(undo)
        await connection.execute("DELETE FROM lane_counts WHERE kind = 'lane'")
        await connection.execute("UPDATE ledger_level SET level = 1")
        assert await migrate(connection) == 1
        found = await connection.fetch("SELECT indexname FROM pg_indexes WHERE schemaname = 'public'")
        assert {row["indexname"] for row in found} >= set(made)
        assert await connection.fetchval("SELECT level FROM ledger_level") == LEVEL
    finally:
        await connection.close()
    again = PostgresEngine(url)
    after = await (await again.open()).count_lanes(TaskQuery())
    await again.close()
    await databases.drop(url)
    assert (after.lanes, after.by_agent) == (before.lanes, before.by_agent)
