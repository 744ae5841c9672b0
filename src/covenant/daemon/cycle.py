"""One request and its answer, as ASGI has them.

An answer that is whole is one write: its head waits for its body, as ASGI allows. Two writes would be two system calls
here and two wake-ups there; the second is nearly a third of what an answer costs.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final, cast

from starlette.types import ASGIApp, Message, Scope
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from covenant.daemon.heads import Header, Heads, line
from covenant.wire.sse import comment

if TYPE_CHECKING:
    from covenant.daemon.gathering import Gathering, GatheringProtocol

_FAILED: Final = (
    b"HTTP/1.1 500 Internal Server Error\r\ncontent-type: text/plain; charset=utf-8\r\n"
    b"content-length: 21\r\nconnection: close\r\n\r\nInternal Server Error"
)
_GOODBYE: Final = comment("the daemon is stopping: what is accepted is kept; come back with Last-Event-ID")
_LAST_CHUNKS: Final = b"%x\r\n%b\r\n0\r\n\r\n" % (len(_GOODBYE), _GOODBYE)
STREAMS: Final = "/v1/"
"""Under here, what has no length is a stream of events."""

log = logging.getLogger(__name__)
_heads: Final = Heads()


class Cycle:
    """Called, it is what ASGI calls `send`; and it is one that also takes an answer as a `whole`."""

    # What most requests never change is said here, once for all: making one costs what is said of it.
    task: asyncio.Task[None]
    body: bytes | None = None
    """What came of it since it was last received."""
    more_body = True
    disconnected = False
    response_complete = False
    _news: asyncio.Future[None] | None = None
    _head = b""
    _left = 0
    _chunked = False
    _started = False

    def __init__(self, at: GatheringProtocol, scope: Scope, *, keep_alive: bool, expects: bool) -> None:
        self._at = at
        self._scope = scope
        self._expects = expects
        self.keep_alive = keep_alive

    async def run(self, app: ASGIApp) -> None:
        try:
            await app(self._scope, self.receive, self)
        except (Exception, asyncio.CancelledError):
            log.exception("http.failed", extra={"path": self._scope["path"]})
        finally:
            self._at.tasks.discard(self.task)
        if not (self.response_complete or self.disconnected):
            self._break_off()

    def _break_off(self) -> None:
        """The application has ended before its answer has. What has not begun can still be refused."""
        if not self._started or self._head:
            self._at.transport.write(_FAILED)
        self._at.transport.close()

    def end_stream(self) -> bool:
        """A stream goes on for as long as there may be something to tell: it ends with its daemon, and says so.

        False if this is none.
        """
        if not self._chunked or self.response_complete or not self._scope["path"].startswith(STREAMS):
            return False
        head, self._head = self._head, b""
        self._at.transport.write(head + _LAST_CHUNKS)
        # From here on it is as if its reader had left.
        self.disconnected = True
        self.wake()
        self._at.transport.close()
        return True

    def wake(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    async def receive(self) -> Message:
        if self._expects and not self._at.transport.is_closing():
            self._at.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self._expects = False
        while self.body is None and not (self.disconnected or self.response_complete):
            self._at.flow.resume_reading()
            self._news = self._at.loop.create_future()
            await self._news
        if self.disconnected or self.response_complete:
            return {"type": "http.disconnect"}
        body, self.body = self.body, None
        return {"type": "http.request", "body": body, "more_body": self.more_body}

    def whole(self, status: int, headers: tuple[Header, ...], body: bytes) -> bool:
        """All of an answer, at once; its length follows. False if it must be sent in the ordinary way, for once.

        `headers` say nothing of the length, or of the connection.
        """
        at = self._at
        if self._started or at.flow.write_paused or not self.keep_alive or self._scope["method"] == "HEAD":
            return False
        if self.disconnected:
            return True
        begins = _heads.of(status, headers, at.server_state.default_headers)
        self._started, self._expects = True, False
        self._end(b"%b%d\r\n\r\n%b" % (begins, len(body), body))
        return True

    async def __call__(self, message: Message) -> None:
        flow = self._at.flow
        if flow.write_paused and not self.disconnected:
            await flow.drain()
        if self.disconnected:
            return
        kind = message["type"]
        if kind == "http.response.body" and self._started and not self.response_complete:
            self._say(message.get("body", b""), more=message.get("more_body", False))
        elif kind == "http.response.start" and not self._started:
            self._begin(message["status"], message.get("headers", ()))
        else:
            raise RuntimeError(f"{kind} was not to be sent here")

    def _begin(self, status: int, headers: list[Header]) -> None:
        length, closes = None, False
        parts = [STATUS_LINE[status]]
        for header in (*self._at.server_state.default_headers, *headers):
            name, value = header
            if name == b"content-length":
                length = int(value)
                parts.append(b"content-length: %d\r\n" % length)
                continue
            if name == b"transfer-encoding":
                continue  # follows from whether there is a length
            parts.append(line(header))
            if name == b"connection":
                closes = closes or b"close" in value.lower()
        self._started, self._expects = True, False
        self.keep_alive = self.keep_alive and not closes
        if not (self.keep_alive or closes):
            parts.append(b"connection: close\r\n")
        self._chunked = length is None and self._scope["method"] != "HEAD" and status not in (204, 304)
        self._left = length or 0
        parts.append(b"transfer-encoding: chunked\r\n\r\n" if self._chunked else b"\r\n")
        self._head = b"".join(parts)

    def _say(self, body: bytes, *, more: bool) -> None:
        if self._scope["method"] == "HEAD":
            body = b""
        elif self._chunked:
            body = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
            body = body if more else body + b"0\r\n\r\n"
        else:
            self._left -= len(body)
            if self._left < 0 or (self._left and not more):
                raise RuntimeError("the body is not as long as its head said")
        head, self._head = self._head, b""
        if more:
            self._at.transport.write(head + body)
        else:
            self._end(head + body)

    def _end(self, data: bytes) -> None:
        transport = cast("Gathering", self._at.transport)
        transport.write_last(data)
        self.response_complete = True
        if self._news is not None:
            self.wake()
        if not self.keep_alive:
            transport.close()
        self._at.on_response_complete()
