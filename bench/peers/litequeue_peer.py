"""litequeue: put → pop → done, each caller with a connection of its own, each statement synced."""

from __future__ import annotations

import litequeue  # type: ignore[import-not-found]  # lives in the separate environment
from rounds import PAYLOAD, Cycle, run  # type: ignore[import-not-found]  # a script's neighbour


def open_queue(file: str) -> Cycle:
    # A long busy timeout: with many callers some would otherwise give up with "database is locked".
    queue = litequeue.LiteQueue(file, timeout=60)
    queue.conn.execute("PRAGMA synchronous = FULL")

    def cycle() -> None:
        queue.put(PAYLOAD)
        queue.done(queue.pop().message_id)

    return cycle


run(open_queue)
