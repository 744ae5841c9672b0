"""Web pages that may call the routes: the origins an operator listed, and no other. (CORS)"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from starlette.types import Message, Scope, Send

from covenant.doors.http.reply import Header

PREFLIGHT_AGE_S: Final = 600


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

    def marked(self, send: Send, origin: bytes) -> Send:
        """`send`, with the headers that let a page of that origin read the reply."""

        async def marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *_headers(origin)]
            await send(message)

        return marked


async def reply_preflight(send: Send) -> None:
    """Which methods and headers a page may use; `marked` adds whose page."""
    headers = [
        (b"access-control-allow-methods", b"GET, POST, PATCH, DELETE, OPTIONS"),
        (b"access-control-allow-headers", b"Authorization, Content-Type"),
        (b"access-control-max-age", b"%d" % PREFLIGHT_AGE_S),
    ]
    await send({"type": "http.response.start", "status": 204, "headers": headers})
    await send({"type": "http.response.body", "body": b""})


def _headers(origin: bytes) -> tuple[Header, ...]:
    return (
        (b"access-control-allow-origin", origin),
        (b"access-control-allow-credentials", b"true"),
        (b"vary", b"Origin"),
    )
