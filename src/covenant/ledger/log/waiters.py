"""Those who wait for a task or a result: what arrives wakes one of them, the longest waiting.

Promises: one arrival wakes at most one waiter, whatever the number of waiters. Waiters are woken in the order in which
they began to wait, those for one identity and those for any identity together. No wake is lost: a waiter that was woken
and leaves without having taken anything (it was cancelled, refused, or its caller left) wakes the next one if something
is still there. A waiter that was woken in vain, because somebody else was faster, keeps its place.

Costs: waiting, waking and leaving cost O(log n) for n waiters. Used on one loop.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self

from covenant.model.ids import PublicKey

DEAD_MAX: Final = 64
"""A line may hold so many numbers of waiters that left, besides as many as there are waiters."""


class Waiters:
    """Everybody who waits for one kind of thing. `pending` says whether something is there for an identity, or for
    any (None)."""

    def __init__(self, pending: Callable[[PublicKey | None], bool]) -> None:
        self._pending = pending
        self.lines: dict[PublicKey | None, _Line] = {}
        self._last_number = 0

    def waiter(self, identity: PublicKey | None) -> Waiter:
        self._last_number += 1
        return Waiter(self, identity, self._last_number)

    def wake(self, identity: PublicKey) -> None:
        """Something arrived for this identity."""
        line = self.lines.get(identity)
        anybody = self.lines.get(None)
        if line is None or (anybody is not None and anybody.first() < line.first()):
            line = anybody
        if line is not None:
            waiter = line.sleeping[line.first()]
            self.remove(waiter)
            waiter.wake(identity)

    def is_pending(self, identity: PublicKey | None) -> bool:
        return self._pending(identity)

    def add(self, waiter: Waiter) -> None:
        line = self.lines.get(waiter.identity)
        if line is None:
            line = self.lines[waiter.identity] = _Line()
        line.add(waiter)

    def remove(self, waiter: Waiter) -> None:
        line = self.lines.get(waiter.identity)
        if line is not None and line.sleeping.pop(waiter.number, None) is not None and not line.sleeping:
            del self.lines[waiter.identity]

    def pass_on(self, identity: PublicKey) -> None:
        """A waiter that was woken for this identity took nothing: the next one is woken instead."""
        if self._pending(identity):
            self.wake(identity)


class Waiter:
    """One place in a line, kept from entering this context until leaving it.

    with waiters.waiter(identity) as waiter:
        while not (found := await take()):
            if not await waiter.wait(timeout_ms):
                return None
        waiter.served()
    """

    def __init__(self, waiters: Waiters, identity: PublicKey | None, number: int) -> None:
        self.identity = identity
        self.number = number
        self._waiters = waiters
        self._woken: asyncio.Future[bool] | None = None
        self._woken_for: PublicKey | None = None

    async def wait(self, timeout_ms: int) -> bool:
        """True when something may be there to take; False when the time is over."""
        if self._waiters.is_pending(self.identity):
            return True
        self._woken_for = None
        if timeout_ms <= 0:
            return False
        loop = asyncio.get_running_loop()
        woken: asyncio.Future[bool] = loop.create_future()
        self._woken = woken
        timer = loop.call_later(timeout_ms / 1000, _end, woken)
        self._waiters.add(self)
        try:
            return await woken
        finally:
            timer.cancel()
            self._waiters.remove(self)

    def wake(self, identity: PublicKey) -> None:
        assert self._woken is not None, "only those who wait are woken"
        self._woken_for = identity
        if not self._woken.done():
            self._woken.set_result(True)

    def served(self) -> None:
        """What this waiter was woken for was taken, so nobody else need look for it.

        A waiter for any identity takes the oldest of all, which may be another one's: what it was woken for is looked
        at once more when it leaves.
        """
        if self.identity is not None:
            self._woken_for = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._waiters.remove(self)
        woken_for, self._woken_for = self._woken_for, None
        if woken_for is not None:
            self._waiters.pass_on(woken_for)


class _Line:
    """The sleeping waiters for one identity, by their numbers, and the order of the numbers. Never empty when used."""

    def __init__(self) -> None:
        self.sleeping: dict[int, Waiter] = {}
        self._order: list[int] = []

    def add(self, waiter: Waiter) -> None:
        self.sleeping[waiter.number] = waiter
        heapq.heappush(self._order, waiter.number)
        if len(self._order) > 2 * len(self.sleeping) + DEAD_MAX:
            self._order = sorted(self.sleeping)

    def first(self) -> int:
        """The number of the longest waiting."""
        while self._order[0] not in self.sleeping:
            heapq.heappop(self._order)
        return self._order[0]


def _end(woken: asyncio.Future[bool]) -> None:
    if not woken.done():
        woken.set_result(False)
