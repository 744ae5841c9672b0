"""Waits, and the events that end them early: the caller left, its token was revoked, the daemon stops.

Only a pause is ended. Work between two pauses (a commit) always finishes: a lease that was taken either reaches its
holder or is given back.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self, TypeVar

from covenant.doors.http.server.http_exchange import HttpExchange
from covenant.doors.http.server.http_refusals import stopping
from covenant.exchange.access.principals import IdentityAuth, Principal
from covenant.model.errors import OverLimit, Unauthenticated
from covenant.model.ids import PublicKey
from covenant.model.settings import Limits

T = TypeVar("T")
CROWDED_RETRY_MS = 1_000


class CallerGoneError(Exception):
    """The caller has left: there is nobody to answer."""


@contextmanager
def on_disconnect(exchange: HttpExchange, callback: Callable[[], None]) -> Iterator[None]:
    """Calls `callback` once if the caller leaves while this context is open."""
    before, exchange.on_disconnect = exchange.on_disconnect, callback
    try:
        if exchange.disconnected:
            callback()
        yield
    finally:
        exchange.on_disconnect = before


class CancelScope:
    """A context around work that can be ended: `end` cancels the work, and then the context raises the reason."""

    __slots__ = ("_reason", "_work")

    def __init__(self) -> None:
        self._work: asyncio.Task[Any] | None = None
        self._reason: Exception | None = None

    def __enter__(self) -> Self:
        self._work = asyncio.current_task()
        return self

    def end(self, reason: Exception) -> None:
        if self._reason is None and self._work is not None:
            self._reason = reason
            # Not at once: if the work itself calls this, it could end before it is canceled.
            self._work.get_loop().call_soon(self._cancel)

    def leave(self) -> None:
        """Ends the work because its caller has left."""
        self.end(CallerGoneError())

    def _cancel(self) -> None:
        if self._work is not None:
            self._work.cancel()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        work, self._work = self._work, None
        if self._reason is not None and kind is not None and issubclass(kind, asyncio.CancelledError):
            assert work is not None
            # If other code has canceled the work as well, its cancellation continues.
            if work.uncancel() == 0:
                raise self._reason from None


@contextmanager
def while_connected(exchange: HttpExchange) -> Iterator[CancelScope]:
    """Runs work for one caller: raises CallerGoneError when the caller leaves."""
    with CancelScope() as work, on_disconnect(exchange, work.leave):
        yield work


class Pause:
    """A wait of one call, which ends early if the caller leaves or may not wait any more."""

    caller_gone = False

    def __init__(self) -> None:
        self._ended: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()

    def leave(self) -> None:
        """Ends the wait because the caller has left."""
        self.caller_gone = True
        self.end(CallerGoneError())

    def end(self, reason: Exception) -> None:
        if not self._ended.done():
            self._ended.set_result(reason)

    async def until(self, awaitable: Awaitable[T]) -> T:
        """The result of `awaitable`, unless the wait is ended first."""
        watched = asyncio.ensure_future(awaitable)
        try:
            await asyncio.wait((watched, self._ended), return_when=asyncio.FIRST_COMPLETED)
            if self._ended.done():
                raise self._ended.result()
            return watched.result()
        finally:
            watched.cancel()


class Waits:
    """All open waits: bounded for each caller and in total, and ended together when the daemon stops."""

    def __init__(self, identity_auth: IdentityAuth, limits: Limits) -> None:
        self._identity_auth = identity_auth
        self._limits = limits
        self._open: set[Pause] = set()
        self._open_by_caller: Counter[PublicKey] = Counter()
        self.stopping = False

    @contextmanager
    def pause(self, principal: Principal) -> Iterator[Pause]:
        """Opens a wait for this caller. It ends early when the token is revoked or the daemon stops."""
        caller = principal.agent.pubkey
        self._check_room(caller)
        pause = Pause()
        if self.stopping:
            pause.end(stopping())
        self._open.add(pause)
        self._open_by_caller[caller] += 1
        try:
            with self._identity_auth.session(
                principal, lambda: pause.end(Unauthenticated("unknown_token", "unknown or revoked token"))
            ):
                yield pause
        finally:
            self._open.discard(pause)
            self._open_by_caller[caller] -= 1
            if not self._open_by_caller[caller]:
                del self._open_by_caller[caller]

    def _check_room(self, caller: PublicKey) -> None:
        if self._open_by_caller[caller] >= self._limits.waits_per_caller_max:
            message = (
                f"{self._limits.waits_per_caller_max} of your requests wait already; end some, or ask without a wait"
            )
        elif len(self._open) >= self._limits.waits_max:
            message = f"{self._limits.waits_max} requests wait here already; ask again later, or without a wait"
        else:
            return
        raise OverLimit("too_many_waits", message, retry_after_ms=CROWDED_RETRY_MS)

    def stop(self) -> None:
        """Ends every wait, now and from now on."""
        self.stopping = True
        for pause in tuple(self._open):
            pause.end(stopping())
