"""Places: how many turns of one tenant the daemon's own agents work on at once.

A turn has a place while it works. One that waits for what it delegated gives its place up, and has one again before it
goes on; so a tenant with a single place can still delegate. Who waits for a place is served in order, and a place that
comes free is handed over: nobody comes between. Tenants have nothing to do with each other's places.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

LOOK_S: Final = 1.0
"""How often somebody who waits looks whether the limit was raised meanwhile."""
UNLIMITED: Final = 1_000_000


class Places:
    """Those of one tenant. `limit` is asked each time, so that a change counts at once; 0: no limit."""

    def __init__(self, limit: Callable[[], int]) -> None:
        self._limit = limit
        self._used = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def used(self) -> int:
        return self._used

    @property
    def free(self) -> int:
        """How many can be taken at once; none while somebody waits."""
        return 0 if self._waiting else max(0, (self._limit() or UNLIMITED) - self._used)

    def take(self, count: int = 1) -> bool:
        if self.free < count:
            return False
        self._used += count
        return True

    def give_back(self) -> None:
        self._used -= 1
        if self._waiting:
            self._serve()

    async def wait(self) -> None:
        """Return with a place. Canceled, it has none."""
        if self.take():
            return
        loop = asyncio.get_running_loop()
        place: asyncio.Future[None] = loop.create_future()
        self._waiting.append(place)
        try:
            while not place.done():
                await asyncio.wait((place,), timeout=LOOK_S)
                self._serve()
        except asyncio.CancelledError:
            if place.done():
                self.give_back()
            else:
                self._waiting.remove(place)
            raise

    def _serve(self) -> None:
        """Hand free places to those who have waited longest."""
        limit = self._limit() or UNLIMITED
        while self._waiting and self._used < limit:
            self._used += 1
            self._waiting.popleft().set_result(None)


class TurnPlace:
    """The place of one turn, which it has when this is made."""

    __slots__ = ("_held", "_left", "_places", "_resuming")

    def __init__(self, places: Places) -> None:
        self._places = places
        self._held = True
        self._left = False
        self._resuming: asyncio.Lock | None = None

    def leave(self) -> None:
        """The turn is over."""
        self._left = True
        self._let_go()

    def _check_left(self) -> None:
        """The turn may have ended while it waited."""
        if self._left:
            self._let_go()

    def _let_go(self) -> None:
        if self._held:
            self._held = False
            self._places.give_back()

    @asynccontextmanager
    async def lent(self) -> AsyncIterator[None]:
        """While the turn only waits for others. It goes on when it has a place again.

        A turn that is canceled meanwhile is not kept waiting for one.
        """
        self._let_go()
        try:
            yield
        except asyncio.CancelledError:
            raise
        except Exception:
            await self._resume()
            raise
        await self._resume()

    async def _resume(self) -> None:
        """Calls that a turn makes at once may end at once: one of them waits for the place."""
        if self._resuming is None:
            self._resuming = asyncio.Lock()
        async with self._resuming:
            if self._held or self._left:
                return
            await self._places.wait()
            self._held = True
            self._check_left()
