"""`covenant a2a`: tasks, their leases and their results."""

from __future__ import annotations

import time
from typing import Any, Final
from uuid import uuid4

import click

from covenant.cli.daemon_client import Answer
from covenant.cli.options import CommandGroup, Duration, Function, Invocation, daemon_command, limit_option, read_text
from covenant.cli.task_tables import (
    PUSH_COLUMNS,
    facts_table,
    lease_table,
    push_row,
    queue_tables,
    summary,
    tree_of,
    update_table,
)
from covenant.cli.terminal import (
    ExitCode,
    Failure,
    age,
    brief,
    console,
    content_text,
    json_shape,
    print_table,
    put,
    say,
)
from covenant.daemon.environment import monotonic_ms, now_ms
from covenant.ledger.machine.states import LEASED, LIVE_NAMES

STATES: Final = (*LIVE_NAMES, LEASED.wire_name.replace("_", "-"))
STATUS_FIELDS: Final = "limit min_lease_age_ms deadline_within_ms state_filter tasks results counts? warnings?".split()
SHOWN_FIELDS: Final = (
    "task state a2a_state attempt turn generation created_at_ms updated_at_ms leases updates result cause holder_lost "
    "truncated?"
).split()
COMPACT_S: Final = 3_600.0
WAIT_MS: Final = 10_000

a2a: Final = CommandGroup(
    "a2a",
    help="""Tasks, their leases and their results: the daemon's mailbox.

    The mailbox is the daemon's own way from agent to agent: `send` queues a task for an identity, `next` leases it,
    `respond` settles it, `results` drains the result. The protocol A2A is at each agent's URL; `covenant call` speaks
    it. Both make the same tasks, so `status`, `show`, `requeue` and the others serve tasks of either kind.
    """,
    short_help="Tasks, their leases and their results.",
    no_args_is_help=True,
)
push: Final = CommandGroup(
    "push", help="Push notifications: what is owed to webhooks, and what was given up.", no_args_is_help=True
)


def queue_options(function: Function) -> Function:
    """The options that choose what of the queue is shown. Filters apply before the limit."""
    for option in (
        click.option("--state", "state_filter", type=click.Choice(STATES), help="Only tasks in this state."),
        click.option(
            "--deadline-within-ms",
            type=click.IntRange(min=0),
            help="Only tasks whose deadline has passed or comes within this time.",
        ),
        click.option(
            "--min-lease-age-ms",
            type=click.IntRange(min=0),
            help="Leave out leases younger than this. Queued tasks stay.",
        ),
        click.option("--counts", is_flag=True, help="With --json: add how much there is of everything."),
        limit_option(10),
    ):
        function = option(function)
    return function


lease_option: Final = click.option(
    "--lease-id", help="Only if this is still the lease: what you saw is what you repair."
)
reason_option: Final = click.option("--reason", required=True, help="Why, for the audit.")


@daemon_command(a2a, "status", "a2a_status", *STATUS_FIELDS)
@queue_options
def status(call: Invocation, **given: Any) -> None:
    """Show queued tasks, leases and results that wait to be drained.

    Leases whose holder is lost come first, then the longest held, then queued tasks, oldest first.
    """
    told, answer = _queue(call, **given)
    if not call.answer(told):
        console().print(queue_tables(answer))


@daemon_command(a2a, "requeue", "a2a_repaired", "outcome")
@click.argument("task_id")
@reason_option
@click.option(
    "--duplicate-risk",
    required=True,
    type=click.Choice(("idempotent", "operator-accepted", "operator_accepted")),
    help="What makes it right to run the work again: it is idempotent, or you accept that it may happen twice.",
)
@lease_option
def requeue(call: Invocation, *, task_id: str, reason: str, duplicate_risk: str, lease_id: str | None) -> None:
    """Give a leased task back to the queue: its holder will not come back.

    Needs the capability a2a.repair.requeue, of the operator too: `covenant capabilities grant a2a.repair.requeue`.
    """
    risk = duplicate_risk.replace("-", "_")
    _repair(call, task_id, reason, {"action": "requeue", "lease_id": lease_id, "duplicate_risk": risk})


@daemon_command(a2a, "force-error", "a2a_repaired", "outcome")
@click.argument("task_id")
@reason_option
@click.option("--message", required=True, help="The error that the sender of the task is told.")
@lease_option
def force_error(call: Invocation, *, task_id: str, reason: str, message: str, lease_id: str | None) -> None:
    """End a leased task with an error result for its sender.

    Needs the capability a2a.repair.force_error, of the operator too:
    `covenant capabilities grant a2a.repair.force_error`.
    """
    _repair(call, task_id, reason, {"action": "force_error", "lease_id": lease_id, "message": message})


@daemon_command(a2a, "cancel", "a2a_task_canceled", "task_id", "canceled", "ending", "result")
@click.argument("task_id")
@reason_option
def cancel(call: Invocation, *, task_id: str, reason: str) -> None:
    """End a task, whether it is queued, waits or is worked on. What has ended stays as it ended."""
    answer = call.ask("cancel_a2a_task", task_id=call.task_id(task_id), reason=reason)
    said = [] if answer["canceled"] else [f"it had ended before: {answer['ending']}"]
    call.show(answer, f"{'canceled' if answer['canceled'] else 'unchanged'} {answer['task_id']}", *said)


@daemon_command(a2a, "release", "a2a_lease_released", "task_id")
@click.argument("task_id")
@click.option("--lease-id", required=True, help="The lease that is given back.")
@reason_option
def release(call: Invocation, *, task_id: str, lease_id: str, reason: str) -> None:
    """Give back a task that the caller has leased and not begun."""
    answer = call.ask("release_a2a_lease", task_id=call.task_id(task_id), lease_id=lease_id, reason=reason)
    call.show(answer, f"released {answer['task_id']}")


@daemon_command(a2a, "renew", "a2a_lease_renewed", "task_id", "lease")
@click.argument("task_id")
@click.option("--lease-id", required=True, help="The lease whose holder is still at work.")
def renew(call: Invocation, *, task_id: str, lease_id: str) -> None:
    """Say that the caller is still at work on a task that it has leased."""
    answer = call.ask("renew_a2a_lease", task_id=call.task_id(task_id), lease_id=lease_id)
    call.show(answer, f"renewed {answer['task_id']}", f"attempt {answer['lease']['attempt']}")


@daemon_command(a2a, "retry-stale", "a2a_auto_retry", "report")
@click.option("--enable", "enabled", is_flag=True, help="Do it. Without this, only say what would be done.")
@click.option("--min-lease-age-ms", type=click.IntRange(min=0), default=300_000, show_default=True, help="Stale from.")
@click.option("--max-attempts", type=click.IntRange(min=0), default=3, show_default=True, help="Leave older tasks be.")
@click.option("--max-requeues", type=click.IntRange(min=0), default=1, show_default=True, help="Most tasks requeued.")
@click.option("--scan-limit", type=click.IntRange(min=0), default=100, show_default=True, help="Most leases looked at.")
def retry_stale(call: Invocation, **policy: Any) -> None:
    """Requeue stale leases of work that its sender declared idempotent under a key.

    With --enable it needs the capability a2a.repair.requeue.
    """
    report = call.ask("retry_a2a_stale", policy=policy)["report"]
    if call.answer({"report": report}):
        return
    verb, chosen = ("requeued", report["requeued"]) if policy["enabled"] else ("would requeue", report["would_requeue"])
    counted = f"considered {report['considered']} task(s), requeued {len(report['requeued'])}"
    put(f"{counted}, skipped {len(report['skipped'])}")
    if chosen or report["skipped"]:
        rows = [
            ("", task["task_id"], str(task["attempt"]), "", verb, f"key {task['idempotency_key']!r}") for task in chosen
        ]
        for task in report["skipped"]:
            if task["reason"] != "disabled":
                held = age(task["lease_age_ms"]) if "lease_age_ms" in task else ""
                why = task["reason"].replace("_", " ")
                rows.append(("", task["task_id"], str(task["attempt"]), held, "skipped", why))
        print_table(("task", "try", "lease age", "what", "why"), rows)
    if not policy["enabled"]:
        say("nothing was changed; add --enable to do it")


@daemon_command(a2a, "compact", "a2a_compacted", "dropped")
def compact(call: Invocation) -> None:
    """Merge the journal's sealed history into a snapshot.

    Drops nothing that is queued, leased, following or not yet drained. Needs the capability a2a.compact.
    """
    dropped = call.ask("compact_a2a", within_s=COMPACT_S)["dropped"]
    call.show({"dropped": dropped}, f"dropped {dropped} a2a event(s)")


@daemon_command(a2a, "send", "a2a_task_queued", "task_id", "duplicate?", "replayed?", "following?", "result?")
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
def send(call: Invocation, *, text: str, wait: bool, timeout_ms: int, **given: Any) -> None:
    """Send a task. TEXT says what is to be done; `-` reads it from standard input.

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
@click.option("--all", "everyone", is_flag=True, help="Of all recipients, in turn (operator only).")
@click.option("--request-id", help="Repeat with the same one if the answer was lost: it gives the same leases again.")
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
            f"  {call.again} a2a respond {task['id']} --lease-id {lease['lease_id']} TEXT"
        )


@daemon_command(a2a, "respond", "a2a_result_posted", "task_id", "duplicate?")
@click.argument("task_id")
@click.argument("text", required=False)
@click.option("--lease-id", help="The lease that this answers. Needed once the task was leased more than once.")
@click.option("--error", "error", metavar="MESSAGE", help="It failed, and why.")
@click.option("--partial", is_flag=True, help="Only a part was done.")
def respond(
    call: Invocation, *, task_id: str, text: str | None, lease_id: str | None, error: str | None, partial: bool
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
    result: dict[str, Any] = {"task_id": call.task_id(task_id), "status": status, "content": content}
    if error is not None:
        result["error_message"] = error
    answer = call.ask("post_a2a_result", result=result, lease_id=lease_id)
    talk = ["this result was posted before; nothing changed"] if answer.get("duplicate") else []
    call.show(answer, answer["task_id"], *talk)


@daemon_command(
    a2a,
    "results",
    "a2a_results",
    "results",
    "truncated?",
    epilog="\n\n" + json_shape("a2a_result_opt", "result", "results").replace("With", "With --next and"),
)
@click.option("--next", "drain", is_flag=True, help="Drain the oldest: it is told once.")
@click.option("--recent", is_flag=True, help="Only look (the default).")
@click.option("--wait-ms", type=click.IntRange(min=0), help="With --next: wait this long for one.")
@click.option("--max", "count", type=click.IntRange(min=1), help="With --next: drain up to this many.")
@click.option("--all", "everyone", is_flag=True, help="With --next: the oldest of all senders (operator only).")
@click.option("--request-id", help="With --next: repeat with the same one if the answer was lost.")
@click.option("--limit", "-n", type=click.IntRange(min=1), help="With --recent: most rows. [default: 10]")
def results(call: Invocation, *, drain: bool, recent: bool, limit: int | None, **given: Any) -> None:
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
    rows = (
        ("red" if each["status"] == "error" else "", each["status"], each["task_id"], brief(summary(each)))
        for each in answer["results"]
    )
    print_table(("status", "task", "says"), rows, "results waiting to be drained")


@daemon_command(a2a, "show", "a2a_task", *SHOWN_FIELDS)
@click.argument("task_id")
def show(call: Invocation, *, task_id: str) -> None:
    """Show everything about one task: its state, its leases, its updates, its result."""
    answer = call.ask("show_a2a_task", task_id=call.task_id(task_id))
    if call.answer(answer):
        return
    screen = console()
    screen.print(facts_table(answer))
    if answer["leases"]:
        screen.print(lease_table(answer["leases"]))
    if answer["updates"]:
        screen.print(update_table(answer["updates"]))


@daemon_command(a2a, "tree", "a2a_tree", "tree")
@click.argument("task_id")
def tree(call: Invocation, *, task_id: str) -> None:
    """Draw a task and all that were sent as its parts.

    Each with its state, its agent, the attempt if it is not the first, how long it took or has taken so far, and its
    tokens with those of everything below it. ⇄ marks what is done elsewhere, and where that is.
    """
    answer = call.ask("a2a_tree", task_id=call.task_id(task_id))
    if not call.answer(answer):
        console().print(tree_of(answer["tree"]))


@daemon_command(a2a, "watch", "a2a_status", *STATUS_FIELDS)
@queue_options
@click.option("--every", "every_ms", type=Duration(), default="1s", show_default=True, help="Pause between two looks.")
@click.option("--once", is_flag=True, help="Look once, and end.")
def watch(call: Invocation, *, every_ms: int, once: bool, **given: Any) -> None:
    """Watch the queue: a table that keeps itself up to date. Ctrl-C ends it.

    With --json it looks once.
    """
    told, answer = _queue(call, **given)
    if call.answer(told):
        return
    screen = console()
    if once:
        screen.print(queue_tables(answer))
        return
    from rich.live import Live

    with Live(queue_tables(answer), console=screen, auto_refresh=False, screen=screen.is_terminal) as live:
        try:
            while True:
                time.sleep(max(every_ms, 100) / 1000)
                live.update(queue_tables(_queue(call, **given)[1]), refresh=True)
        except KeyboardInterrupt:
            return


a2a.add_command(push)


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
    title = f"{answer['count']} push configurations, {answer['dead']} given up"
    print_table(PUSH_COLUMNS, map(push_row, answer["pushes"]), title)


@daemon_command(push, "retry", "a2a_push_retried", "push")
@click.argument("task_id")
@click.argument("push_id")
def retry_push(call: Invocation, *, task_id: str, push_id: str) -> None:
    """Try a push configuration again, at once: from the step it was given up at, and in order."""
    answer = call.ask("retry_a2a_push", task_id=task_id, push_id=push_id)
    if not call.answer(answer):
        found = answer["push"]
        say(f"{found['push_id']} is tried again, from generation {found['delivered'] + 1} on")


def _queue(call: Invocation, *, counts: bool, state_filter: str | None, **given: Any) -> tuple[Answer, Answer]:
    """The queue as --json tells it, with what was asked for; and the daemon's whole answer."""
    query: dict[str, Any] = {
        "limit": given["limit"],
        "min_lease_age_ms": given["min_lease_age_ms"],
        "deadline_within_ms": given["deadline_within_ms"],
        "state_filter": state_filter.replace("-", "_") if state_filter else None,
    }
    answer = call.ask("a2a_queue", **query)
    told: Answer = {**query, **{name: answer[name] for name in ("tasks", "results", "warnings") if name in answer}}
    return {**told, "counts": answer.get("counts")} if counts else told, answer


def _repair(call: Invocation, task_id: str, reason: str, command: dict[str, Any]) -> None:
    task_id = call.task_id(task_id)
    given = {name: value for name, value in command.items() if value is not None}
    answer = call.ask("repair_a2a_task", request={"task_id": task_id, "command": given, "reason": reason})
    outcome = answer["outcome"]
    said = f"it is {outcome['state'].replace('_', ' ')} now, after {outcome['attempt']} attempt(s)"
    call.show(answer, f"{outcome['action']} {outcome['task_id']}", said)


def _receive(
    call: Invocation, kind: str, *, wait_ms: int | None, count: int | None, everyone: bool, request_id: str | None
) -> Answer:
    scope = "all" if everyone else None
    return call.ask_waiting(kind, wait_ms, max=count, request_id=request_id, scope=scope)


def _task(
    text: str, *, deadline_ms: int | None, deadline_in: int | None, key: str | None, idempotent: bool, **given: Any
) -> dict[str, Any]:
    if deadline_ms is not None and deadline_in is not None:
        raise click.UsageError("--deadline-ms and --deadline-in exclude each other")
    if idempotent and key is None:
        raise click.UsageError("--idempotent needs --key: the key names the work that may run twice")
    task: dict[str, Any] = {
        "id": given["task_id"] or str(uuid4()),
        "recipient": {"display": given["recipient"]},
        "intent_text": text,
        "task_kind": given["task_kind"],
        "parent": given["parent"],
        "deadline_ms": deadline_ms if deadline_in is None else now_ms() + deadline_in,
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
                "timeout", f"no result yet; task {task_id} goes on. Look with `{call.again} a2a show {task_id}`"
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
    said = content_text(result["content"])
    if said:
        put(said)
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
