"""Limits of a tenant at the doors: how often it asks, how much is answered at once, and how many streams are open.

Counted by tenant, whichever of its tokens asks and by whichever door; callers without a token are counted together, and
apart from those with one. Every request is a connection while it is answered, and a stream is a stream besides. The
rate is a bucket that holds `burst` requests and fills at `rate_per_min`. How many tasks may wait is the ledger's to
decide, and how many are worked on at once is for whoever works on them.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Final

from covenant.exchange.access.tenants import Caller
from covenant.ledger.machine.decisions.acceptance import LIVE_TASKS, QUEUED_BYTES
from covenant.model.errors import OverLimit
from covenant.model.rate_limits import TokenBuckets
from covenant.model.tenants import TenantLimits

RUNNING_RETRY_MS: Final = 1_000
"""When somebody will be done is not known: soon enough not to be idle, late enough not to be a storm."""

CONCURRENT: Final = "concurrent_request_limit"
STREAMS: Final = "stream_limit"
RATE: Final = "rate_limit"
REASONS: Final = frozenset({CONCURRENT, STREAMS, RATE, LIVE_TASKS, QUEUED_BYTES})
"""The codes of a tenant's limits: a refusal says them as its `reason` too."""
MESSAGE: Final = "rate limit exceeded"
STREAMS_MESSAGE: Final = "too many streams are open; close one, or read the task instead of following it"


class LimitSlot:
    """One of a tenant's places, as a context. (A generator for one costs four times as much, and each call has one.)"""

    __slots__ = ("_code", "_most", "_name", "_taken")

    def __init__(self, taken: dict[str, int], name: str, most: int, code: str) -> None:
        self._taken = taken
        self._name = name
        self._most = most
        self._code = code

    def __enter__(self) -> None:
        now = self._taken.get(self._name, 0)
        if self._most and now >= self._most:
            message = STREAMS_MESSAGE if self._code == STREAMS else MESSAGE
            raise OverLimit(self._code, message, retry_after_ms=RUNNING_RETRY_MS)
        self._taken[self._name] = now + 1

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        left = self._taken[self._name] - 1
        if left:
            self._taken[self._name] = left
        else:
            del self._taken[self._name]


class TenantLimiter:
    """`defaults` are for tenants whose own limits say 0; 0 there means no limit. Lives on one loop."""

    def __init__(self, now_ms: Callable[[], int], defaults: TenantLimits | None = None) -> None:
        self._now_ms = now_ms
        self._defaults = defaults or TenantLimits()
        self._buckets = TokenBuckets()
        self._connections: dict[str, int] = {}
        self._streams: dict[str, int] = {}

    def admit(self, caller: Caller) -> None:
        """Spend a request of the tenant's rate, or refuse with when to come back."""
        own, defaults = caller.tenant.limits, self._defaults
        rate = own.rate_per_min or defaults.rate_per_min
        if rate == 0:
            return
        # A burst belongs to the rate it was given with.
        burst = (own.burst if own.rate_per_min else own.burst or defaults.burst) or rate
        wait_ms = self._buckets.take(caller.tenant.name, self._now_ms(), rate, burst)
        if wait_ms is not None:
            raise OverLimit(RATE, MESSAGE, retry_after_ms=wait_ms)

    def connected(self, caller: Caller) -> LimitSlot:
        """While a request of the tenant is answered; refused if as many are already as may be."""
        most = caller.tenant.limits.connections or self._defaults.connections
        return LimitSlot(self._connections, _counted(caller), most, CONCURRENT)

    def streaming(self, caller: Caller) -> LimitSlot:
        """While a stream of the tenant is open, or somebody waits as if at one."""
        most = caller.tenant.limits.streams or self._defaults.streams
        return LimitSlot(self._streams, _counted(caller), most, STREAMS)


def _counted(caller: Caller) -> str:
    """Strangers at a published agent must not take the places of the tenant whose agent it is."""
    return caller.name if caller.anonymous else caller.tenant.name
