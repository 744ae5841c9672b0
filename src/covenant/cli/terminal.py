"""Output of commands: one JSON object for scripts, lines and tables for people, files; and failures.

Texts of agents are shown without control characters: a task must not be able to control the operator's terminal. Piped
output and JSON keep every byte.
"""

from __future__ import annotations

import enum
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

import click

from covenant.daemon.environment import environment, now_ms

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

WIDTH_PIPED: Final = 200
WIDTH_WIDE: Final = 160
"""From this width on there is room for whole ids."""
INTENT_LENGTH_SHOWN: Final = 60
ONE_LINE: Final = frozenset({"task", "state"})
"""Columns that are not wrapped."""
WHOLE: Final = frozenset({"value", "where", "signature"})
"""Columns whose words are broken, not cut, if they are too long. A command takes the beginning of an id."""

_LINES: Final = frozenset("\n\t")
UNITS_MS: Final = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}


class ExitCode(enum.IntEnum):
    OK = 0
    REFUSED = 1
    USAGE = 2
    UNREACHABLE = 3
    UNCHECKED = 4


class Failure(click.ClickException):
    """Why a command failed, with its exit code. Where JSON was asked for, stdout gets it as one object."""

    exit_code = ExitCode.REFUSED

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        context = click.get_current_context(silent=True)  # gone by the time that `show` is called
        self._as_json = context is not None and bool(context.params.get("as_json"))

    def show(self, file: IO[Any] | None = None) -> None:  # noqa: ARG002  (click's signature)
        if self._as_json:
            put_json({"kind": "error", "code": self.code, "message": self.message})
        say(f"covenant: {self.message}")


class Unreachable(Failure):
    """Nobody answers on the socket or at the URL."""

    exit_code = ExitCode.UNREACHABLE


class Output:
    """How a command was asked to answer: with one JSON object, or with lines and tables for people."""

    def __init__(self, kind: str, *, as_json: bool) -> None:
        self._kind = kind
        self.json = as_json

    def answer(self, value: Mapping[str, Any], *, kind: str | None = None) -> bool:
        """Writes the JSON object if --json was given. Returns False if people are to get lines instead."""
        if self.json:
            put_json({"kind": kind or self._kind, **{name: each for name, each in value.items() if name != "kind"}})
        return self.json

    def show(self, value: Mapping[str, Any], data: str, *messages: str) -> None:
        """Writes the JSON object, or a line of data to stdout and messages to stderr."""
        if self.answer(value):
            return
        put(data)
        for line in messages:
            say(line)

    def show_table(
        self,
        value: Mapping[str, Any],
        columns: Iterable[str],
        rows: Iterable[tuple[str, ...]],
        *,
        title: str = "",
        empty: str = "",
    ) -> None:
        """Writes the JSON object, or a table; `empty` is the message if there are no rows."""
        if self.answer(value):
            return
        shown = list(rows)
        if shown or not empty:
            print_table(columns, shown, title)
        else:
            say(empty)


def json_shape(kind: str, *fields: str) -> str:
    """The shape of `--json`, for a command's help. A field that ends in `?` is left out if it is empty."""
    return "With --json: " + ", ".join((f'{{"kind": "{kind}"', *fields)) + "}"


def put_json(value: Mapping[str, Any]) -> None:
    click.echo(json.dumps(value, ensure_ascii=False, separators=(",", ":")))


def put(text: str, *, nl: bool = True) -> None:
    """Data, to stdout."""
    # With color=True click strips no colours from piped text.
    click.echo(clean(text) if sys.stdout.isatty() else text, nl=nl, color=True)


def say(text: str) -> None:
    """Messages for people, to stderr."""
    click.echo(clean(text), err=True)


def clean(text: str) -> str:
    """The text with its control characters replaced."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in _LINES else "\N{REPLACEMENT CHARACTER}" for c in text)


def brief(text: str, length: int = INTENT_LENGTH_SHOWN) -> str:
    """One line of a longer text."""
    line = clean(" ".join(text.split()))
    return line if len(line) <= length else line[: length - 1] + "…"


def age(ms: int) -> str:
    """An age in the largest whole unit: 59s, 5m, 3h, 12d. A moment in the future has the age 0s."""
    ms = max(0, ms)
    for unit in ("d", "h", "m"):
        if ms >= UNITS_MS[unit]:
            return f"{ms // UNITS_MS[unit]}{unit}"
    return f"{ms // 1_000}s"


def ago(at_ms: int | None) -> str:
    return f"{age(now_ms() - at_ms)} ago" if at_ms else "never"


def clock_time(at_ms: int) -> str:
    """The time of day here."""
    return f"{time.strftime('%H:%M:%S', time.localtime(at_ms / 1000))}.{at_ms % 1000:03d}"


def distance(at_ms: int) -> str:
    """A moment as seen from now: "in 5m", or "5m ago"."""
    ahead_ms = at_ms - now_ms()
    return f"in {age(ahead_ms)}" if ahead_ms >= 0 else ago(at_ms)


def content_text(content: list[dict[str, Any]]) -> str:
    """Blocks of content as text: text blocks as they are, others as JSON."""
    texts: list[str] = []
    for block in content:
        match block:
            case {"type": "text", "text": str(text)}:
                texts.append(text)
            case {"type": "json", "value": value}:
                texts.append(json.dumps(value, ensure_ascii=False))
            case _:
                texts.append(json.dumps(block, ensure_ascii=False))
    return "\n".join(texts)


def console() -> Console:
    from rich.console import Console

    # A pipe has no width; rows are one line each there, so that they can be searched.
    # Cells are plain text: their brackets are no markup.
    width = None if sys.stdout.isatty() or "COLUMNS" in environment() else WIDTH_PIPED
    return Console(highlight=False, markup=False, emoji=False, width=width)


def narrow() -> bool:
    return console().width < WIDTH_WIDE


def table(title: str, *columns: str) -> Table:
    from rich.table import Table

    made = Table(title=title, title_justify="left", header_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in columns:
        made.add_column(name, no_wrap=name in ONE_LINE, overflow="fold" if name in WHOLE else "ellipsis")
    return made


def print_table(columns: Iterable[str], rows: Iterable[tuple[str, ...]], title: str = "") -> None:
    """Each row is a style and its cells."""
    made = table(title, *columns)
    for style, *cells in rows:
        made.add_row(*cells, style=style)
    console().print(made)


@contextmanager
def complete_file(path: Path, *, replace: bool = True) -> Iterator[IO[bytes]]:
    """Writes a file that only its owner can read, and that gets its name once it is complete and on disk.

    A device or a pipe is written to directly. Without `replace`, a file of this name stays as it is.
    """
    from covenant.ledger.embedded.disk import sync_dir

    name = ""
    try:
        if path.exists() and not path.is_file():
            with path.open("wb") as target:
                yield target
            return
        number, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with os.fdopen(number, "wb") as target:
                yield target
                target.flush()
                os.fsync(target.fileno())
            if replace:
                Path(name).replace(path)
            else:
                os.link(name, path)
        finally:
            with suppress(OSError):
                Path(name).unlink()
        with suppress(PermissionError):  # a folder that may be written to and not be read
            sync_dir(path.absolute().parent)
    except FileExistsError as error:
        raise Failure("file_exists", f"{path} is there already; name another file") from error
    except OSError as error:
        about = error.filename if name and error.filename not in (None, name) else path
        raise Failure("cannot_write", f"{about}: {error.strerror or error}") from error
