"""Request bodies, bounded while they are read: a length that lies, or none at all, makes no difference."""

from __future__ import annotations

from typing import Final

from starlette.types import Message, Receive, Scope, Send

from covenant.doors.http.server.exchange import Exchange
from covenant.doors.waiting import CallerGoneError
from covenant.model.errors import Invalid, TooLarge

BODY_TOO_LARGE: Final = "body_too_large"

# How much of a refused body is read and thrown away, so that a client that sends before it reads hears the refusal.
DISCARD_BYTES_MAX: Final = 64 * 1024 * 1024


def body_at_hand(send: Send, bytes_max: int) -> bytes | None:
    """The body, if all of it has arrived at our own server already. None: it must be read."""
    if not isinstance(send, Exchange) or send.kept_bytes > bytes_max:
        return None
    return send.take_whole_body()


async def read_body(scope: Scope, receive: Receive, bytes_max: int) -> bytes:
    announced = announced_length(scope)
    if announced is not None and announced > bytes_max:
        await _discard(receive, announced)
        raise _too_large(bytes_max)
    message = await receive()
    if message["type"] == "http.request" and not message.get("more_body", False):
        # Most come in one piece.
        body: bytes = message.get("body", b"")
        if len(body) > bytes_max:
            raise _too_large(bytes_max)
        return body
    return await _read_on(message, receive, bytes_max)


async def _read_on(message: Message, receive: Receive, bytes_max: int) -> bytes:
    chunks: list[bytes] = []
    size = 0
    while True:
        if message["type"] == "http.disconnect":
            raise CallerGoneError
        chunk: bytes = message.get("body", b"")
        more: bool = message.get("more_body", False)
        size += len(chunk)
        if size > bytes_max:
            chunks.clear()
            if more:
                await _discard(receive, DISCARD_BYTES_MAX)
            raise _too_large(bytes_max)
        chunks.append(chunk)
        if not more:
            return b"".join(chunks)
        message = await receive()


async def _discard(receive: Receive, expected: int) -> None:
    if expected > DISCARD_BYTES_MAX:
        return
    size = 0
    while size <= DISCARD_BYTES_MAX:
        message = await receive()
        size += len(message.get("body", b""))
        if message["type"] == "http.disconnect" or not message.get("more_body"):
            return


def announced_length(scope: Scope) -> int | None:
    """The length that the request says its body has; None if it says none."""
    for name, value in scope["headers"]:
        if name == b"content-length":
            if not value.isdigit():
                raise Invalid("invalid_request", "content-length is not a number")
            return int(value)
    return None


def _too_large(bytes_max: int) -> TooLarge:
    return TooLarge(BODY_TOO_LARGE, f"a request body may have at most {bytes_max} bytes")
