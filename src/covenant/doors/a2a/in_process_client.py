"""Calls a door of this daemon from inside: a transport of the HTTP client without a socket.

The door reads the request and answers as it does over HTTP. Closing an answer early means that the caller left.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, Any, Final, cast

import httpx2
from starlette.types import Message, Scope

from covenant.doors.http.server.http_exchange import HEADERS_BY_NAME, Door, Header, HttpExchange

if TYPE_CHECKING:
    from covenant.doors.http.server.http_connection import HttpConnection

PIECES_MAX: Final = 16
"""The most pieces of an answer that wait to be read."""
CLOSE_TIMEOUT_S: Final = 5.0
"""How long the door may go on after its caller has left."""


class InProcessTransport(httpx2.AsyncBaseTransport):
    """`scope_entries` are added to each request's scope."""

    def __init__(self, door: Door, scope_entries: Mapping[str, Any]) -> None:
        self._door = door
        self._scope_entries = scope_entries

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        exchange = InProcessExchange({**_scope(request), **self._scope_entries}, await request.aread())
        answer = _Answer(self._door, exchange)
        status, headers = await answer.begin()
        return httpx2.Response(status_code=status, headers=headers, stream=answer, request=request)


def _scope(request: httpx2.Request) -> Scope:
    url, headers = request.url, [(name.lower(), value) for name, value in request.headers.raw]
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": request.method,
        "scheme": url.scheme,
        "path": url.path,
        "raw_path": url.raw_path.partition(b"?")[0],
        "query_string": url.query,
        "root_path": "",
        "headers": headers,
        HEADERS_BY_NAME: dict(headers),
        "client": ("127.0.0.1", 0),
        "server": (url.host, url.port or 80),
    }


class InProcessExchange(HttpExchange):
    """An exchange without a connection: the door's messages wait in a queue. None is the last one."""

    __slots__ = ("messages",)

    def __init__(self, scope: Scope, body: bytes) -> None:
        super().__init__(cast("HttpConnection", None), scope, keep_alive=False, expects=False)
        self.messages: asyncio.Queue[Message | None] = asyncio.Queue(PIECES_MAX)
        self.take_body(body)
        self.end_body()

    def answer(self, status: int, headers: tuple[Header, ...], body: bytes) -> None:
        if self.begun:
            raise RuntimeError("this request has an answer already")
        self.begun = True
        if not self.disconnected:  # an answer is the first in the queue, so there is room for both
            start = {"type": "http.response.start", "status": status, "headers": (*headers, *self._more_headers)}
            self.messages.put_nowait(start)
            self.messages.put_nowait({"type": "http.response.body", "body": body})

    def extend_body(self, body_s: float) -> None:
        """Does nothing: the whole body is here."""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.begun = True
            message = {**message, "headers": (*message.get("headers", ()), *self._more_headers)}
        if not self.disconnected:
            await self.messages.put(message)


class _Answer(httpx2.AsyncByteStream):
    def __init__(self, door: Door, exchange: InProcessExchange) -> None:
        self._exchange = exchange
        exchange.task = asyncio.create_task(self._serve(door))

    async def begin(self) -> tuple[int, list[Header]]:
        try:
            first = await self._exchange.messages.get()
        except asyncio.CancelledError:
            await self.aclose()
            raise
        if first is None:  # the door failed before its first message; the log says why
            return 500, []
        return first["status"], list(first["headers"])

    async def __aiter__(self) -> AsyncIterator[bytes]:
        more = True
        while more:
            message = await self._exchange.messages.get()
            if message is None:
                raise httpx2.RemoteProtocolError("the door failed before the end of its answer")
            if message.get("body"):
                yield message["body"]
            more = message.get("more_body", False)

    async def aclose(self) -> None:
        """Tells the door that its caller has left, and waits a little, so that a commit is not interrupted."""
        exchange = self._exchange
        if not exchange.disconnected:
            exchange.disconnect()
        while not exchange.messages.empty():
            exchange.messages.get_nowait()
        await asyncio.wait((exchange.task,), timeout=CLOSE_TIMEOUT_S)
        exchange.task.cancel()
        await asyncio.wait((exchange.task,))

    async def _serve(self, door: Door) -> None:
        try:
            await door.serve(self._exchange)
        finally:
            if not self._exchange.disconnected:
                await self._exchange.messages.put(None)
