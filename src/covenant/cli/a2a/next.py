"""`covenant a2a next`."""

from __future__ import annotations

from typing import Any

import click

from covenant.cli.a2a.taking import take
from covenant.cli.calling import Call, calls
from covenant.cli.output import put, say, shape


@click.command("next", epilog=shape("a2a_task_opt", "task", "lease", "tasks"))
@click.option("--wait-ms", type=click.IntRange(min=0), help="Wait this long for a task.")
@click.option("--max", "count", type=click.IntRange(min=1), help="Lease up to this many.")
@click.option("--all", "everyone", is_flag=True, help="The oldest of all recipients (operator only).")
@click.option("--request-id", help="Repeat with the same one if the answer was lost: it gives the same leases again.")
@calls
def command(call: Call, **given: Any) -> None:
    """Lease the next task that is queued for the caller.

    A lease never expires: answer it with `covenant a2a respond`.
    """
    answer = take(call, "try_recv_a2a_task", **given)
    if call.answer(answer):
        return
    if answer["task"] is None:
        say("no task is queued")
        return
    # A single large one is not repeated in the list, so that it fits a frame.
    for leased in answer["tasks"] or [answer]:
        task, lease = leased["task"], leased["lease"]
        put(task["intent_text"])
        say(
            f"task {task['id']} from {task['sender']['display']}, attempt {lease['attempt']}; answer with\n"
            f"  {call.again} a2a respond {task['id']} --lease-id {lease['lease_id']} TEXT"
        )
