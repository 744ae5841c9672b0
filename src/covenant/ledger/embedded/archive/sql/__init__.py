"""The archive's SQL, one file a purpose. `…schema` and `…indexes` are the file's layout, `from_…` migrate an earlier
one, `write_…`, `purge_…` and `shelving` write records, the rest are reads.

Each read answers with one row that holds one JSON text: the driver takes the interpreter's lock again for every row,
and each time is a wait beside a busy loop.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from importlib.resources import files
from itertools import chain
from typing import Final

Row = tuple[str | bytes | int | None, ...]

AT_ONCE: Final = (256, 64, 16, 4, 1)
"""Numbers of rows in a statement."""


def statement(name: str) -> str:
    """The text of `name.sql`."""
    return files(__name__).joinpath(f"{name}.sql").read_text(encoding="utf-8")


@contextmanager
def transaction(db: sqlite3.Connection, begin: str = "BEGIN IMMEDIATE") -> Iterator[None]:
    """Commits at the end, or rolls back if an exception leaves the context. `BEGIN`: one snapshot for several reads."""
    try:
        db.execute(begin)
        yield
        db.execute("COMMIT")
    except BaseException:
        with suppress(sqlite3.Error):
            db.execute("ROLLBACK")
        raise


def write_rows(db: sqlite3.Connection, name: str, rows: Sequence[Row]) -> None:
    for part in _parts(rows):
        db.execute(of_rows(name, len(part), len(part[0])), list(chain.from_iterable(part)))


def ask_rows(db: sqlite3.Connection, name: str, rows: Sequence[Row]) -> Iterator[str]:
    for part in _parts(rows):
        (found,) = db.execute(of_rows(name, len(part), len(part[0])), list(chain.from_iterable(part))).fetchone()
        yield found


def _parts(rows: Sequence[Row]) -> Iterator[Sequence[Row]]:
    begin = 0
    for size in AT_ONCE:
        while len(rows) - begin >= size:
            yield rows[begin : begin + size]
            begin += size


@cache
def of_rows(name: str, rows: int, columns: int) -> str:
    """One text for each size, so that the driver finds its prepared statement."""
    row = f"({', '.join('?' * columns)})"
    return statement(name).format(rows=", ".join([row] * rows))
