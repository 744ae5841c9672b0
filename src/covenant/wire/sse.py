"""Server-sent events: one frame a generation, whose number is its id, so that a client can go on where it broke off.

Payloads are JSON as the encoders write it, in one line.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from covenant.wire.a2a_errors import InvalidParams

KEEP_ALIVE: Final = b": keep-alive\n\n"
_DIGITS_MAX: Final = 18


class Framing:
    """How the frames of one stream look: `before` and `after` stand around each payload."""

    __slots__ = ("_template",)

    def __init__(self, before: bytes = b"", after: bytes = b"", *, named: bool = False) -> None:
        event = b"event: message\n" if named else b""
        # A call's id may hold a percent sign.
        self._template = b"id: %%d\n%bdata: %b%%b%b\n\n" % (event, before.replace(b"%", b"%%"), after)

    def frame(self, generation: int, payload: bytes) -> bytes:
        return self._template % (generation, payload)

    def frames(self, payloads: Iterable[tuple[int, bytes]]) -> bytes:
        """Several at once: they cost one write."""
        template = self._template
        return b"".join([template % numbered for numbered in payloads])


def comment(text: str) -> bytes:
    """A line that clients ignore."""
    return b"".join(b": %b\n" % line.encode() for line in text.splitlines() or ("",)) + b"\n"


def last_event_id(header: str | None) -> int | None:
    """The generation that a client has seen last; None if it says nothing."""
    said = header.strip() if header is not None else ""
    if not said:
        return None
    if not (said.isascii() and said.isdigit() and len(said) <= _DIGITS_MAX):
        raise InvalidParams("Last-Event-ID", "must be the number of the last frame that was seen")
    return int(said)
