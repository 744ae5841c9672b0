"""`covenant a2a push retry`."""

from __future__ import annotations

import click

from covenant.cli.calling import Call, calls
from covenant.cli.output import say, shape


@click.command("retry", epilog=shape("a2a_push_retried", "push"))
@click.argument("task_id")
@click.argument("push_id")
@calls
def command(call: Call, *, task_id: str, push_id: str) -> None:
    """Try a push configuration again, at once: from the step it was given up at, and in order."""
    answer = call.ask("retry_a2a_push", task_id=task_id, push_id=push_id)
    if not call.answer(answer):
        push = answer["push"]
        say(f"{push['push_id']} is tried again, from generation {push['delivered'] + 1} on")
