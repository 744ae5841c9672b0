"""`covenant a2a send`."""

from __future__ import annotations

from typing import Any, Final
from uuid import uuid4

import click

from covenant.cli.a2a.queue import content_text
from covenant.cli.a2a.texts import read_text
from covenant.cli.ages import Duration
from covenant.cli.calling import Call, calls
from covenant.cli.connection import ANSWER_S
from covenant.cli.failures import ExitCode, Failure
from covenant.cli.output import put, say, shape
from covenant.daemon.environment import monotonic_ms, now_ms

WAIT_MS: Final = 10_000


@click.command("send", epilog=shape("a2a_task_queued", "task_id", "duplicate?", "replayed?", "following?", "result?"))
@click.argument("text")
@click.option("--to", "recipient", required=True, metavar="NAME@HOST", help="Who is to do it.")
@click.option("--id", "task_id", help="The task's UUID. Sending it again with the same content is harmless.")
@click.option("--kind", "task_kind", help="What kind of work it is.")
@click.option("--parent", help="The UUID of the task that this one is a part of.")
@click.option("--deadline-ms", type=click.IntRange(min=1), help="Deadline in epoch milliseconds.")
@click.option("--deadline-in", type=Duration(), metavar="5m", help="Deadline from now.")
@click.option("--key", help="Idempotency key: names the work, across tasks.")
@click.option("--idempotent", is_flag=True, help="Running it twice is safe. Needs --key.")
@click.option("--wait", is_flag=True, help="Wait for the result, drain it, and print what it says.")
@click.option(
    "--timeout", "timeout_ms", type=Duration(), default="1m", show_default=True, help="How long --wait waits."
)
@calls
def command(call: Call, *, text: str, wait: bool, timeout_ms: int, **given: Any) -> None:
    """Send a task. TEXT says what is to be done; `-` reads it from standard input.

    Needs the capability a2a.send.NAME@HOST.
    """
    task = _task(read_text(text), **given)
    answer = call.ask("send_a2a_task", task=task)
    result = _wait(call, task["id"], timeout_ms) if wait else None
    if not call.answer({**answer, "result": result} if wait else answer):
        _tell(answer, result)
    if result is not None and result["status"] == "error":
        raise click.exceptions.Exit(ExitCode.REFUSED)


def _task(
    text: str,
    *,
    recipient: str,
    task_id: str | None,
    task_kind: str | None,
    parent: str | None,
    deadline_ms: int | None,
    deadline_in: int | None,
    key: str | None,
    idempotent: bool,
) -> dict[str, Any]:
    if deadline_ms is not None and deadline_in is not None:
        raise click.UsageError("--deadline-ms and --deadline-in exclude each other")
    if idempotent and key is None:
        raise click.UsageError("--idempotent needs --key: the key names the work that may run twice")
    task: dict[str, Any] = {
        "id": task_id or str(uuid4()),
        "recipient": {"display": recipient},
        "intent_text": text,
        "task_kind": task_kind,
        "parent": parent,
        "deadline_ms": deadline_ms if deadline_in is None else now_ms() + deadline_in,
    }
    if key is not None:
        task["idempotency"] = {"duplicate_safety": "idempotent" if idempotent else "unsafe", "key": key}
    return {name: value for name, value in task.items() if value is not None}


def _wait(call: Call, task_id: str, timeout_ms: int) -> dict[str, Any]:
    """Drain the task's own result, whatever else waits to be drained."""
    give_up_ms = monotonic_ms() + timeout_ms
    while True:
        left_ms = max(0, give_up_ms - monotonic_ms())
        wait_ms = min(left_ms, WAIT_MS)
        answer = call.ask("try_recv_a2a_result", within_s=ANSWER_S + wait_ms / 1000, task_id=task_id, wait_ms=wait_ms)
        result = answer["result"]
        if isinstance(result, dict):
            return result
        if left_ms <= 0:
            raise Failure(
                "timeout", f"no result yet; task {task_id} goes on. Look with `{call.again} a2a show {task_id}`"
            )


def _tell(answer: dict[str, Any], result: dict[str, Any] | None) -> None:
    if answer.get("replayed"):
        say("the same work was done before; its result is replayed")
    elif answer.get("duplicate"):
        say("this task was sent before; nothing was queued")
    elif answer.get("following"):
        say(f"the same work is under way as {answer['following']}; its result will be this task's too")
    if result is None:
        put(answer["task_id"])
        return
    said = content_text(result["content"])
    if said:
        put(said)
    if result["status"] == "error":
        say(f"covenant: the task failed: {result.get('error_message', 'without a message')}")
