"""Replies of the A2A door: JSON that no cache keeps."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import Final

from starlette.types import Send

from covenant.doors.http.reply import JSON, Header, reply

A2A_JSON: Final[Header] = (b"content-type", b"application/a2a+json")


def reply_json(
    send: Send, body: bytes, *, status: int = 200, kind: Header = JSON, headers: Sequence[Header] = ()
) -> Awaitable[None]:
    return reply(send, status, body, headers, kind=kind)
