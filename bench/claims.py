"""A process that times claims before and while somebody holds a snapshot: `python -m bench.claims URL CYCLES`.

A snapshot that is held forbids to remove what was deleted since: a claim must not walk over it.
"""

from __future__ import annotations

import sys
import time
from statistics import median
from typing import Any, Final

import asyncpg
import msgspec

from bench.workload import RECIPIENT, Callers, new_task, opened, run
from covenant import Mailbox

CALLERS: Final = 64
TIMED: Final = 200


class Claims(msgspec.Struct, frozen=True, kw_only=True):
    free_ms: float
    held_ms: float


async def main(url: str, cycles: int) -> Claims:
    async with opened(url) as mailbox:
        await Callers(mailbox, TIMED).run(CALLERS)
        free_ms = await _claim_ms(mailbox)
        holder: asyncpg.Connection[Any] = await asyncpg.connect(url)
        try:
            async with holder.transaction(isolation="repeatable_read"):
                await holder.fetchval("SELECT count(*) FROM queue")
                await Callers(mailbox, cycles).run(CALLERS)
                held_ms = await _claim_ms(mailbox)
        finally:
            await holder.close()
    return Claims(free_ms=free_ms, held_ms=held_ms)


async def _claim_ms(mailbox: Mailbox) -> float:
    took_ms: list[float] = []
    for _ in range(TIMED):
        await mailbox.send_task(new_task())
    for _ in range(TIMED):
        begun = time.perf_counter()
        await mailbox.recv_task_for(RECIPIENT)
        took_ms.append((time.perf_counter() - begun) * 1e3)
    return median(took_ms)


if __name__ == "__main__":
    found = run(main(sys.argv[1], int(sys.argv[2])))
    print(msgspec.json.encode(found).decode())
