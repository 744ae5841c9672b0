"""Envelopes that were refused, in the audit: what the other side may not hear, the operator can see.

One address that nobody is known at costs a row a window, whatever was wrong each time; so does one peer with one and
the same fault. All strangers together cost at most so many rows a window. Rows say how many were left out before them.
"""

from __future__ import annotations

import logging
from typing import Final

from covenant.exchange.access.principals import AuditBudget
from covenant.ledger.contract import Ledger
from covenant.ledger.machine.commands import Note
from covenant.model.errors import Refusal
from covenant.model.ids import AgentId
from covenant.model.peers.instance import InstanceId

log = logging.getLogger(__name__)

REASON_CHARS_MAX: Final = 300


class Refusals:
    """`us` is who is in the audit for it."""

    def __init__(self, ledger: Ledger, us: AgentId) -> None:
        self._ledger = ledger
        self._us = us
        self._budget = AuditBudget()

    async def note(self, code: str, reason: str, address: str | None, sender: InstanceId | None) -> None:
        """Nothing is raised: whoever is refused is told so even if it cannot be written down."""
        source = (sender, code) if sender is not None else address
        left_out = self._budget.spend(source, self._ledger.clock.monotonic_ms(), stranger=sender is None)
        if left_out is None:
            return
        row: dict[str, object] = {
            "type": "envelope_refused",
            "code": code,
            "reason": reason[:REASON_CHARS_MAX],
            "address": address,
            "peer": sender,
            "suppressed_before": left_out,
        }
        try:
            await self._ledger.commit(Note(by=self._us, row=row))
        except Refusal as refusal:
            log.warning("peers.refusal_unnoted", extra={"code": code, "why": refusal.code})
