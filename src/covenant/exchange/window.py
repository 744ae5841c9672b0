"""A sliding window: so many in any stretch of time, counted for each key by itself, and exactly."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

from covenant.exchange.limiter import MESSAGE, RATE
from covenant.model.errors import OverLimit

KEYS_MAX: Final = 10_000
"""Keys that are remembered before those that have been quiet are looked for and forgotten."""


class Window:
    """Keys are credentials, so there are no more of them than there are callers. Lives on one loop."""

    def __init__(self, most: int, span_ms: int, now_ms: Callable[[], int]) -> None:
        """`most` 0: no limit."""
        self._most = most
        self._span_ms = span_ms
        self._now_ms = now_ms
        self._spent: dict[str, deque[int]] = {}

    def spend(self, key: str) -> None:
        """One more, or a refusal that says when there is room again. What is refused is not counted."""
        if not self._most:
            return
        now_ms = self._now_ms()
        times = self._spent.get(key)
        if times is None:
            if len(self._spent) >= KEYS_MAX:
                self._forget_quiet(now_ms)
            times = self._spent[key] = deque(maxlen=self._most)
        self._let_go(times, now_ms)
        if len(times) == self._most:
            raise OverLimit(RATE, MESSAGE, retry_after_ms=times[0] + self._span_ms - now_ms)
        times.append(now_ms)

    def _let_go(self, times: deque[int], now_ms: int) -> None:
        # A time that is still to come is from before the clock was set back: nobody waits for that.
        while times and not 0 <= now_ms - times[0] < self._span_ms:
            times.popleft()

    def _forget_quiet(self, now_ms: int) -> None:
        for key, times in list(self._spent.items()):
            self._let_go(times, now_ms)
            if not times:
                del self._spent[key]
