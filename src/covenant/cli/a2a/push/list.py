"""`covenant a2a push list`."""

from __future__ import annotations

from typing import Any

import click

from covenant.cli.ages import age
from covenant.cli.calling import Call, calls
from covenant.cli.output import brief, console, shape, table
from covenant.daemon.environment import now_ms


@click.command("list", epilog=shape("a2a_pushes", "count", "dead", "pushes"))
@click.option("--dead", is_flag=True, help="Only those that were given up.")
@click.option("--limit", type=int, help="Most of them to show (default: 20).")
@calls
def command(call: Call, *, dead: bool, limit: int | None) -> None:
    """List push configurations and how their deliveries stand, those given up first.

    Only the host of a webhook is shown: its path, its token and its credentials are its owner's.
    """
    answer = call.ask("a2a_pushes", dead=dead or None, limit=limit)
    if call.answer(answer):
        return
    from rich.text import Text

    now = now_ms()
    rows = table(f"{answer['count']} push configurations, {answer['dead']} given up", *_COLUMNS)
    for push in answer["pushes"]:
        rows.add_row(*(Text(cell) for cell in _row(push, now)), style="red" if push["state"] == "dead" else "")
    console().print(rows)


_COLUMNS = ("task", "push", "agent", "host", "delivered", "state", "failed", "why")


def _row(push: dict[str, Any], now: int) -> tuple[str, ...]:
    state = push["state"]
    if "dead_at_ms" in push:
        state = f"given up {age(now - push['dead_at_ms'])} ago"
    elif "next_ms" in push:
        state = f"again in {age(max(0, push['next_ms'] - now))}"
    return (
        push["task_id"],
        brief(push["push_id"]),
        push["agent"],
        brief(push["host"]),
        str(push["delivered"]),
        state,
        str(push["attempts"]),
        brief(push.get("failure", "")),
    )
