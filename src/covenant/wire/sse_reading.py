"""Server-sent events from the reader's side: bytes in as they come, events out as they are complete.

As the HTML standard has it: lines end in CR, LF or both; comments are dropped; an event without data is none. An event
that is longer than it may be is an error, and so is a line: nothing is kept without a bound.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final, NamedTuple

from covenant.model.errors import CovenantError

_LINE_END: Final = re.compile(rb"\r\n|\n|\r")


class EventTooLarge(CovenantError):
    """One event has more bytes than the reader would keep."""


class Event(NamedTuple):
    data: bytes
    id: str | None
    """The number that the stream stands at: that of this event, or of the last one that had one."""


class EventReader:
    def __init__(self, event_bytes_max: int) -> None:
        self._bytes_max = event_bytes_max
        self._rest = b""
        self._data: list[bytes] = []
        self._size = 0
        self._id: str | None = None
        self._began = False

    def feed(self, piece: bytes) -> Iterator[Event]:
        """The events that this piece completes."""
        held = self._rest + piece
        if not self._began and held:
            held, self._began = held.removeprefix(b"\xef\xbb\xbf"), True
        lines = _LINE_END.split(held)
        # A CR at the very end may be half of a line's end.
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

    def _line(self, line: bytes) -> Event | None:
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

    def _end(self) -> Event | None:
        data, self._data, self._size = self._data, [], 0
        return Event(b"\n".join(data), self._id) if data else None
