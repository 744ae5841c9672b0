"""Concurrency of calls: fair scheduling, one call for equal requests, cursors saved in batches, bounded waits.

Everything here must be used on one event loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Hashable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Final, Generic, TypeVar

from covenant.model.errors import Unavailable

MOVES_MAX: Final = 500
RETRY_S: Final = 1.0
"""The pause after a commit that failed because the ledger was unavailable."""

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


async def wait_at_most(event: asyncio.Event, wait_s: float) -> None:
    """Waits until the event is set. When the time is over, sets it."""
    timer = asyncio.get_running_loop().call_later(wait_s, event.set)
    try:
        await event.wait()
    finally:
        timer.cancel()


class SingleFlight(Generic[T]):
    """Equal requests share one call. The call continues when one of its waiters leaves."""

    def __init__(self) -> None:
        self._flights: dict[Hashable, asyncio.Task[T]] = {}

    async def join(self, key: Hashable, ask: Callable[[], Awaitable[T]]) -> T:
        flight = self._flights.get(key)
        if flight is None:
            flight = self._flights[key] = asyncio.ensure_future(_run(ask))
            flight.add_done_callback(lambda ended: self._finished(key, ended))
        return await asyncio.shield(flight)

    async def stop(self) -> None:
        """Cancels the running calls, and their waiters."""
        flights = list(self._flights.values())
        for flight in flights:
            flight.cancel()
        await asyncio.gather(*flights, return_exceptions=True)

    def _finished(self, key: Hashable, flight: asyncio.Task[T]) -> None:
        self._flights.pop(key, None)
        if not flight.cancelled():
            flight.exception()  # retrieved here, since all waiters may have left


async def _run(ask: Callable[[], Awaitable[T]]) -> T:
    return await ask()


class MoveSaver(Generic[K, V]):
    """Saves moves, such as the progress of deliveries: the latest one of each key is committed soon, many at a time.

    `saved` is called with the moves that were committed.
    """

    def __init__(
        self, commit: Callable[[tuple[V, ...]], Awaitable[object]], saved: Callable[[Mapping[K, V]], None]
    ) -> None:
        self._commit = commit
        self._saved = saved
        self._added = asyncio.Event()
        self.unsaved: dict[K, V] = {}
        """Moves that were not committed yet, or are being committed; the one that changed longest ago comes first."""

    def keep(self, key: K, move: V) -> None:
        self.unsaved.pop(key, None)
        self.unsaved[key] = move
        self._added.set()

    async def run(self, on_unavailable: Callable[[Unavailable], None] | None = None) -> None:
        """Runs until canceled, or until a commit fails.

        With `on_unavailable`, a commit that fails as Unavailable is tried again: a database can be down for a while. A
        journal that cannot be written stays so.
        """
        if self.unsaved:  # since an earlier run
            self._added.set()
        while True:
            await self._added.wait()
            self._added.clear()
            try:
                await self.save()
            except Unavailable as unavailable:
                if on_unavailable is None:
                    raise
                on_unavailable(unavailable)
                await asyncio.sleep(RETRY_S)
                self._added.set()

    async def save(self) -> None:
        while self.unsaved:
            moves = dict(islice(self.unsaved.items(), MOVES_MAX))
            await self._commit(tuple(moves.values()))
            for key, move in moves.items():
                if self.unsaved.get(key) is move:
                    del self.unsaved[key]
            self._saved(moves)


@dataclass(slots=True)
class _HostQueue(Generic[T]):
    """The calls to one host for one tenant."""

    waiting: deque[T] = field(default_factory=deque)
    under_way: int = 0


@dataclass(slots=True)
class _TenantQueues(Generic[T]):
    hosts: dict[str, _HostQueue[T]] = field(default_factory=dict)
    ready: dict[str, None] = field(default_factory=dict)
    """Hosts with a waiting call and a free place; the one that had no turn for longest comes first."""
    under_way: int = 0


class FairScheduler(Generic[T]):
    """A fair scheduler of calls: no call waits for another caller's slow host.

    Calls wait in queues, one for each tenant and host, first in first out. Tenants take turns, and so do the hosts of a
    tenant. The calls at once are limited for each host, for each tenant and in total. Every operation takes constant
    time, however many calls wait.
    """

    def __init__(self, *, at_once: int, per_tenant: int, per_host: int) -> None:
        self._at_once = at_once
        self._per_tenant = per_tenant
        self._per_host = per_host
        self._tenants: dict[str, _TenantQueues[T]] = {}
        self._ready: dict[str, None] = {}
        self.under_way = 0

    def wait(self, tenant: str, host: str, call: T) -> None:
        queues = self._tenants.setdefault(tenant, _TenantQueues())
        queue = queues.hosts.setdefault(host, _HostQueue())
        queue.waiting.append(call)
        self._update_ready(tenant, queues, host, queue)

    def next(self) -> T | None:
        """Gives a place to the call whose turn it is; None if no call can go."""
        if self.under_way >= self._at_once or not self._ready:
            return None
        tenant = next(iter(self._ready))
        queues = self._tenants[tenant]
        host = next(iter(queues.ready))
        queue = queues.hosts[host]
        call = queue.waiting.popleft()
        self.under_way += 1
        queues.under_way += 1
        queue.under_way += 1
        # The tenant and the host go to the end of their queues.
        queues.ready.pop(host)
        self._ready.pop(tenant)
        self._update_ready(tenant, queues, host, queue)
        return call

    def done(self, tenant: str, host: str) -> None:
        """Takes back the place of a call that has ended."""
        queues = self._tenants[tenant]
        queue = queues.hosts[host]
        self.under_way -= 1
        queues.under_way -= 1
        queue.under_way -= 1
        self._update_ready(tenant, queues, host, queue)

    def _update_ready(self, tenant: str, queues: _TenantQueues[T], host: str, queue: _HostQueue[T]) -> None:
        """Updates the queues of a tenant and a host after a change: ready, not ready, or gone."""
        if queue.waiting and queue.under_way < self._per_host:
            queues.ready.setdefault(host)
        else:
            queues.ready.pop(host, None)
        if not queue.waiting and not queue.under_way:
            del queues.hosts[host]
        if queues.ready and queues.under_way < self._per_tenant:
            self._ready.setdefault(tenant)
        else:
            self._ready.pop(tenant, None)
        if not queues.hosts:
            del self._tenants[tenant]
