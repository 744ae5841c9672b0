"""The fast path: what is decided in memory and written by one statement, and what its gate finds."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from itertools import chain, combinations
from typing import Final

import asyncpg
import pytest

from covenant.ledger.machine.identity_commands import Enroll
from covenant.ledger.postgres.batch_rows import BatchStatement, encode_numbers, encode_texts
from covenant.ledger.postgres.connections import WRITER_SETTINGS
from covenant.ledger.postgres.postgres_ledger import PostgresLedger
from covenant.ledger.postgres.queue_head import LAG_S, LOOK_S, LOWEST, Floors
from covenant.ledger.postgres.sql import statement
from covenant.model.grant import send_actions
from tests.ledger_contract.driver import LedgerDriver
from tests.ledger_contract.grants import give, sending
from tests.ledger_contract.postgres_engine import PostgresEngine
from tests.ledger_contract.postgres_server import Databases, databases
from tests.ledger_contract.samples import ALICE, BOB, CAROL, OPERATOR, make_grant, make_identity, make_task, ok, task_id
from tests.waits import BOUND_S

__all__ = ["databases"]

HOT: Final = ("live", "queue", "results", "requests")
PARTS: Final = ("held", "taken", "drained", "moved_live", "gone_live", "left_queue", "left_results")


@pytest.fixture
async def engine(databases: Databases) -> AsyncIterator[PostgresEngine]:
    url = await databases.borrow()
    engine = PostgresEngine(url)
    yield engine
    await engine.close()
    await databases.give_back(url)


@pytest.fixture
async def a(engine: PostgresEngine) -> LedgerDriver:
    return LedgerDriver(await engine.join("a"), engine.clock)


@pytest.fixture
async def b(engine: PostgresEngine, a: LedgerDriver) -> LedgerDriver:
    return LedgerDriver(await engine.join("b"), engine.clock)


def fast(driver: LedgerDriver) -> int:
    assert isinstance(driver.ledger, PostgresLedger)
    return driver.ledger._writer.fast


async def test_each_step_of_a_mailbox_is_one_statement(a: LedgerDriver) -> None:
    await a.send(make_task(0))  # the first batch of a node learns where it stands
    await a.take()
    before = fast(a)
    await a.send(make_task(1))
    (leased,) = await a.take()
    await a.finish(leased, ok(leased.task.id))
    (drained,) = await a.drain()
    assert (leased.task.id, drained.task_id) == (task_id(1), task_id(1))
    assert fast(a) - before == 4


async def test_what_another_node_has_taken_is_not_taken_again(a: LedgerDriver, b: LedgerDriver) -> None:
    await a.send(make_task(0))
    await a.send_all([make_task(number) for number in range(1, 4)])
    assert [leased.task.id for leased in await b.take(count=2)] == [task_id(0), task_id(1)]
    assert [leased.task.id for leased in await a.take(count=2)] == [task_id(2), task_id(3)]
    assert not await a.take()


async def test_a_queue_is_served_in_the_order_in_which_two_nodes_were_asked(a: LedgerDriver, b: LedgerDriver) -> None:
    for number in range(12):
        await (a, b)[number % 2].send(make_task(number))
    taken = [leased.task.id for _ in range(6) for driver in (a, b) for leased in await driver.take()]
    assert taken == [task_id(number) for number in range(12)]


async def test_a_node_that_hears_nothing_takes_nothing_before_what_stands_first(
    a: LedgerDriver, b: LedgerDriver
) -> None:
    assert isinstance(a.ledger, PostgresLedger)
    await a.send(make_task(0))
    async with a.ledger._membership._busy:  # no news of the other node are read
        await b.send(make_task(1))
        await a.send(make_task(2))
        leases = [await a.take_one() for _ in range(3)]
        assert [leased.task.id for leased in leases] == [task_id(number) for number in range(3)]
        for number, leased in enumerate(leases):
            await (a, b)[number % 2].finish(leased, ok(leased.task.id))
        drained = [result.task_id for _ in range(3) for result in await a.drain()]
    assert drained == [task_id(number) for number in range(3)]


async def test_results_are_drained_in_order_and_once_at_two_nodes(a: LedgerDriver, b: LedgerDriver) -> None:
    for number in range(8):
        await a.send(make_task(number))
        (leased,) = await a.take()
        await (a, b)[number % 2].finish(leased, ok(leased.task.id))
    drained = [result.task_id for _ in range(4) for driver in (a, b) for result in await driver.drain()]
    assert drained == [task_id(number) for number in range(8)]


async def test_a_task_that_is_sent_twice_is_accepted_once_also_by_one_statement(a: LedgerDriver) -> None:
    await a.send(make_task(0))
    await asyncio.gather(*(a.send(make_task(1)) for _ in range(5)))
    assert [leased.task.id for leased in await a.take(count=10)] == [task_id(0), task_id(1)]


async def test_a_batch_that_is_not_let_through_leaves_no_gap_in_the_audit(a: LedgerDriver, b: LedgerDriver) -> None:
    assert isinstance(a.ledger, PostgresLedger)
    assert isinstance(b.ledger, PostgresLedger)
    await give(a, make_grant(ALICE, send_actions(BOB)[0]))
    await a.send(make_task(0), access=sending(make_task(0)))
    before = a.ledger._writer.conflicts
    async with a.ledger._membership._busy:  # it does not hear that a register was changed
        enrolling = asyncio.create_task(b.ledger.commit(Enroll(by=OPERATOR, identity=make_identity(CAROL))))
        await asyncio.wait_for(_enrolled(b.ledger), BOUND_S)
        await a.send(make_task(1), access=sending(make_task(1)))
    await enrolling
    assert a.ledger._writer.conflicts > before
    await a.check_audit()


async def _enrolled(ledger: PostgresLedger) -> None:
    while True:
        if ledger.identity(make_identity(CAROL).token_sha256) is not None:
            return
        await asyncio.sleep(0.005)


async def test_large_tasks_are_written_in_batches_of_bounded_size(a: LedgerDriver) -> None:
    await a.send(make_task(0))
    assert isinstance(a.ledger, PostgresLedger)
    before = a.ledger._writer.seq
    large = [make_task(number, intent_text="x" * 900_000) for number in range(1, 25)]
    await a.send_all(large)
    assert a.ledger._writer.seq - before >= 3
    assert len(await a.take(count=1)) == 1


async def test_no_plan_walks_a_table_that_a_vacuum_found_empty(engine: PostgresEngine, a: LedgerDriver) -> None:
    await a.send(make_task(0))
    connection = await asyncpg.connect(engine.url, server_settings=WRITER_SETTINGS)
    try:
        for table in HOT:
            await connection.execute(f"DELETE FROM {table}")
            await connection.execute(f"VACUUM ANALYZE {table}")
        every = chain.from_iterable(combinations(PARTS, count) for count in range(1, len(PARTS) + 1))
        texts = [BatchStatement(parts).text for parts in every if "held" in parts or len(parts) == 1]
        texts += [statement("load", name).text for name in ("live", "queue", "results", "requests")]
        for text in texts:
            plan = await _generic_plan(connection, text)
            for at, line in enumerate(plan):
                if any(f" on {table} " in f"{line} " for table in HOT) and "Scan" in line:
                    assert "Index Cond" in plan[at + 1], "\n".join(plan)
    finally:
        await connection.close()


async def _generic_plan(connection: asyncpg.Connection[asyncpg.Record], text: str) -> list[str]:
    await connection.execute(f"PREPARE planned AS {text}")
    values = ", ".join(["NULL"] * len(set(re.findall(r"\$\d+", text))))
    rows = await connection.fetch(f"EXPLAIN (COSTS OFF) EXECUTE planned ({values})")
    await connection.execute("DEALLOCATE planned")
    return [row[0] for row in rows]


@pytest.mark.parametrize(
    "texts",
    [
        ["a", "b"],
        ["", 'say "so"', "back\\slash", "a,b", "{}", "NULL", "ü\n\t", "\x01\x02"],
        [None, "NULL", None, ""],
        [None],
        [],
    ],
)
async def test_texts_reach_the_database_as_they_are(databases: Databases, texts: list[str | None]) -> None:
    connection = await asyncpg.connect(databases.url)
    try:
        assert await connection.fetchval("SELECT $1::text::text[]", encode_texts(texts)) == texts
    finally:
        await connection.close()


async def test_numbers_reach_the_database_as_they_are(databases: Databases) -> None:
    connection = await asyncpg.connect(databases.url)
    numbers, truths = [1, -(1 << 63), None, (1 << 63) - 1], [True, None, False]
    try:
        assert await connection.fetchval("SELECT $1::text::bigint[]", encode_numbers(list(numbers))) == numbers
        assert await connection.fetchval("SELECT $1::text::boolean[]", encode_numbers(list(truths))) == truths
        assert await connection.fetchval("SELECT $1::text::bigint[]", encode_numbers([])) == []
    finally:
        await connection.close()


def test_a_queue_is_read_from_where_it_began_a_while_ago() -> None:
    now_s = 100.0
    floors = Floors(lambda: now_s)
    floors.saw(BOB.pubkey, 7)
    assert floors.at(BOB.pubkey) == LOWEST  # somebody may be writing something that stands before it
    now_s += LAG_S
    assert floors.at(BOB.pubkey) == 7
    floors.saw(BOB.pubkey, 3)
    assert floors.at(BOB.pubkey) == 3


def test_a_task_with_a_priority_is_read_although_it_stands_below_the_floor() -> None:
    now_s = 100.0
    floors = Floors(lambda: now_s)
    floors.saw(BOB.pubkey, 7)
    now_s += LAG_S
    assert floors.at(BOB.pubkey) == 7
    floors.entered([(BOB.pubkey, -5), (BOB.pubkey, 9)])
    assert floors.at(BOB.pubkey) == -5


def test_all_of_a_queue_is_read_once_a_second() -> None:
    now_s = 100.0
    floors = Floors(lambda: now_s)
    floors.saw(BOB.pubkey, 7)
    now_s += LOOK_S
    assert floors.look(BOB.pubkey) == LOWEST
    assert floors.look(BOB.pubkey) == 7
