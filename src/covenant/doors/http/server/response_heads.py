"""The heads of answers, as bytes. Most answers begin alike, so what was written once is kept."""

from __future__ import annotations

import re
from collections.abc import Iterable
from http import HTTPStatus
from types import MappingProxyType
from typing import Final

Header = tuple[bytes, bytes]

KEPT_MAX: Final = 1_024
"""How many header lines are kept, and how many heads."""

_NAME: Final = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_VALUE: Final = re.compile(rb"[^\x00-\x08\x0a-\x1f\x7f]*")


def _status_line(status: int) -> bytes:
    phrase = HTTPStatus(status).phrase if status in HTTPStatus._value2member_map_ else ""
    return b"HTTP/1.1 %d %b\r\n" % (status, phrase.encode())


STATUS_LINES: Final = MappingProxyType({status: _status_line(status) for status in range(100, 600)})


class ResponseHeads:
    """Of one server. `date` is the line that every answer has."""

    __slots__ = ("_date", "_lines", "_whole")

    def __init__(self) -> None:
        self._date = b""
        self._lines: dict[Header, bytes] = {}
        self._whole: dict[tuple[int, tuple[Header, ...]], tuple[bytes, bool]] = {}

    def set_date(self, value: bytes) -> None:
        date = b"date: %b\r\n" % value
        if date != self._date:
            self._date = date
            self._whole.clear()

    def whole(self, status: int, headers: tuple[Header, ...]) -> tuple[bytes, bool]:
        """A head as far as the length of its body, which is all that is left to say; and whether it says `close`."""
        return self._whole.get((status, headers)) or self._write(status, headers)

    def _write(self, status: int, headers: tuple[Header, ...]) -> tuple[bytes, bool]:
        if len(self._whole) >= KEPT_MAX:
            self._whole.clear()
        begun, closes = self.begin(status, headers)
        written = self._whole[status, headers] = (begun + b"content-length: ", closes)
        return written

    def begin(self, status: int, headers: Iterable[Header]) -> tuple[bytes, bool]:
        """The status line and the headers; and whether one of them says `close`.

        Raises RuntimeError for a header that would not be one line.
        """
        lines, closes = [STATUS_LINES[status], self._date], False
        for header in headers:
            lines.append(self._lines.get(header) or self._line(header))
            if header[0] == b"connection":
                closes = closes or b"close" in header[1].lower()
        return b"".join(lines), closes

    def _line(self, header: Header) -> bytes:
        name, value = header
        if _NAME.fullmatch(name) is None or _VALUE.fullmatch(value) is None:
            raise RuntimeError(f"the header {name!r} would not be one line")
        if len(self._lines) >= KEPT_MAX:
            self._lines.clear()
        written = self._lines[header] = b"%b: %b\r\n" % header
        return written
