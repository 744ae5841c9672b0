"""A worker pool on a real ledger, with helpers that send tasks and watch what becomes of them."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

from covenant.agents.api import Agent
from covenant.agents.function_agent import FunctionAgent
from covenant.agents.runtime.job import RunnableAgent
from covenant.agents.runtime.worker_pool import WorkerPool
from covenant.exchange.tasks.reader import TaskReader
from covenant.ledger.contract.ledger import Ledger
from covenant.ledger.embedded.open import memory_ledger
from covenant.ledger.machine.commands import Accept, Cancel, Canceled, Continue
from covenant.model.content import Content, Text
from covenant.model.ids import TaskId
from covenant.model.settings import A2aSettings
from covenant.model.task import Task, fingerprint
from covenant.model.task_event import ArtifactUpdate, Ended, MessageUpdate, StatusUpdate, Step
from covenant.model.task_view import TaskView
from tests.engine_under_test import ON_POSTGRES, open_ledger
from tests.ledger_contract.samples import ALICE, BOB
from tests.waits import BOUND_S


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def function_agent(function: Callable[..., Any], **declared: Any) -> FunctionAgent:
    agent = Agent("bob", **declared)
    agent(function)
    return FunctionAgent(agent)


class PoolUnderTest:
    def __init__(self, ledger: Ledger, workers: WorkerPool) -> None:
        self.ledger = ledger
        self.workers = workers
        self.views = TaskReader(ledger)
        self.running: asyncio.Task[None] | None = None

    def serve(self, body: RunnableAgent | Callable[..., Any], **terms: Any) -> None:
        """Bob is played by this from now on."""
        made = body if hasattr(body, "run") else function_agent(body)
        self.workers.register(BOB, made, **terms)

    async def send(self, text: str = "go", *, at_once: bool = True, **fields: Any) -> TaskId:
        """At once, into a free place if there is one, or only into the queue."""
        fields.setdefault("origin", "a2a")
        fields.setdefault("sender", ALICE)
        task = Task(id=TaskId(str(uuid4())), recipient=BOB, intent_text=text, **fields)
        digest, _ = fingerprint(task)
        place = self.workers.reserve(BOB.pubkey) if at_once else None
        accepted = await self.ledger.commit(
            Accept(task=task, digest=digest, starter=place.starter if place is not None else None)
        )
        if place is not None:
            if accepted.leased is not None:
                place.start(accepted.leased)
            else:
                place.give_back()
        return task.id

    async def say(self, task_id: TaskId, text: str) -> None:
        message = MessageUpdate(role="user", parts=(Text(text),), message_id=str(uuid4()))
        command = Continue(task_id=task_id, message=message, message_id=message.message_id or "")
        await self.ledger.commit(command)

    async def cancel(self, task_id: TaskId) -> Canceled:
        return await self.ledger.commit(Cancel(task_id=task_id, by=ALICE, reason="no longer wanted"))

    async def until(self, task_id: TaskId, met: Callable[[TaskView], bool]) -> TaskView:
        """The task, as soon as it is so."""
        async with asyncio.timeout(BOUND_S):
            with self.ledger.watch(task_id) as watch:
                while True:
                    view = (await self.views.past(task_id)).view()
                    if view is not None and met(view):
                        return view
                    await watch.next(BOUND_S)

    async def ended(self, task_id: TaskId) -> TaskView:
        return await self.until(task_id, lambda view: view.state.terminal)

    async def parked(self, task_id: TaskId) -> TaskView:
        return await self.until(task_id, lambda view: view.state.waits)

    async def ask(self, text: str = "go", **fields: Any) -> TaskView:
        return await self.ended(await self.send(text, **fields))

    async def steps(self, task_id: TaskId) -> list[Step]:
        return list(await self.ledger.steps(task_id, 0, 100_000))

    async def cut_short(self) -> None:
        """Stop the workers without any time for what is under way."""
        assert self.running is not None
        await cut_short(self.workers, self.running)

    async def idle(self) -> None:
        """Nobody is at work any more."""
        await asyncio.wait_for(self.workers.idle(), BOUND_S)


@asynccontextmanager
async def a_ledger(folder: Path | None, **more: Any) -> AsyncIterator[Ledger]:
    if folder is None and ON_POSTGRES:
        folder = Path(str(uuid4()))
    ledger: Ledger = await (
        memory_ledger(clock=now_ms) if folder is None else open_ledger(folder, clock=now_ms, **more)
    )
    try:
        yield ledger
    finally:
        await ledger.close()


@asynccontextmanager
async def open_pool(
    ledger: Ledger,
    *,
    setting: Callable[[PoolUnderTest], None] | None = None,
    limits: A2aSettings | None = None,
    stop_s: float = 2.0,
) -> AsyncIterator[PoolUnderTest]:
    """The workers works inside; at the end it is stopped, with time for what is under way."""
    workers = WorkerPool(ledger, limits=limits, stop_s=stop_s)
    pool = PoolUnderTest(ledger, workers)
    if setting is not None:
        setting(pool)
    pool.running = asyncio.create_task(workers.run())
    await asyncio.sleep(0)
    try:
        yield pool
    finally:
        workers.stop()
        await asyncio.wait((pool.running,), timeout=BOUND_S)
        assert pool.running.done()


HOUR_MS: Final = 3_600_000


def time_out(workers: WorkerPool) -> None:
    """As if the time of all that have a time limit of their own were over now."""
    for job in tuple(workers._jobs):
        if job.deadline is not None:
            workers._time_out(job)


async def cut_short(workers: WorkerPool, running: asyncio.Task[None]) -> None:
    """Stop a workers without any time for what is under way."""
    workers.stop()
    running.cancel()
    async with asyncio.timeout(BOUND_S):
        await asyncio.gather(running, return_exceptions=True)


def chunks(steps: list[Step]) -> list[ArtifactUpdate]:
    return [step.what for step in steps if isinstance(step.what, ArtifactUpdate)]


def statuses(steps: list[Step]) -> list[str]:
    return [step.what.text for step in steps if isinstance(step.what, StatusUpdate)]


def endings(steps: list[Step]) -> list[Ended]:
    return [step.what for step in steps if isinstance(step.what, Ended)]


def words(parts: tuple[Content, ...]) -> str:
    return "".join(part.text for part in parts if isinstance(part, Text))


def told(view: TaskView) -> str:
    """What the final or present message says."""
    return words(view.message.parts) if view.message is not None else ""
