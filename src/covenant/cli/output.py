"""What a command writes: one JSON object for scripts, lines and tables for people.

What agents wrote is shown to people without its control characters: a task must not be able to paint over the
operator's terminal. Piped output and JSON keep every byte.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import click

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

WIDTH_PIPED: Final = 200
INTENT_LENGTH_SHOWN: Final = 60

_LINES: Final = frozenset("\n\t")


def shape(kind: str, *fields: str) -> str:
    """What `--json` answers with, for a command's help. A field that ends in `?` is left out when it says nothing."""
    return "With --json: " + ", ".join((f'{{"kind": "{kind}"', *fields)) + "}"


def put_json(value: Mapping[str, Any]) -> None:
    click.echo(json.dumps(value, ensure_ascii=False, separators=(",", ":")))


def put(text: str, *, nl: bool = True) -> None:
    """Data, to stdout."""
    # Told that colours are wanted, click leaves what is piped as it is.
    click.echo(clean(text) if sys.stdout.isatty() else text, nl=nl, color=True)


def say(text: str) -> None:
    """Talk, to stderr."""
    click.echo(clean(text), err=True)


def clean(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in _LINES else "\N{REPLACEMENT CHARACTER}" for c in text)


def brief(text: str, length: int = INTENT_LENGTH_SHOWN) -> str:
    """One line of a longer text."""
    line = clean(" ".join(text.split()))
    return line if len(line) <= length else line[: length - 1] + "…"


def console() -> Console:
    from rich.console import Console

    # A pipe has no width; rows are one line each there, so that they can be searched.
    # What others wrote is no markup: brackets in it are brackets.
    width = None if sys.stdout.isatty() else WIDTH_PIPED
    return Console(highlight=False, markup=False, emoji=False, width=width)


def table(title: str, *columns: str) -> Table:
    from rich.table import Table

    made = Table(title=title, title_justify="left", header_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in columns:
        made.add_column(name, no_wrap=name in ("task", "state"))
    return made
