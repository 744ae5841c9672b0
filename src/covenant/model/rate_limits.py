"""Rate limits and back-off: token buckets, sliding windows and pauses between attempts.

Pure: the caller passes in the time and the chance for jitter. A clock that was set back adds and removes no tokens.
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
    """Holds up to `burst` tokens and refills at `per_min`. Each `take` passes both, since settings may change."""

    __slots__ = ("_at_ms", "_left")

    def __init__(self, left: float, now_ms: int) -> None:
        self._left = left
        self._at_ms = now_ms

    def take(self, now_ms: int, per_min: float, burst: float) -> int | None:
        """Spends a token and returns None, or returns in how many milliseconds a token will be available."""
        left = min(burst, self._left + max(0, now_ms - self._at_ms) * per_min / MINUTE_MS)
        self._at_ms = now_ms
        if left < 1:
            self._left = left
            return math.ceil((1 - left) * MINUTE_MS / per_min)
        self._left = left - 1
        return None

    def spent(self, now_ms: int, per_min: float, burst: float) -> int:
        """The number of tokens that were spent and are not refilled yet."""
        left = self._left + max(0, now_ms - self._at_ms) * per_min / MINUTE_MS
        return max(0, math.ceil(burst - left))


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

    def spent(self, key: Hashable, now_ms: int, per_min: float, burst: float) -> int:
        bucket = self._buckets.get(key)
        return bucket.spent(now_ms, per_min, burst) if bucket is not None else 0


class SlidingWindow:
    """Allows at most `most` events in any `span_ms`, counted exactly, for each key by itself."""

    def __init__(self, most: int, span_ms: int, *, keys_max: int = 10_000) -> None:
        """`most` 0: no limit. Above `keys_max` keys, those without a recent event are forgotten."""
        self._most = most
        self._span_ms = span_ms
        self._keys_max = keys_max
        self._spent: dict[Hashable, deque[int]] = {}

    def take(self, key: Hashable, now_ms: int, most: int | None = None) -> int | None:
        """Counts an event and returns None, or returns in how many milliseconds there is room and counts nothing.

        `most`: a smaller limit for this call.
        """
        if not self._most:
            return None
        most = self._most if most is None else most
        times = self._spent.get(key)
        if times is None:
            if len(self._spent) >= self._keys_max:
                self._spent = {key: times for key, times in self._spent.items() if self._recent(times, now_ms)}
            times = self._spent[key] = deque(maxlen=self._most)
        if len(self._recent(times, now_ms)) >= most:
            return times[-most] + self._span_ms - now_ms
        times.append(now_ms)
        return None

    def _recent(self, times: deque[int], now_ms: int) -> deque[int]:
        # A future time is from before the clock was set back. It is dropped, so that nobody waits for it.
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
        """The pause after this many failures in a row, from 1 on. `chance`: 0 to 1; 0.5 leaves the pause unchanged."""
        pause = min(self.longest, self.first * self.factor ** min(max(0, failures - 1), DOUBLINGS_MAX))
        return pause * (1 + self.jitter * (2 * chance - 1))
