"""What tests of durable steps do with a pool: wake what is due, requeue, and count what was done."""

import asyncio
from typing import Any

from covenant.ledger.machine.commands import Repair, Sweep
from covenant.model.ids import TaskId
from covenant.model.retry_policy import Posture, Requeue
from covenant.model.task_view import TaskView
from tests.agents.pool_under_test import PoolUnderTest
from tests.ledger_contract.samples import OPERATOR
from tests.waits import BOUND_S, LOOK_S


async def swept(pool: PoolUnderTest, task_id: TaskId) -> TaskView:
    """The task at its end, while what is due is woken, as the daemon does."""
    async with asyncio.timeout(BOUND_S):
        ended = asyncio.ensure_future(pool.ended(task_id))
        while not ended.done():
            await pool.ledger.commit(Sweep())
            await asyncio.wait((ended,), timeout=LOOK_S)
        return ended.result()


async def requeue(pool: PoolUnderTest, task_id: TaskId) -> None:
    command = Requeue(Posture.OPERATOR_ACCEPTED)
    await pool.ledger.commit(Repair(task_id=task_id, by=OPERATOR, command=command, reason="again"))


async def waiting(pool: PoolUnderTest, task_id: TaskId) -> None:
    async with asyncio.timeout(BOUND_S):
        with pool.ledger.watch(task_id) as watch:
            while (entry := await pool.ledger.entry(task_id)) is None or entry.wait is None:
                await watch.next(BOUND_S)
    await pool.idle()


class Done(list[str]):
    """What was done, and so often."""

    def do(self, name: str, value: Any = None) -> Any:
        self.append(name)
        return value
