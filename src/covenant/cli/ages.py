"""Times as people write them: "5m" for an age, "5m" for a deadline from now."""

from __future__ import annotations

import re
from typing import Any, Final

import click

_UNITS_MS: Final = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_DURATION: Final = re.compile(r"(\d{1,12})(ms|s|m|h|d)")


def age(ms: int) -> str:
    """The largest whole unit: 59s, 5m, 3h, 12d. What lies in the future has the age 0s."""
    ms = max(0, ms)
    for unit in ("d", "h", "m"):
        if ms >= _UNITS_MS[unit]:
            return f"{ms // _UNITS_MS[unit]}{unit}"
    return f"{ms // 1_000}s"


def distance(ms: int) -> str:
    """A time ahead ("in 5m") or behind ("5m ago")."""
    return f"in {age(ms)}" if ms >= 0 else f"{age(-ms)} ago"


class Duration(click.ParamType[int]):
    """A number with its unit, as milliseconds."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        match = _DURATION.fullmatch(str(value).strip())
        if match is None:
            self.fail(f"{value!r} is no duration; write 500ms, 30s, 5m, 2h or 1d", param, ctx)
        return int(match[1]) * _UNITS_MS[match[2]]
