"""HTTP/1.1 as uvicorn has it, with less to do for each request, and with a bound on what comes before its body.

What a stream is given within one turn of the loop goes out at once. What is rare is uvicorn's own: errors, pauses,
closing.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any, Final, cast
from urllib.parse import unquote

import httptools
from starlette.types import ASGIApp, Scope
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, service_unavailable
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from covenant.daemon.cycle import Cycle

HEAD_BYTES_MAX: Final = 64 * 1024
_SAID: Final = b'{"error":"the head of a request may have 65536 bytes","code":"head_too_large"}'
_TOO_LARGE: Final = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: application/json\r\n"
    b"content-length: %d\r\nconnection: close\r\n\r\n%b" % (len(_SAID), _SAID)
)
URLS_MAX: Final = 1_024
"""How many URLs are remembered as they were read. Most requests are for the same few."""
URL_BYTES_MAX: Final = 512
"""Longer ones are not remembered."""

_urls: Final[dict[bytes, tuple[str, bytes, bytes]]] = {}


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


class HeadTooLargeError(Exception):
    """Raised where a head is read, so that nothing is read after it."""


class GatheringProtocol(HttpToolsProtocol):
    """The head is read before anybody knows who is calling, so nobody may fill the memory with it."""

    cycle: Cycle | None  # type: ignore[assignment]
    """Whose request is being read."""
    _answering: Cycle | None = None
    _in_head = True
    _head_bytes = 0
    """Read since the last request ended."""
    _shared_bytes = 0
    """Of the read in which it ended: how much of that belongs to the next head is not known."""
    _read_bytes = 0
    _idle_since_s: float | None = None
    """When the last answer was given, unless something came since."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(cast("asyncio.Transport", Gathering(transport, self.loop)))
        self._in_turn: deque[tuple[Cycle, ASGIApp]] = deque()

    def connection_lost(self, exc: Exception | None) -> None:
        for cycle in (self._answering, self.cycle):
            if cycle is not None:
                cycle.disconnected = not cycle.response_complete
                cycle.wake()
        self._answering = self.cycle = None
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._idle_since_s = None
        self._read_bytes = len(data)
        self._head_bytes += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError as wrong:
            if isinstance(wrong.__context__, HeadTooLargeError):
                self._refuse_head()
            else:
                self._refuse_request()
        except httptools.HttpParserUpgrade:
            self._unsupported_upgrade_warning()
        else:
            if self._in_head and self._head_bytes > HEAD_BYTES_MAX and not self.transport.is_closing():
                self._refuse_head()

    def _refuse_head(self) -> None:
        self.transport.write(_TOO_LARGE)
        self.transport.close()

    def _refuse_request(self) -> None:
        said = "Invalid HTTP request received."
        self.logger.warning(said)
        self.send_400_response(said)

    def shutdown(self) -> None:
        if self._answering is None or not self._answering.end_stream():
            super().shutdown()

    def on_message_begin(self) -> None:
        self.url = b""
        self.headers = []
        self.expect_100_continue = False

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_head:
            return  # after the body: nobody here reads those, and they are not what was asked
        name = name.lower()
        if name == b"expect" and value.lower() == b"100-continue":
            self.expect_100_continue = True
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        self._in_head = False
        if self._head_bytes + self._shared_bytes > HEAD_BYTES_MAX and self._head_size() > HEAD_BYTES_MAX:
            raise HeadTooLargeError
        parser, before = self.parser, self.cycle
        version = parser.get_http_version()
        path, raw_path, query = _urls.get(self.url) or _read_url(self.url)
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
            "path": path,
            "raw_path": raw_path,
            "query_string": query,
        }
        keep_alive = version != "1.0" and parser.should_keep_alive()
        self.cycle = cycle = Cycle(self, scope, keep_alive=keep_alive, expects=self.expect_100_continue)
        most = self.limit_concurrency
        crowded = most is not None and (len(self.connections) >= most or len(self.tasks) >= most)
        app = cast("ASGIApp", service_unavailable if crowded else self.app)
        if before is None or before.response_complete:
            self._start(cycle, app)
        else:
            self.flow.pause_reading()
            self._in_turn.append((cycle, app))

    def _head_size(self) -> int:
        """As it is commonly written: of the blanks around a value, one."""
        first = len(self.parser.get_method()) + len(self.url) + len("  HTTP/1.1\r\n\r\n")
        return first + sum(len(name) + len(value) + len(": \r\n") for name, value in self.headers)

    def _start(self, cycle: Cycle, app: ASGIApp) -> None:
        self._answering = cycle
        cycle.task = task = self.loop.create_task(cycle.run(app))
        self.tasks.add(task)

    def on_body(self, body: bytes) -> None:
        cycle = self.cycle
        if cycle is None or cycle.response_complete:
            return
        cycle.body = body if cycle.body is None else cycle.body + body
        if len(cycle.body) > HIGH_WATER_LIMIT:
            self.flow.pause_reading()
        cycle.wake()

    def on_message_complete(self) -> None:
        self._in_head, self._head_bytes, self._shared_bytes = True, 0, self._read_bytes
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
        self._idle_since_s = self.loop.time()
        if self.timeout_keep_alive_task is None:
            self._look_again_after(self.timeout_keep_alive)

    # A connection that is kept: a timer for each answer would be made only to be cancelled by the next request.

    def _look_again_after(self, seconds: float) -> None:
        self.timeout_keep_alive_task = self.loop.call_later(seconds, self.timeout_keep_alive_handler)

    def timeout_keep_alive_handler(self) -> None:
        """Close what has been idle for so long; where something came meanwhile, the next answer has a new timer."""
        self.timeout_keep_alive_task = None
        if self._idle_since_s is None:
            return
        left_s = self._idle_since_s + self.timeout_keep_alive - self.loop.time()
        if left_s > 0:
            self._look_again_after(left_s)
        else:
            super().timeout_keep_alive_handler()


def _read_url(url: bytes) -> tuple[str, bytes, bytes]:
    """Its path, the path as it was written, and the query."""
    parsed = httptools.parse_url(url)
    path = parsed.path.decode("ascii")
    read = (unquote(path) if "%" in path else path, parsed.path, parsed.query or b"")
    if len(url) <= URL_BYTES_MAX:
        if len(_urls) >= URLS_MAX:
            _urls.clear()
        _urls[url] = read
    return read
