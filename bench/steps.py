"""steps: what a durable step costs, alone and beside others, what tasks and schedules cost while they wait, and how
late a task wakes."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from time import perf_counter, process_time, time_ns
from typing import Final
from uuid import uuid4

from bench.report import Level, Row, Table, at_most, fact
from covenant.agents.api import Agent, Turn
from covenant.agents.function_agent import FunctionAgent
from covenant.agents.runtime.worker_pool import WorkerPool
from covenant.daemon.schedulers import Sweeper
from covenant.daemon.telemetry import Log
from covenant.exchange.catalogue import Catalogue
from covenant.exchange.schedules import ScheduleRunner
from covenant.exchange.tasks.writer import TaskWriter
from covenant.ledger.embedded.engine import EmbeddedLedger
from covenant.ledger.embedded.open import open_ledger
from covenant.ledger.machine.commands import Accept
from covenant.ledger.machine.identity_commands import AddTenant
from covenant.model.agent_definition import SCHEDULES_MAX, AgentDefinition, Schedule
from covenant.model.ids import AgentId, PublicKey, TaskId
from covenant.model.settings import Limits
from covenant.model.task import Task, fingerprint
from covenant.model.tenants import Tenant
from covenant.seal.keys import new_private_key

NAME: Final = "steps"
SCALES: Final[dict[Level, tuple[int, int, int, int]]] = {
    "full": (500, 100_000, 10_000, 30),
    "quick": (100, 10_000, 1_000, 10),
    "smoke": (5, 50, 10, 1),
}
"""Steps of a turn, tasks that sleep, schedules, and for how many seconds they are watched."""
WAKES: Final = 50
WAKE_LATE_MS: Final = 50.0
DAY_MS: Final = 86_400_000
AT_ONCE: Final = 16
ANN, BOB = AgentId("ann@bench", PublicKey("a" * 44)), AgentId("bob@bench", PublicKey("b" * 44))


def run(level: Level, folder: Path) -> Table:
    return asyncio.run(_run(*SCALES[level], folder))


async def _run(steps: int, sleeping: int, schedules: int, watched_s: int, folder: Path) -> Table:
    limits = Limits(live_tasks_max=2 * sleeping + WAKES, queued_bytes_max=2**40)
    ledger = await open_ledger(folder, clock=lambda: time_ns() // 1_000_000, limits=limits)
    try:
        rows = [*await _steps(ledger, steps), *await _waiting(ledger, sleeping, schedules, watched_s)]
    finally:
        await ledger.close()
    notes = [
        "A step is done when its record is synced. What waits is in a heap by time; a timer waits for the first of it."
    ]
    return Table(part=NAME, title="durable steps, and what waits", rows=rows, notes=notes)


async def _steps(ledger: EmbeddedLedger, steps: int) -> list[Row]:
    agent = Agent("bob")

    @agent
    async def work(turn: Turn) -> None:
        for number in range(steps):
            await turn.step(f"step {number}", partial(int, number))

    workers = WorkerPool(ledger)
    workers.register(BOB, FunctionAgent(agent))
    running = asyncio.create_task(workers.run())
    rows: list[Row] = []
    for turns in (1, AT_ONCE):
        before, began = (await ledger.counts()).gauges["syncs"], perf_counter()
        task_ids = [await _send(ledger) for _ in range(turns)]
        for task_id in task_ids:
            await ledger.finished(task_id, 600_000)
        spent_s, syncs = perf_counter() - began, (await ledger.counts()).gauges["syncs"] - before
        beside = "alone" if turns == 1 else f"beside {turns - 1} others"
        # A turn has three syncs besides: it is accepted, leased and ended. Few steps are few to share theirs with.
        each = max(1, syncs - 3) / (steps * turns)
        rows += (
            at_most(f"syncs of a step, {beside}", each, 1.0),
            fact(f"time of a step, {beside}", spent_s * 1000 / steps, "ms"),
        )
    workers.stop()
    await running
    return rows


async def _send(ledger: EmbeddedLedger, not_before_ms: int | None = None) -> TaskId:
    task_id = TaskId(str(uuid4()))
    text = str(not_before_ms)
    task = Task(id=task_id, sender=ANN, recipient=BOB, intent_text=text, origin="a2a", not_before_ms=not_before_ms)
    await ledger.commit(Accept(task=task, digest=fingerprint(task)[0], minted=True))
    return task.id


async def _waiting(ledger: EmbeddedLedger, sleeping: int, schedules: int, watched_s: int) -> list[Row]:
    """As in a daemon: agents wait for work, the sweeper for what is due, the schedules for their moments."""
    later_ms, late_ms = ledger.now_ms() + DAY_MS, list[float]()
    for begin in range(0, sleeping, 1_000):
        count = min(1_000, sleeping - begin)
        await asyncio.gather(*(_send(ledger, not_before_ms=later_ms) for _ in range(count)))
    agent = Agent("bob")

    @agent
    async def work(turn: Turn) -> None:
        late_ms.append(time_ns() / 1e6 - int(turn.text))

    workers = WorkerPool(ledger)
    workers.register(BOB, FunctionAgent(agent))
    runner = await _schedules(ledger, workers, schedules)
    parts = (workers.run(), Sweeper(ledger, ANN, log=Log()).run(), runner.run())
    running = [asyncio.create_task(part) for part in parts]
    await asyncio.sleep(1)
    began = process_time()
    await asyncio.sleep(watched_s)
    share = (process_time() - began) / watched_s * 100
    sent = [await _send(ledger, ledger.now_ms() + 200 + 20 * number) for number in range(WAKES)]
    for task_id in sent:
        await ledger.finished(task_id, 60_000)
    workers.stop()
    for each in running[1:]:
        each.cancel()
    await asyncio.wait(running)
    late_ms.sort()
    what = f"{sleeping:,} tasks asleep and {schedules:,} schedules"
    return [
        at_most(f"CPU with {what}, over {watched_s} s", share, 1.0, "% of a core"),
        at_most("how late a task wakes, p99", late_ms[int(len(late_ms) * 0.99)], WAKE_LATE_MS, "ms"),
        fact("how late a task wakes, p50", late_ms[len(late_ms) // 2], "ms"),
    ]


async def _schedules(ledger: EmbeddedLedger, workers: WorkerPool, count: int) -> ScheduleRunner:
    await ledger.commit(AddTenant(by=ANN, tenant=Tenant(name="bench")))
    catalogue = Catalogue(ledger, new_private_key())
    for begin in range(0, count, SCHEDULES_MAX):
        schedules = tuple(
            Schedule(id=f"s{number}", cron=f"{number % 60} {number % 24} 29 2 *", time_zone="Europe/Berlin")
            for number in range(begin, min(count, begin + SCHEDULES_MAX))
        )
        catalogue.add_resident("bench", AgentDefinition(id=f"a{begin}", kind="function", schedules=schedules), "code")
    runner = ScheduleRunner(ledger, catalogue, TaskWriter(ledger, workers))
    await runner.step()
    return runner
