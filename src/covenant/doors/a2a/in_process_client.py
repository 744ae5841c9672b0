"""Calls a door of this daemon from inside: a transport of the HTTP client without a socket.

The door reads the request and answers as it does over HTTP. Closing an answer early means that the caller left.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any, Final

import httpx2
from starlette.types import ASGIApp, Message, Scope

PIECES_MAX: Final = 16
"""The most pieces of an answer that wait to be read."""
CLOSE_TIMEOUT_S: Final = 5.0
"""How long the door may go on after its caller has left."""


class InProcessTransport(httpx2.AsyncBaseTransport):
    """`scope_entries` are added to each request's scope."""

    def __init__(self, door: ASGIApp, scope_entries: Mapping[str, Any]) -> None:
        self._door = door
        self._scope_entries = scope_entries

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        answer = _Answer(self._door, {**_scope(request), **self._scope_entries}, await request.aread())
        status, headers = await answer.begin()
        return httpx2.Response(status_code=status, headers=headers, stream=answer, request=request)


def _scope(request: httpx2.Request) -> Scope:
    url = request.url
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
        "headers": [(name.lower(), value) for name, value in request.headers.raw],
        "client": ("127.0.0.1", 0),
        "server": (url.host, url.port or 80),
    }


class _Answer(httpx2.AsyncByteStream):
    def __init__(self, door: ASGIApp, scope: Scope, body: bytes) -> None:
        self._messages: asyncio.Queue[Message | None] = asyncio.Queue(PIECES_MAX)
        self._body: bytes | None = body
        self._closed = asyncio.Event()
        self._work = asyncio.create_task(self._serve(door, scope))

    async def begin(self) -> tuple[int, list[tuple[bytes, bytes]]]:
        try:
            first = await self._messages.get()
        except asyncio.CancelledError:
            await self.aclose()
            raise
        if first is None:  # the door failed before its first message; the log says why
            return 500, []
        return first["status"], list(first.get("headers", ()))

    async def __aiter__(self) -> AsyncIterator[bytes]:
        more = True
        while more:
            message = await self._messages.get()
            if message is None:
                return
            if message.get("body"):
                yield message["body"]
            more = message.get("more_body", False)

    async def aclose(self) -> None:
        """Tells the door that its caller has left, and waits a little, so that a commit is not interrupted."""
        self._closed.set()
        while not self._messages.empty():
            self._messages.get_nowait()
        await asyncio.wait((self._work,), timeout=CLOSE_TIMEOUT_S)
        self._work.cancel()
        await asyncio.wait((self._work,))

    async def _serve(self, door: ASGIApp, scope: Scope) -> None:
        try:
            await door(scope, self._receive, self._send)
        finally:
            await self._send(None)

    async def _send(self, message: Message | None) -> None:
        if not self._closed.is_set():
            await self._messages.put(message)

    async def _receive(self) -> dict[str, Any]:
        body, self._body = self._body, None
        if body is not None:
            return {"type": "http.request", "body": body, "more_body": False}
        await self._closed.wait()
        return {"type": "http.disconnect"}
