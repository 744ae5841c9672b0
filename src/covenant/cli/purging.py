"""What the three purges share: how old is old, and how the outcome is told."""

from __future__ import annotations

from collections.abc import Callable

import click

from covenant.cli.calling import Call
from covenant.cli.output import put
from covenant.daemon.environment import now_ms


def before(function: Callable[..., None]) -> Callable[..., None]:
    """The two ways to say how old: a moment, or an age."""
    for option in (
        click.option("--older-than-ms", type=click.IntRange(min=0), help="What is older than this many milliseconds."),
        click.option("--before-ms", type=click.IntRange(min=0), help="What is older than this epoch millisecond."),
    ):
        function = option(function)
    return function


def purge(
    call: Call, kind: str, answer_kind: str, what: str, *, before_ms: int | None, older_than_ms: int | None
) -> None:
    if (before_ms is None) == (older_than_ms is None):
        raise click.UsageError("say how old: either --before-ms or --older-than-ms")
    moment_ms = before_ms if before_ms is not None else max(0, now_ms() - (older_than_ms or 0))
    answer = call.ask(kind, before_ms=moment_ms)
    if not call.answer({"kind": answer_kind, "before_ms": answer["before_ms"], "purged": answer["purged"]}):
        put(f"purged {answer['purged']} {what}")
