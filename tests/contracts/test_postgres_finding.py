"""Finding tasks on PostgreSQL: no filter looks through the finished tasks, and no text is too long for an index."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from typing import Any, Final

import asyncpg
import pytest

from covenant.ledger.contract.task_query import Place, TaskQuery
from covenant.ledger.contract.tasks import ListQuery
from covenant.ledger.machine.states import DRAINED, QUEUED
from covenant.ledger.postgres import found_rows
from covenant.ledger.postgres.found_rows import Search
from covenant.ledger.postgres.postgres_ledger import PostgresLedger
from covenant.ledger.postgres.task_history import listing_statements
from covenant.model.ids import PublicKey
from covenant.model.task import Ending
from tests.ledger_contract.driver import LedgerDriver
from tests.ledger_contract.postgres_engine import PostgresEngine
from tests.ledger_contract.postgres_server import Databases
from tests.ledger_contract.samples import ALICE, BOB, make_task, ok, task_id, unsafe
from tests.ledger_contract.searches import course, numbers

TASKS: Final = 20_000
BASE_MS: Final = 1_700_000_000_000
ROWS: Final = f"""
INSERT INTO tasks (
    no, task_id, n, a2a_state, sender, recipient, tenant, agent_id, context_id, origin, parent, created_at_ms,
    updated_at_ms, generation, turn, attempt, settled_place, ended_n, error_message, rest, sender_display,
    recipient_display, task_kind, idempotency_key, remote, cause, intent, size
)
SELECT
    i, md5(i::text), 3, CASE WHEN i % 100 = 3 THEN 'failed' ELSE 'completed' END, 'key of ' || i % 7,
    'key of agent ' || i % 20, CASE i % 3 WHEN 0 THEN NULL WHEN 1 THEN 'acme' ELSE 'default' END, 'agent-' || i % 20,
    'context-' || i / 3, CASE i % 10 WHEN 0 THEN 'mailbox' WHEN 1 THEN 'simple' ELSE 'a2a' END,
    CASE i % 50 WHEN 7 THEN md5((i / 500)::text) END, {BASE_MS} + i * 10, {BASE_MS} + i * 10 + 5, 3, 1,
    CASE i % 200 WHEN 3 THEN 2 ELSE 1 END, i, 3, '', '["", 1, 1]', 'sender-' || i % 7 || '@here',
    'agent-' || i % 20 || '@here', CASE i % 20 WHEN 5 THEN 'invoice' END, CASE i % 50 WHEN 9 THEN 'key-' || i END,
    false, CASE i % 1000 WHEN 3 THEN 'timeout' ELSE 'result' END, 'do it', 600
FROM generate_series(1, {TASKS}) AS i
"""
FILTERS: Final[tuple[dict[str, Any], ...]] = (
    {},
    {"states": (DRAINED,)},
    {"states": (QUEUED,)},
    {"states": (QUEUED, DRAINED)},
    {"outcomes": (Ending.COMPLETED,)},
    {"outcomes": (Ending.FAILED,)},
    {"outcomes": (Ending.FAILED, Ending.CANCELED)},
    {"agent": "agent-3@here"},
    {"agent": "agent-3@here", "outcomes": (Ending.FAILED,)},
    {"sender": "sender-3@here"},
    {"tenant": "acme"},
    {"within": "acme"},
    {"task_kind": "invoice"},
    {"origin": "simple"},
    {"origin": "a2a"},
    {"parent": "c4ca4238a0b923820dcc509a6f75849b"},
    {"context": "context-7"},
    {"context": "c4ca4238a0b923820dcc509a6f75849b"},
    {"key": "key-9"},
    {"cause": "timeout"},
    {"cause": "result"},
    {"attempt_min": 1},
    {"attempt_min": 2},
    {"attempt_min": 3},
    {"since_ms": BASE_MS + 10 * (TASKS - 100)},
    {"until_ms": BASE_MS + 1_000},
    {"moved_since_ms": BASE_MS + 10 * (TASKS - 100)},
    {"id": "c"},
    {"text": "do"},
    {"viewer": ALICE.pubkey, "viewer_names": ("sender-3@here", "agent-3@here")},
)


@pytest.fixture
async def engine(databases: Databases) -> AsyncIterator[PostgresEngine]:
    url = await databases.borrow()
    engine = PostgresEngine(url)
    yield engine
    await engine.close()
    await databases.give_back(url)


@pytest.fixture
async def ledger(engine: PostgresEngine) -> PostgresLedger:
    return await engine.open()


async def test_no_filter_looks_through_the_finished_tasks(engine: PostgresEngine, ledger: PostgresLedger) -> None:
    assert (await ledger.find(TaskQuery())).tasks == ()
    db = await asyncpg.connect(engine.url)
    try:
        await db.execute(ROWS)
        await db.execute("INSERT INTO ids SELECT task_id, no FROM tasks")
        await db.execute("ANALYZE")
        for given in FILTERS:
            for order in ("created", "moved"):
                query = TaskQuery(order=order, **given)
                search = Search(query)
                after = Place(BASE_MS + 10 * TASKS // 2, 1)
                for asked, values in (search.page(None, 51), search.page(after, 51)):
                    plan = "\n".join(row[0] for row in await db.fetch("EXPLAIN " + asked.text, *asked.values(values)))
                    assert "Seq Scan on tasks" not in plan, (query, plan)
        for named in ("context-7", "c4ca4238a0b923820dcc509a6f75849b", None):
            page, _, values = listing_statements(ListQuery(recipient=PublicKey("key of agent 3"), context_id=named))
            plan = "\n".join(row[0] for row in await db.fetch("EXPLAIN " + page.text, *page.values(values)))
            assert "Seq Scan on tasks" not in plan, (named, plan)
        asked, values = Search(TaskQuery(id="c4ca4"), [1]).page(None, 51)
        plan = "\n".join(row[0] for row in await db.fetch("EXPLAIN " + asked.text, *asked.values(values)))
        assert "Seq Scan on tasks" not in plan, plan
    finally:
        await db.close()
    found = await ledger.find(TaskQuery(id="c4ca4", count=True))
    assert ([task.task_id for task in found.tasks], found.total) == (["c4ca4238a0b923820dcc509a6f75849b"], 1)


async def test_what_a_sender_chose_may_be_longer_than_an_entry_of_an_index(
    engine: PostgresEngine, ledger: PostgresLedger
) -> None:
    driver = LedgerDriver(ledger, engine.clock)
    chance = random.Random(1)
    texts = ["".join(chance.choices("abcdefghijklmnopqrstuvwxyz0123456789é\x00\x01", k=20_000)) for _ in range(3)]
    for number, (kind, key, context) in enumerate((texts, [*texts[1:], texts[0]]), 1):
        task = make_task(number, task_kind=kind, idempotency=unsafe(key), context_id=context, tenant="acme")
        await driver.finish(await driver.taken(task), ok(task.id))
        await driver.drain()
    kind, key, context = texts
    for query in (TaskQuery(task_kind=kind), TaskQuery(key=key), TaskQuery(context=context)):
        (found,) = (await ledger.find(query)).tasks
        assert found.task_id == task_id(1)
        assert found.key is not None
        assert key.startswith(found.key)
    assert (await ledger.find(TaskQuery(task_kind=kind[:-1]))).tasks == ()
    listing = await ledger.listing(ListQuery(recipient=BOB.pubkey, context_id=context))
    assert (len(listing.tasks), listing.total) == (1, 1)


async def test_a_text_is_looked_for_in_a_bounded_number_of_tasks_and_bytes(
    engine: PostgresEngine, ledger: PostgresLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = LedgerDriver(ledger, engine.clock)
    await course(driver)
    for bound, value in (("TEXT_PART", 2), ("TEXT_SCAN_MAX", 4)):
        monkeypatch.setattr(found_rows, bound, value)
    pages: list[list[int]] = []
    after: str | None = ""
    while after is not None:
        page = await ledger.find(TaskQuery(text="work 1", after=after))
        pages.append(numbers(page.tasks))
        after = page.next
    assert pages == [[10], [], [1]]
    monkeypatch.setattr(found_rows, "TEXT_BYTES_MAX", 1)
    page = await ledger.find(TaskQuery(text="work 1", count=True))
    assert (numbers(page.tasks), page.total, page.at_least) == ([10], 1, True)
    assert page.next is not None
