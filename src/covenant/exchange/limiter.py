"""Limits of a tenant: how much it has running at once, and how often it asks.

Counted by tenant, whichever of its tokens asks and by whichever door. Reads cost a request of the rate, and never a
place among the running. The rate is a bucket that holds `burst` requests and fills at `rate_per_min`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import TracebackType
from typing import Final

from covenant.exchange.tenancy import Caller
from covenant.model.errors import OverLimit
from covenant.model.tenant import TenantLimits

MINUTE_MS: Final = 60_000
RUNNING_RETRY_MS: Final = 1_000
"""When somebody will be done is not known: soon enough not to be idle, late enough not to be a storm."""

CONCURRENT: Final = "concurrent_request_limit"
RATE: Final = "rate_limit"
REASONS: Final = frozenset({CONCURRENT, RATE})
MESSAGE: Final = "rate limit exceeded"


class _Bucket:
    __slots__ = ("at_ms", "left")

    def __init__(self, left: float, at_ms: int) -> None:
        self.left = left
        self.at_ms = at_ms


class Running:
    """One of a tenant's places, as a context. (A generator for one costs four times as much, and each send has one.)"""

    __slots__ = ("_most", "_name", "_running")

    def __init__(self, running: dict[str, int], name: str, most: int) -> None:
        self._running = running
        self._name = name
        self._most = most

    def __enter__(self) -> None:
        now = self._running.get(self._name, 0)
        if self._most and now >= self._most:
            raise OverLimit(CONCURRENT, MESSAGE, retry_after_ms=RUNNING_RETRY_MS)
        self._running[self._name] = now + 1

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        left = self._running[self._name] - 1
        if left:
            self._running[self._name] = left
        else:
            del self._running[self._name]


class Limiter:
    """`defaults` are for tenants whose own limits say 0; 0 there means no limit. Lives on one loop."""

    def __init__(self, now_ms: Callable[[], int], defaults: TenantLimits | None = None) -> None:
        self._now_ms = now_ms
        self._defaults = defaults or TenantLimits()
        self._buckets: dict[str, _Bucket] = {}
        self._running: dict[str, int] = {}

    def admit(self, caller: Caller) -> None:
        """Spend a request of the tenant's rate, or refuse with when to come back."""
        own, defaults = caller.tenant.limits, self._defaults
        rate = own.rate_per_min or defaults.rate_per_min
        if rate == 0:
            return
        # A burst belongs to the rate it was given with.
        burst = (own.burst if own.rate_per_min else own.burst or defaults.burst) or rate
        now_ms, bucket = self._now_ms(), self._buckets.get(caller.tenant.name)
        if bucket is None:
            bucket = self._buckets[caller.tenant.name] = _Bucket(float(burst), now_ms)
        # A clock that was set back gives nothing, and takes nothing.
        filled = max(0, now_ms - bucket.at_ms) * rate / MINUTE_MS
        bucket.left, bucket.at_ms = min(float(burst), bucket.left + filled), now_ms
        if bucket.left < 1:
            wait_ms = math.ceil((1 - bucket.left) * MINUTE_MS / rate)
            raise OverLimit(RATE, MESSAGE, retry_after_ms=wait_ms)
        bucket.left -= 1

    def running(self, caller: Caller) -> Running:
        """While a send or stream of the tenant is under way; refused if as many are already as may be."""
        most = caller.tenant.limits.concurrency or self._defaults.concurrency
        return Running(self._running, caller.tenant.name, most)
