"""The rows of a batch of many tasks: the same as if each task had been written alone."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Iterable
from typing import Any, Final

import asyncpg
import pytest

from covenant.ledger.postgres.batch_statement import BatchStatement, probe_batch
from covenant.ledger.postgres.connections import WRITER_SETTINGS, Connections
from covenant.ledger.postgres.postgres_ledger import PostgresLedger
from covenant.model.errors import Conflict
from covenant.model.ids import PublicKey
from covenant.model.task import Task
from tests.ledger_contract.driver import LedgerDriver
from tests.ledger_contract.fake_clock import START_MS
from tests.ledger_contract.postgres_engine import PostgresEngine
from tests.ledger_contract.postgres_server import Databases
from tests.ledger_contract.samples import ALICE, BOB, CAROL, DAVE, failed, make_task, ok, task_id, unsafe

COUNT: Final = 6
DRAWN: Final = frozenset({"no", "place", "settled_place", "touched"})
"""Columns that are drawn: they differ from run to run."""
RANDOM: Final = re.compile(r'"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"')

Rows = dict[str, list[dict[str, Any]]]


@pytest.fixture
async def engine(databases: Databases) -> AsyncIterator[PostgresEngine]:
    url = await databases.borrow()
    engine = PostgresEngine(url, lease_ms=60_000)
    yield engine
    await engine.close()
    await databases.give_back(url)


@pytest.fixture
async def other_engine(databases: Databases) -> AsyncIterator[PostgresEngine]:
    url = await databases.borrow()
    engine = PostgresEngine(url, lease_ms=60_000)
    yield engine
    await engine.close()
    await databases.give_back(url)


def alike(number: int) -> Task:
    return make_task(number, intent_text="the same work")


def different(number: int) -> Task:
    """Some columns are null in some tasks, empty in others, and different in the rest."""
    even, third = number % 2 == 0, number % 3 == 0
    return make_task(
        number,
        sender=DAVE if third else ALICE,
        recipient=CAROL if even else BOB,
        tenant="acme" if even else None,
        context_id=f"context {number}" if third else None,
        intent_text="" if third else f"\x1f work {number} \x1e",
        task_kind="invoice" if even else None,
        idempotency=unsafe(f"key-{number}") if third else None,
        deadline_ms=START_MS + 10_000_000 * (number + 1) if even else None,
        origin="a2a" if third else "mailbox",
        priority=number % 2,
    )


def result_alike(task: Task) -> Any:
    return ok(task.id)


def result_different(task: Task) -> Any:
    return failed(task.id, f"\x00 no {task.id}") if int(task.id[-1], 16) % 2 else ok(task.id, "")


class Course:
    """Tasks go through their whole life: in batches (`together`), or each command alone."""

    def __init__(self, engine: PostgresEngine, driver: LedgerDriver, *, together: bool) -> None:
        self._url, self._driver, self._together = engine.url, driver, together
        self._ledger = driver.ledger

    async def _each(self, commands: Iterable[Awaitable[Any]]) -> list[Any]:
        if not self._together:
            return [await command for command in commands]
        assert isinstance(self._ledger, PostgresLedger)
        before = self._ledger._writer.seq
        answers = await asyncio.gather(*commands)
        assert self._ledger._writer.seq == before + 1, "these commands are not one batch"
        return list(answers)

    async def _rows(self) -> Rows:
        connection = await asyncpg.connect(self._url)
        try:
            return {
                "live": await _known(connection, "SELECT * FROM live ORDER BY task_id"),
                "tasks": await _known(connection, "SELECT * FROM tasks ORDER BY task_id"),
                "events": await _known(
                    connection,
                    "SELECT e.*, i.task_id FROM events AS e JOIN ids AS i USING (no) ORDER BY i.task_id, e.n",
                ),
                "queue": await _known(connection, "SELECT task_id, q.* FROM queue AS q JOIN ids USING (no) ORDER BY 1"),
                "results": await _known(
                    connection, "SELECT task_id, r.* FROM results AS r JOIN ids USING (no) ORDER BY 1"
                ),
            }
        finally:
            await connection.close()

    async def run(self, make_one: Any, result_of: Any) -> list[Rows]:
        """The rows after each step."""
        driver, found = self._driver, []
        await driver.send(make_one(0))  # the first batch of a node learns where it stands
        first, more = ([make_one(number) for number in range(at, at + COUNT)] for at in (1, 1 + COUNT))
        await self._each(driver.send(task) for task in first)
        found.append(await self._rows())
        leased = [each for taken in await self._each(map(self._take, _recipients(first))) for each in taken]
        assert len(leased) == COUNT + 1
        found.append(await self._rows())
        ended, moved = leased[: COUNT // 2], leased[COUNT // 2 :]
        await self._each(driver.finish(each, result_of(each.task)) for each in ended)
        found.append(await self._rows())
        # New tasks, tasks that move and tasks that end, all at once.
        drains = [driver.drain(each.task.sender) for each in ended]
        settles = [driver.finish(each, result_of(each.task)) for each in moved[:2]]
        await self._each([*drains, *settles, *(driver.renew(each) for each in moved[2:]), *map(driver.send, more)])
        found.append(await self._rows())
        return found

    async def _take(self, recipient: PublicKey) -> Any:
        holder = {each.pubkey: each for each in (BOB, CAROL)}[recipient]
        return await self._driver.take(holder, count=COUNT + 1)


def _recipients(tasks: list[Task]) -> list[PublicKey]:
    return list(dict.fromkeys(task.recipient.pubkey for task in tasks))


async def _known(connection: asyncpg.Connection[Any], query: str) -> list[dict[str, Any]]:
    return [
        {
            name: RANDOM.sub("ID", value) if isinstance(value, str) else value
            for name, value in row.items()
            if name not in DRAWN
        }
        for row in await connection.fetch(query)
    ]


@pytest.mark.parametrize(
    ("make_one", "result_of"), [(alike, result_alike), (different, result_different), (alike, result_different)]
)
async def test_tasks_that_are_written_together_have_the_rows_of_tasks_that_are_written_alone(
    engine: PostgresEngine, other_engine: PostgresEngine, make_one: Any, result_of: Any
) -> None:
    rows = []
    for each, together in ((engine, True), (other_engine, False)):
        driver = LedgerDriver(await each.join("a"), each.clock)
        rows.append(await Course(each, driver, together=together).run(make_one, result_of))
    for batch, alone in zip(*rows, strict=True):
        assert batch == alone
    assert len(rows[0][-1]["tasks"]) >= COUNT // 2
    assert {row["n"] for row in rows[0][-1]["live"]} > {1}


async def test_a_batch_in_which_one_task_was_changed_elsewhere_writes_nothing(engine: PostgresEngine) -> None:
    a = LedgerDriver(await engine.join("a"), engine.clock)
    b = LedgerDriver(await engine.join("b"), engine.clock)
    assert isinstance(a.ledger, PostgresLedger)
    for number in range(COUNT):
        await a.send(make_task(number))
    leased = await a.take(count=COUNT)
    async with a.ledger._membership._busy:  # no news of the other node are read
        await b.cancel(task_id(3))
        conflicts = a.ledger._writer.conflicts
        commands = [a.finish(each, ok(each.task.id)) for each in leased]
        answers = await asyncio.gather(*commands, return_exceptions=True)
    assert a.ledger._writer.conflicts == conflicts + 1
    refusals = [each for each in answers if isinstance(each, BaseException)]
    assert [(type(each), answers.index(each)) for each in refusals] == [(Conflict, 3)]
    connection = await asyncpg.connect(engine.url)
    try:
        assert await connection.fetchval("SELECT count(*) FROM results") == COUNT
        settled = (
            "SELECT i.task_id, count(*) FROM events JOIN ids AS i USING (no) WHERE kind = 'task_settled' GROUP BY 1"
        )
        assert {row[1] for row in await connection.fetch(settled)} == {1}
    finally:
        await connection.close()


def test_a_column_that_is_alike_in_all_rows_is_given_once() -> None:
    batch = BatchStatement(("new_queue",))
    given = dict.fromkeys(batch.names, 0) | {"q_no": [1, 2], "q_place": [3, 4]}
    for recipients, texts, one in (
        (["bob", "bob"], None, "bob"),
        (["bob", "carol"], "bob\x1fcarol", None),
        (["bob", None], "bob\x1f\x1e", None),
        ([None, None], None, None),
    ):
        values = dict(zip(batch.names, batch.values(given | {"q_recipient": recipients}), strict=True))
        assert (values["q_recipient"], values["q_recipient__alike"]) == (texts, one)
        assert (values["q_no"], values["q_place"]) == ("{1, 2}", "{3, 4}")


async def test_a_batch_with_every_kind_of_row_is_prepared_once(engine: PostgresEngine) -> None:
    await engine.join("a")
    connection = await Connections(engine.url).connect(WRITER_SETTINGS)
    try:
        prepared = []
        for _ in range(2):
            await probe_batch(connection)
            prepared.append(
                await connection.fetchval(
                    "SELECT min(prepare_time) FROM pg_prepared_statements WHERE statement LIKE 'WITH w AS%'"
                )
            )
        assert prepared[0] is not None
        assert prepared[0] == prepared[1]
    finally:
        await connection.close()
