"""steps: what a durable step costs, alone and beside others, and what tasks and schedules cost while they wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter, process_time, time_ns
from typing import Final
from uuid import uuid4

from bench.report import Level, Row, Table, at_most, fact
from covenant.agents.api import Agent, Turn
from covenant.agents.function_agent import FunctionAgent
from covenant.agents.runtime.worker_pool import WorkerPool
from covenant.exchange.cron import read_times
from covenant.ledger.embedded.engine import EmbeddedLedger
from covenant.ledger.embedded.open import open_ledger
from covenant.ledger.machine.commands import Accept, Sweep
from covenant.model.agent_definition import Schedule
from covenant.model.ids import AgentId, PublicKey, TaskId
from covenant.model.task import Task, fingerprint

NAME: Final = "steps"
SCALES: Final[dict[Level, tuple[int, int, int]]] = {
    "full": (500, 100_000, 10_000),
    "quick": (100, 10_000, 1_000),
    "smoke": (5, 50, 10),
}
"""Steps of a turn, tasks that sleep, and schedules."""
AT_ONCE: Final = 16
SWEEPS: Final = 10
ANN, BOB = AgentId("ann@bench", PublicKey("a" * 44)), AgentId("bob@bench", PublicKey("b" * 44))


def run(level: Level, folder: Path) -> Table:
    return asyncio.run(_run(*SCALES[level], folder))


async def _run(steps: int, sleeping: int, schedules: int, folder: Path) -> Table:
    ledger = await open_ledger(folder, clock=lambda: time_ns() // 1_000_000)
    try:
        rows = [*await _steps(ledger, steps), *await _sleeping(ledger, sleeping), _schedules(schedules)]
    finally:
        await ledger.close()
    notes = ["A step is done when its record is synced. What waits is in a heap by time, and is not looked at."]
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
    task = Task(id=task_id, sender=ANN, recipient=BOB, intent_text="go", origin="a2a", not_before_ms=not_before_ms)
    await ledger.commit(Accept(task=task, digest=fingerprint(task)[0], minted=True))
    return task.id


async def _sleeping(ledger: EmbeddedLedger, count: int) -> list[Row]:
    later_ms = ledger.now_ms() + 86_400_000
    for _ in range(0, count, 1_000):
        await asyncio.gather(*(_send(ledger, not_before_ms=later_ms) for _ in range(min(1_000, count))))
    began = process_time()
    for _ in range(SWEEPS):
        swept = await ledger.commit(Sweep())
        assert not swept.woken
    spent_ms = (process_time() - began) * 1000 / SWEEPS
    return [at_most(f"CPU of a look, once a second, with {count:,} tasks asleep", spent_ms, 1.0, "ms")]


def _schedules(count: int) -> Row:
    """Each is asked for its next moment when it is learned, and when it has run; none while it waits."""
    afters: list[Callable[[int], int | None]] = [
        read_times(Schedule(id=f"s{number}", cron=f"{number % 60} {number % 24} * * *", time_zone="Europe/Berlin"))
        for number in range(count)
    ]
    now_ms, began = time_ns() // 1_000_000, process_time()
    for after in afters:
        assert after(now_ms) is not None
    return fact("CPU to find the next moment of a schedule", (process_time() - began) * 1e6 / count, "µs")
