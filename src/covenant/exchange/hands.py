"""Hands: who can start on a task at once, inside this process. Whoever accepts a task asks them before it is queued."""

from __future__ import annotations

from typing import Protocol

from covenant.ledger.machine.commands import LeasedTask, Starter
from covenant.model.ids import PublicKey


class Slot(Protocol):
    """A place kept free for one task. Used once: `start` it, or give it back."""

    @property
    def starter(self) -> Starter: ...
    def start(self, leased: LeasedTask) -> None:
        """The lease is durable: begin. Does not wait."""

    def give_back(self) -> None:
        """The task was not leased: it is queued, known already, or refused."""


class Hands(Protocol):
    def reserve(self, recipient: PublicKey) -> Slot | None:
        """None if nobody here works for this recipient, or nobody is free."""
