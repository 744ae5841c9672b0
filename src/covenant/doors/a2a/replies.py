"""Replies of the A2A door: JSON that no cache keeps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from starlette.types import Send

from covenant.doors.http.reply import Header

JSON: Final[Header] = (b"content-type", b"application/json")
A2A_JSON: Final[Header] = (b"content-type", b"application/a2a+json")
_NO_STORE: Final[Header] = (b"cache-control", b"no-store")


async def reply_json(
    send: Send, body: bytes, *, status: int = 200, kind: Header = JSON, headers: Sequence[Header] = ()
) -> None:
    length = (b"content-length", b"%d" % len(body))
    await send({"type": "http.response.start", "status": status, "headers": [kind, _NO_STORE, length, *headers]})
    await send({"type": "http.response.body", "body": body})
