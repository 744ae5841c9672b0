"""Numbers that are kept as running totals are what a count of everything would give."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from covenant.testing.cast import make_task, ok, task_id
from covenant.testing.desk import Desk
from covenant.testing.log import LogEngine


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[LogEngine]:
    engine = LogEngine(tmp_path)
    yield engine
    await engine.close()


async def lost(desk: Desk) -> int:
    """The total; the same as a count of the queue."""
    total = (await desk.ledger.counts()).holders_lost
    assert total == sum(entry.holder_lost for entry in await desk.queue(limit=1_000))
    return total


async def test_lost_holders_are_counted_as_they_come_and_go(engine: LogEngine) -> None:
    desk = Desk(await engine.open(), engine.clock)
    held = [await desk.taken_here(make_task(number)) for number in range(1, 7)]
    assert await lost(desk) == 0
    await desk.interrupt(held[0])
    assert await lost(desk) == 1
    await desk.renew(held[0])
    assert await lost(desk) == 0
    desk = Desk(await engine.crash_and_reopen(desk.ledger), engine.clock)
    assert await lost(desk) == 6
    await desk.renew(held[0])
    await desk.finish(held[1], ok(task_id(2)))
    await desk.cancel(task_id(3))
    await desk.requeue(task_id(4))
    assert await lost(desk) == 3
    await desk.take_one(node=desk.ledger.node, boot=desk.ledger.boot)
    await desk.park(held[4])
    assert await lost(desk) == 2
    await desk.ledger.compact()
    desk = Desk(await engine.close_and_reopen(desk.ledger), engine.clock)
    assert await lost(desk) == 3
