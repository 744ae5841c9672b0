"""Times: milliseconds since 1970 in UTC, and RFC 3339. A2A is written with three decimals and a Z; any form is read."""

from __future__ import annotations

import functools
import re
from datetime import UTC, datetime, timedelta
from typing import Final

from covenant.model.errors import InvalidParams

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_SECOND: Final = timedelta(seconds=1)
_ENDS: Final = tuple(f".{ms:03d}Z" for ms in range(1000))
_LAST_S: Final = 253_402_300_799
"""The last second of the year 9999, the end of the calendar. A later time is shown as this one."""
_rfc3339 = re.compile(
    r"([0-9]{4})-([0-9]{2})-([0-9]{2})[Tt ]([0-9]{2}):([0-9]{2}):([0-9]{2})"
    r"(?:\.([0-9]{1,9}))?(?:[Zz]|([+-])([0-9]{2}):([0-9]{2}))"
).fullmatch


def format_ms(ms: int) -> str:
    """Formats as 2025-10-28T10:30:00.000Z."""
    return _second(ms // 1000) + _ENDS[ms % 1000]


@functools.lru_cache(maxsize=4096)
def _second(seconds: int) -> str:
    # Many times fall into the same second, so the calendar part is cached.
    return (_EPOCH + timedelta(seconds=min(seconds, _LAST_S))).isoformat()[:19]


def parse_ms(text: str, field: str) -> int:
    """Reads RFC 3339. A fraction of a millisecond is rounded up: the caller asks for times at or after this one."""
    match = _rfc3339(text)
    if match is None:
        raise InvalidParams(field, "must be a moment such as 2025-10-28T10:30:00Z")
    try:
        moment = datetime(*(int(match[group]) for group in range(1, 7)), tzinfo=UTC)  # type: ignore[misc, arg-type]
    except ValueError:
        raise InvalidParams(field, "is not a valid date or time") from None
    nanoseconds = int((match[7] or "").ljust(9, "0"))
    offset = int(match[9]) * 60 + int(match[10]) if match[8] else 0
    ms = (moment - _EPOCH) // _SECOND * 1000
    ms -= (-offset if match[8] == "-" else offset) * 60_000
    return ms - (-nanoseconds // 1_000_000)
