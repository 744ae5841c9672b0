"""Two ledgers over one database: what one decides, the other tells; and what one had in hand, the other sees lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import asyncpg
import pytest

from covenant.agents.model.agent_memory import AgentMemories
from covenant.agents.runtime.lost_work import LostWork
from covenant.daemon.schedulers import AuditAnchors
from covenant.daemon.telemetry import Log
from covenant.dashboard.feed import FeedCollector
from covenant.dashboard.sessions import Role, UiSession
from covenant.exchange.access.principals import IdentityAuth, Principal
from covenant.exchange.access.tenants import Caller, TenantAccess, TenantLimiter
from covenant.ledger.contract.identities import Register, RegisterChange, Resident
from covenant.ledger.contract.retention import EraseTasks
from covenant.ledger.machine.commands import Accept, CancelOrphans, LeasedTask, Starter
from covenant.ledger.machine.identity_commands import Enroll, RevokeGrant, RevokeIdentity
from covenant.ledger.postgres import nodes
from covenant.ledger.postgres.counters import counter_number
from covenant.ledger.postgres.postgres_ledger import PostgresLedger
from covenant.ledger.postgres.sql import Statement, statement
from covenant.model.agent_definition import AgentDefinition, CatalogueAgent, OnLost
from covenant.model.errors import OverLimit, Refusal, Unavailable
from covenant.model.grant import send_actions
from covenant.model.ids import AgentId, TaskId
from covenant.model.settings import Limits
from covenant.model.task import DELEGATION, Task, fingerprint
from covenant.model.task_event import Ended, StatusUpdate
from covenant.model.tenants import DEFAULT, Tenant, TenantLimits
from tests.ledger.machine.peer_commands import add, offered
from tests.ledger_contract.driver import WAIT_MS, LedgerDriver, refused
from tests.ledger_contract.grants import give, sending
from tests.ledger_contract.postgres_engine import PostgresEngine
from tests.ledger_contract.postgres_server import Databases
from tests.ledger_contract.samples import (
    ALICE,
    BOB,
    CAROL,
    OPERATOR,
    make_grant,
    make_identity,
    make_task,
    ok,
    same_work,
    task_id,
)
from tests.ledger_contract.watches import advance, seen
from tests.waits import BOUND_S, eventually

T = TypeVar("T")


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


async def until(is_so: Callable[[], bool | Awaitable[bool]]) -> None:
    """What another node said arrives after a while, and not at a moment that a test could wait for."""
    async with asyncio.timeout(BOUND_S):
        while True:
            answer = is_so()
            if answer if isinstance(answer, bool) else await answer:
                return
            await asyncio.sleep(0.005)


def ledger_of(driver: LedgerDriver) -> PostgresLedger:
    assert isinstance(driver.ledger, PostgresLedger)
    return driver.ledger


async def test_what_one_takes_the_other_does_not(a: LedgerDriver, b: LedgerDriver) -> None:
    await a.send_all([make_task(number) for number in range(40)])
    taken = await asyncio.gather(*(driver.take(count=2) for _ in range(10) for driver in (a, b)))
    ids = [leased.task.id for leases in taken for leased in leases]
    ids += [leased.task.id for leased in await b.take(count=100)]
    assert sorted(ids) == sorted(task_id(number) for number in range(40))


async def test_what_one_erases_the_other_hears_of(a: LedgerDriver, b: LedgerDriver) -> None:
    await a.finish(await a.taken(make_task(1)), ok(task_id(1)))
    await a.drain()
    membership = ledger_of(b)._membership
    membership.beat_now()
    await until(lambda: ledger_of(b)._erased_count is not None)
    heard: list[str] = []
    b.ledger.on_erased(lambda: heard.append("erased"))
    erased = await a.ledger.erase_tasks(EraseTasks(tenant="", before_ms=a.clock.now_ms + 1))
    assert (erased.tasks, heard) == (1, [])
    membership.beat_now()
    await until(lambda: heard == ["erased"])


async def test_counts_that_are_put_together_are_no_sign_that_something_was_erased(
    engine: PostgresEngine, a: LedgerDriver, b: LedgerDriver
) -> None:
    await a.finish(await a.taken(make_task(1)), ok(task_id(1)))
    await a.drain()
    look, writer = ledger_of(b)._look_for_erasure, ledger_of(a)._membership._joined.writer
    heard: list[str] = []
    merge = statement("nodes", "merge_counts")
    numbers = {"first_counter": counter_number(writer, 0), "counter": counter_number(writer, 1_000)}
    connection = await asyncpg.connect(engine.url)
    try:
        await look(connection)
        b.ledger.on_erased(lambda: heard.append("erased"))
        kept = "SELECT count(*) FROM counted WHERE 'kept' = ANY(kinds)"
        assert await connection.fetchval(kept) == 1
        await connection.execute(merge.text, *merge.values({"writer": writer, **numbers}))
        assert await connection.fetchval(kept) == 0
        await look(connection)
    finally:
        await connection.close()
    assert heard == []


async def test_one_of_two_that_settle_the_same_task_wins(a: LedgerDriver, b: LedgerDriver) -> None:
    for number in range(10):
        leased = await a.taken(make_task(number))
        answers = await asyncio.gather(
            a.finish(leased, ok(task_id(number), "a")),
            b.cancel(task_id(number)),
            return_exceptions=True,
        )
        assert sum(isinstance(answer, Refusal) for answer in answers) <= 1
        shown, other = await a.show(task_id(number)), await b.show(task_id(number))
        assert shown == other
        assert len([update for update in shown.updates if update.kind == "settled"]) == 1


async def test_the_same_id_is_accepted_once(a: LedgerDriver, b: LedgerDriver) -> None:
    for number in range(10):
        answers = await asyncio.gather(a.send(make_task(number)), b.send(make_task(number)))
        assert sorted(answer.duplicate for answer in answers) == [False, True]
        with refused("duplicate_task_id", 409):
            await b.send(make_task(number, intent_text="other"))


async def test_equal_work_is_led_by_one_of_them(a: LedgerDriver, b: LedgerDriver) -> None:
    await asyncio.gather(
        *(driver.send(same_work(2 * number + at)) for at, driver in enumerate((a, b)) for number in range(5))
    )
    (leader,) = await b.take(count=10)
    await b.finish(leader, ok(leader.task.id))
    assert len(await a.drain(count=100)) == 10


async def test_a_stream_tells_the_work_of_another_node(a: LedgerDriver, b: LedgerDriver) -> None:
    with b.ledger.watch(task_id(1)) as watch, a.ledger.watch(task_id(1)) as own:
        for each in (a, b):
            assert not await each.ledger.steps(task_id(1), 0, 1), "a reader reads the past once it watches"
        leased = await a.taken(make_task())
        await a.report(leased, "on it")
        await b.say(task_id(1), "and then?")
        await a.report(leased, "still on it")
        await b.say(task_id(1), "and after that?")
        await a.cancel(task_id(1))
        there, here = await seen(watch), await seen(own)
    assert [step.generation for step in there] == list(range(1, len(there) + 1))
    assert there == here
    assert tuple(there) == tuple(await a.ledger.steps(task_id(1), 0, 100))


async def test_who_watches_late_reads_the_past_and_misses_nothing(a: LedgerDriver, b: LedgerDriver) -> None:
    leased = await a.taken(make_task())
    reporting = asyncio.create_task(_report(a, leased, 40))
    with b.ledger.watch(task_id(1)) as watch:
        past = await b.ledger.steps(task_id(1), 0, 100)
        await reporting
        await a.finish(leased, ok(task_id(1)))
        newer = [step for step in await seen(watch) if step.generation > past[-1].generation]
    assert [step.generation for step in (*past, *newer)] == list(range(1, 44))


async def _report(driver: LedgerDriver, leased: object, count: int) -> None:
    for number in range(count):
        await driver.report(leased, f"{number}")  # type: ignore[arg-type]


async def test_a_cancel_tells_the_node_that_holds_the_lease(a: LedgerDriver, b: LedgerDriver) -> None:
    lost_at_a: list[TaskId] = []
    lost_at_b: list[TaskId] = []
    a.ledger.on_lost(lost_at_a.append)
    b.ledger.on_lost(lost_at_b.append)
    await a.taken_here(make_task(1))
    await b.taken_here(make_task(2, recipient=CAROL))
    await b.cancel(task_id(1))
    await until(lambda: lost_at_a == [task_id(1)])
    await a.cancel(task_id(2))
    await until(lambda: task_id(2) in lost_at_b)
    assert lost_at_a == [task_id(1), task_id(2)], "the node that ended it knows too"


async def test_whoever_waits_is_woken_by_what_arrives_elsewhere(a: LedgerDriver, b: LedgerDriver) -> None:
    with b.ledger.task_waiter(BOB.pubkey) as tasks, a.ledger.result_waiter(ALICE.pubkey) as results:
        waiting = asyncio.gather(tasks.wait(WAIT_MS), results.wait(WAIT_MS), a.ledger.finished(task_id(2), WAIT_MS))
        await a.send(make_task(2))
        await until(lambda: ledger_of(b)._counters.get("queued", BOB.pubkey) == 1)
        leased = await b.take_one()
        await b.finish(leased, ok(task_id(2)))
        assert all(await asyncio.wait_for(waiting, BOUND_S))


async def test_a_register_is_the_same_everywhere_before_its_change_is_acknowledged(
    a: LedgerDriver, b: LedgerDriver
) -> None:
    heard: list[RegisterChange] = []
    b.ledger.on_registers(heard.append)
    identity = make_identity(ALICE)
    await a.ledger.commit(Enroll(by=OPERATOR, identity=identity))
    assert b.ledger.identity(identity.token_sha256) == identity
    await a.ledger.commit(RevokeIdentity(by=OPERATOR, token_sha256=identity.token_sha256))
    known = b.ledger.identity(identity.token_sha256)
    assert known is not None
    assert known.revoked_at_ms is not None
    assert heard == [RegisterChange(Register.IDENTITIES, identity.token_sha256)] * 2


async def test_nobody_is_let_in_after_a_revocation_was_acknowledged(a: LedgerDriver, b: LedgerDriver) -> None:
    grant = await give(a, make_grant(ALICE, send_actions(BOB)[0]))
    await b.send(make_task(1), access=sending(make_task(1)))
    await a.ledger.commit(RevokeGrant(by=OPERATOR, signature_b58=grant.signature_b58))
    with refused("capability_missing", 403):
        await b.send(make_task(2), access=sending(make_task(2)))


async def test_whoever_waits_for_a_move_is_woken_by_one_at_another_node(a: LedgerDriver, b: LedgerDriver) -> None:
    moved = b.ledger.changes.next_change()
    await a.send(make_task())
    await asyncio.wait_for(asyncio.shield(moved), BOUND_S)


async def test_changes_at_another_node_move_the_place_of_a_reader_that_is_away(
    a: LedgerDriver, b: LedgerDriver
) -> None:
    changes = b.ledger.changes
    assert not changes.enabled
    before = changes.position
    await a.send(make_task())
    await until(lambda: changes.position > before)


async def test_the_tenants_of_many_tasks_of_another_node_are_read_together_for_the_feed(
    a: LedgerDriver, b: LedgerDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    collector = FeedCollector(b.ledger, followers_max=1)
    principal = Principal(ALICE, operator=False, token_sha256="", tenant="acme")
    caller = Caller(Tenant(name="acme"), "secret", operator=False, name="acme")
    with collector.following(UiSession("secret", Role.TENANT, principal, caller, 0)):
        for tenant, numbers in (("acme", range(60)), (None, range(60, 80))):
            await a.send_all([make_task(number, tenant=tenant) for number in numbers])
        await until(lambda: len(b.ledger.changes._remote.tasks) == 80)
        reads, read = list[str](), ledger_of(b)._rows

        async def counted(name: str, **values: Any) -> Any:
            reads.append(name)
            return await read(name, **values)

        monkeypatch.setattr(b.ledger, "_rows", counted)
        await collector.run_round(counting=False)
        (only,) = collector.ring.since(collector.ring.start) or ()
        assert only.more == 80 - len(only.tasks)
        assert {tenant: len(own.latest) + own.more for tenant, own in only.own.items()} == {"acme": 60}
        assert len(reads) <= 2 * len(only.tasks) + 1
    collector._ledger.changes.end()


async def test_uses_of_a_grant_are_counted_over_all_nodes(a: LedgerDriver, b: LedgerDriver) -> None:
    await give(a, make_grant(ALICE, send_actions(BOB)[0], max_uses=5))
    sends = [
        driver.send(make_task(2 * n + at), access=sending(make_task(2 * n + at)))
        for n in range(10)
        for at, driver in enumerate((a, b))
    ]
    answers = await asyncio.gather(*sends, return_exceptions=True)
    assert sum(not isinstance(answer, BaseException) for answer in answers) == 5


async def test_counts_agree_after_a_while(a: LedgerDriver, b: LedgerDriver) -> None:
    await a.send_all([make_task(number) for number in range(5)])
    await b.send_all([make_task(number, recipient=CAROL) for number in range(5, 8)])
    await b.take(count=2)
    await b.finish(await a.take_one(CAROL), ok(task_id(5)))
    sums = [ledger_of(driver)._counters for driver in (a, b)]
    await until(lambda: sorted(sums[0]) == sorted(sums[1]))
    assert (await a.ledger.counts()).queued == (await b.ledger.counts()).queued == 5


async def test_what_was_delegated_ends_whichever_node_its_parent_ended_at(a: LedgerDriver, b: LedgerDriver) -> None:
    await a.taken(make_task(1))
    await b.send(make_task(2, sender=BOB, recipient=CAROL, origin=DELEGATION, parent=task_id(1), depth=1))
    waiting = asyncio.ensure_future(a.ledger.orphaned(WAIT_MS))
    await b.cancel(task_id(1))
    assert await asyncio.wait_for(waiting, BOUND_S)
    assert (await a.ledger.commit(CancelOrphans())).task_ids == (task_id(2),)


async def _holder_lost(driver: LedgerDriver) -> bool:
    return (await driver.show(task_id(1))).holder_lost


async def test_a_killed_node_is_lost_and_its_leases_are_shown_so(
    engine: PostgresEngine, a: LedgerDriver, b: LedgerDriver
) -> None:
    leased = await a.taken_here(make_task())
    assert not (await b.show(task_id(1))).holder_lost
    b.ledger.changes.begin()
    b.ledger.changes.take()
    await engine.kill(ledger_of(a))
    await until(lambda: _holder_lost(b))
    await until(lambda: not b.ledger.alive(leased.lease.node, leased.lease.boot or ""))
    await until(lambda: b.ledger.changes.take().nodes)
    lost, living = await b.ledger.nodes()
    assert [(node.node, node.alive, node.leases) for node in (lost, living)] == [("a", False, 1), ("b", True, 0)]
    assert lost.started_at_ms <= lost.seen_at_ms <= living.seen_at_ms
    assert (await b.ledger.counts()).holders_lost == 1
    assert await b.take() == (), "what was begun is begun again by a repair alone"
    await b.requeue(task_id(1))
    assert (await b.take_one()).lease.attempt == 2


async def test_a_node_that_was_closed_has_left_and_is_not_called_lost(
    engine: PostgresEngine, a: LedgerDriver, b: LedgerDriver
) -> None:
    await engine.close_one(a.ledger)
    gone, living = await b.ledger.nodes()
    assert [(node.node, node.alive, node.left) for node in (gone, living)] == [("a", False, True), ("b", True, False)]
    await engine.kill(LedgerDriver(await engine.join("a"), engine.clock).ledger)  # type: ignore[arg-type]

    async def is_lost() -> bool:
        node = (await b.ledger.nodes())[0]
        return (node.alive, node.left) == (False, False)

    await until(is_lost)
    await until(lambda: not b.ledger.alive("a", ""))


async def test_as_many_leases_as_were_lost_before_are_found_when_another_node_is_lost(
    engine: PostgresEngine, b: LedgerDriver
) -> None:
    agents = {each.pubkey: PoolAgent(each, "requeue", follows=True) for each in (BOB, CAROL)}
    lost_work = LostWork(b.ledger, agents, hold_ms=1_000)
    for number, recipient in ((1, BOB), (2, CAROL)):
        other = LedgerDriver(await engine.join(f"node-{number}"), engine.clock)
        await other.taken_here(make_task(number, recipient=recipient))
        await engine.kill(ledger_of(other))
        await eventually(partial(_lost_one, b))
        await lost_work.step()
        assert (await b.ledger.counts()).holders_lost == 0


class PoolAgent(NamedTuple):
    identity: AgentId
    on_lost: OnLost
    follows: bool
    agent: object = None


async def _lost_one(driver: LedgerDriver) -> bool:
    return (await driver.ledger.counts()).holders_lost == 1


async def test_a_boot_that_was_declared_lost_writes_nothing_more(
    engine: PostgresEngine, a: LedgerDriver, b: LedgerDriver
) -> None:
    await a.send(make_task(1))
    again = LedgerDriver(await engine.join("a"), engine.clock)
    with refused("ledger_fenced", 503):
        await a.send(make_task(2))
    await again.send(make_task(3))
    assert await b.queued_ids() == [task_id(1), task_id(3)]


async def start(driver: LedgerDriver, task: Task) -> LeasedTask | None:
    """As a daemon takes a message to an agent of its own: under a new id, and begun at once."""
    starter = Starter(task.recipient, driver.ledger.node, driver.ledger.boot)
    command = Accept(task=task, digest=fingerprint(task)[0], starter=starter, minted=True)
    return (await driver.ledger.commit(command)).leased


def a2a(number: int) -> Task:
    return make_task(number, origin="a2a", tenant="acme")


async def gauge(driver: LedgerDriver, name: str) -> int:
    return (await driver.ledger.counts()).gauges[name]


async def test_what_a_holder_here_does_is_one_statement(a: LedgerDriver, b: LedgerDriver) -> None:
    await a.note("the first batch of a node looks at its row")
    before = await gauge(a, "batches_fast")
    with b.ledger.watch(task_id(1)) as watch:
        leased = await start(a, a2a(1))
        assert leased is not None
        await advance(a.ledger, leased, StatusUpdate("on it"))
        await advance(a.ledger, leased, reply="done")
        assert await gauge(a, "batches_fast") == before + 3
        steps = await seen(watch)
    assert [step.generation for step in steps] == [1, 2, 3, 4]
    assert await a.show(task_id(1)) == await b.show(task_id(1))
    with refused("already_settled", 409):
        await advance(a.ledger, leased, reply="again")


async def test_what_another_node_changed_meanwhile_is_found_before_anything_is_written(
    a: LedgerDriver, b: LedgerDriver
) -> None:
    await a.note("the first batch of a node looks at its row")
    for number in range(10):
        leased = await start(a, a2a(number))
        assert leased is not None
        await b.cancel(task_id(number))
        with refused("canceled", 409):
            await advance(a.ledger, leased, reply="too late")
        assert [update.kind for update in (await b.show(task_id(number))).updates] == [
            "submitted",
            "working",
            "settled",
        ]
    assert await gauge(a, "conflicts") >= 10


async def test_nobody_starts_before_those_who_wait_at_another_node(a: LedgerDriver, b: LedgerDriver) -> None:
    await a.note("the first batch of a node looks at its row")
    for number in range(0, 20, 2):
        await b.send(make_task(number))
        assert await start(a, a2a(number + 1)) is None
        assert [leased.task.id for leased in await a.take(count=2)] == [task_id(number), task_id(number + 1)]


async def test_the_work_of_an_offer_does_not_start_before_what_waits_at_another_node(
    a: LedgerDriver, b: LedgerDriver
) -> None:
    await a.ledger.commit(add(1))
    starter = Starter(BOB, a.ledger.node, a.ledger.boot)
    for number in range(10):
        await b.send(make_task(number))
        received = await a.ledger.commit(offered(number, jti=f"offer-{number}", starter=starter))
        assert received.leased is None
        assert [leased.task.id for leased in await a.take(count=2)] == [task_id(number), task_id(100 + number)]
    assert (await a.ledger.commit(offered(10, jti="offer-10", starter=starter))).leased is not None


async def test_many_callers_of_few_tasks_at_two_nodes_leave_no_gap(a: LedgerDriver, b: LedgerDriver) -> None:
    leases = [await start(a, a2a(number)) for number in range(8)]
    calls: list[Coroutine[Any, Any, object]] = []
    for at in range(64):
        leased = leases[at % 8]
        assert leased is not None
        driver = (a, b)[at // 8 % 2]
        calls.append(advance(driver.ledger, leased, StatusUpdate(f"{at}")))
        calls.append(driver.say(leased.task.id, f"{at}"))
    await asyncio.gather(*calls)
    for number in range(8):
        steps = await b.ledger.steps(task_id(number), 0, 1_000)
        assert [step.generation for step in steps] == list(range(1, 19))
    sums = [ledger_of(driver)._counters for driver in (a, b)]
    await until(lambda: sorted(sums[0]) == sorted(sums[1]))


async def test_a_limit_is_passed_by_no_more_than_what_is_decided_at_once(engine: PostgresEngine) -> None:
    limits = Limits(queued_per_recipient_max=10)
    drivers = [LedgerDriver(await engine.join(name, limits), engine.clock) for name in ("a", "b")]
    sends = [drivers[number % 2].send(make_task(number)) for number in range(40)]
    answers = await asyncio.gather(*sends, return_exceptions=True)
    assert 10 <= sum(not isinstance(answer, BaseException) for answer in answers) <= 20
    await until(lambda: all(ledger_of(driver)._counters.get("queued", BOB.pubkey) >= 10 for driver in drivers))
    for driver in drivers:
        with refused("queue_full"):
            await driver.send(make_task(99))


async def test_every_hint_that_is_lost_costs_time_only(
    a: LedgerDriver, b: LedgerDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def nothing(_: object) -> None:
        pass

    monkeypatch.setattr(nodes.Membership, "_notify_nodes", nothing)
    with b.ledger.watch(task_id(1)) as watch:
        await a.finish(await a.taken(make_task()), ok(task_id(1)))
        assert isinstance((await seen(watch))[-1].what, Ended)


async def test_a_cut_connection_costs_nobody_a_task(engine: PostgresEngine, a: LedgerDriver, b: LedgerDriver) -> None:
    """Whoever is not told that its task was accepted sends it again, and it is there once."""
    due = asyncio.Event()
    cutting = asyncio.create_task(_cut(engine, due))
    try:
        for number in range(60):
            await eventually(lambda: answered(a.send(make_task(number))))  # noqa: B023  (awaited in this round)
            if number % 4 == 0:
                due.set()  # while the next ones are sent
    finally:
        cutting.cancel()
        await asyncio.wait((cutting,))
    taken: list[TaskId] = []

    async def take() -> bool:
        leases = await answered(b.take(count=100))
        taken.extend(leased.task.id for leased in leases or ())
        return bool(leases)

    await eventually(take)
    assert sorted(taken) == sorted(task_id(number) for number in range(60))


async def answered(asking: Awaitable[T]) -> T | None:
    """None: the database could not be reached."""
    try:
        return await asking
    except Unavailable:
        return None


async def _cut(engine: PostgresEngine, due: asyncio.Event) -> None:
    """Terminate every backend of the ledger, whenever it is due."""
    connection = await asyncpg.connect(engine.url)
    try:
        while True:
            await due.wait()
            due.clear()
            await connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
    finally:
        await connection.close()


async def test_behind_a_pooler_nothing_is_kept_in_a_session_and_news_are_polled_for(databases: Databases) -> None:
    url = await databases.borrow()
    engine = PostgresEngine(url, pooler=True)
    a, b = [LedgerDriver(await engine.join(name), engine.clock) for name in ("a", "b")]
    with b.ledger.watch(task_id(1)) as watch:
        await a.finish(await a.taken(make_task()), ok(task_id(1)))
        assert isinstance((await seen(watch))[-1].what, Ended)
    assert len(await b.drain()) == 1
    listening = (
        "SELECT count(*) AS n FROM pg_stat_activity WHERE datname = current_database() AND query ILIKE 'LISTEN%'"
    )
    kept = "SELECT count(*) AS n FROM pg_prepared_statements"
    assert [row["n"] for row in await ledger_of(a)._connections.fetch(Statement(listening), {})] == [0]
    assert [row["n"] for row in await ledger_of(a)._connections.fetch(Statement(kept), {})] <= [1], "the one that asks"
    await engine.close()
    await databases.give_back(url)


async def test_daemons_that_open_an_empty_ledger_at_once_all_have_its_first_tenant(engine: PostgresEngine) -> None:
    joined = await asyncio.gather(*(engine.join(name) for name in ("one", "two", "three")))
    opened = [TenantAccess(each, OPERATOR, IdentityAuth(each, OPERATOR)) for each in joined]
    await asyncio.gather(*(each.open() for each in opened))
    for ledger in joined:
        await ledger.durable()
        assert [tenant.name for tenant in await ledger.tenants()] == [DEFAULT]


async def test_a_chain_whose_end_was_cut_is_found_by_what_another_chain_has_seen(
    engine: PostgresEngine, a: LedgerDriver, b: LedgerDriver
) -> None:
    for driver in (a, b, b):
        await driver.note("something happened")
    anchors = AuditAnchors(a.ledger, OPERATOR, log=Log(), interval_ms=60_000)
    assert await anchors.step()
    assert not await anchors.step(), "nothing is new in the other chains"
    assert (await a.ledger.audit_verify()).valid
    connection = await asyncpg.connect(engine.url)
    try:
        await connection.execute("DELETE FROM audit WHERE chain = 'b' AND idx = 2")
        await connection.execute(
            "UPDATE writers SET audit_index = 1, audit_hash = a.chain_hash FROM audit AS a"
            " WHERE a.chain = 'b' AND writers.node = 'b'"
        )
    finally:
        await connection.close()
    report = await a.ledger.audit_verify()
    assert not report.valid
    assert report.failures == ("b: row 2, which the chain of a has seen, is missing",)
    assert await anchors.step(), "the cut head is anchored, too"
    assert (await a.ledger.audit_verify()).failures == report.failures


async def test_a_chain_that_was_cut_and_continued_is_found_by_what_another_chain_has_seen(
    engine: PostgresEngine, a: LedgerDriver
) -> None:
    b = await engine.join("b")
    driver = LedgerDriver(b, engine.clock)
    await a.note("something happened")
    for _ in range(3):
        await driver.note("something happened")
    anchors = AuditAnchors(a.ledger, OPERATOR, log=Log(), interval_ms=60_000)
    assert await anchors.step()
    await engine.close_one(b)
    connection = await asyncpg.connect(engine.url)
    try:
        await connection.execute("DELETE FROM audit WHERE chain = 'b' AND idx > 1")
        await connection.execute(
            "UPDATE writers SET audit_index = 1, audit_hash = a.chain_hash FROM audit AS a"
            " WHERE a.chain = 'b' AND writers.node = 'b'"
        )
    finally:
        await connection.close()
    driver = LedgerDriver(await engine.join("b"), engine.clock)
    for _ in range(4):
        await driver.note("nothing happened")
        assert await anchors.step()
    report = await a.ledger.audit_verify()
    assert report.failures == ("b: row 3, which the chain of a has seen, is another one",)


async def test_notes_of_an_agent_are_numbered_once_over_all_nodes(
    a: LedgerDriver, b: LedgerDriver, engine: PostgresEngine, tmp_path: Path
) -> None:
    ledgers = [await engine.join(name) for name in ("c", "d")]
    places = [AgentMemories(tmp_path, lambda: 1_000, ledger).of("acme", "bot") for ledger in ledgers]
    written = await asyncio.gather(*(place.write(f"note {n}") for n in range(4) for place in places))
    assert sorted(note.id for note in written) == list(range(1, 9))
    assert {note.text for note in await places[0].notes()} == {note.text for note in written}
    assert await places[1].clear(3) == 1
    assert len(await places[0].notes()) == 7
    assert await AgentMemories(tmp_path, lambda: 1_000, ledgers[0]).of("other", "bot").notes() == ()
    assert not list(tmp_path.iterdir()), "nothing of it is in a file"


async def test_each_node_lets_in_its_share_of_a_limit(a: LedgerDriver, b: LedgerDriver, engine: PostgresEngine) -> None:
    ledgers = [await engine.join(name) for name in ("c", "d")]
    await until(lambda: all(ledger.living() == 4 for ledger in ledgers))
    tenant = Tenant(
        name="acme", token_sha256="", token_prefix="", created_at_ms=0, limits=TenantLimits(rate_per_min=10)
    )
    caller = Caller(tenant, "token", operator=False, name="acme")
    admitted = 0
    for ledger in ledgers:
        limiter = TenantLimiter(lambda: 0, living=ledger.living)
        with suppress(OverLimit):
            while admitted < 100:
                limiter.admit(caller)
                admitted += 1
    assert admitted == 2 * 3, "ten, divided by four nodes and rounded up, at each of two"


async def test_agents_that_a_node_serves_are_known_to_the_others_until_it_is_gone(
    a: LedgerDriver, b: LedgerDriver, engine: PostgresEngine
) -> None:
    c, d = [await engine.join(name) for name in ("c", "d")]
    agent = CatalogueAgent(tenant=DEFAULT, definition=AgentDefinition(id="bot", kind="worker"), source="code")
    heard: list[RegisterChange] = []
    d.on_registers(heard.append)
    await c.announce((agent,))
    assert d.residents() == [Resident("c", agent)]
    assert c.residents() == [], "it knows its own"
    assert RegisterChange(Register.AGENTS, DEFAULT) in heard
    heard.clear()
    await engine.kill(c)
    await until(lambda: d.residents() == [Resident("c", agent, alive=False)])
    assert RegisterChange(Register.AGENTS, DEFAULT) in heard
    again = await engine.join("c")
    await again.announce(())
    assert d.residents() == []


async def test_a_node_that_was_declared_lost_announces_its_agents_again(
    a: LedgerDriver, b: LedgerDriver, engine: PostgresEngine
) -> None:
    c, d = [await engine.join(name) for name in ("c", "d")]
    agent = CatalogueAgent(tenant=DEFAULT, definition=AgentDefinition(id="bot", kind="worker"), source="code")
    await c.announce((agent,))
    boot = c.boot
    connection = await asyncpg.connect(engine.url)
    try:
        for table in ("writers", "nodes"):
            await connection.execute(f"UPDATE {table} SET lost_at_ms = 1 WHERE node = 'c'")
    finally:
        await connection.close()
    await until(lambda: c.boot != boot)
    await until(lambda: d.residents() == [Resident("c", agent)])


async def test_a_node_that_is_closed_while_it_announces_its_agents_again_leaves_nothing_behind(
    a: LedgerDriver, b: LedgerDriver, engine: PostgresEngine
) -> None:
    agent = CatalogueAgent(tenant=DEFAULT, definition=AgentDefinition(id="bot", kind="worker"), source="code")
    agents = ledger_of(b)._node_agents
    await agents.announce((agent,))
    async with ledger_of(a)._membership._busy:  # it does not look, so that nothing is known to all
        agents.announce_again()
        announcing = agents._reannouncing
        assert announcing is not None
        await asyncio.sleep(0)
        await engine.close_one(b.ledger)
        assert announcing.cancelled()
