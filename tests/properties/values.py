"""Python values of every kind that a caller could hand over: what JSON has, what it has not, and what only looks so."""

from __future__ import annotations

import datetime as dt
import decimal
import enum
import uuid
from typing import Any

import msgspec
from hypothesis import strategies as st

from covenant.model.content import Json, Text
from covenant.model.task import ResultStatus


class Word(str):
    """A string that is none: equal to everything."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 1


class Number(int):
    pass


class Odd(dict[str, Any]):
    """A dictionary that cannot be compared."""

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("not me")

    __hash__ = None


class Colour(enum.Enum):
    RED = "red"


class Fine(Text, frozen=True):
    more: int = 1


def deep(levels: int) -> Any:
    value: Any = 0
    for _ in range(levels):
        value = [value]
    return value


def cyclic() -> Any:
    value: list[Any] = []
    value.append(value)
    return value


ODD: list[Any] = [
    b"bytes",
    bytearray(b"b"),
    {1, 2},
    frozenset({"a"}),
    uuid.UUID(int=7),
    dt.datetime(2026, 1, 1),  # noqa: DTZ001  the odder the better
    decimal.Decimal("1.5"),
    1j,
    object(),
    msgspec.UNSET,
    msgspec.Raw(b"garbage"),
    msgspec.Raw(b'"x"\n'),
    msgspec.Raw(b"[1,\n2]"),
    Word("word"),
    Number(3),
    Odd(a=1),
    Colour.RED,
    ResultStatus.OK,
    Fine("x"),
    Text(5),  # type: ignore[arg-type]
    Json(float("inf")),
    deep(40),
    deep(200),
    deep(5_000),
    cyclic(),
    range(3),
    lambda: None,
    2**63 - 1,
    2**63,
    2**64,
    -(2**70),
    10**5_000,
    float("nan"),
    1e308,
    "\ud800",
    "\x00",
    "\u2028\n",
    {"\ud800": 1},
    {None: 1},
    {1: 2},
    {True: 1},
    {1: 2, "1": 3},
    {"a": float("-inf")},
]


def odd(place: int) -> Any:
    return ODD[place]


VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(exclude_categories=()), max_size=8)
    | st.binary(max_size=4)
    | st.integers(0, len(ODD) - 1).map(odd),  # some have no `repr`, so they are not named themselves
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=2).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.integers() | st.none(), inner, max_size=3)
        | inner.map(Json)
        | inner.map(Text)
        | inner.map(lambda value: (Json(value),))
        | inner.map(lambda value: {"usage": value})
    ),
    max_leaves=5,
)
