"""LateTimer what takes long: one timer for all that is under way, since nearly all of it ends before anybody looks."""

from __future__ import annotations

import asyncio
from typing import Final, Protocol

NOTICE_S: Final = 1.0


class Timed(Protocol):
    def late(self) -> None:
        """It has not ended in time, or only just. Called once, and by the loop."""


class LateTimer:
    """Lives on one loop at a time."""

    def __init__(self, after_s: float = NOTICE_S) -> None:
        self._after_s = after_s
        self._due_s: dict[Timed, float] = {}
        """In the order in which they are due, as all have the same time."""
        self._timer: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def begin(self, lasting: Timed, loop: asyncio.AbstractEventLoop) -> None:
        if loop is not self._loop:
            self._due_s.clear()
            self._loop, self._timer = loop, None
        self._due_s[lasting] = loop.time() + self._after_s
        if self._timer is None:
            self._timer = loop.call_later(self._after_s, self._look)

    def end(self, lasting: Timed) -> None:
        """May be repeated, and may come after it was late."""
        self._due_s.pop(lasting, None)

    def _look(self) -> None:
        assert self._loop is not None
        self._timer, now_s = None, self._loop.time()
        late = []
        for lasting, due_s in self._due_s.items():
            if due_s > now_s:
                self._timer = self._loop.call_later(due_s - now_s, self._look)
                break
            late.append(lasting)
        for lasting in late:
            del self._due_s[lasting]
            # Each in a turn of its own: what goes wrong with one is no matter of the others.
            self._loop.call_soon(lasting.late)
