"""Waiters that a test watches: who is woken by what arrives, one by one."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Final, Self

from covenant.ledger.watchers import QueueWaiter
from covenant.model.ids import AgentId, PublicKey
from tests.ledger_contract.driver import LedgerDriver
from tests.waits import BOUND_S

WAIT_MS: Final = 60_000
TURNS: Final = 10
"""Turns of the loop after which whoever was woken has noticed."""


class Waiting:
    """One waiter, asleep in a task of its own."""

    def __init__(self, waiter: QueueWaiter) -> None:
        self.waiter = waiter.__enter__()
        self._left = False
        self._task = asyncio.ensure_future(self.waiter.wait(WAIT_MS))

    @property
    def is_woken(self) -> bool:
        return self._task.done() and not self._task.cancelled() and self._task.result()

    async def woken(self) -> bool:
        return await asyncio.wait_for(asyncio.shield(self._task), BOUND_S)

    async def wait_again(self) -> None:
        self._task = asyncio.ensure_future(self.waiter.wait(WAIT_MS))
        await asyncio.sleep(0)

    def cancel(self) -> None:
        self._task.cancel()
        self.leave()

    def leave(self) -> None:
        if not self._left:
            self._left = True
            self.waiter.__exit__(None, None, None)


class WaiterQueue:
    """Everybody who waits, in the order in which they began. All of them leave at the end."""

    def __init__(self, driver: LedgerDriver) -> None:
        self._ledger = driver.ledger
        self._waiting: list[Waiting] = []

    async def wait_for_tasks(self, recipient: AgentId | None) -> Waiting:
        return await self._begin(self._ledger.task_waiter(_key(recipient)))

    async def wait_for_results(self, sender: AgentId | None) -> Waiting:
        return await self._begin(self._ledger.result_waiter(_key(sender)))

    async def _begin(self, waiter: QueueWaiter) -> Waiting:
        waiting = Waiting(waiter)
        self._waiting.append(waiting)
        await asyncio.sleep(0)
        return waiting

    async def turns(self) -> None:
        for _ in range(TURNS):
            await asyncio.sleep(0)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        for waiting in self._waiting:
            waiting.cancel()
        await self.turns()


def _key(agent: AgentId | None) -> PublicKey | None:
    return None if agent is None else agent.pubkey
