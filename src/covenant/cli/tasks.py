"""`covenant a2a`: tasks, their leases and their results. The mailbox's own verbs are here."""

from __future__ import annotations

import json
from typing import Any, Final
from uuid import uuid4

import click

from covenant.cli import task_queries, task_repair
from covenant.cli.daemon_client import (
    Answer,
    Invocation,
    complete_identities,
    complete_tasks,
    daemon_command,
    task_argument,
)
from covenant.cli.options import CommandGroup, Duration, read_text
from covenant.cli.task_tables import summary
from covenant.cli.terminal import ExitCode, Failure, brief, content_text, json_shape, put, say
from covenant.daemon.environment import monotonic_ms, now_ms

WAIT_MS: Final = 10_000

a2a: Final = CommandGroup(
    "a2a",
    help="""Tasks, their leases and their results: the daemon's mailbox.

    The mailbox carries tasks between identities: `send` queues a task for an identity, `next` leases it,
    `respond` settles it, `results` drains the result. The protocol A2A is at each agent's URL; `covenant call` speaks
    it. Both make the same tasks, so `status`, `list`, `show`, `requeue` and the others serve tasks of either kind.

    A task is named by its id, or by the beginning of its id if only one task begins so.
    """,
    short_help="Tasks, their leases and their results.",
    no_args_is_help=True,
)
a2a.commands.update(task_queries.commands.commands)


@daemon_command(a2a, "send", "a2a_task_queued", "task_id", "duplicate?", "replayed?", "following?", "result?")
@click.argument("text")
@click.option(
    "--to",
    "recipient",
    required=True,
    metavar="NAME@HOST",
    shell_complete=complete_identities,
    help="The recipient of the task.",
)
@click.option("--id", "task_id", help="The task's UUID. Sending it again with the same content is harmless.")
@click.option("--kind", "task_kind", help="The kind of work: any word.")
@click.option("--parent", metavar="ID", shell_complete=complete_tasks, help="The parent task.")
@click.option("--deadline-ms", type=click.IntRange(min=1), help="Deadline in epoch milliseconds.")
@click.option("--deadline-in", type=Duration(), metavar="5m", help="Deadline from now.")
@click.option("--not-before-ms", type=click.IntRange(min=1), help="Earliest start in epoch milliseconds.")
@click.option("--not-before-in", type=Duration(), metavar="1h", help="Earliest start from now.")
@click.option("--priority", type=click.IntRange(0, 9), help="Starts before tasks of a lower priority, within bounds.")
@click.option("--key", help="Idempotency key: tasks with the same key share one execution.")
@click.option("--idempotent", is_flag=True, help="Running the task twice is safe. Needs --key.")
@click.option("--wait", is_flag=True, help="Wait for the result, drain it, and print it.")
@click.option(
    "--timeout", "timeout_ms", type=Duration(), default="1m", show_default=True, help="How long --wait waits."
)
def send(call: Invocation, *, text: str, wait: bool, timeout_ms: int, **given: Any) -> None:
    """Send a task. TEXT describes the work; `-` reads it from standard input.

    Needs the capability a2a.send.NAME@HOST.
    """
    task = _task(read_text(text), **given)
    answer = call.ask("send_a2a_task", task=task)
    result = _wait_for_result(call, task["id"], timeout_ms) if wait else None
    if not call.answer({**answer, "result": result} if wait else answer):
        _show_sent(answer, result)
    if result is not None and result["status"] == "error":
        raise click.exceptions.Exit(ExitCode.REFUSED)


@daemon_command(a2a, "next", "a2a_task_opt", "task", "lease", "tasks")
@click.option("--wait-ms", type=click.IntRange(min=0), help="Wait this long for a task.")
@click.option("--max", "count", type=click.IntRange(min=1), help="Lease up to this many.")
@click.option("--all", "everyone", is_flag=True, help="Lease tasks of all recipients, in turn (operator only).")
@click.option(
    "--request-id",
    help="If the answer was lost, repeat the command with the same request id: it gives the same leases again.",
)
def next_task(call: Invocation, **given: Any) -> None:
    """Lease the next task that is queued for the caller.

    A lease never expires: answer it with `covenant a2a respond`.
    """
    answer = _receive(call, "try_recv_a2a_task", **given)
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
            f"  {call.program} a2a respond {task['id']} --lease-id {lease['lease_id']} TEXT"
        )


@daemon_command(a2a, "respond", "a2a_result_posted", "task_id", "duplicate?")
@task_argument
@click.argument("text", required=False)
@click.option("--lease-id", help="The lease that this answers. Needed once the task was leased more than once.")
@click.option("--error", "error", metavar="MESSAGE", help="The task failed, for this reason.")
@click.option("--partial", is_flag=True, help="Only a part of the task was done.")
def respond(
    call: Invocation, *, task_id: str, text: str | None, lease_id: str | None, error: str | None, partial: bool
) -> None:
    """Post the result of a leased task. `-` reads TEXT from standard input.

    Needs the capability a2a.respond.SENDER, and the lease.
    """
    if error is not None and partial:
        raise click.UsageError("--error and --partial exclude each other; give one of them")
    if text is None and error is None:
        raise click.UsageError("give a TEXT, `-` to read it from standard input, or --error MESSAGE")
    status = "error" if error is not None else "partial" if partial else "ok"
    content = [{"type": "text", "text": read_text(text)}] if text is not None else []
    result: dict[str, Any] = {"task_id": task_id, "status": status, "content": content}
    if error is not None:
        result["error_message"] = error
    answer = call.ask("post_a2a_result", result=result, lease_id=lease_id)
    _show_task_id(call, answer, "this result was posted before")


def _show_task_id(call: Invocation, answer: Answer, duplicate: str) -> None:
    call.show(answer, answer["task_id"], *([f"{duplicate}; nothing changed"] if answer.get("duplicate") else ()))


def _decide(call: Invocation, task_id: str, reason: str, *, approved: bool, **given: Any) -> None:
    answer = call.ask("answer_a2a_task", task_id=task_id, approved=approved, text=reason, **given)
    _show_task_id(call, answer, "this was decided before")


question_option = click.option("--question-id", help="The question that this decides. [default: the one that is asked]")
answer_id_option = click.option(
    "--answer-id", help="If the answer was lost, repeat the command with the same answer id."
)


@daemon_command(a2a, "approve", "a2a_answered", "task_id", "duplicate?")
@task_argument
@question_option
@answer_id_option
def approve(call: Invocation, *, task_id: str, **given: Any) -> None:
    """Approve the question of a task, which `covenant a2a show` shows. The task continues."""
    _decide(call, task_id, "", approved=True, **given)


@daemon_command(a2a, "deny", "a2a_answered", "task_id", "duplicate?")
@task_argument
@click.argument("reason", required=False, default="")
@question_option
@answer_id_option
def deny(call: Invocation, *, task_id: str, reason: str, **given: Any) -> None:
    """Deny the question of a task. The task continues, and its agent gets the REASON."""
    _decide(call, task_id, reason, approved=False, **given)


@daemon_command(a2a, "answer", "a2a_answered", "task_id", "duplicate?")
@task_argument
@click.argument("text")
@answer_id_option
def answer_task(call: Invocation, *, task_id: str, text: str, answer_id: str | None) -> None:
    """Answer a task that waits for its sender. `-` reads TEXT from standard input."""
    answer = call.ask("answer_a2a_task", task_id=task_id, text=read_text(text), answer_id=answer_id)
    _show_task_id(call, answer, "this was answered before")


@daemon_command(a2a, "signal", "a2a_signaled", "task_id", "duplicate?")
@task_argument
@click.argument("name")
@click.argument("value", required=False)
@click.option("--signal-id", help="If the answer was lost, repeat the command with the same signal id.")
def signal(call: Invocation, *, task_id: str, name: str, value: str | None, signal_id: str | None) -> None:
    """Send a task the signal NAME that it waits for. VALUE is JSON, or else a text.

    A signal that comes early is kept until the task waits for it.
    """
    given: Any = None
    if value is not None:
        try:
            given = json.loads(value)
        except ValueError:
            given = value
    answer = call.ask("signal_a2a_task", task_id=task_id, name=name, value=given, signal_id=signal_id)
    _show_task_id(call, answer, "this was signaled before")


@daemon_command(
    a2a,
    "results",
    "a2a_results",
    "results",
    "truncated?",
    epilog="\n\n" + json_shape("a2a_result_opt", "result", "results").replace("With", "With --next and"),
)
@click.option("--next", "drain", is_flag=True, help="Drain the oldest result. Each result is returned once.")
@click.option("--recent", is_flag=True, help="Only look (the default).")
@click.option("--wait-ms", type=click.IntRange(min=0), help="With --next: wait this long for a result.")
@click.option("--max", "count", type=click.IntRange(min=1), help="With --next: drain up to this many.")
@click.option(
    "--all", "everyone", is_flag=True, help="With --next: drain the oldest result of all senders (operator only)."
)
@click.option("--request-id", help="With --next: if the answer was lost, repeat the command with the same request id.")
@click.option("--limit", "-n", type=click.IntRange(min=1), help="With --recent: most rows. [default: 10]")
def results(call: Invocation, *, drain: bool, recent: bool, limit: int | None, **given: Any) -> None:
    """List the results that wait for the caller, or drain them."""
    if drain and recent:
        raise click.UsageError("--next and --recent exclude each other; give one of them")
    if drain:
        if limit is not None:
            raise click.UsageError("--limit belongs to --recent; with --next give --max")
        _drain(call, given)
        return
    if any(value for value in given.values()):
        raise click.UsageError("--wait-ms, --max, --all and --request-id belong to --next")
    answer = call.ask("recent_a2a_results", limit=limit or 10)
    rows = (
        ("red" if each["status"] == "error" else "", each["status"], each["task_id"], brief(summary(each)))
        for each in answer["results"]
    )
    title, empty = "results waiting to be drained", "no result is waiting"
    call.show_table(answer, ("status", "task", "says"), rows, title=title, empty=empty)


def _receive(
    call: Invocation, kind: str, *, wait_ms: int | None, count: int | None, everyone: bool, request_id: str | None
) -> Answer:
    scope = "all" if everyone else None
    return call.ask_waiting(kind, wait_ms, max=count, request_id=request_id, scope=scope)


def _task(
    text: str,
    *,
    deadline_ms: int | None,
    deadline_in: int | None,
    not_before_ms: int | None,
    not_before_in: int | None,
    key: str | None,
    idempotent: bool,
    **given: Any,
) -> dict[str, Any]:
    if deadline_ms is not None and deadline_in is not None:
        raise click.UsageError("--deadline-ms and --deadline-in exclude each other; give one of them")
    if not_before_ms is not None and not_before_in is not None:
        raise click.UsageError("--not-before-ms and --not-before-in exclude each other; give one of them")
    if idempotent and key is None:
        raise click.UsageError("--idempotent needs --key: the key names the work that may run twice")
    task: dict[str, Any] = {
        "id": given["task_id"] or str(uuid4()),
        "recipient": {"display": given["recipient"]},
        "intent_text": text,
        "task_kind": given["task_kind"],
        "parent": given["parent"],
        "deadline_ms": deadline_ms if deadline_in is None else now_ms() + deadline_in,
        "not_before_ms": not_before_ms if not_before_in is None else now_ms() + not_before_in,
        "priority": given["priority"],
    }
    if key is not None:
        task["idempotency"] = {"duplicate_safety": "idempotent" if idempotent else "unsafe", "key": key}
    return {name: value for name, value in task.items() if value is not None}


def _wait_for_result(call: Invocation, task_id: str, timeout_ms: int) -> dict[str, Any]:
    """Drain the task's own result, whatever else waits to be drained."""
    give_up_ms = monotonic_ms() + timeout_ms
    while True:
        left_ms = max(0, give_up_ms - monotonic_ms())
        result = call.ask_waiting("try_recv_a2a_result", min(left_ms, WAIT_MS), task_id=task_id)["result"]
        if isinstance(result, dict):
            return result
        if left_ms <= 0:
            raise Failure(
                "timeout", f"no result yet; task {task_id} goes on. Look with `{call.program} a2a show {task_id}`"
            )


def _show_sent(answer: Answer, result: dict[str, Any] | None) -> None:
    if answer.get("replayed"):
        say("the same work was done before; its result is replayed")
    elif answer.get("duplicate"):
        say("this task was sent before; nothing was queued")
    elif answer.get("following"):
        say(f"the same work is under way as {answer['following']}; its result will be this task's too")
    if result is None:
        put(answer["task_id"])
        return
    text = content_text(result["content"])
    if text:
        put(text)
    if result["status"] == "error":
        say(f"covenant: the task failed: {result.get('error_message', 'without a message')}")


def _drain(call: Invocation, given: dict[str, Any]) -> None:
    answer = _receive(call, "try_recv_a2a_result", **given)
    if call.answer(answer, kind="a2a_result_opt"):
        return
    if answer["result"] is None:
        say("no result is waiting")
        return
    # A single large one is not repeated in the list, so that it fits a frame.
    for result in answer["results"] or [answer["result"]]:
        say(f"{result['status']} {result['task_id']}")
        put(summary(result))


a2a.commands.update(task_repair.commands.commands)
