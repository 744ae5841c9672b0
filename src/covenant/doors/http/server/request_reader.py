"""Reads requests from the bytes of one connection, over httptools' parser, within the bounds of heads and trailers.

The parser is strict: only CRLF ends a line, and a request with two lengths or two framings is an error. What it accepts
beyond our rules is refused here. An `Upgrade` is ignored: its request is answered like any other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final
from urllib.parse import unquote

import httptools
from starlette.types import Scope

from covenant.doors.http.server import http_refusals as refusals
from covenant.doors.http.server.http_exchange import HEADERS_BY_NAME, Header, HttpExchange
from covenant.model.errors import Refusal

if TYPE_CHECKING:
    from covenant.doors.http.server.http_connection import HttpConnection

_NOT_REPEATED: Final = (b"host", b"authorization", b"transfer-encoding")
"""Headers that must not be repeated: a proxy might use the first value, and the daemon the last.

The parser itself refuses a second `content-length`.
"""


_ASGI: Final = {"version": "3.0", "spec_version": "2.3"}

URLS_MAX: Final = 1_024
"""The most URLs that are cached as parsed: most requests are for the same few."""
URL_BYTES_MAX: Final = 512
"""Longer URLs are not cached."""

Url = tuple[str, bytes, bytes]
"""The path, the path as it was written, and the query."""


class HttpRequestReader:
    __slots__ = (
        "_bounds",
        "_by_name",
        "_connection",
        "_fed_bytes",
        "_head_bytes",
        "_headers",
        "_headers_max",
        "_parser",
        "_pending_bytes",
        "_progress",
        "_sized_request",
        "_trailer_bytes",
        "_unsure_bytes",
        "_upgrades",
        "_url",
        "ended",
        "exchange",
        "in_head",
        "number",
        "open",
    )

    def __init__(self, connection: HttpConnection) -> None:
        self._connection = connection
        self._bounds = connection.bounds
        self._headers_max = connection.bounds.headers_max
        self._parser = httptools.HttpRequestParser(self)
        self.exchange: HttpExchange | None = None
        """The exchange whose body is being read."""
        self.open = False
        """Whether a request has begun, and is not complete."""
        self.in_head = True
        self.number = 0
        """The number of the request that is being read, or was read last."""
        self.ended = False
        """The last request of this connection has been read: later bytes are ignored."""
        self._url = b""
        self._headers: list[Header] = []
        self._by_name: dict[bytes, bytes] = {}
        """The headers by name; the last value of a repeated header counts."""
        self._upgrades = False
        self._fed_bytes = 0
        """The size of the piece that is being read."""
        self._sized_request = 0
        """The number of the request that the following sizes belong to."""
        self._head_bytes = 0
        """The size of pieces that belong to the head alone."""
        self._unsure_bytes = 0
        """The size of the piece in which the request began, of which an unknown part belongs to the head."""
        self._trailer_bytes = 0
        """The size of the complete trailers."""
        self._pending_bytes = 0
        """The size of body pieces that gave neither data nor a trailer: a long trailer, or a chunk's extension."""
        self._progress = False
        """The piece that is being read has given data or a trailer."""

    def close(self) -> None:
        """Ends the reading. The parser and its callbacks form a cycle that holds the connection."""
        del self._parser
        self.exchange = None

    def feed(self, data: bytes) -> Refusal | None:
        """Reads a piece. Returns the refusal after which nothing more can be read; None if reading goes on."""
        self._fed_bytes = len(data)
        first = self.number + (not self.open)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            return self.feed(self._without_upgrade() + data[upgrade.args[0] :])
        except httptools.HttpParserError as error:
            if self.ended and not self.open:
                return None  # bytes after the last request
            return error.__context__ if isinstance(error.__context__, Refusal) else refusals.malformed()
        return self._check_unfinished(alone=self.number == first) if self.open else None

    def _check_unfinished(self, *, alone: bool) -> Refusal | None:
        """Bounds a head or a trailer that is not complete, which no callback has seen yet.

        `alone`: the piece has no bytes of another request.
        """
        if self._sized_request != self.number:
            self._sized_request, self._head_bytes, self._unsure_bytes = self.number, 0, 0
        if self.in_head:
            if alone:
                self._head_bytes += self._fed_bytes
            else:
                self._unsure_bytes = self._fed_bytes
            if self._head_bytes > self._bounds.head_bytes_max:
                return refusals.head_too_large(self._bounds.head_bytes_max)
            return None
        if self._progress:
            self._progress, self._pending_bytes = False, 0
            return None
        self._pending_bytes += self._fed_bytes
        if self._trailer_bytes + self._pending_bytes > self._bounds.trailer_bytes_max:
            return refusals.trailers_too_large(self._bounds.trailer_bytes_max)
        return None

    def _without_upgrade(self) -> bytes:
        """The head that was just read, without its `Upgrade`, for a new parser.

        The old parser would take the body for the other protocol's bytes.
        """
        parser = self._parser
        lines = [b"%b %b HTTP/%b" % (parser.get_method(), self._url, parser.get_http_version().encode())]
        lines += [b"%b: %b" % header for header in self._headers if header[0] != b"upgrade"]
        self._parser = httptools.HttpRequestParser(self)
        self._upgrades = False
        return b"\r\n".join((*lines, b"", b""))

    # The parser's callbacks.

    def on_message_begin(self) -> None:
        if self.ended:
            raise refusals.malformed()
        self.open = True
        self.number += 1
        self._url = b""
        self._headers = []
        self._by_name = {}

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.in_head:
            headers, name = self._headers, name.lower()
            headers.append((name, value))
            self._by_name[name] = value
            if len(headers) > self._headers_max:  # at once: one piece can hold many thousands
                raise refusals.too_many_headers(self._headers_max)
            return
        # Trailers: nobody reads them, and they are no part of the request.
        self._progress = True
        self._trailer_bytes += len(name) + len(value) + 4
        if self._trailer_bytes > self._bounds.trailer_bytes_max:
            raise refusals.trailers_too_large(self._bounds.trailer_bytes_max)

    def on_headers_complete(self) -> None:
        parser, headers, by_name, connection = self._parser, self._headers, self._by_name, self._connection
        if self._fed_bytes + self._head_bytes + self._unsure_bytes > self._bounds.head_bytes_max:
            self._measure_head()
        version = parser.get_http_version()
        keep_alive = version == "1.1"
        if not keep_alive and version != "1.0":
            raise refusals.unknown_version()
        if len(by_name) != len(headers) or b"transfer-encoding" in by_name:
            _check_repeated(headers)
        method = parser.get_method().decode("ascii")
        if parser.should_upgrade():
            if method == "CONNECT":
                raise refusals.no_tunnel()
            self._upgrades = True
            return
        self.in_head = False
        self._trailer_bytes = self._pending_bytes = 0
        self._progress = True  # this piece holds the head too
        path, raw_path, query = connection.urls[self._url]
        if connection.certificate_names and b"authorization" not in by_name:
            _add_certificate_credential(connection, headers, by_name)
        scope: Scope = {
            "type": "http",
            "asgi": _ASGI,
            "http_version": version,
            "server": connection.server,
            "client": connection.client,
            "scheme": connection.scheme,
            "root_path": "",
            "headers": headers,
            HEADERS_BY_NAME: by_name,
            "method": method,
            "path": path,
            "raw_path": raw_path,
            "query_string": query,
        }
        keep_alive = keep_alive and parser.should_keep_alive()
        self.ended = not keep_alive
        expects_continue = b"expect" in by_name and by_name[b"expect"].lower() == b"100-continue"
        self.exchange = exchange = connection.new_exchange(connection, scope, keep_alive, expects_continue)
        connection.accept(exchange)

    def _measure_head(self) -> None:
        """Measures the head as it is commonly written, with one blank before a value."""
        size = len(self._parser.get_method()) + len(self._url) + len("  HTTP/1.1\r\n\r\n")
        size += sum(len(name) + len(value) + len(": \r\n") for name, value in self._headers)
        if size > self._bounds.head_bytes_max:
            raise refusals.head_too_large(self._bounds.head_bytes_max)

    def on_body(self, body: bytes) -> None:
        self._progress = True
        exchange = self.exchange
        assert exchange is not None
        if exchange.complete or exchange.disconnected:
            self._connection.discard(len(body))
        else:
            exchange.take_body(body)

    def on_message_complete(self) -> None:
        if self._upgrades:
            return
        exchange, self.exchange = self.exchange, None
        self.open, self.in_head = False, True
        if exchange is not None:
            exchange.end_body()


def _add_certificate_credential(connection: HttpConnection, headers: list[Header], by_name: dict[bytes, bytes]) -> None:
    """Authenticates by the client's certificate, if it sent no token and the operator has mapped its name."""
    assert connection.tls is not None
    credential = connection.tls.credential_of(connection.certificate_names)
    if credential is not None:
        headers.append((b"authorization", credential))
        by_name[b"authorization"] = credential


def _check_repeated(headers: list[Header]) -> None:
    for header_name in _NOT_REPEATED:
        found = [value for name, value in headers if name == header_name]
        if len(found) > 1:
            raise refusals.repeated(header_name.decode().title())
        if header_name == b"transfer-encoding" and found and found[0].strip().lower() != b"chunked":
            raise refusals.unknown_coding()


class Urls(dict[bytes, Url]):
    """The URLs that one server has parsed. An unknown URL is parsed when it is looked up."""

    __slots__ = ()

    def __missing__(self, url: bytes) -> Url:
        """Raises httptools.HttpParserInvalidURLError, or UnicodeDecodeError."""
        parsed = httptools.parse_url(url)
        raw_path: bytes = parsed.path or b"/"
        path = raw_path.decode("ascii")
        parsed_url = (unquote(path) if "%" in path else path, raw_path, parsed.query or b"")
        if len(url) <= URL_BYTES_MAX:
            if len(self) >= URLS_MAX:
                self.clear()
            self[url] = parsed_url
        return parsed_url
