"""The work that is measured: tasks of 600 bytes, and callers that carry each through its whole life.

A cycle is send → lease → result → drain, each step durable before the next begins. Callers share one queue, as those of
the peers do: a caller may lease and drain what another one sent.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Final, TypeVar
from uuid import uuid4

import msgspec
import uvloop

from covenant import Mailbox
from covenant.daemon.environment import monotonic_ms, now_ms
from covenant.ledger.postgres.open_postgres import open_postgres_ledger
from covenant.model.content import Text
from covenant.model.errors import Unavailable
from covenant.model.ids import AgentId, PublicKey, TaskId
from covenant.model.task import Result, ResultStatus, Task

PAYLOAD_BYTES: Final = 600
PAYLOAD: Final = "x" * PAYLOAD_BYTES
WARM_S: Final = 0.3
ARCHIVED_TRIES: Final = 20

SENDER: Final = AgentId("sender@bench", PublicKey("1" * 31 + "2"))
RECIPIENT: Final = AgentId("recipient@bench", PublicKey("1" * 31 + "3"))

T = TypeVar("T")


def run(main: Coroutine[Any, Any, T]) -> T:
    """On the loop that the daemon uses."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


@asynccontextmanager
async def opened(home: str) -> AsyncIterator[Mailbox]:
    """In a folder, or in the database that a URL names."""
    if "://" not in home:
        async with Mailbox.open(home) as mailbox:
            yield mailbox
        return
    ledger = await open_postgres_ledger(home, clock=now_ms, monotonic_ms=monotonic_ms)
    try:
        yield Mailbox(ledger)
    finally:
        await ledger.close()


def new_task(recipient: AgentId = RECIPIENT) -> Task:
    return Task(id=TaskId(str(uuid4())), sender=SENDER, recipient=recipient, intent_text=PAYLOAD)


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    cycles: int
    seconds: float
    cpu_s: float

    @property
    def per_s(self) -> float:
        return self.cycles / self.seconds

    @property
    def cpu_us(self) -> float:
        return self.cpu_s / max(1, self.cycles) * 1e6


class Callers:
    """Repeat the cycle until told to stop, or until so many were begun."""

    def __init__(self, mailbox: Mailbox, cycles_max: int | None = None) -> None:
        self._mailbox = mailbox
        self._left = cycles_max
        self.stopped = False
        self.done = 0

    async def run(self, callers: int) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(callers):
                group.create_task(self._caller())

    async def _caller(self) -> None:
        while not self.stopped and self._left != 0:
            if self._left is not None:
                self._left -= 1
            await self._cycle()
            self.done += 1

    async def _cycle(self) -> None:
        mailbox = self._mailbox
        await mailbox.send_task(new_task())
        leased = await mailbox.recv_task_for(RECIPIENT)
        result = Result(task_id=leased.task.id, status=ResultStatus.OK, content=(Text("done"),))
        await mailbox.send_result(result, leased.lease.lease_id)
        if await mailbox.try_recv_result_for(SENDER) is None:
            raise AssertionError("a result that was sent is not there")


async def over_time(mailbox: Mailbox, callers: int, seconds: float) -> Measured:
    """Count the cycles of a window, after a warm-up."""
    work = Callers(mailbox)
    async with asyncio.TaskGroup() as group:
        group.create_task(work.run(callers))
        await asyncio.sleep(WARM_S)
        done, begun, cpu_s = work.done, time.perf_counter(), time.process_time()
        await asyncio.sleep(seconds)
        measured = Measured(
            cycles=work.done - done, seconds=time.perf_counter() - begun, cpu_s=time.process_time() - cpu_s
        )
        work.stopped = True
    return measured


async def over_cycles(mailbox: Mailbox, callers: int, cycles: int) -> Measured:
    """Time so many cycles and the archiving of them: what a cycle costs in all."""
    begun, cpu_s = time.perf_counter(), time.process_time()
    await Callers(mailbox, cycles).run(callers)
    await archived(mailbox)
    return Measured(cycles=cycles, seconds=time.perf_counter() - begun, cpu_s=time.process_time() - cpu_s)


async def archived(mailbox: Mailbox) -> None:
    """Reads of history wait until the archive holds everything before them; far behind, they ask to be asked again."""
    for _ in range(ARCHIVED_TRIES):
        try:
            await mailbox.recent_tasks(1)
        except Unavailable:
            continue
        return
    raise AssertionError("the archive does not catch up")
