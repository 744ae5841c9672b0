"""How many rows of the audit strangers may cost: one a window for each source, and so many a window for all of them.

Whoever comes from many addresses, or makes many up, fills no disk. A row says how many were left out before it.
Kept in memory, and bounded there too.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Final

WINDOW_MS: Final = 60_000
STRANGERS_MAX: Final = 100
"""Rows a window for all that come from nobody we know."""
SOURCES_MAX: Final = 10_000


class AuditBudget:
    def __init__(self) -> None:
        self._sources: dict[Hashable, tuple[int, int]] = {}
        """Since when each is counted, and how many rows were left out."""
        self._strangers = (0, 0, 0)
        """Since when they are counted, how many rows they had, and how many were left out."""

    def spend(self, source: Hashable, now_ms: int, *, stranger: bool) -> int | None:
        """Room for a row: how many were left out before it. None: this one is left out and counted."""
        since_ms, left_out = self._sources.get(source, (None, 0))
        if since_ms is not None and 0 <= now_ms - since_ms < WINDOW_MS:
            self._sources[source] = (since_ms, left_out + 1)
            return None
        if stranger:
            crowd = self._crowd(now_ms)
            if crowd is None:
                return None
            left_out += crowd
        if len(self._sources) >= SOURCES_MAX:
            self._sources.clear()
        self._sources[source] = (now_ms, 0)
        return left_out

    def _crowd(self, now_ms: int) -> int | None:
        since_ms, rows, left_out = self._strangers
        if not 0 <= now_ms - since_ms < WINDOW_MS:
            since_ms, rows = now_ms, 0
        if rows >= STRANGERS_MAX:
            self._strangers = (since_ms, rows, left_out + 1)
            return None
        self._strangers = (since_ms, rows + 1, 0)
        return left_out
