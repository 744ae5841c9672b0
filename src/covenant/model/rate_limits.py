"""Rate limits and back-off: token buckets, sliding windows and pauses between attempts.

Pure: the caller passes the time in, and the chance for jitter. A clock that was set back neither gives nor takes.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable
from typing import Final

import msgspec

MINUTE_MS: Final = 60_000
DOUBLINGS_MAX: Final = 64


class TokenBucket:
    """Holds up to `burst` tokens, and fills at `per_min`. Both are given with each `take`, since they may change."""

    __slots__ = ("_at_ms", "_left")

    def __init__(self, left: float, now_ms: int) -> None:
        self._left = left
        self._at_ms = now_ms

    def take(self, now_ms: int, per_min: float, burst: float) -> int | None:
        """Spend a token. None, or in how many milliseconds there will be one to spend."""
        left = min(burst, self._left + max(0, now_ms - self._at_ms) * per_min / MINUTE_MS)
        self._at_ms = now_ms
        if left < 1:
            self._left = left
            return math.ceil((1 - left) * MINUTE_MS / per_min)
        self._left = left - 1
        return None


class TokenBuckets:
    """A bucket for each key, full at first. The caller bounds how many keys there are."""

    def __init__(self) -> None:
        self._buckets: dict[Hashable, TokenBucket] = {}

    def take(self, key: Hashable, now_ms: int, per_min: float, burst: float | None = None) -> int | None:
        """As `TokenBucket.take`. Without `burst` a bucket holds a minute's worth."""
        burst = per_min if burst is None else burst
        bucket = self._buckets.get(key)
        if bucket is None:
            bucket = self._buckets[key] = TokenBucket(burst, now_ms)
        return bucket.take(now_ms, per_min, burst)


class SlidingWindow:
    """At most `most` in any `span_ms`, counted exactly and for each key by itself."""

    def __init__(self, most: int, span_ms: int, *, keys_max: int = 10_000) -> None:
        """`most` 0: no limit. `keys_max`: keys that are remembered before those that have been quiet are forgotten."""
        self._most = most
        self._span_ms = span_ms
        self._keys_max = keys_max
        self._spent: dict[Hashable, deque[int]] = {}

    def take(self, key: Hashable, now_ms: int) -> int | None:
        """Count one more. None, or in how many milliseconds there is room; what is refused is not counted."""
        if not self._most:
            return None
        times = self._spent.get(key)
        if times is None:
            if len(self._spent) >= self._keys_max:
                self._spent = {key: times for key, times in self._spent.items() if self._recent(times, now_ms)}
            times = self._spent[key] = deque(maxlen=self._most)
        if len(self._recent(times, now_ms)) == self._most:
            return times[0] + self._span_ms - now_ms
        times.append(now_ms)
        return None

    def _recent(self, times: deque[int], now_ms: int) -> deque[int]:
        # A time that is still to come is from before the clock was set back: nobody waits for that.
        while times and not 0 <= now_ms - times[0] < self._span_ms:
            times.popleft()
        return times


class Backoff(msgspec.Struct, frozen=True, gc=False):
    """Pauses that grow by `factor` from `first` to `longest`, each longer or shorter by up to `jitter` of itself."""

    first: float
    longest: float
    factor: float = 2
    jitter: float = 0

    def pause(self, failures: int, chance: float = 0.5) -> float:
        """After so many failures in a row, from 1 on. `chance`: from 0 to 1; one half leaves the pause as it is."""
        pause = min(self.longest, self.first * self.factor ** min(max(0, failures - 1), DOUBLINGS_MAX))
        return pause * (1 + self.jitter * (2 * chance - 1))
