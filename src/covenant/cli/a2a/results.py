"""`covenant a2a results`."""

from __future__ import annotations

from typing import Any

import click

from covenant.cli.a2a.queue import summary
from covenant.cli.a2a.taking import take
from covenant.cli.calling import Call, calls
from covenant.cli.output import brief, console, put, say, shape, table


@click.command(
    "results",
    epilog=shape("a2a_results", "results", "truncated?")
    + "\n\n"
    + shape("a2a_result_opt", "result", "results").replace("With", "With --next and"),
)
@click.option("--next", "drain", is_flag=True, help="Drain the oldest: it is told once.")
@click.option("--recent", is_flag=True, help="Only look (the default).")
@click.option("--wait-ms", type=click.IntRange(min=0), help="With --next: wait this long for one.")
@click.option("--max", "count", type=click.IntRange(min=1), help="With --next: drain up to this many.")
@click.option("--all", "everyone", is_flag=True, help="With --next: the oldest of all senders (operator only).")
@click.option("--request-id", help="With --next: repeat with the same one if the answer was lost.")
@click.option("--limit", "-n", type=click.IntRange(min=1), help="With --recent: most rows. [default: 10]")
@calls
def command(call: Call, *, drain: bool, recent: bool, limit: int | None, **given: Any) -> None:
    """Look at the results that wait for the caller, or drain them."""
    if drain and recent:
        raise click.UsageError("--next and --recent exclude each other")
    if drain:
        if limit is not None:
            raise click.UsageError("--limit belongs to --recent; with --next say --max")
        _drain(call, given)
        return
    if any(value for value in given.values()):
        raise click.UsageError("--wait-ms, --max, --all and --request-id belong to --next")
    answer = call.ask("recent_a2a_results", limit=limit or 10)
    if call.answer(answer):
        return
    if not answer["results"]:
        say("no result is waiting")
        return
    rows = table("results waiting to be drained", "status", "task", "says")
    for result in answer["results"]:
        rows.add_row(result["status"], result["task_id"], brief(summary(result)), style=_style(result))
    console().print(rows)


def _style(result: dict[str, Any]) -> str:
    return "red" if result["status"] == "error" else ""


def _drain(call: Call, given: dict[str, Any]) -> None:
    answer = take(call, "try_recv_a2a_result", **given)
    if call.answer(answer):
        return
    if answer["result"] is None:
        say("no result is waiting")
        return
    # A single large one is not repeated in the list, so that it fits a frame.
    for result in answer["results"] or [answer["result"]]:
        say(f"{result['status']} {result['task_id']}")
        put(summary(result))
