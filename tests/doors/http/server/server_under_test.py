"""A server of its own for a test, and a connection without a socket."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from covenant.daemon.listeners import bound
from covenant.daemon.settings import HttpSettings
from covenant.doors.http.server.bounds import HttpBounds
from covenant.doors.http.server.http_connection import HttpConnection
from covenant.doors.http.server.http_exchange import HttpExchange
from covenant.doors.http.server.http_server import HttpServer
from tests.waits import BOUND_S

GET = b"GET /some%20where?a=b HTTP/1.1\r\nhost: h\r\n\r\n"
HEALTH = "/healthz"


class AsgiDoor:
    """An ASGI application behind the server."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def serve(self, exchange: HttpExchange) -> None:
        await self._app(exchange.scope, exchange.receive, exchange)


async def hello(_: Scope, receive: Receive, send: Send) -> None:
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"5")]})
    await send({"type": "http.response.body", "body": b"hello"})


def now_ms() -> int:
    return int(time.time() * 1000)


def make(app: ASGIApp, bounds: HttpBounds | None = None, **more: Any) -> HttpServer:
    return HttpServer(AsgiDoor(app), bounds or HttpBounds(), now_ms=now_ms, exempt_paths=(HEALTH,), **more)


@asynccontextmanager
async def listening(
    app: ASGIApp = hello, bounds: HttpBounds | None = None, *, grace_s: float = 1, **more: Any
) -> AsyncIterator[tuple[HttpServer, int]]:
    """A server, and its port on loopback."""
    with bound(HttpSettings(port=0)) as listener:
        server = make(app, bounds, **more)
        await server.start(listener)
        try:
            async with asyncio.timeout(BOUND_S):
                yield server, listener.getsockname()[1]
        finally:
            await server.stop(grace_s)


@asynccontextmanager
async def serving(
    app: ASGIApp = hello, bounds: HttpBounds | None = None
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A client's end of one connection."""
    async with listening(app, bounds) as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            yield reader, writer
        finally:
            writer.close()


class Written(asyncio.Transport):
    """A transport that remembers each write."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []
        self.closed = False
        self.paused = False
        self.unsent = 0
        self._used = asyncio.Event()

    async def until(self, done: Callable[[], bool]) -> None:
        async with asyncio.timeout(BOUND_S):
            while not done():
                self._used.clear()
                await self._used.wait()

    async def answered(self, number: int) -> None:
        await self.until(lambda: len(self.writes) >= number)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.writes.append(bytes(data))
        self._used.set()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def can_write_eof(self) -> bool:
        return False

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True
        self._used.set()

    def abort(self) -> None:
        self.close()

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False

    def get_extra_info(self, _: str, default: Any = None) -> Any:
        return default


class Whole:
    """A door that is given to the server as it is."""

    def __init__(self, serve: Callable[[HttpExchange], None]) -> None:
        self._serve = serve

    async def serve(self, exchange: HttpExchange) -> None:
        self._serve(exchange)


def connected(
    app: ASGIApp = hello, bounds: HttpBounds | None = None, *, server: HttpServer | None = None
) -> tuple[HttpConnection, Written]:
    """A connection without a socket."""
    connection, transport = HttpConnection(server or make(app, bounds)), Written()
    connection.connection_made(transport)
    return connection, transport


async def answer(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
    return head.partition(b"\r\n")[0], await reader.readexactly(length)
