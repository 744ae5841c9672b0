"""The life of a node on PostgreSQL: fenced, cut off, replaced, rolled back; and how it comes back as a new run."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final

import asyncpg
import pytest

from covenant.ledger.postgres import nodes
from covenant.ledger.postgres.database_admin import mark_restored
from covenant.ledger.postgres.postgres_ledger import PostgresLedger
from covenant.model.errors import Unavailable
from covenant.model.ids import TaskId
from tests.ledger_contract.driver import LedgerDriver, refused
from tests.ledger_contract.postgres_engine import PostgresEngine
from tests.ledger_contract.postgres_proxy import proxy_before
from tests.ledger_contract.postgres_server import Databases, databases
from tests.ledger_contract.samples import CAROL, make_task, ok, task_id
from tests.waits import BOUND_S

__all__ = ["databases"]

LEASE_MS: Final = 1_500


@pytest.fixture
async def engine(databases: Databases) -> AsyncIterator[PostgresEngine]:
    url = await databases.borrow()
    engine = PostgresEngine(url, lease_ms=LEASE_MS)
    yield engine
    await engine.close()
    await databases.give_back(url)


@pytest.fixture
async def a(engine: PostgresEngine) -> LedgerDriver:
    return LedgerDriver(await engine.join("a"), engine.clock)


@pytest.fixture
async def b(engine: PostgresEngine, a: LedgerDriver) -> LedgerDriver:
    return LedgerDriver(await engine.join("b"), engine.clock)


async def until(is_so: Callable[[], bool | Awaitable[bool]]) -> None:
    async with asyncio.timeout(BOUND_S):
        while True:
            answer = is_so()
            if answer if isinstance(answer, bool) else await answer:
                return
            await asyncio.sleep(0.01)


async def execute(engine: PostgresEngine, sql: str, *values: Any) -> None:
    connection = await asyncpg.connect(engine.url)
    try:
        await connection.execute(sql, *values)
    finally:
        await connection.close()


def membership(driver: LedgerDriver) -> nodes.Membership:
    assert isinstance(driver.ledger, PostgresLedger)
    return driver.ledger._membership


async def serves(driver: LedgerDriver, number: int) -> bool:
    try:
        await driver.send(make_task(number))
    except Unavailable:
        return False
    return True


async def test_a_node_that_stood_still_finds_itself_fenced_and_goes_on_as_a_new_run(
    engine: PostgresEngine, a: LedgerDriver, b: LedgerDriver
) -> None:
    lost: list[TaskId] = []
    a.ledger.on_lost(lost.append)
    leased = await a.taken_here(make_task(1))
    before = a.ledger.boot
    async with membership(a)._busy:
        await until(lambda: not b.ledger.alive("a", before))
        with refused("database_unavailable", 503):
            await a.send(make_task(2))
        with pytest.raises(Unavailable):
            await a.finish(leased, ok(task_id(1)))
        assert (await b.show(task_id(1))).holder_lost
    await until(lambda: a.ledger.boot != before)
    await until(lambda: serves(a, 3))
    await until(lambda: lost == [task_id(1)])
    assert await b.queued_ids() == [task_id(3)]
    assert (await b.show(task_id(1))).holder_lost, "only a repair begins it again"
    await until(lambda: b.ledger.alive("a", a.ledger.boot))
    again = await a.taken_here(make_task(4, recipient=CAROL))
    assert (again.lease.boot, (await b.show(task_id(4))).holder_lost) == (a.ledger.boot, False)
    assert (await a.ledger.counts()).failure is None


async def test_a_node_that_stood_still_as_a_whole_takes_nothing_before_it_has_looked_again(a: LedgerDriver) -> None:
    await a.send(make_task(1))
    time.sleep(LEASE_MS / 1_000)  # noqa: ASYNC251  (the fault itself: nothing of this process runs)
    with refused("database_unavailable", 503):
        await a.send(make_task(2))
    await until(lambda: serves(a, 3))


async def test_a_node_without_the_database_takes_nothing_new_and_comes_back(
    engine: PostgresEngine,
) -> None:
    async with proxy_before(engine.url) as proxy:
        far = PostgresEngine(proxy.url, lease_ms=LEASE_MS)
        a = LedgerDriver(await far.join("a"), engine.clock)
        b = LedgerDriver(await engine.join("b"), engine.clock)
        await a.send(make_task(1))
        before = a.ledger.boot
        proxy.silence()
        await until(lambda: membership(a).trouble is not None)
        await until(lambda: not b.ledger.alive("a", before))
        with refused("database_unavailable", 503):
            await a.send(make_task(2))
        proxy.mend()
        await until(lambda: serves(a, 3))
        assert a.ledger.boot != before
        assert await b.queued_ids() == [task_id(1), task_id(3)]
        await far.close()


async def test_the_loss_of_a_node_is_shown_within_its_lease_and_a_beat(
    engine: PostgresEngine, a: LedgerDriver, b: LedgerDriver
) -> None:
    """By the database's own clock: from the last sign of life to the moment it was declared lost."""
    await a.taken_here(make_task(1))
    await engine.kill(a.ledger)  # type: ignore[arg-type]
    await until(lambda: not b.ledger.alive("a", a.ledger.boot))
    connection = await asyncpg.connect(engine.url)
    try:
        took_ms = await connection.fetchval("SELECT lost_at_ms - seen_ms FROM nodes WHERE node = 'a'")
    finally:
        await connection.close()
    # A beat is a third of a lease; a second more for a machine that does other work, too.
    assert LEASE_MS <= took_ms <= LEASE_MS * 4 / 3 + 1_000
    assert (await b.show(task_id(1))).holder_lost


async def test_a_second_daemon_under_the_same_name_stays_and_the_first_one_says_so(
    engine: PostgresEngine, a: LedgerDriver, b: LedgerDriver
) -> None:
    again = LedgerDriver(await engine.join("a"), engine.clock)
    await until(lambda: membership(a).refusing is not None)
    with refused("ledger_fenced", 503):
        await a.send(make_task(1))
    assert "daemon.node" in ((await a.ledger.counts()).failure or "")
    await again.send(make_task(2))
    assert await b.queued_ids() == [task_id(2)]


async def test_a_database_that_has_lost_commits_is_refused_until_somebody_accepts_it(
    engine: PostgresEngine, a: LedgerDriver, b: LedgerDriver
) -> None:
    for number in range(5):
        await a.send(make_task(number))
    await until(lambda: membership(b)._cursors[membership(a)._joined.writer] == membership(a).written)
    boots = (a.ledger.boot, b.ledger.boot)
    # As a standby that had not been sent the last batches: their rows are not there, and the writer's row is behind.
    await execute(engine, "UPDATE writers SET seq = seq - 3 WHERE node = 'a'")
    await until(lambda: all(membership(driver).refusing is not None for driver in (a, b)))
    for driver in (a, b):
        with refused("ledger_rolled_back", 503):
            await driver.send(make_task(9))
        assert "covenant ledger restored" in ((await driver.ledger.counts()).failure or "")
    await execute(engine, "DELETE FROM news")
    assert await mark_restored(engine.url) == 2
    await until(lambda: serves(a, 10))
    await until(lambda: serves(b, 11))
    assert a.ledger.boot not in boots
    assert b.ledger.boot not in boots
    assert [task_id(10), task_id(11)] == (await a.queued_ids())[-2:]


async def test_a_privilege_that_was_taken_away_or_a_table_that_was_altered_is_said_and_costs_nothing(
    engine: PostgresEngine, a: LedgerDriver
) -> None:
    await a.send(make_task(1))
    await execute(engine, "ALTER TABLE events RENAME COLUMN body TO words")
    with refused("database_refused", 503):
        await a.send(make_task(2))
    await execute(engine, "ALTER TABLE events RENAME COLUMN words TO body")
    await until(lambda: serves(a, 2))
    assert await a.queued_ids() == [task_id(1), task_id(2)]


async def test_a_commit_whose_answer_is_lost_is_found_out(engine: PostgresEngine) -> None:
    """Under the same id it is repeated; whether it had happened or not, it is there once."""
    async with proxy_before(engine.url) as proxy:
        far = PostgresEngine(proxy.url)
        a = LedgerDriver(await far.join("a"), engine.clock)
        await a.send(make_task(0))
        for number in range(1, 20):
            proxy.answers_lost = True
            sending = asyncio.ensure_future(a.send(make_task(number)))
            await asyncio.sleep(0.01 * (number % 4))  # wherever it is by then
            proxy.answers_lost = False
            proxy.cut()
            try:
                await sending
            except Unavailable:
                await until(lambda: serves(a, number))  # noqa: B023  (awaited in this round)
        assert await a.queued_ids() == [task_id(number) for number in range(20)]
        await far.close()


async def test_one_node_leads_and_another_one_when_it_is_lost(
    engine: PostgresEngine, a: LedgerDriver, b: LedgerDriver
) -> None:
    def leaders() -> list[str]:
        return [driver.ledger.node for driver in (a, b) if driver.ledger.leads("pushes")]

    await until(lambda: bool(leaders()))
    (first,) = leaders()
    leader, other = (a, b) if first == "a" else (b, a)
    async with membership(leader)._busy:
        await until(lambda: other.ledger.leads("pushes"))
        assert not leader.ledger.leads("pushes"), "it had stopped before the other one began"
    await until(lambda: membership(leader).refusing is None and membership(leader).silent_ms < LEASE_MS / 2)
    assert leaders() == [other.ledger.node]
