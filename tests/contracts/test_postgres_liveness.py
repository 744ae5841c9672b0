"""The life of a node on PostgreSQL: fenced, cut off, replaced, rolled back; and how it comes back as a new run."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, Final

import asyncpg
import pytest

from covenant.daemon.settings_loader import load
from covenant.ledger.contract.identities import Register, RegisterChange
from covenant.ledger.machine.identity_commands import RemoveAgent, WriteAuditRow
from covenant.ledger.postgres import batch_writer, connections, nodes, writer_connection
from covenant.ledger.postgres.batch_items import DecidedBatch
from covenant.ledger.postgres.database_admin import CHAIN, find_troubles, mark_restored
from covenant.ledger.postgres.migrations import LEVEL, WrongSchema
from covenant.ledger.postgres.open_postgres import DatabaseUnusable, open_postgres_ledger
from covenant.ledger.postgres.postgres_ledger import PostgresLedger
from covenant.model.errors import SettingsError, Unavailable
from covenant.model.ids import TaskId
from covenant.model.peers.instance import InstanceId
from tests.ledger.machine.peer_commands import add, id_of
from tests.ledger_contract.driver import LedgerDriver, refused
from tests.ledger_contract.postgres_engine import PostgresEngine
from tests.ledger_contract.postgres_proxy import proxy_before
from tests.ledger_contract.postgres_server import Databases
from tests.ledger_contract.samples import CAROL, OPERATOR, make_task, ok, task_id
from tests.ledger_contract.tenants import add_tenant, put_agent
from tests.waits import BOUND_S

LEASE_MS: Final = 1_500


@pytest.fixture
async def engine(databases: Databases) -> AsyncIterator[PostgresEngine]:
    url = await databases.borrow()
    engine = PostgresEngine(url, lease_ms=LEASE_MS)
    yield engine
    await engine.close()
    await databases.give_back(url)


async def joined(engine: PostgresEngine, name: str) -> LedgerDriver:
    """A node that has looked once: before that it refuses nothing."""
    driver = LedgerDriver(await engine.join(name), engine.clock)
    await until(lambda: membership(driver)._looked)
    return driver


@pytest.fixture
async def a(engine: PostgresEngine) -> LedgerDriver:
    return await joined(engine, "a")


@pytest.fixture
async def b(engine: PostgresEngine, a: LedgerDriver) -> LedgerDriver:
    return await joined(engine, "b")


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


async def test_a_node_without_the_database_takes_nothing_new_and_comes_back(engine: PostgresEngine) -> None:
    async with proxy_before(engine.url) as proxy:
        far = PostgresEngine(proxy.url, lease_ms=LEASE_MS)
        a, b = await joined(far, "a"), await joined(engine, "b")
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


async def test_a_fenced_node_does_not_wait_for_connections_that_will_never_answer(
    engine: PostgresEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "COMMAND_S", 10 * BOUND_S)  # whoever waits for an answer waits too long
    async with proxy_before(engine.url) as proxy:
        far = PostgresEngine(proxy.url, lease_ms=LEASE_MS)
        a, b = await joined(far, "a"), await joined(engine, "b")
        await a.send(make_task(1))
        before = a.ledger.boot
        proxy.silence()
        asked = [asyncio.ensure_future(each) for each in (a.send(make_task(2)), *(a.queued_ids() for _ in range(8)))]
        await until(lambda: not b.ledger.alive("a", before))
        proxy.forget()
        await until(lambda: serves(a, 3))
        answers = await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), BOUND_S)
        assert a.ledger.boot != before
        sent, *read = answers
        assert isinstance(sent, Unavailable)
        # Reads that had a connection are refused. Those that still waited for one are answered by a new one.
        assert isinstance(read[0], Unavailable)
        known = ([task_id(1)], [task_id(1), task_id(3)])
        assert all(isinstance(each, Unavailable) or each in known for each in read), read
        assert await b.queued_ids() == [task_id(1), task_id(3)]
        await far.close()


async def test_a_writer_tries_again_as_soon_as_the_database_is_back(
    engine: PostgresEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pauses grow while the database is away; a node that was fenced meanwhile begins anew without them."""
    async with proxy_before(engine.url) as proxy:
        far = PostgresEngine(proxy.url, lease_ms=LEASE_MS)
        a, b = await joined(far, "a"), await joined(engine, "b")
        await a.send(make_task(1))
        before = a.ledger.boot
        assert isinstance(a.ledger, PostgresLedger)
        writing = a.ledger._writer._connection
        monkeypatch.setattr(batch_writer, "PAUSE_S", 10 * BOUND_S)
        proxy.silence()
        sending = asyncio.ensure_future(serves(a, 2))
        await until(lambda: writing._connection is None)
        await until(lambda: not b.ledger.alive("a", before))
        proxy.mend()
        await until(lambda: serves(a, 3))
        assert a.ledger.boot != before
        await asyncio.wait_for(sending, BOUND_S)
        await far.close()


async def test_a_read_whose_connection_is_dropped_before_its_statement_is_sent_is_refused_and_can_be_repeated(
    a: LedgerDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    await a.send(make_task(1))
    assert isinstance(a.ledger, PostgresLedger)
    held, prepare = a.ledger._connections, asyncpg.Connection._get_statement
    drops = 0

    async def prepared_and_dropped(*given: Any, **named: Any) -> Any:
        nonlocal drops
        found = await prepare(*given, **named)
        if asyncio.current_task() is reading:
            held.drop_all()
            drops += 1
        return found

    monkeypatch.setattr(asyncpg.Connection, "_get_statement", prepared_and_dropped)
    reading = asyncio.ensure_future(a.queued_ids())
    with refused("database_unavailable", 503):
        await reading
    assert drops
    await until(lambda: serves(a, 2))
    assert await a.queued_ids() == [task_id(1), task_id(2)]


TRIES: Final = 3


async def test_the_loss_of_a_node_is_shown_within_its_lease_and_a_beat(engine: PostgresEngine, b: LedgerDriver) -> None:
    """By the database's own clock: from the last sign of life to the moment it was declared lost."""
    took_ms: list[int] = []
    for number in range(TRIES):
        node = LedgerDriver(await engine.join(f"node-{number}"), engine.clock)
        await node.taken_here(make_task(number))
        await until(lambda: b.ledger.alive(node.ledger.node, node.ledger.boot))  # noqa: B023  (in this round)
        await engine.kill(node.ledger)  # type: ignore[arg-type]
        await until(lambda: not b.ledger.alive(node.ledger.node, node.ledger.boot))  # noqa: B023  (in this round)
        connection = await asyncpg.connect(engine.url)
        try:
            asked = "SELECT lost_at_ms - seen_ms FROM nodes WHERE node = $1"
            took_ms.append(await connection.fetchval(asked, node.ledger.node))
        finally:
            await connection.close()
        assert took_ms[-1] >= LEASE_MS
        assert (await b.show(task_id(number))).holder_lost
        # A beat is a third of a lease. A machine that does other work takes longer, but not each time.
        if took_ms[-1] <= LEASE_MS * 4 / 3 + 1_000:
            return
    pytest.fail(f"it took {took_ms} ms")


async def test_a_node_that_stands_still_within_a_transaction_keeps_nobody_from_serving(
    engine: PostgresEngine, a: LedgerDriver, b: LedgerDriver
) -> None:
    holding = await asyncpg.connect(engine.url)
    try:
        async with holding.transaction():
            await holding.execute("SELECT FROM writers WHERE node = 'a' FOR UPDATE")
            await engine.kill(a.ledger)  # type: ignore[arg-type]
            lapsed = (
                "SELECT until_ms < (extract(epoch FROM clock_timestamp()) * 1000)::bigint FROM nodes WHERE node = 'a'"
            )
            await until(lambda: holding.fetchval(lapsed))
            since_s = asyncio.get_running_loop().time()
            await until(lambda: membership(b)._fresh_s > since_s + LEASE_MS / 1_000)
            await until(lambda: serves(b, 1))
            assert b.ledger.alive("a", a.ledger.boot), "what it had under way may be committed yet"
    finally:
        await holding.close()
    await until(lambda: not b.ledger.alive("a", a.ledger.boot))


async def test_a_node_that_stands_still_within_a_statement_is_fenced_all_the_same(
    engine: PostgresEngine, a: LedgerDriver, b: LedgerDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_connection, "TRANSACTION_MS", 3_000)
    holding = await writer_connection.WriterConnection(connections.Connections(engine.url)).get()
    try:
        await holding.execute("BEGIN")
        await holding.execute("SELECT FROM writers WHERE node = 'a' FOR UPDATE")
        await holding.prepare("SELECT FROM nodes")  # the server waits for the rest, and does not call that idle
        await engine.kill(a.ledger)  # type: ignore[arg-type]
        await until(lambda: not b.ledger.alive("a", a.ledger.boot))
    finally:
        holding.terminate()


async def test_a_second_daemon_under_the_same_name_stays_and_the_first_one_says_so(
    engine: PostgresEngine, a: LedgerDriver, b: LedgerDriver
) -> None:
    again = LedgerDriver(await engine.join("a"), engine.clock)
    await until(lambda: membership(a).refusal is not None)
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
    await execute(engine, "DELETE FROM counted")
    await until(lambda: all(membership(driver).refusal is not None for driver in (a, b)))
    for driver in (a, b):
        with refused("ledger_rolled_back", 503):
            await driver.send(make_task(9))
        assert "covenant ledger restored" in ((await driver.ledger.counts()).failure or "")
    await execute(engine, "DELETE FROM news")
    assert await mark_restored(engine.url, OPERATOR, 1_000, "a row") == 2
    await until(lambda: serves(a, 10))
    await until(lambda: serves(b, 11))
    rows = [each for each in await a.ledger.audit_recent(None, 100, None) if '"ledger_restored"' in each.row]
    assert [(each.chain, '"fenced":2' in each.row) for each in rows] == [(CHAIN, True)]
    assert (await a.ledger.audit_verify()).valid
    assert a.ledger.boot not in boots
    assert b.ledger.boot not in boots
    assert [task_id(10), task_id(11)] == (await a.queued_ids())[-2:]


async def test_a_daemon_that_refuses_a_database_without_its_commits_goes_on_when_the_right_one_is_back(
    engine: PostgresEngine, a: LedgerDriver
) -> None:
    await a.send(make_task(1))
    await execute(engine, "UPDATE writers SET seq = seq - 1 WHERE node = 'a'")
    await until(lambda: membership(a).refusal is not None)
    await execute(engine, "UPDATE writers SET seq = seq + 1 WHERE node = 'a'")
    await until(lambda: serves(a, 2))


async def test_the_loss_of_commits_stays_refused_when_a_new_run_writes_as_many_again(
    engine: PostgresEngine, a: LedgerDriver, b: LedgerDriver
) -> None:
    for number in range(5):
        await b.send(make_task(number))
    await until(lambda: membership(a)._cursors.get(membership(b)._joined.writer) == membership(b).written)
    await engine.close_one(b.ledger)
    await execute(engine, "UPDATE writers SET seq = seq - 3 WHERE node = 'b'")
    await execute(engine, "DELETE FROM counted")
    await execute(engine, "DELETE FROM news")
    await until(lambda: membership(a).refusal is not None)
    again = await joined(engine, "b")
    for number in range(10, 20):
        await again.send(make_task(number))
    beaten_s = membership(a)._fresh_s
    await until(lambda: membership(a)._fresh_s > beaten_s + 2 * LEASE_MS / 1_000)
    with refused("ledger_rolled_back", 503):
        await a.send(make_task(30))


async def test_a_database_whose_open_tasks_were_deleted_is_refused_until_somebody_accepts_it(
    engine: PostgresEngine,
) -> None:
    first = await joined(engine, "a")
    await first.taken(make_task(3))
    await first.finish(await first.taken(make_task(4)), ok(task_id(4)))
    await first.send_all([make_task(number) for number in range(3)])
    await engine.close_one(first.ledger)
    await engine.close_one((await joined(engine, "a")).ledger)  # all that is counted is there
    assert await find_troubles(engine.url, durable=False) == (LEVEL, [])
    await execute(engine, "TRUNCATE live")
    with pytest.raises(WrongSchema, match=r"live: 5 tasks are open, and 0 are there; restore a backup"):
        await engine.join("a")
    (_, (trouble,)) = await find_troubles(engine.url, durable=False)
    assert "table live" in trouble.what
    assert "covenant ledger restored" in trouble.fix
    assert await mark_restored(engine.url, OPERATOR, 1_000, "a row") == 0
    again = await joined(engine, "a")
    assert (await again.ledger.counts()).queued == 0
    assert (await again.taken(make_task(9))).task.id == task_id(9)
    assert await again.drain() == ()
    assert (await again.ledger.audit_verify()).valid


async def test_a_restored_database_is_audited_in_a_chain_that_no_daemon_can_have(
    engine: PostgresEngine, tmp_path: Path
) -> None:
    console = LedgerDriver(await engine.join("console"), engine.clock)
    await console.ledger.commit(WriteAuditRow(by=OPERATOR, row={"type": "noted"}))
    assert await mark_restored(engine.url, OPERATOR, 1_000, "a row") == 1
    chains = {each.chain: each.index for each in await console.ledger.audit_recent(None, 10, None)}
    assert chains == {"console": 1, CHAIN: 1}
    with pytest.raises(SettingsError, match=r"daemon\.node"):
        load({"daemon.node": CHAIN}, {}, home=tmp_path)
    assert (await console.ledger.audit_verify()).valid


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


async def test_what_a_take_was_given_goes_back_if_its_commit_was_told_as_unknown_and_had_happened(
    engine: PostgresEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody would ever begin it: the lease is of a run that lives."""
    monkeypatch.setattr(batch_writer, "TRIES_MAX", 2)
    async with proxy_before(engine.url) as proxy:
        far = PostgresEngine(proxy.url)
        a = LedgerDriver(await far.join("a"), engine.clock)
        for number in (1, 2):  # so that the next one is taken by one statement
            await a.send(make_task(number))
        await a.take_one()
        proxy.answers_lost = True
        with refused("outcome_unknown", 503):
            await a.take_one()
        proxy.answers_lost = False
        connection = await asyncpg.connect(engine.url)
        try:
            assert await connection.fetchval("SELECT count(*) FROM live WHERE state = 'leased'") == 2, "it had happened"
        finally:
            await connection.close()
        await until(lambda: serves(a, 3))

        async def is_back() -> bool:
            return await a.queued_ids() == [task_id(2), task_id(3)]

        await until(is_back)
        assert (await a.take_one()).task.id == task_id(2)
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
    await until(lambda: membership(leader).refusal is None and membership(leader).silent_ms < LEASE_MS / 2)
    assert leaders() == [other.ledger.node]


async def test_nodes_share_work_and_one_that_is_lost_leaves_its_parts_to_the_rest(
    engine: PostgresEngine, a: LedgerDriver, b: LedgerDriver
) -> None:
    parts = {str(number) for number in range(16)}

    def done_by(driver: LedgerDriver) -> set[str]:
        return {part for part in parts if driver.ledger.shares("peers", part)}

    await until(lambda: done_by(a) == parts)  # b has not asked yet, so that it has none
    seen: list[set[str]] = []

    def is_shared() -> bool:
        found = done_by(a), done_by(b)
        seen.append(found[0] & found[1])
        return all(found) and found[0] | found[1] == parts

    await until(is_shared)
    async with membership(a)._busy:
        await until(lambda: done_by(b) == parts)
        assert not done_by(a), "it had stopped before the other one began"
    await until(lambda: is_shared() and membership(a).refusal is None)
    assert not any(seen), "no part was done by two at once"


async def test_a_secret_is_replaced_by_whoever_knows_what_it_was(a: LedgerDriver, b: LedgerDriver) -> None:
    first, second = a.ledger, b.ledger
    assert isinstance(first, PostgresLedger)
    assert isinstance(second, PostgresLedger)
    assert not await first.replace_secret("keys", "none", "one"), "nobody has left it"
    await first.keep_secret("keys", "one")
    changed = await asyncio.gather(*(each.replace_secret("keys", "one", each.node) for each in (first, second)))
    assert sorted(changed) == [False, True]
    assert await first.secret("keys") == await second.secret("keys") in ("a", "b")


async def test_a_secret_that_is_replaced_is_known_to_every_living_node_when_that_is_acknowledged(
    a: LedgerDriver, b: LedgerDriver
) -> None:
    first, second = a.ledger, b.ledger
    assert isinstance(first, PostgresLedger)
    assert isinstance(second, PostgresLedger)
    told: list[str | None] = []
    for each in (first, second):
        each.on_registers(lambda change, each=each: told.append(each.replaced_secret(change.name)))  # type: ignore[misc]
    await first.keep_secret("keys", "one")
    async with membership(b)._busy:
        replacing = asyncio.create_task(first.replace_secret("keys", "one", "two"))
        await until(lambda: told == ["two"])
        assert not replacing.done(), "the other node has not looked yet"
    assert await replacing
    assert told == ["two", "two"]
    assert second.replaced_secret("keys") == "two"


async def test_registers_are_taken_in_with_news_and_after_a_node_was_away(a: LedgerDriver, b: LedgerDriver) -> None:
    changes: list[RegisterChange] = []
    b.ledger.on_registers(changes.append)
    away = membership(b)
    async with away._busy:
        putting = asyncio.create_task(add_tenant(a, "acme"))
        await until(lambda: a.ledger.tenant("acme") is not None)
        await a.send(make_task(1))
        await away._poll()
        assert b.ledger.tenant("acme") is not None, "a busy cluster has news at every look"
    await putting
    await put_agent(a, "acme", "writer")
    changes.clear()
    async with away._busy:
        removing = asyncio.create_task(a.ledger.commit(RemoveAgent(by=OPERATOR, tenant="acme", agent_id="writer")))
        await until(lambda: a.ledger.agent("acme", "writer") is None)
        await away._reload()
        assert b.ledger.agent("acme", "writer") is None
        assert RegisterChange(Register.AGENTS, "acme") in changes
    await removing


async def test_whoever_waits_for_a_peer_looks_again_when_news_were_passed_over(
    a: LedgerDriver, b: LedgerDriver
) -> None:
    await a.ledger.commit(add())
    told: list[InstanceId] = []
    b.ledger.on_peer(told.append)
    away = membership(b)
    async with away._busy:
        await away._reload()
    assert told == [id_of(1)]


async def test_a_register_that_a_look_has_found_before_its_own_commit_landed_counts_once(
    a: LedgerDriver, b: LedgerDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = a.ledger
    assert isinstance(ledger, PostgresLedger)
    landed: list[DecidedBatch] = []
    monkeypatch.setattr(ledger._writer, "_on_committed", landed.append)
    await add_tenant(a, "acme")
    version = ledger._registers.version
    assert ledger.tenant("acme") is not None, "by the look"
    ledger._on_committed(landed[0])
    assert ledger._registers.version == version
    await add_tenant(b, "other")
    assert ledger.tenant("other") is not None, "no version is passed over"


async def test_heartbeats_that_wait_for_a_lock_do_not_use_up_the_connections(databases: Databases) -> None:
    """As behind a commit that waits for a standby which is away: each attempt ends before the next begins."""
    url = await databases.make()
    engine = PostgresEngine(url, lease_ms=300)
    ledger = await engine.join("a")
    watcher, holder = await asyncpg.connect(url), await asyncpg.connect(url)
    waiting = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    waited: list[int] = []
    try:
        async with holder.transaction():
            await holder.execute("SELECT FROM nodes FOR UPDATE")
            backends: set[int] = set()
            async with asyncio.timeout(BOUND_S):
                while len(backends) < 6:  # so many attempts
                    rows = await watcher.fetch(waiting.replace("count(*)", "pid"))
                    backends |= {row["pid"] for row in rows}
                    waited.append(len(rows))
                    await asyncio.sleep(0.05)
        assert max(waited) <= 2, waited
        await until(lambda: ledger._membership.refusal is None)
    finally:
        await holder.close()
        await watcher.close()
        await engine.close()
        await databases.drop(url)


async def test_old_news_that_another_node_deletes_are_left_to_it(engine: PostgresEngine, a: LedgerDriver) -> None:
    first, second = await asyncpg.connect(engine.url), await asyncpg.connect(engine.url)
    try:
        await first.execute(
            "INSERT INTO news (writer, seq, topics, at) SELECT 99, n, '{}', 'epoch' FROM generate_series(1, 9) AS n"
        )
        async with first.transaction():
            await first.execute("SELECT FROM news WHERE writer = 99 AND seq <= 3 FOR UPDATE")
            await asyncio.wait_for(connections.execute("nodes", second, "forget_news", kept_s=60.0), BOUND_S)
        left = await first.fetch("SELECT seq FROM news WHERE writer = 99 ORDER BY seq")
        assert [row["seq"] for row in left] == [1, 2, 3]
    finally:
        await first.close()
        await second.close()


async def test_a_url_with_a_word_that_nobody_knows_is_said_to_be_unreadable(engine: PostgresEngine) -> None:
    for words in ("target_session_attrs=readwrite", "sslmode=maybe"):
        with pytest.raises(DatabaseUnusable, match=r"ledger\.url cannot be read"):
            await open_postgres_ledger(f"{engine.url}&{words}", clock=engine.clock)
