"""Envelopes that were refused, in the audit: what the other side may not hear, the operator can see.

One address that nobody is known at costs a row a window, whatever was wrong each time; so does one peer with one and
the same fault. All strangers together cost at most so many rows a window. Rows say how many were left out before them.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable
from typing import Final

from covenant.ledger.contract import Ledger
from covenant.ledger.machine.commands import Note
from covenant.model.errors import Refusal
from covenant.model.ids import AgentId
from covenant.model.peer import InstanceId

log = logging.getLogger(__name__)

WINDOW_MS: Final = 60_000
STRANGERS_MAX: Final = 100
"""Rows a window for all that come from nobody we know."""
SOURCES_MAX: Final = 10_000
REASON_CHARS_MAX: Final = 300


class Refusals:
    """`us` is who is in the audit for it."""

    def __init__(self, ledger: Ledger, us: AgentId) -> None:
        self._ledger = ledger
        self._us = us
        self._sources: dict[Hashable, tuple[int, int]] = {}
        """Since when each is counted, and how many rows were left out."""
        self._strangers = (0, 0, 0)
        """Since when they are counted, how many rows they had, and how many were left out."""

    async def note(self, code: str, reason: str, address: str | None, sender: InstanceId | None) -> None:
        """Nothing is raised: whoever is refused is told so even if it cannot be written down."""
        now_ms = self._ledger.clock.monotonic_ms()
        source = (sender, code) if sender is not None else address
        since_ms, left_out = self._sources.get(source, (None, 0))
        if since_ms is not None and 0 <= now_ms - since_ms < WINDOW_MS:
            self._sources[source] = (since_ms, left_out + 1)
            return
        if len(self._sources) >= SOURCES_MAX:
            self._sources.clear()
        if sender is None:
            crowd = self._crowd(now_ms)
            if crowd is None:
                return
            left_out += crowd
        self._sources[source] = (now_ms, 0)
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

    def _crowd(self, now_ms: int) -> int | None:
        """Room for a stranger's row: how many were left out since the last one; None if there is none."""
        since_ms, rows, left_out = self._strangers
        if not 0 <= now_ms - since_ms < WINDOW_MS:
            since_ms, rows = now_ms, 0
        if rows >= STRANGERS_MAX:
            self._strangers = (since_ms, rows, left_out + 1)
            return None
        self._strangers = (since_ms, rows + 1, 0)
        return left_out
