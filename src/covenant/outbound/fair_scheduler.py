"""A fair scheduler of calls: nobody waits for somebody else's slow host.

Calls stand in lanes, one for each tenant and host, first in first out. Tenants take turns, and so do the hosts of a
tenant; each host, each tenant and all together have so many places at once. Every operation costs the same, however
many wait.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(slots=True)
class _Lane(Generic[T]):
    """The calls to one host for one tenant."""

    waiting: deque[T] = field(default_factory=deque)
    under_way: int = 0


@dataclass(slots=True)
class _Tenant(Generic[T]):
    lanes: dict[str, _Lane[T]] = field(default_factory=dict)
    ready: dict[str, None] = field(default_factory=dict)
    """Hosts with somebody waiting and a place free; whoever has waited longest first."""
    under_way: int = 0


class FairScheduler(Generic[T]):
    def __init__(self, *, at_once: int, per_tenant: int, per_host: int) -> None:
        self._at_once = at_once
        self._per_tenant = per_tenant
        self._per_host = per_host
        self._tenants: dict[str, _Tenant[T]] = {}
        self._ready: dict[str, None] = {}
        self.under_way = 0

    def wait(self, tenant: str, host: str, call: T) -> None:
        lanes = self._tenants.setdefault(tenant, _Tenant())
        lane = lanes.lanes.setdefault(host, _Lane())
        lane.waiting.append(call)
        self._settle(tenant, lanes, host, lane)

    def next(self) -> T | None:
        """The call whose turn it is, which now has a place; None if nobody can go."""
        if self.under_way >= self._at_once or not self._ready:
            return None
        tenant = next(iter(self._ready))
        lanes = self._tenants[tenant]
        host = next(iter(lanes.ready))
        lane = lanes.lanes[host]
        call = lane.waiting.popleft()
        self.under_way += 1
        lanes.under_way += 1
        lane.under_way += 1
        # To the end of the line, both of them.
        lanes.ready.pop(host)
        self._ready.pop(tenant)
        self._settle(tenant, lanes, host, lane)
        return call

    def done(self, tenant: str, host: str) -> None:
        """A call has given its place back."""
        lanes = self._tenants[tenant]
        lane = lanes.lanes[host]
        self.under_way -= 1
        lanes.under_way -= 1
        lane.under_way -= 1
        self._settle(tenant, lanes, host, lane)

    def _settle(self, tenant: str, lanes: _Tenant[T], host: str, lane: _Lane[T]) -> None:
        """Put both where they belong after a change: ready, not ready, or gone."""
        if lane.waiting and lane.under_way < self._per_host:
            lanes.ready.setdefault(host)
        else:
            lanes.ready.pop(host, None)
        if not lane.waiting and not lane.under_way:
            del lanes.lanes[host]
        if lanes.ready and lanes.under_way < self._per_tenant:
            self._ready.setdefault(tenant)
        else:
            self._ready.pop(tenant, None)
        if not lanes.lanes:
            del self._tenants[tenant]
