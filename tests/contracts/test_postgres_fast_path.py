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
from covenant.ledger.postgres.batch_statement import (
    BatchStatement,
    array_sql,
    choose_statement,
    encode_numbers,
    encode_values,
    join_texts,
)
from covenant.ledger.postgres.connections import WRITER_SETTINGS
from covenant.ledger.postgres.counters import COUNTED_TOGETHER, counter_number
from covenant.ledger.postgres.postgres_ledger import PostgresLedger
from covenant.ledger.postgres.queue_head import LAG_S, LOOK_S, LOWEST, Floors
from covenant.ledger.postgres.sql import Statement, statement
from covenant.model.grant import send_actions
from covenant.model.task_event import StatusUpdate
from tests.contracts.test_postgres_liveness import membership, until
from tests.ledger_contract.driver import LedgerDriver
from tests.ledger_contract.grants import give, sending
from tests.ledger_contract.postgres_engine import PostgresEngine
from tests.ledger_contract.postgres_server import Databases
from tests.ledger_contract.push import put
from tests.ledger_contract.samples import ALICE, BOB, CAROL, OPERATOR, make_grant, make_identity, make_task, ok, task_id
from tests.ledger_contract.watches import advance
from tests.waits import BOUND_S

HOT: Final = ("live", "queue", "results", "requests", "counted")
PARTS: Final = ("held", "taken", "drained", "moved_live", "gone_live", "left_queue", "left_results")


@pytest.fixture
async def engine(databases: Databases) -> AsyncIterator[PostgresEngine]:
    url = await databases.borrow()
    # A busy machine must not make the heartbeat drop connections that a test uses.
    engine = PostgresEngine(url, lease_ms=60_000)
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


async def test_a_push_configuration_ends_with_its_task_at_a_node_that_did_not_know_of_it(
    a: LedgerDriver, b: LedgerDriver
) -> None:
    assert isinstance(a.ledger, PostgresLedger)
    await a.send(make_task(0))
    await a.send(make_task(1))
    leased = await a.take(count=2)
    async with a.ledger._membership._busy:  # no news of the other node are read
        await put(b, task_id(1))
        await a.finish(leased[1], ok(task_id(1)))
        (push,) = await a.ledger.pushes(task_id(1))
    assert push.ended is not None


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


async def test_counts_that_are_put_together_stay_what_they_are(engine: PostgresEngine, a: LedgerDriver) -> None:
    assert isinstance(a.ledger, PostgresLedger)
    for number in range(5):
        await a.send(make_task(number))
    seq, connection = a.ledger._writer.seq, await asyncpg.connect(engine.url)
    try:
        before = await connection.fetch(statement("nodes", "counts").text)
        merge, writer = statement("nodes", "merge_counts"), a.ledger._writer._joined.writer
        numbers = {"first_counter": counter_number(writer, 0), "counter": counter_number(writer, seq + 1_000)}
        await connection.execute(merge.text, *merge.values({"writer": writer, **numbers}))
        assert sorted(await connection.fetch(statement("nodes", "counts").text)) == sorted(before)
        assert await connection.fetchval("SELECT count(DISTINCT writer) FROM lane_counts WHERE n <> 0") == 1
    finally:
        await connection.close()
    assert len(await a.take(count=9)) == 5


async def test_what_batches_have_counted_is_added_together_after_some_of_them(
    engine: PostgresEngine, a: LedgerDriver
) -> None:
    assert isinstance(a.ledger, PostgresLedger)
    number, connection = 0, await asyncpg.connect(engine.url)
    try:
        while number <= COUNTED_TOGETHER:
            await a.send(make_task(number))
            number += 1
        assert 0 < await connection.fetchval("SELECT count(*) FROM counted") <= COUNTED_TOGETHER
        assert await connection.fetchval("SELECT sum(n) FROM lane_counts WHERE kind = 'queued'") > 0
        assert await connection.fetchval("SELECT sum(n) FROM counts WHERE kind = 'queued'") == number
    finally:
        await connection.close()


async def test_counts_are_rows_of_their_own_while_a_daemon_lives_that_knows_no_others(
    engine: PostgresEngine, a: LedgerDriver
) -> None:
    assert isinstance(a.ledger, PostgresLedger)
    await a.send(make_task(0))
    connection = await asyncpg.connect(engine.url)
    try:
        await connection.execute(
            "INSERT INTO nodes (node, boot, seen_ms, until_ms, level) VALUES ('old', 'old', 0, 1::bigint << 60, 12)"
        )
        await until(lambda: membership(a).level == 12)
        before = await connection.fetchval("SELECT count(*) FROM counted")
        await a.send(make_task(1))
        assert await connection.fetchval("SELECT count(*) FROM counted") == before
        assert await connection.fetchval("SELECT sum(n) FROM lane_counts WHERE kind = 'queued'") == 1
        assert await connection.fetchval("SELECT sum(n) FROM counts WHERE kind = 'queued'") == 2
    finally:
        await connection.close()


async def test_large_tasks_are_written_in_batches_of_bounded_size(a: LedgerDriver) -> None:
    await a.send(make_task(0))
    assert isinstance(a.ledger, PostgresLedger)
    before = a.ledger._writer.seq
    large = [make_task(number, intent_text="x" * 900_000) for number in range(1, 25)]
    await a.send_all(large)
    assert a.ledger._writer.seq - before >= 3
    assert len(await a.take(count=1)) == 1


async def test_a_command_with_many_events_is_written_whole(a: LedgerDriver) -> None:
    await a.send(make_task(0))
    (leased,) = await a.take()
    said = [str(number) for number in range(700)]
    await advance(a.ledger, leased, *(StatusUpdate(each) for each in said))
    steps = await a.ledger.steps(leased.task.id, 0, 1_000)
    assert [step.what.text for step in steps if isinstance(step.what, StatusUpdate)] == said


def test_long_arrays_are_not_read_by_number() -> None:
    """To find the n-th text, PostgreSQL walks over those before it."""
    rows = {name: [0] * 700 for name in ("e_no", "e_n", "e_generation", "e_ts_ms", "e_kind", "e_body")}
    assert "unnest(" in choose_statement(rows, single=False).text
    assert "unnest(" not in choose_statement({name: values[:7] for name, values in rows.items()}, single=False).text


async def test_no_plan_walks_a_table_that_a_vacuum_found_empty(engine: PostgresEngine, a: LedgerDriver) -> None:
    await a.send(make_task(0))
    connection = await asyncpg.connect(engine.url, server_settings=WRITER_SETTINGS)
    try:
        for table in HOT:
            await connection.execute(f"DELETE FROM {table}")
            await connection.execute(f"VACUUM ANALYZE {table}")
        every = chain.from_iterable(combinations(PARTS, count) for count in range(1, len(PARTS) + 1))
        wanted = [parts for parts in every if "held" in parts or len(parts) == 1] + [("counted", "added_counts")]
        texts = [BatchStatement(parts, single=single).text for parts in wanted for single in (False, True)]
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
        [""],
        ["", ""],
        ["\x1f", "\x1e", None, "\x1e\x1f", ""],
        ["\x1e", "a"],
        ["a\x1f"],
    ],
)
async def test_texts_reach_the_database_as_they_are(databases: Databases, texts: list[str | None]) -> None:
    connection = await asyncpg.connect(databases.url)
    asked = Statement(f"SELECT {array_sql('texts', 'text')}")
    try:
        encoders = [(name, join_texts if name == "texts" else None) for name in asked.names]
        given = encode_values({"texts": texts}, encoders)
        assert await connection.fetchval(asked.text, *given) == texts
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
    floors.note_first(BOB.pubkey, 7)
    assert floors.at(BOB.pubkey) == LOWEST  # somebody may be writing something that stands before it
    now_s += LAG_S
    assert floors.at(BOB.pubkey) == 7
    floors.note_first(BOB.pubkey, 3)
    assert floors.at(BOB.pubkey) == 3


def test_a_task_with_a_priority_is_read_although_it_stands_below_the_floor() -> None:
    now_s = 100.0
    floors = Floors(lambda: now_s)
    floors.note_first(BOB.pubkey, 7)
    now_s += LAG_S
    assert floors.at(BOB.pubkey) == 7
    floors.note_added([(BOB.pubkey, -5), (BOB.pubkey, 9)])
    assert floors.at(BOB.pubkey) == -5


def test_all_of_a_queue_is_read_once_a_second() -> None:
    now_s = 100.0
    floors = Floors(lambda: now_s)
    floors.note_first(BOB.pubkey, 7)
    now_s += LOOK_S
    assert floors.look(BOB.pubkey) == LOWEST
    assert floors.look(BOB.pubkey) == 7


async def test_a_command_that_the_database_refuses_fails_alone(engine: PostgresEngine, a: LedgerDriver) -> None:
    await a.send(make_task(0))
    connection = await asyncpg.connect(engine.url)
    try:
        await connection.execute(
            f"""
            CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$
            BEGIN
                IF NEW.task_id = '{task_id(7)}' THEN RAISE data_exception; END IF;
                RETURN NEW;
            END $$;
            CREATE TRIGGER refuse BEFORE INSERT ON live FOR EACH ROW EXECUTE FUNCTION refuse();
            """
        )
        answers = await asyncio.gather(*(a.send(make_task(each)) for each in range(1, 20)), return_exceptions=True)
        assert [type(each) for each in answers if isinstance(each, Exception)] == [asyncpg.DataError]
        assert isinstance(answers[6], asyncpg.DataError)
    finally:
        await connection.execute("DROP TRIGGER refuse ON live; DROP FUNCTION refuse")
        await connection.close()
    await a.send(make_task(7))
    assert sorted(await a.queued_ids()) == sorted(task_id(each) for each in range(20))
    assert isinstance(a.ledger, PostgresLedger)
    before = a.ledger._writer.seq
    await asyncio.gather(*(a.cancel(task_id(each)) for each in range(20)))
    assert a.ledger._writer.seq - before <= 6, "as many go together again as before"


async def test_a_record_that_the_database_refuses_takes_later_records_of_its_job_with_it(
    engine: PostgresEngine, a: LedgerDriver
) -> None:
    """The batch is divided, and the later records come into another part of it, or wait behind it."""
    await a.send(make_task(0))
    await a.send(make_task(1))
    refused, other = await a.take(count=2)
    connection = await asyncpg.connect(engine.url)
    try:
        await connection.execute(
            """
            CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$
            BEGIN
                IF NEW.body LIKE '%refused%' THEN RAISE data_exception; END IF;
                RETURN NEW;
            END $$;
            CREATE TRIGGER refuse BEFORE INSERT ON events FOR EACH ROW EXECUTE FUNCTION refuse();
            """
        )
        words = [(refused, "refused"), *((other, str(number)) for number in range(4)), (refused, "later")]
        answers = await asyncio.gather(
            *(advance(a.ledger, leased, StatusUpdate(word)) for leased, word in words), return_exceptions=True
        )
        assert [isinstance(each, asyncpg.DataError) for each in answers] == [True, *(False,) * 4, True]
        await advance(a.ledger, refused, StatusUpdate("after it"))
    finally:
        await connection.execute("DROP TRIGGER refuse ON events; DROP FUNCTION refuse")
        await connection.close()
    for leased, texts in ((refused, ["after it"]), (other, ["0", "1", "2", "3"])):
        steps = await a.ledger.steps(leased.task.id, 2, 10)
        assert [step.what.text for step in steps if isinstance(step.what, StatusUpdate)] == texts
