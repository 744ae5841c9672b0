"""The statements, by file and name. A value is written `:name`; PostgreSQL is given its number."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from importlib.resources import files
from typing import Any, Final

_NAMED: Final = re.compile(r"^-- :(\w+)\n", re.MULTILINE)
_VALUE: Final = re.compile(r"(?<![:\w]):([a-z]\w*)")
_HOLDER_LOST: Final = re.compile(r"/\* holder_lost (\w+) \*/")
_IS_LOST: Final = r"""\1.state = 'leased' AND (
    \1.interrupted OR (
        \1.boot IS NOT NULL AND \1.node IS NOT NULL
        AND NOT EXISTS (SELECT FROM nodes AS o WHERE o.node = \1.node AND o.boot = \1.boot AND o.lost_at_ms IS NULL)
    )
)"""
"""The condition for a lease that nobody holds any more, of a row of `live`."""


class Statement:
    """A text with numbered values, and their names."""

    def __init__(self, text: str) -> None:
        self.names: tuple[str, ...] = tuple(dict.fromkeys(_VALUE.findall(text)))
        numbers = {name: f"${number}" for number, name in enumerate(self.names, 1)}
        self.text = _VALUE.sub(lambda found: numbers[found[1]], text)

    def values(self, values: dict[str, Any]) -> list[Any]:
        return [values[name] for name in self.names]


@cache
def text(file: str) -> str:
    return files(__name__).joinpath(f"{file}.sql").read_text(encoding="utf-8")


@cache
def statements(file: str) -> dict[str, str]:
    """The texts of a file by their names."""
    _, *parts = _NAMED.split(_HOLDER_LOST.sub(_IS_LOST, text(file)))
    return dict(zip(parts[::2], (part.strip() for part in parts[1::2]), strict=True))


@cache
def statement(file: str, name: str) -> Statement:
    return Statement(statements(file)[name])


def walked(file: str, name: str, walk: str, walks: Iterable[dict[str, str]], **shape: str) -> Statement:
    """A statement over walks, each of one table. `walk` names their text."""
    texts = statements(file)
    united = "UNION ALL".join(texts[walk].format(**each, **shape) for each in walks)
    return Statement(texts[name].format(walks=united, **shape))
