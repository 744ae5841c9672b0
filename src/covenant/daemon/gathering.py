"""HTTP/1.1 as uvicorn has it, with less to do for each request, and with a bound on what comes before its body.

An answer that is whole is one write: its head waits for its body, as ASGI allows. Two writes would be two system calls
here and two wake-ups there; the second is nearly a third of what an answer costs. What a stream is given within one
turn of the loop goes out at once, too. What is rare is uvicorn's own: errors, pauses, closing.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import Any, Final, cast
from urllib.parse import unquote

import httptools
from starlette.types import ASGIApp, Message, Scope
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, service_unavailable
from uvicorn.protocols.http.httptools_impl import HEADER_RE, HEADER_VALUE_RE, STATUS_LINE, HttpToolsProtocol

from covenant.wire.sse import comment

HEAD_BYTES_MAX: Final = 64 * 1024
_SAID: Final = b'{"error":"the head of a request may have 65536 bytes","code":"head_too_large"}'
_TOO_LARGE: Final = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: application/json\r\n"
    b"content-length: %d\r\nconnection: close\r\n\r\n%b" % (len(_SAID), _SAID)
)
_FAILED: Final = (
    b"HTTP/1.1 500 Internal Server Error\r\ncontent-type: text/plain; charset=utf-8\r\n"
    b"content-length: 21\r\nconnection: close\r\n\r\nInternal Server Error"
)
LINES_MAX: Final = 1_024
"""How many headers are remembered as they are written. Most answers say the same few."""

log = logging.getLogger(__name__)
_lines: Final[dict[tuple[bytes, bytes], bytes]] = {}


_GOODBYE: Final = comment("the daemon is stopping: what is accepted is kept; come back with Last-Event-ID")
_LAST_CHUNKS: Final = b"%x\r\n%b\r\n0\r\n\r\n" % (len(_GOODBYE), _GOODBYE)
STREAMS: Final = "/v1/"
"""Under here, what has no length is a stream of events."""


class Gathering:
    """A transport that writes at the end of the turn. Everything else is the transport's own."""

    __slots__ = ("_loop", "_parts", "_transport", "get_extra_info", "is_closing", "pause_reading", "resume_reading")

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._parts: list[bytes] = []
        self.get_extra_info = transport.get_extra_info
        self.is_closing = transport.is_closing
        self.pause_reading = transport.pause_reading
        self.resume_reading = transport.resume_reading

    def write(self, data: bytes) -> None:
        if not self._parts:
            self._loop.call_soon(self._flush)
        self._parts.append(data)

    def write_last(self, data: bytes) -> None:
        """At once: nothing more will come with it."""
        if self._parts:
            self._parts.append(data)
            self._flush()
        elif not self.is_closing():
            self._transport.write(data)

    def _flush(self) -> None:
        parts, self._parts = self._parts, []
        if parts and not self._transport.is_closing():
            self._transport.write(parts[0] if len(parts) == 1 else b"".join(parts))

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class Cycle:
    """One request and its answer: what ASGI calls `receive` and `send`."""

    __slots__ = (
        "_at",
        "_chunked",
        "_expects",
        "_head",
        "_left",
        "_news",
        "_scope",
        "_started",
        "body",
        "disconnected",
        "keep_alive",
        "more_body",
        "response_complete",
        "task",
    )

    task: asyncio.Task[None]

    def __init__(self, at: GatheringProtocol, scope: Scope, *, keep_alive: bool, expects: bool) -> None:
        self._at = at
        self._scope = scope
        self._expects = expects
        self._news: asyncio.Future[None] | None = None
        self._head = b""
        self._left = 0
        self._chunked = False
        self._started = False
        self.keep_alive = keep_alive
        self.body: bytes | None = None
        """What came of it since it was last received."""
        self.more_body = True
        self.disconnected = False
        self.response_complete = False

    async def run(self, app: ASGIApp) -> None:
        try:
            await app(self._scope, self.receive, self.send)
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

    async def send(self, message: Message) -> None:
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

    def _begin(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        length, closes = None, False
        parts = [STATUS_LINE[status]]
        for name, value in (*self._at.server_state.default_headers, *headers):
            if name == b"content-length":
                length = int(value)
                parts.append(b"content-length: %d\r\n" % length)
                continue
            if name == b"transfer-encoding":
                continue  # follows from whether there is a length
            parts.append(_lines.get((name, value)) or _line(name, value))
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
        transport = cast("Gathering", self._at.transport)
        if more:
            transport.write(head + body)
            return
        transport.write_last(head + body)
        self.response_complete = True
        self.wake()
        if not self.keep_alive:
            transport.close()
        self._at.on_response_complete()


def _line(name: bytes, value: bytes) -> bytes:
    if HEADER_RE.search(name) or HEADER_VALUE_RE.search(value):
        raise RuntimeError(f"the header {name!r} would not be one line")
    if len(_lines) >= LINES_MAX:
        _lines.clear()
    line = _lines[name, value] = b"%b: %b\r\n" % (name, value)
    return line


class GatheringProtocol(HttpToolsProtocol):
    """The head is read before anybody knows who is calling, so nobody may fill the memory with it."""

    cycle: Cycle | None  # type: ignore[assignment]
    """Whose request is being read."""
    _answering: Cycle | None = None
    _head_bytes = 0
    _in_head = True

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(cast("asyncio.Transport", Gathering(transport, self.loop)))
        self._in_turn: deque[tuple[Cycle, ASGIApp]] = deque()

    def connection_lost(self, exc: Exception | None) -> None:
        for cycle in (self._answering, self.cycle):
            if cycle is not None:
                cycle.disconnected = not cycle.response_complete
                cycle.wake()
        self._answering = self.cycle = None
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._head_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._head_bytes > HEAD_BYTES_MAX and not self.transport.is_closing():
            self.transport.write(_TOO_LARGE)
            self.transport.close()

    def shutdown(self) -> None:
        if self._answering is None or not self._answering.end_stream():
            super().shutdown()

    def on_message_begin(self) -> None:
        self.url = b""
        self.headers = []
        self.expect_100_continue = False

    def on_headers_complete(self) -> None:
        self._in_head = False
        parser, before = self.parser, self.cycle
        version = parser.get_http_version()
        url = httptools.parse_url(self.url)
        path = url.path.decode("ascii")
        scope: Scope = {
            "type": "http",
            "asgi": {"version": self.asgi_version, "spec_version": "2.3"},
            "http_version": version,
            "server": self.server,
            "client": self.client,
            "scheme": self.scheme,
            "root_path": "",
            "headers": self.headers,
            "state": {},
            "method": parser.get_method().decode("ascii"),
            "path": unquote(path) if "%" in path else path,
            "raw_path": url.path,
            "query_string": url.query or b"",
        }
        keep_alive = version != "1.0" and parser.should_keep_alive()
        self.cycle = cycle = Cycle(self, scope, keep_alive=keep_alive, expects=self.expect_100_continue)
        app = cast("ASGIApp", service_unavailable if self._is_crowded() else self.app)
        if before is None or before.response_complete:
            self._start(cycle, app)
        else:
            self.flow.pause_reading()
            self._in_turn.append((cycle, app))

    def _is_crowded(self) -> bool:
        most = self.limit_concurrency
        return most is not None and (len(self.connections) >= most or len(self.tasks) >= most)

    def _start(self, cycle: Cycle, app: ASGIApp) -> None:
        self._answering = cycle
        cycle.task = self.loop.create_task(cycle.run(app))
        self.tasks.add(cycle.task)

    def on_body(self, body: bytes) -> None:
        cycle = self.cycle
        if cycle is None or cycle.response_complete:
            return
        cycle.body = body if cycle.body is None else cycle.body + body
        if len(cycle.body) > HIGH_WATER_LIMIT:
            self.flow.pause_reading()
        cycle.wake()

    def on_message_complete(self) -> None:
        self._in_head, self._head_bytes = True, 0
        cycle = self.cycle
        if cycle is None or cycle.response_complete:
            return
        cycle.more_body = False
        cycle.body = cycle.body or b""
        cycle.wake()

    def on_response_complete(self) -> None:
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self._in_turn:
            self._start(*self._in_turn.popleft())
            return
        self._unset_keepalive_if_required()
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)
