"""The ledger's numbers: its own counts, and those of the database for the operator."""

from __future__ import annotations

import asyncio
from typing import Final

from covenant.ledger.clock import Clock
from covenant.ledger.contract.ledger import Counts
from covenant.ledger.postgres.batch_writer import BatchWriter
from covenant.ledger.postgres.connections import Connections
from covenant.ledger.postgres.counters import Counters
from covenant.ledger.postgres.nodes import Membership
from covenant.ledger.postgres.stored_task import decode_rest
from covenant.model.errors import Unavailable

KEPT_S: Final = 5.0
"""The database's own numbers are read at most this often, in seconds."""


class EngineMetrics:
    def __init__(self, connections: Connections, counters: Counters) -> None:
        self._connections = connections
        self._counters = counters
        self._known: dict[str, int] = {}
        self._read_s = float("-inf")

    async def counts(self, writer: BatchWriter, membership: Membership, clock: Clock) -> Counts:
        get, failure = self._counters.get, _failure(writer, membership)
        oldest, lost, database_gauges = None, 0, dict[str, int]()
        if failure is None:
            try:
                oldest = await self._connections.value("history", "oldest_lease")
                lost = await self._connections.value("history", "holders_lost")
                database_gauges = await self._database_gauges()
            except Unavailable as refusal:
                failure = refusal.message  # the other numbers are in memory
        lease = decode_rest(oldest).lease if oldest is not None else None
        return Counts(
            queued=get("state", "queued"),
            leased=get("state", "leased"),
            parked=get("state", "parked"),
            following=get("state", "following"),
            settled=get("state", "settled"),
            cached=get("cached"),
            oldest_lease_age_ms=lease.age_ms(clock.now_ms(), clock.ages) if lease is not None else 0,
            holders_lost=lost,
            commits=get("commits"),
            failure=failure,
            pushes=get("pushes"),
            pushes_dead=get("pushes_dead"),
            delegations=get("delegations"),
            delegations_lost=get("delegations_lost"),
            peer_outbox=self._counters.total("parcels"),
            clock_steps=clock.steps_total,
            clock_paused_ms=clock.paused_ms_left,
            gauges={
                "batches": writer.seq,
                "batches_fast": writer.fast,
                "conflicts": writer.conflicts,
                "nodes": membership.living(),
                "news_age_ms": membership.silent_ms,
                **database_gauges,
            },
        )

    async def _database_gauges(self) -> dict[str, int]:
        now_s = asyncio.get_running_loop().time()
        if now_s - self._read_s >= KEPT_S:
            self._read_s = now_s
            (row,) = await self._connections.rows("nodes", "operating")
            self._known = {name: int(row[name]) for name in row.keys()}  # noqa: SIM118  (a row is no mapping)
        return self._known


def _failure(writer: BatchWriter, membership: Membership) -> str | None:
    """Why this node decides nothing; None if it does."""
    try:
        membership.check()
    except Unavailable as refusal:
        return refusal.message
    if writer.trouble is not None:
        return writer.trouble.message
    return writer.failure
