"""Moments: milliseconds since 1970 in UTC, and RFC 3339. A2A writes three decimals and a Z; it may read any of it."""

from __future__ import annotations

import functools
import re
from typing import Final

from covenant.model.errors import InvalidParams

_DAY_MS: Final = 86_400_000
_MONTH_DAYS: Final = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
_rfc3339 = re.compile(
    r"([0-9]{4})-([0-9]{2})-([0-9]{2})[Tt ]([0-9]{2}):([0-9]{2}):([0-9]{2})"
    r"(?:\.([0-9]{1,9}))?(?:[Zz]|([+-])([0-9]{2}):([0-9]{2}))"
).fullmatch


@functools.lru_cache(maxsize=4096)
def format_ms(ms: int) -> str:
    """2025-10-28T10:30:00.000Z"""
    seconds, rest = divmod(ms, 1000)
    return f"{_second(seconds)}.{rest:03d}Z"


@functools.lru_cache(maxsize=4096)
def _second(seconds: int) -> str:
    # Many moments are of one second: the calendar is asked once for it.
    days, rest = divmod(seconds, 86_400)
    year, month, day = _date(days)
    return f"{year:04d}-{month:02d}-{day:02d}T{rest // 3600:02d}:{rest // 60 % 60:02d}:{rest % 60:02d}"


def parse_ms(text: str, field: str) -> int:
    """Of a part of a millisecond, the next one: what is asked for is what came at or after."""
    match = _rfc3339(text)
    if match is None:
        raise InvalidParams(field, "must be a moment such as 2025-10-28T10:30:00Z")
    year, month, day, hour, minute, second = (int(match[group]) for group in range(1, 7))
    leap = month == 2 and _is_leap(year)
    if not (
        1 <= month <= 12 and 1 <= day <= _MONTH_DAYS[month - 1] + leap and hour < 24 and minute < 60 and second < 60
    ):
        raise InvalidParams(field, "is not in the calendar")
    nanoseconds = int((match[7] or "").ljust(9, "0"))
    offset = int(match[9]) * 60 + int(match[10]) if match[8] else 0
    ms = _days(year, month, day) * _DAY_MS + (hour * 3600 + minute * 60 + second) * 1000
    ms -= (-offset if match[8] == "-" else offset) * 60_000
    return ms - (-nanoseconds // 1_000_000)


def _is_leap(year: int) -> bool:
    return year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)


def _days(year: int, month: int, day: int) -> int:
    """Days since 1970-01-01. The year is counted from March, so that the leap day comes last."""
    year -= month <= 2
    era, of_era = divmod(year, 400)
    of_year = (153 * (month + (-3 if month > 2 else 9)) + 2) // 5 + day - 1
    return era * 146_097 + of_era * 365 + of_era // 4 - of_era // 100 + of_year - 719_468


def _date(days: int) -> tuple[int, int, int]:
    era, of_era = divmod(days + 719_468, 146_097)
    year = (of_era - of_era // 1460 + of_era // 36_524 - of_era // 146_096) // 365
    of_year = of_era - (365 * year + year // 4 - year // 100)
    from_march = (5 * of_year + 2) // 153
    month = from_march + (3 if from_march < 10 else -9)
    return year + era * 400 + (month <= 2), month, of_year - (153 * from_march + 2) // 5 + 1
