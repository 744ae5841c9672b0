"""The connection that a node writes by, and the batch whose commit was not answered when the connection broke."""

from __future__ import annotations

import logging
from typing import Any, Final

import asyncpg

from covenant.ledger.postgres.batch_items import Committed, Fenced, Item
from covenant.ledger.postgres.connections import WRITER_SETTINGS, Connections
from covenant.ledger.postgres.database_errors import REFUSED, UNAVAILABLE, lost_if_dropped, outcome_unknown
from covenant.ledger.postgres.news import was_written
from covenant.ledger.postgres.node_runs import Joined
from covenant.model.errors import Unavailable

log = logging.getLogger(__name__)

TRANSACTION_MS: Final = 30_000
"""As long as a statement may take. The server does not call a daemon idle that stops between the messages of one
statement, so that its time for idle transactions does not end: it would keep its locks, and could not be fenced."""
TRANSACTION_TIMEOUT_SINCE: Final = 17
"""The version of PostgreSQL that can bound a transaction."""


class WriterConnection:
    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._connection: asyncpg.Connection[Any] | None = None
        self.doubtful: Committed | None = None
        """Its outcome is found out before anything else is written."""

    async def get(self) -> asyncpg.Connection[Any]:
        if self._connection is None or self._connection.is_closed():
            self._connection = connection = await self._connections.connect(WRITER_SETTINGS)
            if not self._connections.pooler and connection.get_server_version().major >= TRANSACTION_TIMEOUT_SINCE:
                await connection.execute(f"SET transaction_timeout = {TRANSACTION_MS}")
        return self._connection

    def drop(self) -> None:
        if self._connection is not None:
            self._connection.terminate()
            self._connection = None

    async def close(self) -> None:
        if self._connection is not None:
            await self._connection.close()

    async def find_out(self, joined: Joined) -> tuple[Committed, bool]:
        """The batch in doubt, and whether it was committed. If not, it never will be. Raises Fenced."""
        doubtful, connection = self.doubtful, await self.get()
        assert doubtful is not None
        async with connection.transaction():
            # Waits until the old connection's backend has finished it.
            happened = await was_written(connection, joined.writer, joined.boot, doubtful.seq, give_up=True)
        if happened is None:
            raise Fenced
        self.doubtful = None
        log.warning("ledger.commit_in_doubt", extra={"seq": doubtful.seq, "happened": happened})
        return doubtful, happened

    async def find_out_when_fenced(self, joined: Joined) -> Committed | None:
        """The batch in doubt, if it was committed. It stays in doubt if the database cannot tell.

        The fence has waited for it: its news are there, or never will be.
        """
        doubtful = self.doubtful
        if doubtful is None:
            return None
        try:
            with lost_if_dropped():
                happened = await was_written(await self.get(), joined.writer, joined.boot, doubtful.seq)
        except (*UNAVAILABLE, *REFUSED) as error:
            log.warning("ledger.commit_unknown", extra={"seq": doubtful.seq, "reason": str(error)})
            self.drop()
            return None
        self.doubtful = None
        return doubtful if happened else None

    def fail(self, items: list[Item], trouble: Unavailable) -> None:
        """Fails items; those of the batch in doubt get `outcome_unknown`, which names the trouble, too."""
        in_doubt = self.doubtful.items if self.doubtful is not None else ()
        for item in items:
            item.fail(outcome_unknown(trouble) if item in in_doubt else trouble)
