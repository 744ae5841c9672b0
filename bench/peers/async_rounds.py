"""One round of an asynchronous peer: callers that repeat a cycle, counted over a window. Prints JSON."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager

import uvloop  # type: ignore[import-not-found,unused-ignore]  # also in the separate environment
from rounds import WARM_S  # type: ignore[import-not-found]  # a script's neighbour

Cycle = Callable[[], Awaitable[None]]
Opened = AbstractAsyncContextManager[Cycle]
Opening = AsyncIterator[Cycle]


async def _run(open_queue: Callable[[str, int], Opened]) -> None:
    url, callers, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    done, stopped = 0, False

    async def caller(cycle: Cycle) -> None:
        nonlocal done
        while not stopped:
            await cycle()
            done += 1

    async with open_queue(url, callers) as cycle, asyncio.TaskGroup() as group:
        for _ in range(callers):
            group.create_task(caller(cycle))
        await asyncio.sleep(WARM_S)
        before, begun, cpu_s = done, time.perf_counter(), time.process_time()
        await asyncio.sleep(seconds)
        measured = {
            "cycles": done - before,
            "seconds": time.perf_counter() - begun,
            "cpu_s": time.process_time() - cpu_s,
        }
        stopped = True
    print(json.dumps(measured))


def run(open_queue: Callable[[str, int], Opened]) -> None:
    """`open_queue(url, callers)` gives the cycle that every caller repeats."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_run(open_queue))
