"""Cards that were fetched lately, and failures to fetch them: each place is asked once, however many want to know.

A card is kept for five minutes, a failure for half a minute. Whoever asks while somebody else's question is under way
waits for that answer; it is not called off because one of those who wait leaves.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from covenant.model.errors import CovenantError
from covenant.model.agent_card import RemoteCard

CARD_S: Final = 300.0
FAILURE_S: Final = 30.0
CARDS_MAX: Final = 1_000


@dataclass(frozen=True, slots=True)
class _Kept:
    until_s: float
    what: RemoteCard | CovenantError


class CardCache:
    def __init__(
        self,
        *,
        card_s: float = CARD_S,
        failure_s: float = FAILURE_S,
        cards_max: int = CARDS_MAX,
        keeps: Callable[[CovenantError], bool] = lambda _: True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`keeps`: which failures are kept; the others are for those alone who waited for them."""
        self._card_s = card_s
        self._failure_s = failure_s
        self._cards_max = cards_max
        self._keeps = keeps
        self._clock = clock
        self._kept: dict[str, _Kept] = {}
        self._flights: dict[tuple[str, int], asyncio.Task[RemoteCard]] = {}

    async def get(self, key: str, fetch: Callable[[], Awaitable[RemoteCard]]) -> RemoteCard:
        """The card under this key, fetched if need be. Raises what fetching it raised."""
        kept = self._kept.get(key)
        if kept is not None and kept.until_s > self._clock():
            if isinstance(kept.what, RemoteCard):
                return kept.what
            raise kept.what.with_traceback(None)
        # A question under way belongs to the loop that it is asked in.
        flight_key = (key, id(asyncio.get_running_loop()))
        flight = self._flights.get(flight_key)
        if flight is None:
            flight = asyncio.ensure_future(self._fetch(key, fetch))
            self._flights[flight_key] = flight
            flight.add_done_callback(lambda landed: self._landed(flight_key, landed))
        return await asyncio.shield(flight)

    def clear(self) -> None:
        self._kept.clear()

    def _landed(self, flight_key: tuple[str, int], flight: asyncio.Task[RemoteCard]) -> None:
        self._flights.pop(flight_key, None)
        if not flight.cancelled():
            flight.exception()  # looked at here: everybody who waited for it may have left

    async def _fetch(self, key: str, fetch: Callable[[], Awaitable[RemoteCard]]) -> RemoteCard:
        self._prune()
        try:
            card = await fetch()
        except CovenantError as error:
            if self._keeps(error):
                self._keep(key, error, self._failure_s)
            raise
        self._keep(key, card, self._card_s)
        return card

    def _keep(self, key: str, what: RemoteCard | CovenantError, for_s: float) -> None:
        self._kept.pop(key, None)
        if len(self._kept) >= self._cards_max:
            self._kept.pop(next(iter(self._kept)))
        self._kept[key] = _Kept(self._clock() + for_s, what)

    def _prune(self) -> None:
        now_s = self._clock()
        for key in [key for key, kept in self._kept.items() if kept.until_s <= now_s]:
            del self._kept[key]
