"""A process with two nodes on one database: `python -m bench.news URL (listen | poll) COUNT`.

One writes steps of a task, one after the other; the other watches the task. What is timed: from when the first node's
commit is acknowledged to when the other has the step.
"""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Final
from uuid import uuid4

import msgspec

from bench.workload import RECIPIENT, new_task, run
from covenant.daemon.environment import monotonic_ms, now_ms
from covenant.ledger.machine.commands import Accept, Report, Starter
from covenant.ledger.postgres.open_postgres import open_postgres_ledger
from covenant.ledger.postgres.postgres_ledger import PostgresLedger
from covenant.ledger.watchers import TaskWatch
from covenant.model.content import Text
from covenant.model.ids import LeaseId, TaskId
from covenant.model.task import fingerprint
from covenant.model.task_event import ArtifactUpdate

PAUSE_S: Final = 0.013
"""Between two steps: no multiple of what anybody polls by."""


SEEN_S: Final = 5.0


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    p50_ms: float
    p99_ms: float


async def _open(url: str, node: str, *, polls: bool) -> PostgresLedger:
    return await open_postgres_ledger(url, clock=now_ms, monotonic_ms=monotonic_ms, node=node, pooler=polls)


async def main(url: str, mode: str, count: int) -> Seen:
    here, there = [await _open(url, node, polls=mode == "poll") for node in ("here", "there")]
    try:
        task = new_task()
        starter = Starter(RECIPIENT, here.node, here.boot)
        accept = Accept(task=task, digest=fingerprint(task)[0], starter=starter, minted=True)
        leased = (await here.commit(accept)).leased
        assert leased is not None
        with there.watch(task.id) as watch:
            await there.steps(task.id, 0, 1)  # it is known where the watch begins
            took_ms = sorted([await _step(here, watch, task.id, leased.lease.lease_id) for _ in range(count)])
    finally:
        await here.close()
        await there.close()
    return Seen(p50_ms=took_ms[count // 2], p99_ms=took_ms[count * 99 // 100])


async def _step(here: PostgresLedger, watch: TaskWatch, task_id: TaskId, lease_id: LeaseId) -> float:
    """In ms; 0 if the other node was faster than the acknowledgement."""
    await asyncio.sleep(PAUSE_S)
    came_s: dict[int, float] = {}
    seen = asyncio.create_task(_see(watch, came_s))
    update = ArtifactUpdate(str(uuid4()), (Text("word"),))
    reported = await here.commit(Report(task_id=task_id, holder=RECIPIENT, lease_id=lease_id, update=update))
    acknowledged_s = time.perf_counter()
    while reported.generation not in came_s:
        await seen
        seen = asyncio.create_task(_see(watch, came_s))
    seen.cancel()
    return max(0.0, came_s[reported.generation] - acknowledged_s) * 1e3


async def _see(watch: TaskWatch, came_s: dict[int, float]) -> None:
    steps = await watch.next(SEEN_S)
    if watch.cut:
        raise AssertionError("the watch was cut")
    came_s |= dict.fromkeys([step.generation for step in steps], time.perf_counter())


if __name__ == "__main__":
    found = run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
    print(msgspec.json.encode(found).decode())
