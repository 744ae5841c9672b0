"""A process that opens a mailbox and works: `python -m bench.callers HOME CALLERS (SECONDS | CYCLES)`.

The home is a folder, or the URL of a database. A whole number is a number of cycles, anything else a time.
"""

from __future__ import annotations

import sys
import time

import msgspec

from bench.workload import Measured, archived, opened, over_cycles, over_time, run
from covenant import Mailbox

READS = 50


class Round(msgspec.Struct, frozen=True, kw_only=True):
    measured: Measured
    archived_s: float
    """How long the archive still needed afterwards."""
    recent_us: float
    """CPU of reading the 10 most recent tasks."""
    queue_us: float
    """CPU of looking at the queue."""


async def main(home: str, callers: int, extent: str) -> Round:
    async with opened(home) as mailbox:
        if extent.isdigit():
            measured = await over_cycles(mailbox, callers, int(extent))
        else:
            measured = await over_time(mailbox, callers, float(extent))
        begun = time.perf_counter()
        await archived(mailbox)
        archived_s = time.perf_counter() - begun
        return Round(
            measured=measured,
            archived_s=archived_s,
            recent_us=await _read_us(mailbox, "recent_tasks"),
            queue_us=await _read_us(mailbox, "task_queue"),
        )


async def _read_us(mailbox: Mailbox, verb: str) -> float:
    read = getattr(mailbox, verb)
    await read(10)
    cpu_s = time.process_time()
    for _ in range(READS):
        await read(10)
    return (time.process_time() - cpu_s) / READS * 1e6


if __name__ == "__main__":
    found = run(main(sys.argv[1], int(sys.argv[2]), sys.argv[3]))
    print(msgspec.json.encode(found).decode())
