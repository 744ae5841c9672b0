"""Numbers that are kept as running totals are what a count of everything would give."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.ledger_contract.driver import LedgerDriver
from tests.ledger_contract.embedded_engine import EmbeddedEngine
from tests.ledger_contract.samples import make_task, ok, task_id


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[EmbeddedEngine]:
    engine = EmbeddedEngine(tmp_path)
    yield engine
    await engine.close()


async def lost(driver: LedgerDriver) -> int:
    """The total; the same as a count of the queue."""
    total = (await driver.ledger.counts()).holders_lost
    assert total == sum(entry.holder_lost for entry in await driver.queue(limit=1_000))
    return total


async def test_lost_holders_are_counted_as_they_come_and_go(engine: EmbeddedEngine) -> None:
    driver = LedgerDriver(await engine.open(), engine.clock)
    held = [await driver.taken_here(make_task(number)) for number in range(1, 7)]
    assert await lost(driver) == 0
    await driver.interrupt(held[0])
    assert await lost(driver) == 1
    await driver.renew(held[0])
    assert await lost(driver) == 0
    driver = LedgerDriver(await engine.crash_and_reopen(driver.ledger), engine.clock)
    assert await lost(driver) == 6
    await driver.renew(held[0])
    await driver.finish(held[1], ok(task_id(2)))
    await driver.cancel(task_id(3))
    await driver.requeue(task_id(4))
    assert await lost(driver) == 3
    await driver.take_one(node=driver.ledger.node, boot=driver.ledger.boot)
    await driver.park(held[4])
    assert await lost(driver) == 2
    await driver.ledger.compact()
    driver = LedgerDriver(await engine.close_and_reopen(driver.ledger), engine.clock)
    assert await lost(driver) == 3


async def test_the_holders_of_a_run_under_another_name_are_lost(engine: EmbeddedEngine) -> None:
    """A machine was renamed, a home was copied to another one, or a container began under another random name."""
    driver = LedgerDriver(await engine.open(), engine.clock)
    for number in (1, 2):
        await driver.taken_here(make_task(number))
    await driver.taken(make_task(3))  # a worker on another machine: it may come back
    engine.node = "renamed"
    driver = LedgerDriver(await engine.crash_and_reopen(driver.ledger), engine.clock)
    assert await lost(driver) == 2
    shown = [await driver.ledger.show(task_id(number), None, 10) for number in (1, 2, 3)]
    assert [each.holder_lost for each in shown if each is not None] == [True, True, False]
