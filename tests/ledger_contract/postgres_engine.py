"""The PostgreSQL engine under test: each test has a database of its own."""

from __future__ import annotations

from pathlib import Path

from covenant.ledger.contract.ledger import Ledger
from covenant.ledger.postgres.nodes import LEASE_MS
from covenant.ledger.postgres.open_postgres import open_postgres_ledger
from covenant.ledger.postgres.postgres_ledger import PostgresLedger
from covenant.model.settings import Limits
from tests.ledger_contract.embedded_engine import NODE
from tests.ledger_contract.fake_clock import FakeClock


class PostgresEngine:
    """Ledgers on one database, one after the other, or several nodes at once (`join`)."""

    def __init__(self, url: str, *, lease_ms: int = LEASE_MS, pooler: bool = False) -> None:
        self._pooler = pooler
        self._lease_ms = lease_ms
        self.clock = FakeClock()
        self.url = url
        self._boots = 0
        self._limits: Limits | None = None
        self._open: list[PostgresLedger] = []

    async def open(self, limits: Limits | None = None) -> PostgresLedger:
        return await self.join(NODE, limits)

    async def join(self, node: str, limits: Limits | None = None, *, lost_path: Path | None = None) -> PostgresLedger:
        """Another node on the same facts."""
        self._boots += 1
        self._limits = limits
        ledger = await open_postgres_ledger(
            self.url,
            clock=self.clock,
            limits=limits,
            durability="os",
            node=node,
            boot=f"boot-{self._boots}",
            lease_ms=self._lease_ms,
            pooler=self._pooler,
            lost_path=lost_path,
        )
        self._open.append(ledger)
        return ledger

    async def close_and_reopen(self, ledger: Ledger) -> PostgresLedger:
        await self._forget(ledger).close()
        return await self.open(self._limits)

    async def crash_and_reopen(self, ledger: Ledger) -> PostgresLedger:
        await self._forget(ledger).abort()
        return await self.open(self._limits)

    async def close_one(self, ledger: Ledger) -> None:
        await self._forget(ledger).close()

    async def kill(self, ledger: PostgresLedger) -> None:
        await self._forget(ledger).abort()

    def _forget(self, ledger: Ledger) -> PostgresLedger:
        (known,) = (each for each in self._open if each is ledger)
        self._open.remove(known)
        return known

    async def close(self) -> None:
        for ledger in self._open:
            await ledger.close()
