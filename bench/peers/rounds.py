"""One round of a peer: threads that repeat a cycle, counted over a window. Prints JSON.

Runs with the interpreter of the separate environment: standard library only.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable

PAYLOAD = "x" * 600
WARM_S = 0.3

Cycle = Callable[[], None]


def run(open_queue: Callable[[str], Cycle]) -> None:
    """`open_queue(file)` is called once in each thread and gives the cycle that the thread repeats."""
    file, callers, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    open_queue(file)()  # makes the tables once, before the threads race for it
    counts = [0] * callers
    failed: list[Exception] = []
    stop = threading.Event()
    ready = threading.Barrier(callers + 1)

    def caller(number: int) -> None:
        try:
            cycle = open_queue(file)
            ready.wait()
            while not stop.is_set():
                cycle()
                counts[number] += 1
        except Exception as error:  # noqa: BLE001  whatever it was, the round failed
            failed.append(error)
            ready.abort()

    threads = [threading.Thread(target=caller, args=(number,)) for number in range(callers)]
    for thread in threads:
        thread.start()
    ready.wait()
    time.sleep(WARM_S)
    cycles, begun, cpu_s = sum(counts), time.perf_counter(), time.process_time()
    time.sleep(seconds)
    measured = {
        "cycles": sum(counts) - cycles,
        "seconds": time.perf_counter() - begun,
        "cpu_s": time.process_time() - cpu_s,
    }
    stop.set()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    print(json.dumps(measured))
