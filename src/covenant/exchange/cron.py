"""Cron: the moments of an expression of five fields (minute, hour, day, month, weekday) in a time zone.

A field is `*`, a number, a range `a-b`, a list `a,b`, each also with a step `/n`. Weekdays are 0 to 7 (0 and 7 are
Sunday) or `mon`, months 1 to 12 or `jan`. If both day and weekday are given, either is enough, as in every cron.

On a day with 23 hours, a local time that does not exist moves on by the missing hour (02:30 becomes 03:30). On a day
with 25 hours, a local time that comes twice means the first. If the hour is every hour (`*`, `*/1`, `0-23`), each hour
that passes counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, date, datetime, time, timedelta
from typing import Final
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from covenant.model.agent_definition import Schedule
from covenant.model.errors import Invalid

DAYS_MAX: Final = 9 * 366
"""A 29th of February may be eight years away."""
QUARTER: Final = 15
_OF_THE_MACHINE: Final = ("localtime", "posix", "right/", "Factory")
"""Files beside the time zones that depend on the machine, count leap seconds, or are no time zone at all."""
_MONTHS: Final = "jan feb mar apr may jun jul aug sep oct nov dec".split()
_WEEKDAYS: Final = "sun mon tue wed thu fri sat".split()
_FIELDS: Final[tuple[tuple[str, int, int, list[str]], ...]] = (
    ("minute", 0, 59, []),
    ("hour", 0, 23, []),
    ("day", 1, 31, []),
    ("month", 1, 12, _MONTHS),
    ("weekday", 0, 7, _WEEKDAYS),
)


def invalid_schedule(message: str) -> Invalid:
    return Invalid("invalid_schedule", message)


def read_time_zone(name: str) -> ZoneInfo:
    try:
        if name.startswith(_OF_THE_MACHINE):
            raise ValueError
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise invalid_schedule(
            f"time_zone: {name!r} is not a time zone of this machine; name one such as Europe/Berlin or UTC"
        ) from None


class CronTimes:
    def __init__(self, expression: str, zone: ZoneInfo) -> None:
        fields = expression.lower().split()
        if len(fields) != len(_FIELDS):
            raise invalid_schedule(f"cron: {expression!r} must have five fields: minute hour day month weekday")
        self._minutes, self._hours, self._days, self._months, weekdays = (
            _values(text, *field) for text, field in zip(fields, _FIELDS, strict=True)
        )
        self._weekdays = frozenset(number % 7 for number in weekdays)
        self._hourly = len(self._hours) == 24
        self._any_day, self._any_weekday = fields[2].startswith("*"), fields[4].startswith("*")
        self._zone = zone
        if self.after(0) is None:
            raise invalid_schedule(f"cron: {expression!r} names a date that never comes; check its day and month")

    def after(self, moment_ms: int) -> int | None:
        """The next moment, in epoch milliseconds; None if there is none."""
        start = datetime.fromtimestamp(moment_ms / 1000, self._zone)
        day = start.date() - timedelta(days=1)
        for _ in range(DAYS_MAX):
            if self._is_day(day):
                found = min((at for at in self._moments(day) if at > moment_ms), default=None)
                if found is not None:
                    return found
            day += timedelta(days=1)
        return None

    def _is_day(self, day: date) -> bool:
        if day.month not in self._months:
            return False
        by_day, by_weekday = day.day in self._days, day.isoweekday() % 7 in self._weekdays
        if self._any_day or self._any_weekday:
            return by_day and by_weekday
        return by_day or by_weekday

    def _moments(self, day: date) -> Iterator[int]:
        if not self._hourly:
            for hour in self._hours:
                for minute in self._minutes:
                    local = datetime.combine(day, time(hour, minute), self._zone)
                    yield round(local.timestamp() * 1000)
            return
        # Each hour that passes on this day, whether it has 23, 24 or 25, is found by stepping through UTC. A zone
        # changes its offset only at a quarter of an hour.
        at = datetime.combine(day, time(), UTC) - timedelta(hours=15)
        for _ in range(54 * 4):
            local = at.astimezone(self._zone)
            if local.date() == day:
                for minute in self._minutes:
                    if local.minute <= minute < local.minute + QUARTER:
                        yield round(at.timestamp() * 1000) + (minute - local.minute) * 60_000
            at += timedelta(minutes=QUARTER)


def _values(text: str, name: str, least: int, most: int, words: list[str]) -> frozenset[int]:
    found: set[int] = set()
    for item in text.split(","):
        span, slash, step = item.partition("/")
        first, dash, last = span.partition("-")
        try:
            begin = least if span == "*" else _number(first, words, least)
            end = most if span == "*" or (slash and not dash) else _number(last, words, least) if dash else begin
            stride = _number(step, [], 0) if slash else 1
        except ValueError:
            raise invalid_schedule(f"cron: {item!r} is not a valid {name}") from None
        if not least <= begin <= end <= most or stride < 1:
            raise invalid_schedule(f"cron: {item!r} is not a valid {name}; it must be from {least} to {most}")
        found.update(range(begin, end + 1, stride))
    return frozenset(found)


def _number(text: str, words: list[str], least: int) -> int:
    if text in words:
        return words.index(text) + least
    if not (text.isascii() and text.isdigit() and len(text) <= 4):
        raise ValueError(text)
    return int(text)


NextMoment = Callable[[int], int | None]


def read_times(schedule: Schedule) -> NextMoment:
    """A function that returns the next moment after a given one. Raises `Invalid` for an invalid schedule."""
    if bool(schedule.cron) == bool(schedule.every_s):
        raise invalid_schedule(f"schedule {schedule.id!r}: give either cron, or an every_s of at least 1")
    zone = read_time_zone(schedule.time_zone)
    if schedule.cron:
        return CronTimes(schedule.cron, zone).after
    every_ms = schedule.every_s * 1000
    return lambda moment_ms: (moment_ms // every_ms + 1) * every_ms


def check_schedules(schedules: Iterable[Schedule]) -> None:
    seen: set[str] = set()
    for schedule in schedules:
        read_times(schedule)
        if schedule.id in seen:
            raise invalid_schedule(f"two schedules of an agent have the id {schedule.id!r}; give each its own")
        seen.add(schedule.id)
