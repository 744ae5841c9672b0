"""Vacuums the tables that tasks enter and leave all the time, sooner than autovacuum looks at them.

The room of a row that left is used again only after a vacuum. Until then each new row makes its table larger, and a
task costs the database more. Autovacuum looks once a minute at most, which is many thousand tasks later.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from covenant.ledger.postgres.connections import Connections
from covenant.ledger.postgres.database_errors import translated
from covenant.ledger.postgres.nodes import stop_task
from covenant.model.errors import Unavailable

TABLES: Final = ("live", "queue", "results", "counted")
ALL_TABLES: Final = (*TABLES, "lane_counts", "news", "writers")
CHANGED_MAX: Final = 4_000
"""After this many changes of tasks the tables are vacuumed."""
PAUSE_FACTOR: Final = 20
"""After a vacuum comes a pause of so many times its length: it removes nothing while somebody holds a snapshot."""
RUN_S: Final = 10.0
"""A vacuum that takes longer is left to autovacuum: it holds a connection of the readers."""
COMPACT_S: Final = 600.0
"""The time limit of a vacuum that was requested."""

log = logging.getLogger(__name__)


class HotTables:
    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._changed = 0
        self._begin_s = 0.0
        """The vacuum does not begin before this time of the loop."""
        self._task: asyncio.Task[None] | None = None
        self.vacuums = 0

    def count(self, changed: int) -> None:
        """Counts changes of tasks by this node. A vacuum begins when they are many."""
        self._changed += changed
        if self._changed >= CHANGED_MAX and self._task is None:
            loop = asyncio.get_running_loop()
            if loop.time() >= self._begin_s:
                self._changed = 0
                self._task = loop.create_task(self._run())

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        try:
            # To shorten a table takes a lock that stops every writer. Another node may be vacuuming the same table.
            await self._connections.execute(f"VACUUM (TRUNCATE false, SKIP_LOCKED) {', '.join(TABLES)}", RUN_S)
            self.vacuums += 1
        except Unavailable as error:
            log.debug("ledger.vacuum_refused", extra={"reason": str(error)})
        finally:
            self._task = None
            self._begin_s = loop.time() + PAUSE_FACTOR * (loop.time() - began_s)

    async def vacuum(self) -> None:
        """Vacuums all tables that change all the time, within COMPACT_S. Raises Unavailable."""
        # On a connection of its own: a long vacuum must not hold one of the readers'.
        with translated():
            connection = await self._connections.connect(command_s=COMPACT_S)
            try:
                await connection.execute(f"VACUUM {', '.join(ALL_TABLES)}")
            finally:
                await connection.close()

    async def close(self) -> None:
        await stop_task(self._task)
