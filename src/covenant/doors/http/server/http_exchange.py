"""One request and its answer: the interface between the server and the doors.

A door gets an `HttpExchange`. It gives a whole answer with `answer`, which is one write; or it uses the exchange as
ASGI's `send`, piece by piece. ASGI's `receive` and `scope` are the request.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Iterable
from http import HTTPStatus
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Protocol

from starlette.types import Message, Scope, Send

from covenant.wire.sse import comment

if TYPE_CHECKING:
    from covenant.doors.http.server.http_connection import HttpConnection


Header = tuple[bytes, bytes]
HEADERS_BY_NAME: Final = "covenant.headers_by_name"
"""Key in the scope, beside ASGI's list: the headers by name; the last value of a repeated header counts."""

CACHED_MAX: Final = 1_024
"""The most header lines, and the most heads, that are cached."""

_NAME: Final = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_VALUE: Final = re.compile(rb"[^\x00-\x08\x0a-\x1f\x7f]*")


_PHRASES: Final = {status.value: status.phrase.encode() for status in HTTPStatus}
STATUS_LINES: Final = MappingProxyType(
    {status: b"HTTP/1.1 %d %b\r\n" % (status, _PHRASES.get(status, b"")) for status in range(100, 600)}
)
_STOPPING_COMMENT: Final = comment("the daemon is stopping; accepted tasks are kept: resume with Last-Event-ID")
_LAST_CHUNKS: Final = b"%x\r\n%b\r\n0\r\n\r\n" % (len(_STOPPING_COMMENT), _STOPPING_COMMENT)
_CLOSE: Final = b"connection: close\r\n"
STREAMS: Final = ("/v1/", "/ui/feed")
"""Under these paths, an answer without a length is a stream of events that can be resumed."""
log = logging.getLogger(__name__)


class ResponseHeadCache:
    """The cache of one server. `date` is the line that every answer has."""

    __slots__ = ("_date", "_lines", "_whole")

    def __init__(self) -> None:
        self._date = b""
        self._lines: dict[Header, bytes] = {}
        self._whole: dict[tuple[int, tuple[Header, ...]], tuple[bytes, bool]] = {}

    def set_date(self, value: bytes) -> None:
        date = b"date: %b\r\n" % value
        if date != self._date:
            self._date = date
            self._whole.clear()

    def whole(self, status: int, headers: tuple[Header, ...]) -> tuple[bytes, bool]:
        """A head up to the value of its content length; and whether the head closes the connection."""
        return self._whole.get((status, headers)) or self._write(status, headers)

    def _write(self, status: int, headers: tuple[Header, ...]) -> tuple[bytes, bool]:
        if len(self._whole) >= CACHED_MAX:
            self._whole.clear()
        head, closes = self.begin(status, headers)
        written = self._whole[status, headers] = (head + b"content-length: ", closes)
        return written

    def begin(self, status: int, headers: Iterable[Header]) -> tuple[bytes, bool]:
        """The status line and the headers; and whether one of them closes the connection.

        Raises RuntimeError for a header that would not be one line.
        """
        lines, closes = [STATUS_LINES[status], self._date], False
        for header in headers:
            lines.append(self._lines.get(header) or self._line(header))
            if header[0] == b"connection":
                closes = closes or b"close" in header[1].lower()
        return b"".join(lines), closes

    def _line(self, header: Header) -> bytes:
        name, value = header
        if _NAME.fullmatch(name) is None or _VALUE.fullmatch(value) is None:
            raise RuntimeError(f"the header {name!r} would not be one line")
        written = b"%b: %b\r\n" % header
        if name == b"set-cookie":  # a secret must not be cached
            return written
        if len(self._lines) >= CACHED_MAX:
            self._lines.clear()
        self._lines[header] = written
        return written


class Door(Protocol):
    """What the server calls for each request."""

    def serve(self, exchange: HttpExchange) -> Awaitable[None]:
        """Answers. A door that raises, or returns without a whole answer, is a defect: the server answers 500."""


def exchange_of(send: Send) -> HttpExchange:
    """The exchange of a request that a router of ASGI applications has passed on."""
    assert isinstance(send, HttpExchange), "only the daemon's own server serves the doors"
    return send


NewExchange = Callable[["HttpConnection", Scope, bool, bool], "HttpExchange"]
"""Makes the exchange of a request. The flags: the connection stays open afterwards; the client awaits 100 Continue."""


class HttpExchange:
    __slots__ = (
        "_body_parts",
        "_connection",
        "_expects_continue",
        "_head",
        "_more_headers",
        "_remaining_bytes",
        "_waiter",
        "begun",
        "body_complete",
        "chunked",
        "complete",
        "disconnected",
        "keep_alive",
        "kept_bytes",
        "on_disconnect",
        "scope",
        "task",
    )

    task: asyncio.Task[None]

    def __init__(self, connection: HttpConnection, scope: Scope, keep_alive: bool, expects: bool) -> None:  # noqa: FBT001
        self.body_complete = False
        self.disconnected = False
        """The client has left, or was cut off. Whatever is sent from now on is dropped."""
        self.complete = False
        """The whole answer was written."""
        self.kept_bytes = 0
        """Bytes of the body that have arrived, and the door has not received yet."""
        self.chunked = False
        self.on_disconnect: Callable[[], None] | None = None
        """Called once, on the event loop, when the client leaves or is cut off; see `waits.while_connected`."""
        self._body_parts: list[bytes] | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._head = b""
        self._remaining_bytes = 0
        self.begun = False
        """An answer has begun: it is too late for another."""
        self._more_headers: tuple[Header, ...] = ()
        self._connection = connection
        self.scope = scope
        self.keep_alive = keep_alive
        self._expects_continue = expects

    # For doors.

    @property
    def written(self) -> bool:
        """Whether a part of the answer is on its way."""
        return self.begun and not self._head

    def add_headers(self, headers: Iterable[Header]) -> None:
        """Adds these headers to the answer, whatever it is."""
        self._more_headers = (*self._more_headers, *headers)

    def answer(self, status: int, headers: tuple[Header, ...], body: bytes) -> None:
        """Gives a whole answer. `headers` do not have the length."""
        if self.begun:
            raise RuntimeError("this request has an answer already")
        self.begun = True
        if self.disconnected:
            return
        if self._more_headers:
            headers = (*headers, *self._more_headers)
        head, closes = self._connection.heads.whole(status, headers)
        has_body = self.scope["method"] != "HEAD"
        if has_body and self.keep_alive and not closes:
            self._finish(b"".join((head, str(len(body)).encode(), b"\r\n\r\n", body)))
            return
        line = self._connection_line(closes=closes)
        self._finish(b"%b%d\r\n%b\r\n%b" % (head, len(body), line, body if has_body else b""))

    def take_whole_body(self, bytes_max: int) -> bytes | None:
        """The body, if all of it has arrived, as most bodies do with their heads. None: `receive` it."""
        parts = self._body_parts
        if parts is None or not self.body_complete or self.disconnected or self.kept_bytes > bytes_max:
            return None
        self._body_parts, self.kept_bytes = None, 0
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def extend_body(self, body_s: float) -> None:
        """Gives the body this much time from now on, instead of the general bound."""
        self._connection.extend_body(self, body_s)

    async def receive(self) -> Message:
        """ASGI's `receive`: the next piece of the body, or the message that the client has left."""
        if self._expects_continue and not self._body_parts:
            self._expects_continue = False
            self._connection.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        while self._body_parts is None and not (self.disconnected or self.complete):
            # The waiter is made first: `want_body` may deliver the body at once.
            self._waiter = self._connection.loop.create_future()
            self._connection.want_body()
            await self._waiter
        if self.disconnected or self.complete:
            return {"type": "http.disconnect"}
        parts, self._body_parts, self.kept_bytes = self._body_parts, None, 0
        assert parts is not None
        body = parts[0] if len(parts) == 1 else b"".join(parts)
        return {"type": "http.request", "body": body, "more_body": not self.body_complete}

    async def __call__(self, message: Message) -> None:
        """ASGI's `send`."""
        if self._connection.write_paused and not self.disconnected:
            await self._connection.drain()
        if self.disconnected:
            return
        kind = message["type"]
        if kind == "http.response.body" and self.begun and not self.complete:
            self._write(message.get("body", b""), more=message.get("more_body", False))
        elif kind == "http.response.start" and not self.begun:
            self._begin(message["status"], message.get("headers", ()))
        else:
            raise RuntimeError(f"{kind} cannot be sent now")

    def _begin(self, status: int, headers: Iterable[Header]) -> None:
        length: int | None = None
        kept: list[Header] = []
        for header in headers:
            if header[0] == b"content-length":
                length = int(header[1])
            elif header[0] != b"transfer-encoding":  # follows from whether there is a length
                kept.append(header)
        head, closes = self._connection.heads.begin(status, (*kept, *self._more_headers))
        self.begun, self._expects_continue = True, False
        self.chunked = length is None and self.scope["method"] != "HEAD" and status not in (204, 304)
        self._remaining_bytes = length or 0
        framing = b"transfer-encoding: chunked\r\n" if self.chunked else b""
        if length is not None:
            framing = b"content-length: %d\r\n" % length
        # The head waits for the first piece of the body: two writes would be two system calls.
        self._head = b"%b%b%b\r\n" % (head, framing, self._connection_line(closes=closes))

    def _connection_line(self, *, closes: bool) -> bytes:
        """The line that closes the connection, if one is needed."""
        line = b"" if self.keep_alive or closes else _CLOSE
        self.keep_alive = self.keep_alive and not closes
        return line

    def _write(self, body: bytes, *, more: bool) -> None:
        if self.scope["method"] == "HEAD":
            body = b""
        elif self.chunked:
            body = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
            body = body if more else body + b"0\r\n\r\n"
        else:
            self._remaining_bytes -= len(body)
            if self._remaining_bytes < 0 or (self._remaining_bytes and not more):
                raise RuntimeError("the body's length differs from its content-length")
        head, self._head = self._head, b""
        if more:
            self._connection.write(head + body)
        else:
            self._finish(head + body)

    def _finish(self, data: bytes) -> None:
        self.complete = True
        self._expects_continue = False
        if self._waiter is not None:
            self._wake()
        self._connection.finish(self, data)

    # For the server.

    async def run(self, door: Door) -> None:
        connection = self._connection
        try:
            await door.serve(self)
        except asyncio.CancelledError:
            if not self.disconnected:
                log.exception("http.failed", extra={"path": self.scope["path"]})
        except Exception:  # the client is told nothing of the cause; the log has it
            log.exception("http.failed", extra={"path": self.scope["path"]})
        finally:
            connection.tasks.discard(self.task)
        if not (self.complete or self.disconnected):
            # The door has ended before its answer was complete.
            connection.break_off(self)

    def take_body(self, data: bytes) -> None:
        if self._body_parts is None:
            self._body_parts = [data]
            if self._waiter is not None:
                self._wake()
        else:
            self._body_parts.append(data)
        self.kept_bytes += len(data)

    def end_body(self) -> None:
        self.body_complete = True
        if self.complete or self.disconnected:
            return
        if self._body_parts is None:
            self._body_parts = [b""]
        if self._waiter is not None:
            self._wake()

    def disconnect(self) -> None:
        self.disconnected = True
        self._body_parts = None
        if self._waiter is not None:
            self._wake()
        if self.on_disconnect is not None:
            self.on_disconnect()

    def end_stream(self) -> bool:
        """Ends a stream when the daemon stops, with a comment for the client. False if this is no stream."""
        if not self.chunked or self.complete or not self.scope["path"].startswith(STREAMS):
            return False
        head, self._head = self._head, b""
        self._connection.write(head + _LAST_CHUNKS)
        self.disconnect()
        return True

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
