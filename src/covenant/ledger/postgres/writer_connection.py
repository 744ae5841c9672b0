"""The connection that a node writes by, and the batch whose commit was not answered when the connection broke."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Final

import asyncpg

from covenant.ledger.postgres.batch_items import DecidedBatch, Fenced, Item
from covenant.ledger.postgres.connections import WRITER_SETTINGS, Connections, fetch_value
from covenant.ledger.postgres.database_errors import REFUSED, UNAVAILABLE, fenced, lost_if_dropped, outcome_unknown
from covenant.ledger.postgres.news import was_written
from covenant.ledger.postgres.node_runs import Joined
from covenant.model.errors import Unavailable

log = logging.getLogger(__name__)

TRANSACTION_MS: Final = 30_000
"""As long as a statement may take. A daemon that stops between the messages of one statement is not idle for the
server, so the bound for idle transactions does not end its transaction: it would keep its locks, and could not be
fenced."""
TRANSACTION_TIMEOUT_SINCE: Final = 17
"""The version of PostgreSQL that can bound a transaction."""


class WriterConnection:
    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._connection: asyncpg.Connection[Any] | None = None
        self._answers = asyncio.Event()
        self.in_doubt: DecidedBatch | None = None
        """The batch whose commit was not answered. Nothing else is written before its outcome is known."""

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

    async def pause(self, pause_s: float) -> None:
        """Waits before another try, at most until somebody finds that the database answers."""
        self._answers.clear()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._answers.wait(), pause_s)

    def end_pause(self) -> None:
        self._answers.set()

    async def close(self) -> None:
        if self._connection is not None:
            await self._connection.close()

    async def resolve(self, joined: Joined) -> tuple[DecidedBatch, bool]:
        """The batch in doubt, and whether it was committed. If not, it never will be. Raises Fenced."""
        in_doubt, connection = self.in_doubt, await self.get()
        assert in_doubt is not None
        async with connection.transaction():
            # The row's lock waits until the old connection's backend has finished the batch.
            was_committed = await was_written(connection, joined.writer, joined.boot, in_doubt.seq, give_up=True)
        if was_committed is None:
            raise Fenced
        self.in_doubt = None
        log.warning("ledger.commit_in_doubt", extra={"seq": in_doubt.seq, "happened": was_committed})
        return in_doubt, was_committed

    async def resolve_when_fenced(self, joined: Joined) -> DecidedBatch | None:
        """The batch in doubt, if it was committed. It stays in doubt if the database does not answer.

        The fence has waited for the batch: its news are in the database, or never will be.
        """
        in_doubt = self.in_doubt
        if in_doubt is None:
            return None
        try:
            with lost_if_dropped():
                was_committed = await was_written(await self.get(), joined.writer, joined.boot, in_doubt.seq)
        except (*UNAVAILABLE, *REFUSED) as error:
            log.warning("ledger.commit_unknown", extra={"seq": in_doubt.seq, "reason": str(error)})
            self.drop()
            return None
        self.in_doubt = None
        return in_doubt if was_committed else None

    async def why_fenced(self, joined: Joined) -> Unavailable:
        """The refusal of a fenced run, with the reason if the database answers."""
        restored_at_ms = 0
        try:
            with lost_if_dropped():
                restored_at_ms = await fetch_value("nodes", await self.get(), "last_restore") or 0
        except (*UNAVAILABLE, *REFUSED):
            self.drop()
        return fenced(restored=restored_at_ms > joined.restored_at_ms)

    def fail(self, items: Iterable[Item], error: Exception) -> None:
        """Fails items. Those of the batch in doubt get `outcome_unknown`, which also names the trouble."""
        in_doubt = self.in_doubt.items if self.in_doubt is not None else ()
        for item in items:
            item.fail(outcome_unknown(error) if isinstance(error, Unavailable) and item in in_doubt else error)
