"""Waits for something to happen, and what may end them early: the caller left, its token was revoked, the daemon stops.

Only a pause is ever ended. What runs between two pauses (a commit) is left to finish: a lease that was taken is either
told to its holder or given back, never lost on the way.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from covenant.exchange.access.principals import IdentityAuth, Principal
from covenant.model.errors import OverLimit, Refusal, Unauthenticated, Unavailable
from covenant.model.ids import PublicKey

T = TypeVar("T")
STOPPING_RETRY_MS = 1_000
CROWDED_RETRY_MS = 1_000
WAITS_MAX = 10_000
WAITS_PER_CALLER_MAX = 1_000


class CallerGoneError(Exception):
    """There is nobody left to answer."""


class Pause:
    """Sits between a call and what it waits for. `gone` is done once the caller has left."""

    def __init__(self, gone: asyncio.Future[Any]) -> None:
        self._gone = gone
        self._ended: asyncio.Future[Refusal] = asyncio.get_running_loop().create_future()

    @property
    def caller_gone(self) -> bool:
        return self._gone.done()

    def end(self, refusal: Refusal) -> None:
        if not self._ended.done():
            self._ended.set_result(refusal)

    async def until(self, happening: Coroutine[Any, Any, T]) -> T:
        """What `happening` gives, unless the wait is ended first."""
        watched = asyncio.ensure_future(happening)
        try:
            await asyncio.wait((watched, self._gone, self._ended), return_when=asyncio.FIRST_COMPLETED)
            if self._ended.done():
                raise self._ended.result()
            if self._gone.done():
                raise CallerGoneError
            return watched.result()
        finally:
            watched.cancel()


class Waits:
    """All waits that are open: bounded, for each caller and in all, and ended together when the daemon stops."""

    def __init__(
        self,
        doorkeeper: IdentityAuth,
        *,
        waits_max: int = WAITS_MAX,
        waits_per_caller_max: int = WAITS_PER_CALLER_MAX,
    ) -> None:
        self._doorkeeper = doorkeeper
        self._waits_max = waits_max
        self._waits_per_caller_max = waits_per_caller_max
        self._open: set[Pause] = set()
        self._open_of: Counter[PublicKey] = Counter()
        self._stopping = False

    async def run(
        self,
        principal: Principal,
        gone: asyncio.Future[Any],
        call: Callable[[Pause], Awaitable[T]],
    ) -> T:
        caller = principal.agent.pubkey
        self._check_room(caller)
        pause = Pause(gone)
        if self._stopping:
            pause.end(_stopping())
        self._open.add(pause)
        self._open_of[caller] += 1
        try:
            with self._doorkeeper.session(principal, lambda: pause.end(_revoked())):
                return await call(pause)
        finally:
            self._open.discard(pause)
            self._open_of[caller] -= 1
            if not self._open_of[caller]:
                del self._open_of[caller]

    def _check_room(self, caller: PublicKey) -> None:
        if self._open_of[caller] >= self._waits_per_caller_max:
            raise _too_many(
                f"{self._waits_per_caller_max} of your requests wait already; end some, or ask without a wait"
            )
        if len(self._open) >= self._waits_max:
            raise _too_many(f"{self._waits_max} requests wait here already; ask again later, or without a wait")

    def stop(self) -> None:
        """End every wait, now and from now on."""
        self._stopping = True
        for pause in tuple(self._open):
            pause.end(_stopping())

    @property
    def stopping(self) -> bool:
        return self._stopping


def _too_many(message: str) -> Refusal:
    return OverLimit("too_many_waits", message, retry_after_ms=CROWDED_RETRY_MS)


def _revoked() -> Refusal:
    return Unauthenticated("unknown_token", "unknown or revoked token")


def _stopping() -> Refusal:
    return Unavailable("stopping", "the daemon is stopping; ask again", retry_after_ms=STOPPING_RETRY_MS)
