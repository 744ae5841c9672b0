"""The tables that tasks enter and leave are vacuumed by the daemons, and so stay small."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import asyncpg
import pytest

from covenant.ledger.postgres import hot_tables
from covenant.ledger.postgres.hot_tables import HotTables
from covenant.ledger.postgres.postgres_ledger import PostgresLedger
from tests.ledger_contract.driver import LedgerDriver
from tests.ledger_contract.postgres_engine import PostgresEngine
from tests.ledger_contract.postgres_server import Databases
from tests.ledger_contract.samples import make_task, ok

CHANGED = 200
BOUND_S = 60.0


@pytest.fixture
async def engine(databases: Databases, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[PostgresEngine]:
    monkeypatch.setattr(hot_tables, "CHANGED_MAX", CHANGED)
    monkeypatch.setattr(hot_tables, "PAUSE_FACTOR", 0)
    url = await databases.make()
    engine = PostgresEngine(url)
    yield engine
    await engine.close()
    await databases.drop(url)


@pytest.fixture
async def ledger(engine: PostgresEngine) -> PostgresLedger:
    ledger = await engine.open()
    connection = await asyncpg.connect(engine.url)
    await connection.execute("ALTER TABLE live SET (autovacuum_enabled = off)")
    await connection.close()
    return ledger


async def _finish(driver: LedgerDriver, first: int, count: int) -> None:
    for number in range(first, first + count):
        await driver.send(make_task(number))
        (leased,) = await driver.take()
        await driver.finish(leased, ok(leased.task.id))
        await driver.drain()


async def _rested(tables: HotTables) -> int:
    """The number of vacuums so far, when none is under way."""
    if tables._task is not None:
        await asyncio.wait_for(asyncio.shield(tables._task), BOUND_S)
    return tables.vacuums


async def test_finished_tasks_do_not_make_the_table_of_live_tasks_larger(
    engine: PostgresEngine, ledger: PostgresLedger
) -> None:
    driver = LedgerDriver(ledger, engine.clock)
    connection = await asyncpg.connect(engine.url)
    pages = []
    try:
        for part in range(4):
            for tenth in range(10):
                await _finish(driver, part * 1_000 + tenth * 20, 20)
                await _rested(ledger._hot_tables)
            pages.append(await connection.fetchval("SELECT pg_relation_size('live') / 8192"))
    finally:
        await connection.close()
    assert pages[-1] < 2 * pages[0], pages  # without a vacuum, four times as many


async def test_a_vacuum_does_not_wait_for_a_lock(engine: PostgresEngine, ledger: PostgresLedger) -> None:
    holder = await asyncpg.connect(engine.url)
    try:
        async with holder.transaction():
            await holder.execute("LOCK TABLE live, queue IN SHARE UPDATE EXCLUSIVE MODE")
            ledger._hot_tables.count(CHANGED)
            assert await _rested(ledger._hot_tables) == 1
    finally:
        await holder.close()


async def test_a_ledger_that_closes_does_not_wait_for_a_vacuum(engine: PostgresEngine, ledger: PostgresLedger) -> None:
    holder = await asyncpg.connect(engine.url)
    try:
        async with holder.transaction():
            await holder.execute("LOCK TABLE pg_class IN ACCESS EXCLUSIVE MODE")
            ledger._hot_tables.count(CHANGED)
            vacuum = ledger._hot_tables._task
            assert vacuum is not None
            await asyncio.sleep(0)
            await asyncio.wait_for(ledger._hot_tables.close(), BOUND_S)
            assert vacuum.cancelled()
    finally:
        await holder.close()


async def test_a_vacuum_is_followed_by_a_pause_that_is_longer_than_itself(
    ledger: PostgresLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While somebody holds a snapshot, a vacuum walks over everything and removes nothing."""
    tables = ledger._hot_tables
    monkeypatch.setattr(hot_tables, "PAUSE_FACTOR", 1_000_000)
    tables.count(CHANGED)
    assert await _rested(tables) == 1
    tables.count(CHANGED)
    assert await _rested(tables) == 1
    tables._begin_s = 0.0
    tables.count(1)
    assert await _rested(tables) == 2


async def test_compacting_vacuums_at_once(engine: PostgresEngine, ledger: PostgresLedger) -> None:
    connection = await asyncpg.connect(engine.url)
    try:
        before = await _sizes(connection)
        await _finish(LedgerDriver(ledger, engine.clock), 1, 3)
        await ledger.compact()
        assert {name for name, pages in (await _sizes(connection)).items() if pages > before[name]} >= {"live"}
    finally:
        await connection.close()


async def _sizes(connection: asyncpg.Connection[asyncpg.Record]) -> dict[str, int]:
    """The pages of each table's map of free room, which only a vacuum makes."""
    rows = await connection.fetch(
        "SELECT name, pg_relation_size(name::regclass, 'fsm') / 8192 AS pages FROM unnest($1::text[]) AS u (name)",
        list(hot_tables.ALL_TABLES),
    )
    return {row["name"]: row["pages"] for row in rows}
