"""What a suite needs of the engine under test: a way to open it, and to lose it."""

from __future__ import annotations

from typing import Protocol

from covenant.ledger.contract.ledger import Ledger
from covenant.model.settings import Limits
from tests.ledger_contract.fake_clock import FakeClock


class Engine(Protocol):
    """Made afresh for each test, with nothing in it; whoever makes it also closes what it opened."""

    @property
    def clock(self) -> FakeClock: ...

    async def open(self, limits: Limits | None = None) -> Ledger:
        """A new, empty ledger."""


class DurableEngine(Engine, Protocol):
    """One whose facts outlive the process. Both verbs give a ledger on the same facts, in a new boot."""

    async def close_and_reopen(self, ledger: Ledger) -> Ledger:
        """End it as a clean stop does."""

    async def crash_and_reopen(self, ledger: Ledger) -> Ledger:
        """End it as `kill -9` does: nothing more is written, synced or said."""
