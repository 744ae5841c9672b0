"""Two ledgers behind a transaction pooler: they have fewer connections than clients, and no session of their own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Final

import asyncpg
import pytest

from covenant.ledger.postgres.database_admin import find_troubles, mark_restored, migrate_database
from covenant.ledger.postgres.migrations import LEVEL
from covenant.ledger.postgres.open_postgres import DatabaseUnusable, open_postgres_ledger
from covenant.ledger.postgres.postgres_ledger import PostgresLedger
from covenant.model.ids import TaskId
from covenant.model.task_event import Ended
from tests.ledger_contract.driver import LedgerDriver
from tests.ledger_contract.leases import LeaseSuite
from tests.ledger_contract.postgres_engine import PostgresEngine
from tests.ledger_contract.postgres_server import Databases
from tests.ledger_contract.results import ResultSuite
from tests.ledger_contract.samples import OPERATOR, make_task, ok, task_id
from tests.ledger_contract.transaction_pooler import TransactionPooler, pooler_before
from tests.ledger_contract.watches import seen

BACKENDS: Final = 3
CLIENTS: Final = 8
TASKS: Final = 120


@pytest.fixture
async def pooler(databases: Databases) -> AsyncIterator[TransactionPooler]:
    url = await databases.borrow()
    async with pooler_before(url, BACKENDS) as pooler:
        yield pooler
    await databases.give_back(url)


@pytest.fixture
async def engine(pooler: TransactionPooler) -> AsyncIterator[PostgresEngine]:
    engine = PostgresEngine(pooler.url, pooler=True)
    yield engine
    await engine.close()


@pytest.mark.matrix
class TestLeasesBehindAPooler(LeaseSuite):
    @pytest.fixture
    def engine(self, engine: PostgresEngine) -> PostgresEngine:
        return engine


@pytest.mark.matrix
class TestResultsBehindAPooler(ResultSuite):
    @pytest.fixture
    def engine(self, engine: PostgresEngine) -> PostgresEngine:
        return engine


async def test_two_ledgers_share_the_few_connections_of_a_pooler(
    engine: PostgresEngine, pooler: TransactionPooler
) -> None:
    a, b = [LedgerDriver(await engine.join(name), engine.clock) for name in ("a", "b")]
    taken: list[TaskId] = []

    async def send(driver: LedgerDriver, numbers: range) -> None:
        for number in numbers:
            await driver.send(make_task(number))

    async def work(driver: LedgerDriver) -> None:
        while len(taken) < TASKS:
            for leased in await driver.take(count=5):
                taken.append(leased.task.id)
                await driver.finish(leased, ok(leased.task.id))

    with b.ledger.watch(task_id(1)) as watch:
        async with asyncio.TaskGroup() as clients:
            for first in range(CLIENTS):
                clients.create_task(send((a, b)[first % 2], range(first, TASKS, CLIENTS)))
                clients.create_task(work((a, b)[first // 2 % 2]))
        assert isinstance((await seen(watch))[-1].what, Ended)
    assert sorted(taken) == sorted(task_id(number) for number in range(TASKS))
    drained = [result.task_id for _ in range(TASKS // 10) for result in await b.drain(count=10)]
    assert sorted(drained) == sorted(taken)
    assert (await a.ledger.audit_verify()).valid
    assert pooler.handed_out > TASKS
    rows = await _of_database(a, "SELECT query FROM pg_stat_activity WHERE datname = current_database()")
    assert len(rows) == BACKENDS
    assert not [row for row in rows if row["query"].startswith("LISTEN")]


async def _of_database(driver: LedgerDriver, text: str) -> list[Any]:
    assert isinstance(driver.ledger, PostgresLedger)
    async with driver.ledger._connections.transaction() as connection:
        return list(await connection.fetch(text))


async def test_a_session_with_settings_is_refused_by_the_pooler(pooler: TransactionPooler) -> None:
    """As poolers do: otherwise nothing would be shown by what works behind this one."""
    with pytest.raises(asyncpg.PostgresConnectionError, match="unsupported startup parameter"):
        await asyncpg.connect(pooler.url, server_settings={"jit": "off"})
    with pytest.raises(DatabaseUnusable, match=r"set ledger\.pooler = true"):
        await open_postgres_ledger(pooler.url, clock=lambda: 0, durability="os")


async def test_what_an_operator_does_to_the_database_can_be_done_through_the_pooler(
    engine: PostgresEngine, pooler: TransactionPooler
) -> None:
    a = LedgerDriver(await engine.join("a"), engine.clock)
    await a.send(make_task(1))
    assert await migrate_database(pooler.url) == (LEVEL, LEVEL)
    assert await find_troubles(pooler.url, durable=False) == (LEVEL, [])
    assert await mark_restored(pooler.url, OPERATOR, 1_000, "a row") == 1
