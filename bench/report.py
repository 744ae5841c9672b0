"""What a part found out: rows with a value and, where there is a promise, whether it was kept."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec
from rich.console import Console
from rich.table import Table as RichTable

Level = Literal["full", "quick", "smoke"]
"""How long to measure: for numbers worth quoting, for a look, or only to see that it runs."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    what: str
    value: float
    unit: str = ""
    target: str = ""
    met: bool | None = None
    """None for a number without a promise."""


class Table(msgspec.Struct, frozen=True, kw_only=True):
    part: str
    title: str
    rows: Sequence[Row]
    notes: Sequence[str] = ()


def at_least(what: str, value: float, bound: float, unit: str = "") -> Row:
    return Row(what=what, value=value, unit=unit, target=f"≥ {bound:g}", met=value >= bound)


def at_most(what: str, value: float, bound: float, unit: str = "") -> Row:
    return Row(what=what, value=value, unit=unit, target=f"≤ {bound:g}", met=value <= bound)


def ratio(ours: float, theirs: float) -> float:
    """0 where the other one has done nothing while it was measured: then nothing is shown."""
    return ours / theirs if theirs else 0.0


def fact(what: str, value: float, unit: str = "") -> Row:
    return Row(what=what, value=value, unit=unit)


def show(console: Console, table: Table) -> None:
    console.print(f"{table.part}: {table.title}", style="bold", highlight=False)
    drawn = RichTable()
    drawn.add_column("what")
    drawn.add_column("measured", justify="right", no_wrap=True)
    drawn.add_column("target", justify="right", no_wrap=True)
    drawn.add_column("met", no_wrap=True)
    for row in table.rows:
        met = "" if row.met is None else "[green]yes[/]" if row.met else "[red]NO[/]"
        drawn.add_row(row.what, f"{_number(row.value)} {row.unit}".rstrip(), row.target, met)
    console.print(drawn)
    for note in table.notes:
        console.print(f"  {note}", style="dim", highlight=False)
    console.print()


def summary(tables: Iterable[Table]) -> tuple[str, list[str]]:
    """One sentence, and the promises that were not kept."""
    promised = [(table.part, row) for table in tables for row in table.rows if row.met is not None]
    missed = [
        f"{part}: {row.what}: {_number(row.value)} {row.unit}, target {row.target}"
        for part, row in promised
        if not row.met
    ]
    return f"{len(promised) - len(missed)} of {len(promised)} targets met", missed


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
