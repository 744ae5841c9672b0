"""Server-sent events, encoded and decoded.

A frame that we write is one generation of a task, whose number is the frame's id. `EventReader` follows the HTML
standard. A line or an event beyond the bound is an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from covenant.model.errors import CovenantError, InvalidParams

KEEP_ALIVE: Final = b": keep-alive\n\n"
KEEP_ALIVE_S: Final = 15.0
"""A stream without events sends `KEEP_ALIVE` at this interval."""
_DIGITS_MAX: Final = 18
_LINE_END: Final = re.compile(rb"\r\n|\n|\r")


class SseFormat:
    """The format of one stream's frames: each payload is written between `before` and `after`."""

    __slots__ = ("_template",)

    def __init__(self, before: bytes = b"", after: bytes = b"", *, named: bool = False) -> None:
        event = b"event: message\n" if named else b""
        # A call's id may contain a percent sign.
        self._template = b"id: %%d\n%bdata: %b%%b%b\n\n" % (event, before.replace(b"%", b"%%"), after)

    def frame(self, generation: int, payload: bytes) -> bytes:
        return self._template % (generation, payload)

    def frames(self, payloads: Iterable[tuple[int, bytes]]) -> bytes:
        """Encodes several frames at once, for a single write."""
        template = self._template
        return b"".join([template % numbered for numbered in payloads])


def comment(text: str) -> bytes:
    """Encodes lines that clients ignore."""
    return b"".join(b": %b\n" % line.encode() for line in text.splitlines() or ("",)) + b"\n"


def last_event_id(header: str | None) -> int | None:
    """The last generation that a client has seen; None if the header is absent or empty."""
    text = header.strip() if header is not None else ""
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= _DIGITS_MAX):
        raise InvalidParams(
            "Last-Event-ID", "must be the number of the last frame that was seen; leave it out to begin with the task"
        )
    return int(text)


class EventTooLarge(CovenantError):
    """An event has more bytes than the reader keeps."""


class ServerSentEvent(NamedTuple):
    data: bytes
    id: str | None
    """The last event id of the stream: that of this event, or of an earlier one."""


class EventReader:
    def __init__(self, event_bytes_max: int) -> None:
        self._bytes_max = event_bytes_max
        self._rest = b""
        self._data: list[bytes] = []
        self._size = 0
        self._id: str | None = None
        self._began = False

    def feed(self, piece: bytes) -> Iterator[ServerSentEvent]:
        """Yields the events that this piece completes."""
        held = self._rest + piece
        if not self._began and held:
            held, self._began = held.removeprefix(b"\xef\xbb\xbf"), True
        lines = _LINE_END.split(held)
        # A CR at the end may be the first half of a line end.
        if held.endswith(b"\r"):
            lines = _LINE_END.split(held[:-1])
            self._rest = lines.pop() + b"\r"
        else:
            self._rest = lines.pop()
        for line in lines:
            event = self._line(line)
            if event is not None:
                yield event
        if len(self._rest) + self._size > self._bytes_max:
            raise EventTooLarge(f"an event has more than {self._bytes_max} bytes")

    def _line(self, line: bytes) -> ServerSentEvent | None:
        if not line:
            return self._end()
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if name == b"data":
            self._data.append(value)
            self._size += len(value) + 1
            if self._size > self._bytes_max:
                raise EventTooLarge(f"an event has more than {self._bytes_max} bytes")
        elif name == b"id" and b"\0" not in value:
            self._id = value.decode("utf-8", errors="replace") or None
        return None

    def _end(self) -> ServerSentEvent | None:
        data, self._data, self._size = self._data, [], 0
        return ServerSentEvent(b"\n".join(data), self._id) if data else None
