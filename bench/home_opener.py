"""A process that opens a home once: `python -m bench.home_opener HOME`. How long it took, and what it holds then."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import msgspec

from bench import machine
from bench.workload import new_task, run
from covenant import Mailbox


class Opening(msgspec.Struct, frozen=True, kw_only=True):
    open_s: float
    first_send_s: float
    """From the beginning until the first task is durable."""
    resident_bytes: int
    cpu_s: float


async def main(home: Path) -> Opening:
    begun, cpu_s = time.perf_counter(), time.process_time()
    async with Mailbox.open(home) as mailbox:
        open_s, cpu_s, resident_bytes = (
            time.perf_counter() - begun,
            time.process_time() - cpu_s,
            machine.resident_bytes(),
        )
        await mailbox.send_task(new_task())
        first_send_s = time.perf_counter() - begun
    return Opening(open_s=open_s, first_send_s=first_send_s, resident_bytes=resident_bytes, cpu_s=cpu_s)


if __name__ == "__main__":
    print(msgspec.json.encode(run(main(Path(sys.argv[1])))).decode())
