"""Replies: a status, a JSON body and nothing that a cache may keep (receiving is a GET)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from starlette.types import Send

from covenant.doors.answers import INTERNAL_ERROR, Error, encode, error_of
from covenant.model.errors import Refusal, Unauthenticated

Header = tuple[bytes, bytes]

_JSON: Final[Header] = (b"content-type", b"application/json")
_NO_STORE: Final[Header] = (b"cache-control", b"no-store")
_CHALLENGE: Final[Header] = (b"www-authenticate", b"Bearer")
CLOSE: Final[Header] = (b"connection", b"close")

# For refusals that do not know better themselves.
_RETRY_AFTER_MS: Final = {429: 1_000, 503: 5_000}


async def reply(send: Send, status: int, body: bytes, headers: Sequence[Header] = ()) -> None:
    length = (b"content-length", b"%d" % len(body))
    await send({"type": "http.response.start", "status": status, "headers": [_JSON, _NO_STORE, length, *headers]})
    await send({"type": "http.response.body", "body": body})


async def reply_refused(send: Send, refusal: Refusal, headers: Sequence[Header] = ()) -> None:
    await reply(send, refusal.status, encode(error_of(refusal)), (*_refusal_headers(refusal), *headers))


async def reply_internal(send: Send) -> None:
    await reply(send, 500, encode(INTERNAL_ERROR))


async def reply_not_found(send: Send) -> None:
    await reply(send, 404, encode(Error(code="unknown_route", message="there is nothing at this path")))


async def reply_not_allowed(send: Send, methods: Sequence[str]) -> None:
    allowed = ", ".join(methods)
    error = Error(code="method_not_allowed", message=f"this path takes {allowed}")
    await reply(send, 405, encode(error), [(b"allow", allowed.encode())])


def _refusal_headers(refusal: Refusal) -> list[Header]:
    if isinstance(refusal, Unauthenticated):
        return [_CHALLENGE]
    retry_after_ms = refusal.retry_after_ms or _RETRY_AFTER_MS.get(refusal.status)
    if retry_after_ms is None:
        return []
    return [(b"retry-after", b"%d" % max(1, -(-retry_after_ms // 1000)))]
