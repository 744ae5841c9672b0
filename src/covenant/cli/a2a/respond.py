"""`covenant a2a respond`."""

from __future__ import annotations

from typing import Any

import click

from covenant.cli.a2a.texts import read_text
from covenant.cli.calling import Call, calls
from covenant.cli.output import put, say, shape


@click.command("respond", epilog=shape("a2a_result_posted", "task_id", "duplicate?"))
@click.argument("task_id")
@click.argument("text", required=False)
@click.option("--lease-id", help="The lease that this answers. Needed once the task was leased more than once.")
@click.option("--error", "error", metavar="MESSAGE", help="It failed, and why.")
@click.option("--partial", is_flag=True, help="Only a part was done.")
@calls
def command(
    call: Call, *, task_id: str, text: str | None, lease_id: str | None, error: str | None, partial: bool
) -> None:
    """Post the result of a leased task. `-` reads TEXT from standard input.

    Needs the capability a2a.respond.SENDER, and the lease.
    """
    if error is not None and partial:
        raise click.UsageError("--error and --partial exclude each other")
    if text is None and error is None:
        raise click.UsageError("give a TEXT, `-` to read it from standard input, or --error MESSAGE")
    status = "error" if error is not None else "partial" if partial else "ok"
    content = [{"type": "text", "text": read_text(text)}] if text is not None else []
    result: dict[str, Any] = {"task_id": task_id, "status": status, "content": content}
    if error is not None:
        result["error_message"] = error
    answer = call.ask("post_a2a_result", result=result, lease_id=lease_id)
    if call.answer(answer):
        return
    put(answer["task_id"])
    if answer.get("duplicate"):
        say("this result was posted before; nothing changed")
