"""The heads of answers, as bytes. Most answers begin alike, so what was written once is written down."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from uvicorn.protocols.http.httptools_impl import HEADER_RE, HEADER_VALUE_RE, STATUS_LINE

Header = tuple[bytes, bytes]

REMEMBERED_MAX: Final = 1_024
"""How many headers are remembered as they are written, and how many heads."""

_lines: Final[dict[Header, bytes]] = {}


def line(header: Header) -> bytes:
    """Raises RuntimeError for what would not be one line."""
    return _lines.get(header) or _line(header)


def _line(header: Header) -> bytes:
    name, value = header
    if HEADER_RE.search(name) or HEADER_VALUE_RE.search(value):
        raise RuntimeError(f"the header {name!r} would not be one line")
    if len(_lines) >= REMEMBERED_MAX:
        _lines.clear()
    written = _lines[header] = b"%b: %b\r\n" % header
    return written


class Heads:
    """As far as the length of the body, for answers whose length is all that differs."""

    __slots__ = ("_defaults", "_written")

    def __init__(self) -> None:
        self._defaults: Sequence[Header] = ()
        self._written: dict[tuple[int, tuple[Header, ...]], bytes] = {}

    def of(self, status: int, headers: tuple[Header, ...], defaults: Sequence[Header]) -> bytes:
        """`defaults` are what the server says with every answer: another list whenever that changes, as its date does.

        `headers` say nothing of the length, or of the connection.
        """
        if defaults is not self._defaults or len(self._written) > REMEMBERED_MAX:
            self._written.clear()
            self._defaults = defaults
        asked = (status, headers)
        return self._written.get(asked) or self._write(asked)

    def _write(self, asked: tuple[int, tuple[Header, ...]]) -> bytes:
        status, headers = asked
        lines = map(line, (*self._defaults, *headers))
        written = self._written[asked] = b"%b%bcontent-length: " % (STATUS_LINE[status], b"".join(lines))
        return written
