"""The statement that writes a batch: only the parts that it needs, in the form that costs the database least.

For each of its arrays `unnest` builds a store of rows, whose memory takes longer than the rows. So the rows of many
tasks are elements of arrays by their number, and those of a single task are given as values.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from operator import itemgetter
from typing import Any, Final
from uuid import uuid4

import asyncpg
import msgspec

from covenant.ledger.postgres.connections import execute
from covenant.ledger.postgres.sql import Statement, statement, statements

_PARTS: Final = (
    ("held", "held_nos"),
    ("started", "started"),
    ("alone", "last_place"),
    ("taken", "qt_count"),
    ("drained", "rt_count"),
    ("new_ids", "id_nos"),
    ("new_live", "l_no"),
    ("moved_live", "m_no"),
    ("gone_live", "gone_nos"),
    ("back_tasks", "back_nos"),
    ("new_tasks", "t_no"),
    ("new_events", "e_no"),
    ("left_queue", "ql_place"),
    ("new_queue", "q_no"),
    ("left_results", "rl_place"),
    ("new_results", "r_no"),
    ("new_audit", "a_idx"),
    ("counted", "counted"),
    ("added_counts", "added_from"),
    ("new_counts", "as_rows"),
)
"""The optional parts of the statement, and the array by which each is recognised."""
_OF_BATCH: Final = frozenset(statement("write", "batch").names) | {
    *("chain", "counter", "counted", "added_from", "last_place", "between", "null")
}
"""Values that a batch has once."""
_TEXTS_OF_BATCH: Final = ("audit_hash", "boot", "chain", "topics")
SEPARATORS: Final = ("\x1f", "\x1e")
"""The separator of an array's texts, and the mark of null. No JSON contains them."""
_ARRAY: Final = re.compile(r"(?<![:\w]):([a-z]\w*)::(\w+)\[\]")
_LISTED: Final = re.compile(r"\bunnest\(([^()]*)\)")
_LISTS: Final = ("new_events", "new_audit", "new_counts", "counted", "added_counts")
"""The parts that may have several rows even if only one task changes."""
_ALL_OR_NOTHING: Final = ("/* gated */ EXISTS (SELECT FROM ok)", "1 / (SELECT count(*) FROM ok) = 1")
_SINGLE_ROW: Final = (
    (r"\bunnest\(([^()]*)\)", r"(SELECT \1)"),
    (r"\bANY\(", "("),
    (r"\(SELECT count\(\*\) FROM held\) = cardinality\([^()]*\)", "EXISTS (SELECT FROM held)"),
)
BY_NUMBER_MAX: Final = 256
"""The most rows that are read by their number. PostgreSQL finds a text in an array by walking over those before it."""
_LONG: Final = ("e_no", "a_idx", "l_no", "m_no")
"""The first columns of the arrays to which one command can add many rows."""
_ALIKE: Final = "__alike"
"""The suffix of a column's name, for the value that all its rows have."""
_OWN: Final = frozenset({"no", "task_id", "place", "head", "rest", "body"})
"""Columns in which no two rows are alike."""
EVENTS_MAX: Final = 4
"""The most events of one task that are given as values: each number of them is a statement of its own."""


class Written(msgspec.Struct, frozen=True):
    """Whether the writer's row changed, whether the rest was written with it, and the place of the next batch."""

    writer: bool
    rows: bool
    place: int


class BatchStatement:
    """The statement of a batch with these parts.

    Its arrays are given as texts, since asyncpg looks at each element of an array several times. `single`: only one
    task changes, and its columns are given as values. `events`: so many events are given as values, too; 0: as arrays.
    `large`: the arrays are long.
    """

    def __init__(self, parts: tuple[str, ...], *, single: bool = False, events: int = 0, large: bool = False) -> None:
        text = dict(statements("write"))
        if single:
            text = {name: part if name in _LISTS else _single_row(part) for name, part in text.items()}
        if events:
            text["new_events"] = _few_rows(text["new_events"], events)
        gates = [text[f"gate_{part}"] for part in parts if f"gate_{part}" in text]
        written = [text[part] for part in parts if part in text and part != "held"]
        whole = text["batch"].replace("/* held */", text["held"] if "held" in parts else "")
        whole = whole.replace("/* gates */", "\n".join(gates)).replace("/* parts */", "\n\n".join(written))
        if "new_audit" in parts:
            whole = whole.replace(*_ALL_OR_NOTHING)
        kinds = dict(_ARRAY.findall(whole))
        if not large:
            whole = _LISTED.sub(_rows_by_number, whole)
        statement = Statement(_ARRAY.sub(lambda found: array_sql(*found.groups()), whole))
        self.text, self.names = statement.text, statement.names
        self._encoders = [self._encoder(name, kinds.get(name)) for name in statement.names]
        self._alike = [name.removesuffix(_ALIKE) for name in statement.names if name.endswith(_ALIKE)]

    @staticmethod
    def _encoder(name: str, kind: str | None) -> Encoder:
        """The name of the given value or list, and its encoder."""
        if kind is not None:
            return name, _ENCODERS[kind]
        if name in _OF_BATCH or name.endswith(_ALIKE):
            return name, None
        column, _, number = name.partition("__")
        return column, itemgetter(int(number or 0))

    def values(self, values: dict[str, Any]) -> list[Any]:
        for name in self._alike:
            column = values[name]
            if column and column.count(column[0]) == len(column):
                values[name], values[name + _ALIKE] = None, column[0]
            else:
                values[name + _ALIKE] = None
        return encode_values(values, self._encoders)


Encoder = tuple[str, Callable[..., Any] | None]


def _rows_by_number(found: re.Match[str]) -> str:
    """The rows of the arrays, read by their number. The first array tells how many there are."""
    arrays = [each.strip() for each in found[1].split(",")]
    values = ", ".join(f"{array} AS a{number}" for number, array in enumerate(arrays))
    elements = ", ".join(_element(number, array) for number, array in enumerate(arrays))
    once = f"(SELECT {values} OFFSET 0)"
    numbered = f"(SELECT v.*, generate_series(1, cardinality(v.a0)) AS i FROM {once} AS v)"  # noqa: S608  from `sql`
    return f"(SELECT {elements} FROM {numbered} AS r)"  # noqa: S608  from `sql`


def _element(number: int, array: str) -> str:
    element, named = f"r.a{number}[r.i]", _ARRAY.fullmatch(array)
    if number == 0 or named is None or named[1].partition("_")[2] in _OWN:
        return element
    # If all rows are alike, the array is null.
    return f"coalesce({element}, :{named[1]}{_ALIKE}::{named[2]})"


def _few_rows(part: str, count: int) -> str:
    """A part of the statement for `count` rows."""

    def rows(found: re.Match[str]) -> str:
        columns = (_ARRAY.sub(rf":\1__{number}::\2", found[1]) for number in range(count))
        return f"(VALUES {', '.join(f'({each})' for each in columns)})"

    return _LISTED.sub(rows, part)


def _single_row(part: str) -> str:
    """A part of the statement for a single row."""
    for many, one in _SINGLE_ROW:
        part = re.sub(many, one, part)
    return _ARRAY.sub(r":\1::\2", part)


@cache
def _nulls(count: int) -> str:
    return f"{{{','.join(['NULL'] * count)}}}"


def encode_numbers(values: list[int | bool | None]) -> str:
    nulls = values.count(None)
    if nulls and nulls == len(values):
        return _nulls(nulls)
    text = f"{{{repr(values)[1:-1]}}}"
    return text.replace("None", "NULL") if nulls else text


class SeparatorTaken(Exception):
    """A text contains the separator or the mark of null."""


def join_texts(values: list[str | None], between: str, null: str) -> str | None:
    """Joins texts for `array_sql`. PostgreSQL parses an array's text by characters, and this by a search."""
    if not values:
        return None
    nulls = values.count(None)
    text = between.join([null if value is None else value for value in values] if nulls else values)  # type: ignore[arg-type]
    if text.count(between) != len(values) - 1 or text.count(null) != nulls:
        raise SeparatorTaken
    return text


def array_sql(name: str, kind: str) -> str:
    """The SQL of an array in the form that its encoder makes."""
    if kind != "text":
        return f":{name}::text::{kind}[]"
    # PostgreSQL turns an empty text into an empty array.
    return f"CASE :{name}::text WHEN '' THEN ARRAY[''] ELSE string_to_array(:{name}, :between::text, :null::text) END"


def encode_values(values: dict[str, Any], encoders: Sequence[Encoder]) -> list[Any]:
    """The values in the order of their names, each encoded."""
    try:
        return _encode_values(values, encoders, *SEPARATORS)
    except SeparatorTaken:
        made = uuid4().hex
        return _encode_values(values, encoders, f"/{made}", f"-{made}")


def _encode_values(values: dict[str, Any], encoders: Sequence[Encoder], between: str, null: str) -> list[Any]:
    values["between"], values["null"] = between, null
    return [
        values[name]
        if encode is None or values[name] is None
        else join_texts(values[name], between, null)
        if encode is join_texts
        else encode(values[name])
        for name, encode in encoders
    ]


_ENCODERS: Final[dict[str, Callable[..., str | None]]] = {
    "text": join_texts,
    "bigint": encode_numbers,
    "integer": encode_numbers,
    "boolean": encode_numbers,
}

_batch: Final = cache(BatchStatement)


def choose_statement(values: dict[str, Any], *, single: bool) -> BatchStatement:
    events = len(values.get("e_no", ())) if single else 0
    parts = tuple([part for part, sign in _PARTS if sign in values])
    large = any(len(values[name]) > BY_NUMBER_MAX for name in _LONG if name in values)
    return _batch(parts, single=single, events=events if events <= EVENTS_MAX else 0, large=large)


async def write_batch(connection: asyncpg.Connection[Any], values: dict[str, Any], *, single: bool) -> Written:
    """`single`: only one task changes."""
    batch = choose_statement(values, single=single)
    row = await connection.fetchrow(batch.text, *batch.values(values))
    assert row is not None
    return Written(*row)


async def probe_batch(connection: asyncpg.Connection[Any]) -> None:
    """Checks that a batch could be written: raises the errors of all its tables, and those of a write that needs room.

    It leaves nothing behind: the batch's gate is closed, and the row that needs room is deleted in its transaction.
    """
    batch = _batch(tuple([part for part, _ in _PARTS]))
    closed: dict[str, Any] = (
        {name: [] for name in batch.names} | dict.fromkeys(_OF_BATCH, 0) | dict.fromkeys(_TEXTS_OF_BATCH, "")
    )
    with suppress(asyncpg.DivisionByZeroError):
        await connection.fetchrow(batch.text, *batch.values(closed))
    async with connection.transaction():
        await execute("write", connection, "room_used")
        await execute("write", connection, "room_left")
