"""feed: what the dashboard's feed costs while 2,000 tasks a second go through the ledger.

The events are those of real tasks: sent, leased, and answered by an agent in the worker pool. What the feed does with
the events of one second is done again and again, and its CPU is taken: notes on the ledger's loop, four rounds with
their look-ups, two counts, and what is written for a reader.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from time import process_time, time_ns
from typing import Final
from uuid import uuid4

from bench.report import Level, Table, at_most, fact
from covenant.agents.api import Agent, Turn
from covenant.agents.function_agent import FunctionAgent
from covenant.agents.runtime.worker_pool import WorkerPool
from covenant.dashboard.feed import ROUND_S, ROUNDS_PER_COUNT, FeedCollector, write_all_frames
from covenant.ledger.embedded.engine import EmbeddedLedger
from covenant.ledger.embedded.open import open_ledger
from covenant.ledger.machine.commands import Accept
from covenant.ledger.machine.events import AnyEvent
from covenant.model.ids import AgentId, PublicKey, TaskId
from covenant.model.task import Task, fingerprint

NAME: Final = "feed"
RATE: Final = 2_000
SECONDS: Final[dict[Level, int]] = {"full": 50, "quick": 10, "smoke": 1}
AT_ONCE: Final = 100
ROUNDS: Final = int(1 / ROUND_S)
ANN, BOB = AgentId("ann@bench", PublicKey("a" * 44)), AgentId("bob@bench", PublicKey("b" * 44))
Record = tuple[Sequence[AnyEvent], int, int]


def run(level: Level, folder: Path) -> Table:
    return asyncio.run(_run(SECONDS[level], folder))


async def _run(seconds: int, folder: Path) -> Table:
    ledger = await open_ledger(folder, clock=lambda: time_ns() // 1_000_000)
    try:
        records = await _record(ledger)
        spent_ms = [await _second(ledger, records) for _ in range(seconds)]
    finally:
        await ledger.close()
    rows = [
        at_most(f"CPU of the feed at {RATE:,} tasks a second, one reader", median(spent_ms) / 10, 1.0, "% of a core"),
        fact("records of a task", len(records) / RATE),
    ]
    return Table(part=NAME, title="the dashboard's feed", rows=rows, notes=[f"median of {seconds} seconds"])


async def _record(ledger: EmbeddedLedger) -> list[Record]:
    """The records of as many tasks as come in a second."""
    agent = Agent("bob")

    @agent
    async def work(turn: Turn) -> str:
        return turn.text

    records: list[Record] = []
    noted, changes = ledger.changes.note, ledger.changes
    changes.note = lambda *record: records.append(record)  # type: ignore[method-assign]  # only to listen
    changes.begin()
    workers = WorkerPool(ledger)
    workers.register(BOB, FunctionAgent(agent))
    running = asyncio.create_task(workers.run())
    for _ in range(0, RATE, AT_ONCE):
        await asyncio.gather(*(_send(ledger) for _ in range(AT_ONCE)))
    workers.stop()
    await running
    changes.note = noted  # type: ignore[method-assign]
    changes.end()
    return records


async def _send(ledger: EmbeddedLedger) -> None:
    task = Task(id=TaskId(str(uuid4())), sender=ANN, recipient=BOB, intent_text="go", origin="a2a")
    await ledger.commit(Accept(task=task, digest=fingerprint(task)[0], minted=True))
    await ledger.finished(task.id, 60_000)


async def _second(ledger: EmbeddedLedger, records: Sequence[Record]) -> float:
    """The feed's CPU for a second's records, in milliseconds."""
    changes = ledger.changes
    collector = FeedCollector(ledger, followers_max=1)
    collector.ring.clear(0)
    changes.begin()
    began = process_time()
    size = -(-len(records) // ROUNDS)
    for number in range(ROUNDS):
        some = records[number * size : (number + 1) * size]
        for events, ts_ms, seq in some:
            changes.note(events, ts_ms, seq)
        changes.position = some[-1][2]
        position = collector.ring.position
        await collector.run_round(counting=number % ROUNDS_PER_COUNT == 0)
        written = write_all_frames(collector.ring.since(position) or (), place=str(changes.position))
        assert written
    spent = process_time() - began
    changes.end()
    return spent * 1_000
