"""The archive's SQL, one file a purpose. `…schema` and `…indexes` are the file's layout, `from_…` bring an
earlier one up to it, `write_…`, `purge_…` and `shelving` take records in, the rest are reads.

Each read answers with one row that holds one JSON text: the driver takes the interpreter's lock again for every row
it steps over, and beside a busy loop each of those is a wait.
"""

from __future__ import annotations

from importlib.resources import files


def statement(name: str) -> str:
    """The text of `name.sql`."""
    return files(__name__).joinpath(f"{name}.sql").read_text(encoding="utf-8")
