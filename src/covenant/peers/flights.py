"""One question at a time: whoever asks what is being asked already waits for the same answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

T = TypeVar("T")


class Flights(Generic[T]):
    """A question is not called off because one of those who wait for it leaves. For one loop."""

    def __init__(self) -> None:
        self._flights: dict[Hashable, asyncio.Task[T]] = {}

    async def join(self, key: Hashable, ask: Callable[[], Awaitable[T]]) -> T:
        flight = self._flights.get(key)
        if flight is None:
            flight = self._flights[key] = asyncio.ensure_future(_run(ask))
            flight.add_done_callback(lambda landed: self._landed(key, landed))
        return await asyncio.shield(flight)

    async def stop(self) -> None:
        """End what is under way: those who wait are told that it was cancelled."""
        flights = list(self._flights.values())
        for flight in flights:
            flight.cancel()
        await asyncio.gather(*flights, return_exceptions=True)

    def _landed(self, key: Hashable, flight: asyncio.Task[T]) -> None:
        self._flights.pop(key, None)
        if not flight.cancelled():
            flight.exception()  # looked at here: everybody who waited for it may have left


async def _run(ask: Callable[[], Awaitable[T]]) -> T:
    return await ask()
