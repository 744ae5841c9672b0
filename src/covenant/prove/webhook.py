"""A receiver of push notifications that can refuse them."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final, Self

import msgspec

from covenant.prove.protocol import EventSeen, read_event, read_object

BODY_BYTES_MAX: Final = 32 * 1024 * 1024
HEAD_BYTES_MAX: Final = 64 * 1024
READ_S: Final = 30.0


class Notification(msgspec.Struct, frozen=True):
    headers: dict[str, str]
    body: bytes
    accepted: bool

    @property
    def event(self) -> EventSeen:
        return read_event(read_object("a notification", self.body))

    @property
    def delivery(self) -> object:
        """A value that is the same for each attempt at one delivery."""
        return self.headers.get("webhook-id") or self.body


class Webhook:
    """`accepts`: whether the next notification is answered with 204 or 503."""

    def __init__(self) -> None:
        self.accepts = True
        self.notifications: list[Notification] = []
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._take, "127.0.0.1", 0, limit=HEAD_BYTES_MAX)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()

    @property
    def url(self) -> str:
        assert self._server is not None
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/hook"

    def accepted(self, task_id: str) -> list[EventSeen]:
        """The accepted notifications about a task, each delivery once, in the order of arrival."""
        seen: dict[object, EventSeen] = {}
        for each in self.notifications:
            if each.accepted and each.event.task_id == task_id:
                seen.setdefault(each.delivery, each.event)
        return list(seen.values())

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        gone = (OSError, TimeoutError, ValueError, asyncio.IncompleteReadError, asyncio.LimitOverrunError)
        with contextlib.closing(writer), contextlib.suppress(*gone):
            async with asyncio.timeout(READ_S):
                while notification := await self._read(reader):
                    self.notifications.append(notification)
                    status = "204 No Content" if notification.accepted else "503 Service Unavailable"
                    writer.write(f"HTTP/1.1 {status}\r\ncontent-length: 0\r\n\r\n".encode())
                    await writer.drain()

    async def _read(self, reader: asyncio.StreamReader) -> Notification | None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers: dict[str, str] = {}
        for line in head[1:]:
            name, _, value = line.partition(":")
            headers[name.strip().lower()] = value.strip()
        size = int(headers.get("content-length", "0"))
        if size > BODY_BYTES_MAX:
            return None
        return Notification(headers, await reader.readexactly(size), self.accepts)
