"""Nodes that ended long ago are forgotten, and with them nothing that anybody still needs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from math import inf
from typing import Any, Final

import asyncpg
import pytest

from covenant.ledger.postgres import nodes
from covenant.ledger.postgres.old_rows import NODES_KEPT_MS
from covenant.ledger.postgres.postgres_ledger import PostgresLedger
from covenant.model.agent_definition import AgentDefinition, CatalogueAgent
from covenant.model.errors import Unavailable
from covenant.model.tenants import DEFAULT
from tests.ledger_contract.driver import LedgerDriver
from tests.ledger_contract.postgres_engine import PostgresEngine
from tests.ledger_contract.postgres_server import Databases
from tests.ledger_contract.samples import make_task, ok, task_id
from tests.waits import eventually

SHOP: Final = CatalogueAgent(tenant=DEFAULT, definition=AgentDefinition(id="shop", kind="worker"), source="code")


@pytest.fixture
async def engine(databases: Databases, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[PostgresEngine]:
    monkeypatch.setattr(nodes, "TIDY_S", 0.0)
    url = await databases.borrow()
    engine = PostgresEngine(url)
    yield engine
    await engine.close()
    await databases.give_back(url)


async def ask(engine: PostgresEngine, sql: str, *values: Any) -> list[tuple[Any, ...]]:
    connection = await asyncpg.connect(engine.url)
    try:
        return [tuple(row) for row in await connection.fetch(sql, *values)]
    finally:
        await connection.close()


async def grow_old(engine: PostgresEngine, *names: str) -> None:
    """As if they had ended a day ago."""
    aged = "UPDATE nodes SET lost_at_ms = lost_at_ms - $1, until_ms = until_ms - $1 WHERE node = ANY($2)"
    await ask(engine, f"{aged} AND lost_at_ms IS NOT NULL", NODES_KEPT_MS, list(names))


async def listed(ledger: PostgresLedger) -> list[str]:
    return [each.node for each in await ledger.nodes()]


async def lists(ledger: PostgresLedger, *names: str) -> None:
    async def is_so() -> bool:
        return await listed(ledger) == list(names)

    await eventually(is_so)


async def test_nodes_that_ended_a_day_ago_are_forgotten_and_their_chains_and_counts_stay(
    engine: PostgresEngine,
) -> None:
    a = await engine.join("a")
    ended = [LedgerDriver(await engine.join(name), engine.clock) for name in ("left", "lost", "young")]
    for number, driver in enumerate(ended):
        ledger = driver.ledger
        assert isinstance(ledger, PostgresLedger)
        await driver.note("something happened")
        await driver.send(make_task(number))
        await ledger.announce([SHOP])
        await eventually(_leads(ledger))
    left, lost, young = (driver.ledger for driver in ended)
    assert isinstance(lost, PostgresLedger)
    await engine.close_one(left)
    await engine.kill(lost)
    await engine.close_one(young)
    await eventually(_is_lost(engine, "lost"))
    counts, end = await a.counts(), a.committed_batches()
    await grow_old(engine, "a", "left", "lost")
    await lists(a, "a", "young")
    kept = await ask(engine, "SELECT name FROM register_rows WHERE kind = 'resident'")
    assert [name for (name,) in kept if "young" not in name] == []
    assert await ask(engine, "SELECT 1 FROM singletons WHERE node IN ('left', 'lost')") == []
    gone = "SELECT 1 FROM counted JOIN writers ON writer = batch >> 40 WHERE node IN ('left', 'lost')"

    async def is_merged() -> bool:
        return not await ask(engine, gone)

    async def is_away_no_more() -> bool:
        return [each.node for each in a.residents()] == ["young"]

    await eventually(is_merged)
    await eventually(is_away_no_more)
    assert a._membership.away_s("left") == inf, "whatever time the loop's clock began at"
    assert (await a.counts()).queued == counts.queued == 3
    assert a.committed_batches() == end
    report = await a.audit_verify()
    assert (report.valid, report.events) == (True, 3)
    other = LedgerDriver(await engine.join("b"), engine.clock)
    assert isinstance(other.ledger, PostgresLedger)
    assert other.ledger.committed_batches() == end, "peers take less for a ledger that was restored"
    assert (await other.ledger.counts()).queued == 3
    assert [each.node for each in other.ledger.residents()] == ["young"]
    again = LedgerDriver(await engine.join("left"), engine.clock)
    await again.note("it is back")
    assert (await other.ledger.audit_verify()).valid
    assert {each.chain: each.index for each in await other.ledger.audit_recent(None, 100, None)}["left"] == 2
    await lists(other.ledger, "a", "b", "left", "young")


def _leads(ledger: PostgresLedger) -> Any:
    async def is_so() -> bool:
        return ledger.leads(f"work of {ledger.node}")

    return is_so


def _is_lost(engine: PostgresEngine, node: str) -> Any:
    async def is_so() -> bool:
        return bool(await ask(engine, "SELECT 1 FROM nodes WHERE node = $1 AND lost_at_ms IS NOT NULL", node))

    return is_so


async def test_a_run_that_was_forgotten_while_it_stood_still_finds_itself_fenced(engine: PostgresEngine) -> None:
    a, still = await engine.join("a"), LedgerDriver(await engine.join("still"), engine.clock)
    ledger = still.ledger
    assert isinstance(ledger, PostgresLedger)
    before, leased = ledger.boot, await still.taken_here(make_task(1))
    async with ledger._membership._busy:
        await eventually(_is_lost(engine, "still"))
        await grow_old(engine, "still")
        await lists(a, "a")
        assert (await LedgerDriver(a, engine.clock).show(task_id(1))).holder_lost
        with pytest.raises(Unavailable):
            await still.finish(leased, ok(task_id(1)))

    codes: set[str] = set()

    async def serves() -> bool:
        try:
            await still.send(make_task(2))
        except Unavailable as refusal:
            codes.add(refusal.code)
            return False
        return True

    await eventually(serves)
    assert "ledger_rolled_back" not in codes
    assert ledger.boot != before
    await lists(a, "a", "still")
    assert (await LedgerDriver(a, engine.clock).show(task_id(1))).holder_lost
