"""Refusals of the HTTP layer itself, before any door has the request or in place of one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec

from covenant.doors.http.server.http_exchange import Header
from covenant.model.errors import Refusal, Unavailable

RETRY_MS: Final = 1_000

RefusalForm = Callable[[str, Refusal], tuple[tuple[Header, ...], bytes]]
"""Makes the headers and body of a refusal, in the form of the door at a path."""
JSON: Final[Header] = (b"content-type", b"application/json")
CLOSE: Final[Header] = (b"connection", b"close")


class HttpRefusal(Refusal):
    """A refusal with its own status. After most of these nothing more on the connection can be read."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(code, message)
        self.status = status


def head_too_large(bytes_max: int) -> Refusal:
    return HttpRefusal(431, "head_too_large", f"the head of a request may have at most {bytes_max} bytes")


def too_many_headers(most: int) -> Refusal:
    return HttpRefusal(431, "too_many_headers", f"a request may have at most {most} headers")


def trailers_too_large(bytes_max: int) -> Refusal:
    return HttpRefusal(431, "trailers_too_large", f"trailers and chunk extensions may have at most {bytes_max} bytes")


def malformed() -> Refusal:
    return HttpRefusal(400, "malformed_http", "this is not a valid HTTP/1.1 request")


def repeated(header: str) -> Refusal:
    return HttpRefusal(400, "repeated_header", f"a request may have only one {header} header")


def unknown_coding() -> Refusal:
    return HttpRefusal(501, "unknown_transfer_encoding", "the only supported transfer encoding is chunked")


def method_not_allowed(allowed: str) -> Refusal:
    return HttpRefusal(405, "method_not_allowed", f"this path takes only {allowed}")


def no_tunnel() -> Refusal:
    return HttpRefusal(501, "no_tunnel", "CONNECT is not supported")


def unknown_version() -> Refusal:
    return HttpRefusal(505, "unknown_http_version", "only HTTP/1.1 and HTTP/1.0 are supported")


def timed_out(part: str) -> Refusal:
    return HttpRefusal(408, "request_timeout", f"{part} did not arrive in time")


def stopping() -> Refusal:
    return Unavailable("stopping", "the daemon is stopping; ask again", retry_after_ms=RETRY_MS)


def crowded() -> Refusal:
    return Unavailable(
        "too_many_connections", "there are too many connections; use fewer, or ask again", retry_after_ms=RETRY_MS
    )


def internal() -> Refusal:
    return HttpRefusal(500, "internal", "internal error")


def plain_form(_: str, refusal: Refusal) -> tuple[tuple[Header, ...], bytes]:
    """The form for a request whose path is not known, or for a server without doors."""
    return (JSON,), msgspec.json.encode({"error": refusal.message, "code": refusal.code})
