"""Request bodies, bounded while they are read, whatever length was announced."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Final, TypeVar

from starlette.types import Message, Receive, Scope

from covenant.doors.http.server.bounds import DEFAULTS
from covenant.doors.http.server.http_exchange import HEADERS_BY_NAME
from covenant.doors.waits import CallerGoneError
from covenant.model.errors import Invalid, TooLarge, Unavailable

BODY_TOO_LARGE: Final = "body_too_large"

# This much of a refused body is read and discarded, so that a client that sends before it reads gets the refusal.
DISCARD_BYTES_MAX: Final = DEFAULTS.body_discarded_bytes_max
ADDRESS_SHARE: Final = 4
"""One address may use at most 1/ADDRESS_SHARE of the pool."""
RETRY_MS: Final = 1_000
WAIT_S: Final = 5.0
"""How long a message waits for bytes of the pool."""
T = TypeVar("T")


async def read_body(scope: Scope, receive: Receive, bytes_max: int) -> bytes:
    announced = announced_length(scope)
    if announced is not None and announced > bytes_max:
        await _discard(receive, announced)
        raise _too_large(bytes_max)
    chunks: list[bytes] = []
    size, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise CallerGoneError
        chunk: bytes = message.get("body", b"")
        more = message.get("more_body", False)
        size += len(chunk)
        if size > bytes_max:
            chunks.clear()
            if more:
                await _discard(receive, DISCARD_BYTES_MAX)
            raise _too_large(bytes_max)
        chunks.append(chunk)
    return b"".join(chunks)


async def _discard(receive: Receive, expected: int) -> None:
    if expected > DISCARD_BYTES_MAX:
        return
    size = 0
    while size <= DISCARD_BYTES_MAX:
        message = await receive()
        size += len(message.get("body", b""))
        if message["type"] == "http.disconnect" or not message.get("more_body"):
            return


def announced_length(scope: Scope) -> int | None:
    """The announced length of the body; None without one."""
    length: bytes | None = scope[HEADERS_BY_NAME].get(b"content-length")
    if length is None:
        return None
    if not length.isdigit():
        raise Invalid("invalid_request", "content-length is not a number")
    return int(length)


def _too_large(bytes_max: int) -> TooLarge:
    return TooLarge(BODY_TOO_LARGE, f"a request body may have at most {bytes_max} bytes")


Take = Callable[[int], None]
"""Takes this many bytes out of the pool, or refuses."""


class AnonymousPool:
    """Bounds the memory that callers without a token use. Must be used on one event loop."""

    def __init__(self, *, bytes_max: int, body_ms: int) -> None:
        """`body_ms`: how long a caller without a token has for its whole message."""
        self._bytes_max = bytes_max
        self.share = bytes_max // ADDRESS_SHARE
        """The most bytes of one address."""
        self._body_s = body_ms / 1000
        self.used = 0
        self._by_address: dict[str, int] = {}
        """The bytes that each address holds. An address that holds nothing has no entry."""
        self._waiting: set[asyncio.Event] = set()

    @contextmanager
    def lease(self, address: str) -> Iterator[Take]:
        """A context whose `Take` takes bytes out of the pool. They go back at the end of the context."""
        held = 0

        def take(size: int) -> None:
            nonlocal held
            of_address = self._by_address.get(address, 0)
            if self.used + size > self._bytes_max or of_address + size > self.share:
                raise _busy()
            held += size
            self.used += size
            self._by_address[address] = of_address + size

        try:
            yield take
        finally:
            self._give_back(address, held)

    def _give_back(self, address: str, size: int) -> None:
        self.used -= size
        remaining = self._by_address.pop(address, 0) - size
        if remaining > 0:
            self._by_address[address] = remaining
        for waiting in self._waiting:
            waiting.set()

    async def take_when_free(self, take: Take, size: int) -> None:
        """Waits for free bytes: other messages hold theirs only briefly. For messages of unknown length."""
        woken = asyncio.Event()
        self._waiting.add(woken)
        try:
            async with asyncio.timeout(WAIT_S):
                while True:
                    woken.clear()
                    try:
                        return take(size)
                    except Unavailable:
                        await woken.wait()
        except TimeoutError:
            raise _busy() from None
        finally:
            self._waiting.discard(woken)

    async def within(self, reading: Awaitable[T], s_max: float = math.inf) -> T:
        """The result of `reading`, within the time limit of a message."""
        try:
            async with asyncio.timeout(min(self._body_s, s_max)):
                return await reading
        except TimeoutError:
            message = f"a message must arrive within {min(self._body_s, s_max):g} s; send it faster, or split it"
            raise Invalid("too_slow", message) from None

    async def read(self, scope: Scope, receive: Receive, bytes_max: int, take: Take) -> bytes:
        """The body of a request without a token, counted against the pool.

        Only bytes that have arrived are taken: announcing many and sending few blocks nobody.
        """
        announced = announced_length(scope)
        too_large = announced is not None and announced > bytes_max  # discarded as it arrives
        counted = receive if too_large else _counted(receive, take, bytes_max)
        return await self.within(read_body(scope, counted, bytes_max))


def _busy() -> Unavailable:
    message = "callers without a token send too much just now; try again later"
    return Unavailable("busy", message, retry_after_ms=RETRY_MS)


def _counted(receive: Receive, take: Take, bytes_max: int) -> Receive:
    """Counts arriving bytes; bytes after `bytes_max` are discarded, and not counted."""
    size = 0

    async def receive_counted() -> Message:
        nonlocal size
        message = await receive()
        arrived = len(message.get("body", b""))
        size += arrived
        if size <= bytes_max:
            take(arrived)
        return message

    return receive_counted
