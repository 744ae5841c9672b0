"""Web pages that may call the routes: the origins an operator listed, and no other. (CORS)"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from starlette.types import Scope

from covenant.doors.http.server.exchange import Exchange
from covenant.doors.http.server.response_heads import Header

PREFLIGHT_AGE_S: Final = 600

_SENT: Final = b"Authorization, Content-Type, A2A-Version, A2A-Extensions, Idempotency-Key, Last-Event-ID, Traceparent"
_READ: Final = b"ETag, Retry-After, WWW-Authenticate"


class Origins:
    def __init__(self, allowed: Iterable[str]) -> None:
        self._allowed = frozenset(origin.lower().encode() for origin in allowed)

    def __bool__(self) -> bool:
        return bool(self._allowed)

    def of(self, scope: Scope) -> bytes | None:
        """The allowed origin that this request comes from."""
        for name, value in scope["headers"]:
            if name == b"origin":
                origin: bytes = value
                return origin if origin.lower() in self._allowed else None
        return None

    def foreign(self, scope: Scope) -> bool:
        """Whether a web page asks that is neither this daemon's own nor of an allowed origin."""
        said: dict[bytes, bytes] = dict(scope["headers"])
        origin = said.get(b"origin")
        if origin is None or origin.lower() in self._allowed:
            return False
        return origin.lower().partition(b"://")[2] != said.get(b"host", b"").lower()


async def reply_preflight(exchange: Exchange) -> None:
    """Which methods and headers a page may use. `cors_headers` say whose page."""
    headers = [
        (b"access-control-allow-methods", b"GET, POST, PATCH, DELETE, OPTIONS"),
        (b"access-control-allow-headers", _SENT),
        (b"access-control-max-age", b"%d" % PREFLIGHT_AGE_S),
    ]
    await exchange({"type": "http.response.start", "status": 204, "headers": headers})
    await exchange({"type": "http.response.body", "body": b""})


def cors_headers(origin: bytes) -> tuple[Header, ...]:
    """What lets a page of that origin read an answer."""
    return (
        (b"access-control-allow-origin", origin),
        (b"access-control-allow-credentials", b"true"),
        (b"access-control-expose-headers", _READ),
        (b"vary", b"Origin"),
    )
