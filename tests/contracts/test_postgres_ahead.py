"""What is decided on top of a batch that is being written: it waits for that batch, and is decided again if it fails.

A batch is held by a second connection that has the row of its writer. It is let go, cut off, or made to fail.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any, Final

import asyncpg
import pytest

from covenant.ledger.machine.commands import LeasedTask
from covenant.ledger.postgres.batch_writer import BatchWriter
from covenant.ledger.postgres.postgres_ledger import PostgresLedger
from covenant.model.errors import Refusal, Unavailable
from covenant.model.grant import send_actions
from covenant.model.settings import Limits
from tests.ledger_contract.driver import WAIT_MS, LedgerDriver, refused
from tests.ledger_contract.grants import give, sending
from tests.ledger_contract.postgres_engine import PostgresEngine
from tests.ledger_contract.postgres_server import Databases
from tests.ledger_contract.samples import ALICE, BOB, CAROL, make_grant, make_task, ok, task_id
from tests.waits import BOUND_S

LOOK_S: Final = 0.001
FAULT: Final = """
CREATE SEQUENCE attempts;
CREATE FUNCTION fail_first() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE attempt bigint := nextval('attempts');
BEGIN
    IF attempt <= {count} THEN RAISE unique_violation; END IF;
    IF attempt = {count} + 1 THEN PERFORM pg_advisory_xact_lock(1); END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER fail_first BEFORE INSERT ON news FOR EACH ROW EXECUTE FUNCTION fail_first();
"""


@pytest.fixture
async def engine(databases: Databases) -> AsyncIterator[PostgresEngine]:
    url = await databases.borrow()
    engine = PostgresEngine(url, lease_ms=60_000)
    yield engine
    await engine.close()
    await databases.give_back(url)


@pytest.fixture
async def a(engine: PostgresEngine) -> LedgerDriver:
    """It has written and taken: it knows where it stands, and keeps a place for what is decided ahead."""
    return await _ready(LedgerDriver(await engine.join("a"), engine.clock))


async def _ready(driver: LedgerDriver) -> LedgerDriver:
    await driver.send(make_task(90))
    (leased,) = await driver.take()
    _writer(driver).inputs.places.wanted = 2  # as after somebody has waited while a batch was written
    await driver.renew(leased)
    await driver.finish(leased, ok(leased.task.id))
    await driver.drain()
    return driver


def _ledger(driver: LedgerDriver) -> PostgresLedger:
    assert isinstance(driver.ledger, PostgresLedger)
    return driver.ledger


def _writer(driver: LedgerDriver) -> BatchWriter:
    return _ledger(driver)._writer


@asynccontextmanager
async def _held(engine: PostgresEngine) -> AsyncIterator[asyncpg.Connection[Any]]:
    """No batch is written here: somebody has the rows of the writers."""
    connection = await asyncpg.connect(engine.url)
    try:
        async with connection.transaction():
            await connection.fetch("SELECT FROM writers FOR UPDATE")
            yield connection
    finally:
        await connection.close()


async def _until(reached: Callable[[], bool | Awaitable[bool]]) -> None:
    async with asyncio.timeout(BOUND_S):
        while True:
            found = reached()
            if found if isinstance(found, bool) else await found:
                return
            await asyncio.sleep(LOOK_S)


async def _is_written(driver: LedgerDriver, *doing: Awaitable[Any]) -> list[asyncio.Task[Any]]:
    """These are a batch that is under way."""
    tasks = [asyncio.ensure_future(each) for each in doing]
    await _until(lambda: _writer(driver)._writing)
    return tasks


async def _is_decided_ahead(driver: LedgerDriver, *doing: Awaitable[Any]) -> list[asyncio.Task[Any]]:
    """These are decided on top of it."""
    tasks, before = [asyncio.ensure_future(each) for each in doing], _ahead(driver)
    await _until(lambda: _ahead(driver) - before == len(tasks))
    return tasks


def _ahead(driver: LedgerDriver) -> int:
    opened = _writer(driver)._open
    return len(opened.items) if opened is not None else 0


async def _send(driver: LedgerDriver, numbers: Iterable[int]) -> None:
    await asyncio.gather(*(driver.send(make_task(number)) for number in numbers))


async def _terminate_writer(connection: asyncpg.Connection[Any]) -> None:
    """The backend that waits for the rows of the writers."""
    await connection.execute("SELECT pg_stat_clear_snapshot()")
    ended = await connection.fetchval(
        "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity "
        "WHERE datname = current_database() AND pid <> pg_backend_pid() AND wait_event_type = 'Lock'"
    )
    assert ended == 1


async def _waits_for_a_lock(connection: asyncpg.Connection[Any]) -> None:
    """The batch has come as far as to where somebody holds it."""
    # A transaction sees the activity of one moment, unless it lets go of it.
    waiting = (
        "SELECT count(*) > 0 FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    )

    async def waits() -> bool:
        await connection.execute("SELECT pg_stat_clear_snapshot()")
        return bool(await connection.fetchval(waiting))

    await _until(waits)


async def _is_consistent(engine: PostgresEngine, driver: LedgerDriver) -> None:
    """A node that reads everything anew counts the same; the audit has no gap."""
    fresh = LedgerDriver(await engine.join("fresh"), engine.clock)
    here, there = _ledger(driver), _ledger(fresh)
    await here.durable()
    mine, stored = await here.counts(), await there.counts()
    for name in ("queued", "leased", "parked", "settled", "commits"):
        assert getattr(mine, name) == getattr(stored, name), name
    assert sorted(here._counters) == sorted(there._counters)
    await driver.check_audit()


async def test_what_is_sent_taken_and_finished_meanwhile_is_the_next_batch(
    engine: PostgresEngine, a: LedgerDriver
) -> None:
    first = await a.taken(make_task(0))
    before = _writer(a).fast
    async with _held(engine):
        sent = await _is_written(a, _send(a, range(1, 4)))
        done = await _is_decided_ahead(
            a, a.take(count=2), a.finish(first, ok(first.task.id)), a.send(make_task(4)), a.take(count=5)
        )
    await asyncio.gather(*sent)
    taken, _, _, rest = await asyncio.gather(*done)
    assert [leased.task.id for leased in (*taken, *rest)] == [task_id(number) for number in range(1, 5)]
    assert _writer(a).fast - before == 2
    assert [result.task_id for result in await a.drain()] == [first.task.id]
    await _is_consistent(engine, a)


async def test_nobody_is_told_or_shown_what_is_not_committed(engine: PostgresEngine, a: LedgerDriver) -> None:
    await give(a, make_grant(ALICE, send_actions(BOB)[0]))
    await a.send(make_task(0), access=sending(make_task(0)))
    before, audited = sorted(_ledger(a)._counters), len(await a.audit_rows())
    with a.ledger.task_waiter(CAROL.pubkey) as waiter:
        waiting = asyncio.create_task(waiter.wait(WAIT_MS))
        async with _held(engine):
            doing = await _is_written(a, a.send(make_task(1, recipient=CAROL)))
            doing += await _is_decided_ahead(a, a.take(), a.send(make_task(2), access=sending(make_task(2))))
            assert sorted(_ledger(a)._counters) == before
            assert await a.queued_ids() == [task_id(0)]
            assert await a.ledger.entry(task_id(1)) is None
            assert await a.ledger.entry(task_id(2)) is None
            assert len(await a.audit_rows()) == audited
            assert not any(each.done() for each in (waiting, *doing))
        await asyncio.gather(*doing)
        assert await waiting
    assert len(await a.audit_rows()) > audited
    await _is_consistent(engine, a)


async def test_many_batches_one_upon_the_other_keep_the_order(engine: PostgresEngine, a: LedgerDriver) -> None:
    order: list[int] = []

    async def send(number: int) -> None:
        await a.send(make_task(number))
        order.append(number)

    sending_: list[asyncio.Task[Any]] = []
    for number in range(40):
        sending_.append(asyncio.create_task(send(number)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    await asyncio.gather(*sending_)
    assert order == list(range(40))
    assert [leased.task.id for leased in await a.take(count=50)] == [task_id(number) for number in range(40)]
    await _is_consistent(engine, a)


async def test_limits_count_what_is_being_written(engine: PostgresEngine) -> None:
    a = await _ready(LedgerDriver(await engine.join("a", Limits(queued_per_recipient_max=3)), engine.clock))
    async with _held(engine):
        doing = await _is_written(a, _send(a, range(2)))
        doing += [asyncio.create_task(a.send(make_task(number))) for number in range(2, 6)]
        await _until(lambda: _ahead(a) == 1)
    outcomes = await asyncio.gather(*doing, return_exceptions=True)
    assert [isinstance(each, Refusal) for each in outcomes] == [False, False, True, True, True]
    assert await a.queued_ids() == [task_id(number) for number in range(3)]
    await _is_consistent(engine, a)


async def test_what_was_decided_on_top_of_a_batch_that_loses_is_decided_again(
    engine: PostgresEngine, a: LedgerDriver
) -> None:
    """Another node has ended a task meanwhile: this node's cancel of its lease was decided upon what was not so."""
    b = LedgerDriver(await engine.join("b"), engine.clock)
    await _ledger(a).durable()
    await a.send_all([make_task(number) for number in range(3)])
    lost, *kept = await a.take(count=3)
    before = _writer(a).conflicts
    async with _ledger(a)._membership._busy:  # it does not hear that the other node has ended the task
        await b.finish(lost, ok(lost.task.id))
        async with _held(engine):
            losing = await _is_written(a, a.renew(lost))
            again = await _is_decided_ahead(a, a.renew(lost), *(a.renew(leased) for leased in kept))
        outcomes = await asyncio.gather(*losing, *again, return_exceptions=True)
    assert [isinstance(each, Refusal) for each in outcomes] == [True, True, False, False]
    assert _writer(a).conflicts > before
    for leased in kept:
        await a.finish(leased, ok(leased.task.id))
    assert [result.task_id for result in await a.drain(count=5)] == [task_id(number) for number in range(3)]
    await _is_consistent(engine, a)


async def test_a_task_that_was_accepted_elsewhere_is_taken_once(engine: PostgresEngine, a: LedgerDriver) -> None:
    """The batch below accepts an id that another node has taken just now; its take was decided on top of that."""
    async with _ledger(a)._membership._busy:  # it knows of no other node
        b = LedgerDriver(await engine.join("b"), engine.clock)
        async with _held(engine) as connection:
            doing = await _is_written(a, a.send(make_task(1)), a.send(make_task(2)))
            doing += await _is_decided_ahead(a, a.take(count=1), a.send(make_task(3)))
            await _waits_for_a_lock(connection)
            other = asyncio.create_task(b.send(make_task(1)))
        accepted = await other
        first, second, taken, third = await asyncio.gather(*doing)
    assert sorted(each.duplicate for each in (accepted, first)) == [False, True]
    assert not second.duplicate
    assert not third.duplicate
    rest = await b.take(count=5)
    assert sorted(leased.task.id for leased in (*taken, *rest)) == [task_id(number) for number in range(1, 4)]
    await _is_consistent(engine, a)


@asynccontextmanager
async def _failing(engine: PostgresEngine, count: int) -> AsyncIterator[asyncpg.Connection[Any]]:
    """So many batches fail as if somebody else had been faster, and the next one waits until this is left."""
    connection = await asyncpg.connect(engine.url)
    try:
        await connection.execute(FAULT.format(count=count))
        await connection.fetch("SELECT pg_advisory_lock(1)")
        yield connection
        await connection.fetch("SELECT pg_advisory_unlock(1)")
    finally:
        await connection.close()


@pytest.fixture
async def mended(engine: PostgresEngine, a: LedgerDriver) -> AsyncIterator[None]:
    """The fault is taken out of the database, which another test will have."""
    yield
    connection = await asyncpg.connect(engine.url)
    await connection.execute("DROP TRIGGER fail_first ON news; DROP FUNCTION fail_first; DROP SEQUENCE attempts")
    await connection.close()


@pytest.mark.usefixtures("mended")
@pytest.mark.parametrize("others", [1, 2, 5])
async def test_a_half_of_a_batch_is_not_taken_for_what_was_decided_upon_the_other(
    engine: PostgresEngine, a: LedgerDriver, others: int
) -> None:
    """A batch that fails twice is divided. While its first half is written, others are decided on top of that."""
    before = _writer(a).conflicts
    async with _failing(engine, 2) as connection:
        doing = [asyncio.create_task(a.send(make_task(number))) for number in range(2)]
        await _waits_for_a_lock(connection)
        doing += await _is_decided_ahead(a, *(a.send(make_task(number)) for number in range(2, 2 + others)))
    async with asyncio.timeout(BOUND_S):
        await asyncio.gather(*doing)
    assert _writer(a).conflicts - before == 2
    assert await a.queued_ids() == [task_id(number) for number in range(2 + others)]
    await _is_consistent(engine, a)


@pytest.mark.usefixtures("mended")
async def test_what_comes_while_a_batch_is_decided_anew_comes_after_it(engine: PostgresEngine, a: LedgerDriver) -> None:
    async with _held(engine), _failing(engine, 1) as connection:
        doing = await _is_written(a, _send(a, range(3)))
        doing += await _is_decided_ahead(a, a.take(count=2), a.send(make_task(3)))
        await _waits_for_a_lock(connection)
    _, taken, _ = await asyncio.gather(*doing)
    assert [leased.task.id for leased in taken] == [task_id(0), task_id(1)]
    assert await a.queued_ids() == [task_id(2), task_id(3)]
    await _is_consistent(engine, a)


@pytest.mark.parametrize("happened", [False, True])
async def test_a_commit_whose_answer_is_lost_is_found_out_before_the_next(
    engine: PostgresEngine, a: LedgerDriver, *, happened: bool
) -> None:
    async with _held(engine) as connection:
        doing = await _is_written(a, a.send(make_task(0)))
        doing += await _is_decided_ahead(a, a.take(), a.send(make_task(1)))
        await _waits_for_a_lock(connection)
        if happened:
            writer = _writer(a)._connection._connection
            assert writer is not None
            writer.terminate()  # the backend goes on: nobody hears its answer
        else:
            await _terminate_writer(connection)
    _, taken, _ = await asyncio.gather(*doing)
    assert [leased.task.id for leased in taken] == [task_id(0)]
    assert [leased.task.id for leased in await a.take(count=5)] == [task_id(1)]
    await _is_consistent(engine, a)


async def test_a_node_that_was_declared_lost_refuses_all_of_it(engine: PostgresEngine, a: LedgerDriver) -> None:
    async with _held(engine) as connection:
        doing = await _is_written(a, a.send(make_task(0)))
        doing += await _is_decided_ahead(a, a.take(), a.send(make_task(1)))
        await connection.execute("UPDATE writers SET lost_at_ms = 1")
    outcomes = await asyncio.gather(*doing, return_exceptions=True)
    codes = [each.code if isinstance(each, Unavailable) else each for each in outcomes]
    assert codes == ["ledger_fenced"] * 3
    fresh = LedgerDriver(await engine.join("fresh"), engine.clock)
    assert not await fresh.queued_ids()
    assert sorted(_ledger(a)._counters) == sorted(_ledger(fresh)._counters)


async def test_a_close_writes_what_is_under_way_and_refuses_the_rest(engine: PostgresEngine, a: LedgerDriver) -> None:
    async with _held(engine):
        doing = await _is_written(a, a.send(make_task(0)))
        doing += await _is_decided_ahead(a, a.take(), a.send(make_task(1)))
        closing = asyncio.create_task(_writer(a).close())
        await asyncio.sleep(0)
    await closing
    await doing.pop(0)
    outcomes = await asyncio.gather(*doing, return_exceptions=True)
    assert [each.code for each in outcomes if isinstance(each, Unavailable)] == ["ledger_closed"] * 2
    fresh = LedgerDriver(await engine.join("fresh"), engine.clock)
    assert await fresh.queued_ids() == [task_id(0)]


async def test_what_its_asker_gave_up_is_given_back_also_when_it_was_decided_ahead(
    engine: PostgresEngine, a: LedgerDriver
) -> None:
    async with _held(engine) as connection:
        doing = await _is_written(a, a.send(make_task(0)))
        (taking,) = await _is_decided_ahead(a, a.take())
        await _waits_for_a_lock(connection)
        taking.cancel()
        await _terminate_writer(connection)
    await asyncio.gather(*doing)
    await asyncio.wait([taking])
    assert taking.cancelled()
    assert await a.queued_ids() == [task_id(0)]
    await _is_consistent(engine, a)


async def test_a_task_with_a_priority_is_seen_although_others_were_taken_in_the_same_batch(a: LedgerDriver) -> None:
    await a.send_all([make_task(number) for number in range(4)])
    taken, _ = await asyncio.gather(a.take(), a.send(make_task(5, priority=9)))
    assert [leased.task.id for leased in taken] == [task_id(0)]
    _writer(a).inputs.recent.clear()  # it is read from the database
    order = [leased.task.id for _ in range(4) for leased in await a.take()]
    assert order == [task_id(number) for number in (5, 1, 2, 3)]


async def test_a_node_that_joins_is_not_overtaken_by_a_place_that_was_kept(
    engine: PostgresEngine, a: LedgerDriver
) -> None:
    taken: list[LeasedTask] = []
    async with _ledger(a)._membership._busy:  # it does not hear that there is another node
        b = LedgerDriver(await engine.join("b"), engine.clock)
        for number in range(8):
            await (b, a)[number % 2].send(make_task(number))
        while len(taken) < 8:
            taken += await b.take()
    assert [leased.task.id for leased in taken] == [task_id(number) for number in range(8)]


async def test_a_commit_in_doubt_of_a_lost_run_that_cannot_be_found_out_is_told_as_unknown(
    engine: PostgresEngine, a: LedgerDriver
) -> None:
    async with _held(engine) as connection:
        (doing,) = await _is_written(a, a.send(make_task(0)))
        await _waits_for_a_lock(connection)
        await _terminate_writer(connection)
        await _waits_for_a_lock(connection)  # it asks what became of its batch
        await connection.execute("ALTER TABLE news RENAME TO news_away")
        await connection.execute("UPDATE writers SET lost_at_ms = 1")
        await connection.execute("UPDATE nodes SET lost_at_ms = 1")
    with refused("outcome_unknown", 503):
        await doing
    other = await asyncpg.connect(engine.url)
    try:
        await other.execute("ALTER TABLE news_away RENAME TO news")
    finally:
        await other.close()

    async def is_sent() -> bool:
        try:
            await a.send(make_task(0))
        except Unavailable:
            return False
        return True

    await _until(is_sent)
    assert await a.queued_ids() == [task_id(0)]
    await _is_consistent(engine, a)
