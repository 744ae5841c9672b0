"""huey on SQLite: enqueue → dequeue → put_data → pop_data, each caller with a storage of its own, with fsync."""

from __future__ import annotations

from itertools import count
from threading import get_ident

from huey.storage import SqliteStorage  # type: ignore[import-not-found]  # lives in the separate environment
from rounds import PAYLOAD, Cycle, run  # type: ignore[import-not-found]  # a script's neighbour


def open_queue(file: str) -> Cycle:
    # A long busy timeout: with many callers some would otherwise give up with "database is locked".
    storage = SqliteStorage("bench", file, fsync=True, timeout=60)
    payload, numbers, thread = PAYLOAD.encode(), count(), get_ident()

    def cycle() -> None:
        key = f"{thread}-{next(numbers)}"
        storage.enqueue(payload)
        storage.dequeue()
        storage.put_data(key, b"done")
        storage.pop_data(key)

    return cycle


run(open_queue)
