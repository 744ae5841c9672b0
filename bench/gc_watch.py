"""A process that sends while the garbage collector is watched: `python -m bench.gc_watch HOME LIVE SENDS`."""

from __future__ import annotations

import asyncio
import gc
import sys
import time
from array import array
from pathlib import Path
from typing import Any, Final

import msgspec

from bench.workload import new_task, run
from covenant import Mailbox
from covenant.daemon.lifecycle import GC_THRESHOLDS, SWITCH_INTERVAL_S
from covenant.model.ids import AgentId, PublicKey, base58

CALLERS: Final = 64
# A queue takes 100,000 tasks.
RECIPIENTS: Final = tuple(AgentId(f"recipient-{n}@bench", PublicKey(base58(bytes([n + 1] * 32)))) for n in range(8))


class Pauses(msgspec.Struct, frozen=True, kw_only=True):
    longest_ms: tuple[float, float, float]
    """Of each generation, while sending."""
    collections: tuple[int, int, int]
    forced_ms: float
    """A full collection at the end: the worst that can come."""
    p50_ms: float
    p99_ms: float
    longest_send_ms: float
    tracked: int
    """Objects that a full collection walks."""


class Watch:
    """Times each collection by the collector's own callbacks."""

    def __init__(self) -> None:
        self.longest_ms = [0.0, 0.0, 0.0]
        self.collections = [0, 0, 0]
        self._begun_s = 0.0

    def __call__(self, phase: str, info: dict[str, Any]) -> None:
        if phase == "start":
            self._begun_s = time.perf_counter()
            return
        generation = info["generation"]
        took_ms = (time.perf_counter() - self._begun_s) * 1e3
        self.longest_ms[generation] = max(self.longest_ms[generation], took_ms)
        self.collections[generation] += 1


async def main(home: Path, live: int, sends: int) -> Pauses:
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    async with Mailbox.open(home) as mailbox:
        gc.collect()
        gc.freeze()
        gc.set_threshold(*GC_THRESHOLDS)
        watch = Watch()
        gc.callbacks.append(watch)
        await _send(mailbox, live, array("d"))
        took_s = array("d")
        await _send(mailbox, sends, took_s)
        longest_ms, collections = tuple(watch.longest_ms), tuple(watch.collections)
        tracked = len(gc.get_objects())
        begun = time.perf_counter()
        gc.collect()
        forced_ms = (time.perf_counter() - begun) * 1e3
    took_ms = sorted(one * 1e3 for one in took_s)
    return Pauses(
        longest_ms=(longest_ms[0], longest_ms[1], longest_ms[2]),
        collections=(collections[0], collections[1], collections[2]),
        forced_ms=forced_ms,
        p50_ms=took_ms[len(took_ms) // 2],
        p99_ms=took_ms[len(took_ms) * 99 // 100],
        longest_send_ms=took_ms[-1],
        tracked=tracked,
    )


async def _send(mailbox: Mailbox, count: int, took_s: array[float]) -> None:
    left = count

    async def caller(number: int) -> None:
        nonlocal left
        recipient = RECIPIENTS[number % len(RECIPIENTS)]
        while left > 0:
            left -= 1
            task = new_task(recipient)
            begun = time.perf_counter()
            await mailbox.send_task(task)
            took_s.append(time.perf_counter() - begun)

    async with asyncio.TaskGroup() as group:
        for number in range(CALLERS):
            group.create_task(caller(number))


if __name__ == "__main__":
    found = run(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
    print(msgspec.json.encode(found).decode())
