"""`covenant a2a push`: deliveries to webhooks that are pending or were given up."""

from __future__ import annotations

from typing import Final

import click

from covenant.cli.daemon_client import Answer
from covenant.cli.options import CommandGroup, Invocation, daemon_command
from covenant.cli.terminal import age, brief, console, say, table
from covenant.daemon.environment import now_ms

COLUMNS: Final = ("task", "push", "agent", "host", "delivered", "state", "failed", "why")

push: Final = CommandGroup(
    "push", help="Push notifications: what is owed to webhooks, and what was given up.", no_args_is_help=True
)


@daemon_command(push, "list", "a2a_pushes", "count", "dead", "pushes")
@click.option("--dead", is_flag=True, help="Only those that were given up.")
@click.option("--limit", type=int, help="Most of them to show (default: 20).")
def list_pushes(call: Invocation, *, dead: bool, limit: int | None) -> None:
    """List push configurations and how their deliveries stand, those given up first.

    Only the host of a webhook is shown: its path, its token and its credentials are its owner's.
    """
    answer = call.ask("a2a_pushes", dead=dead or None, limit=limit)
    if call.answer(answer):
        return
    from rich.text import Text

    now = now_ms()
    rows = table(f"{answer['count']} push configurations, {answer['dead']} given up", *COLUMNS)
    for each in answer["pushes"]:
        rows.add_row(*(Text(cell) for cell in _cells(each, now)), style="red" if each["state"] == "dead" else "")
    console().print(rows)


@daemon_command(push, "retry", "a2a_push_retried", "push")
@click.argument("task_id")
@click.argument("push_id")
def retry(call: Invocation, *, task_id: str, push_id: str) -> None:
    """Try a push configuration again, at once: from the step it was given up at, and in order."""
    answer = call.ask("retry_a2a_push", task_id=task_id, push_id=push_id)
    if not call.answer(answer):
        found = answer["push"]
        say(f"{found['push_id']} is tried again, from generation {found['delivered'] + 1} on")


def _cells(push: Answer, now: int) -> tuple[str, ...]:
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
