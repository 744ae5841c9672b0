"""`covenant a2a`: repair of tasks, one by one or many at once, and of push notifications."""

from __future__ import annotations

from typing import Any, Final

import click

from covenant.cli.daemon_client import Invocation, complete_tasks, daemon_command, task_argument
from covenant.cli.options import CommandGroup, combined, limit_option
from covenant.cli.task_queries import FILTERS, filter_options, filters
from covenant.cli.task_tables import PUSH_COLUMNS, outcome_row, push_row
from covenant.cli.terminal import ExitCode, age, json_shape, print_table, put, say

COMPACT_S: Final = 3_600.0
BULK_S: Final = 600.0

commands: Final = CommandGroup("a2a")
push: Final = CommandGroup(
    "push", help="Push notifications: pending deliveries, and those given up.", no_args_is_help=True
)

lease_option: Final = click.option("--lease-id", help="Repair only if this is still the lease that you saw.")
reason_option: Final = click.option("--reason", required=True, help="Why, for the audit.")


BULK: Final = "\n\n" + json_shape("a2a_bulk", "dry_run", "matched", "applied", "outcomes", "more?").replace(
    "With", "With filters and"
)
optional_task: Final = click.argument("task_id", required=False, shell_complete=complete_tasks)


bulk_options: Final = combined(
    filter_options,
    click.option(
        "--limit",
        "-n",
        type=click.IntRange(1, 1_000),
        default=100,
        show_default=True,
        help="Maximum number of tasks, with filters.",
    ),
    click.option("--apply", is_flag=True, help="Apply it. Without this, a dry run."),
)
"""Without an id, the filters choose the tasks, and nothing is done without `--apply`."""


@daemon_command(commands, "requeue", "a2a_repaired", "outcome", epilog=BULK)
@optional_task
@reason_option
@click.option(
    "--duplicate-risk",
    required=True,
    type=click.Choice(("idempotent", "operator-accepted", "operator_accepted")),
    help="Why the work may run again: it is idempotent, or you accept that it may happen twice.",
)
@lease_option
@bulk_options
def requeue(
    call: Invocation, *, task_id: str | None, reason: str, duplicate_risk: str, lease_id: str | None, **given: Any
) -> None:
    """Give a leased task back to the queue, because its holder is lost. Without an id: all tasks that match the
    filters.

    Needs the capability a2a.repair.requeue, even as the operator: `covenant capabilities grant a2a.repair.requeue`.
    """
    risk = duplicate_risk.replace("-", "_")
    if task_id is None:
        _repair_all(call, given, lease_id, command="requeue", reason=reason, duplicate_risk=risk)
    else:
        _check_one(given)
        _repair(call, task_id, reason, {"action": "requeue", "lease_id": lease_id, "duplicate_risk": risk})


@daemon_command(commands, "force-error", "a2a_repaired", "outcome", epilog=BULK)
@optional_task
@reason_option
@click.option("--message", required=True, help="The error message for the sender of the task.")
@lease_option
@bulk_options
def force_error(
    call: Invocation, *, task_id: str | None, reason: str, message: str, lease_id: str | None, **given: Any
) -> None:
    """End a leased task with an error result for its sender. Without an id: all tasks that match the filters.

    Needs the capability a2a.repair.force_error, even as the operator:
    `covenant capabilities grant a2a.repair.force_error`.
    """
    if task_id is None:
        _repair_all(call, given, lease_id, command="force_error", reason=reason, message=message)
    else:
        _check_one(given)
        _repair(call, task_id, reason, {"action": "force_error", "lease_id": lease_id, "message": message})


@daemon_command(commands, "cancel", "a2a_task_canceled", "task_id", "canceled", "ending", "result", epilog=BULK)
@optional_task
@reason_option
@bulk_options
def cancel(call: Invocation, *, task_id: str | None, reason: str, **given: Any) -> None:
    """End a task that is queued, waiting or running. An ended task stays as it is.

    Without an id: all tasks that match the filters.
    """
    if task_id is None:
        _repair_all(call, given, None, command="cancel", reason=reason)
        return
    _check_one(given)
    answer = call.ask("cancel_a2a_task", task_id=task_id, reason=reason)
    messages = [] if answer["canceled"] else [f"it had ended before: {answer['ending']}"]
    call.show(answer, f"{'canceled' if answer['canceled'] else 'unchanged'} {answer['task_id']}", *messages)


def _check_one(given: dict[str, Any]) -> None:
    if given["apply"] or any(given[name] is not None for name in FILTERS):
        raise click.UsageError("TASK_ID names one task; filters and --apply are for many. Leave one of them out")


def _repair_all(call: Invocation, given: dict[str, Any], lease_id: str | None, **command: Any) -> None:
    if lease_id is not None:
        raise click.UsageError("--lease-id names the lease of one task; give its TASK_ID, too")
    chosen = filters(given)
    if not chosen:
        raise click.UsageError("no task is named; give a TASK_ID, or filters such as --agent and --state")
    answer = call.ask(
        "repair_a2a_tasks", filter=chosen, dry_run=not given["apply"], limit=given["limit"], within_s=BULK_S, **command
    )
    if not call.answer(answer, kind="a2a_bulk"):
        if answer["outcomes"]:
            print_table(("task", "state", "what", "why"), map(outcome_row, answer["outcomes"]))
        put(f"matched {answer['matched']} task(s), changed {answer['applied']}")
        if answer.get("more"):
            say("the filters leave more tasks than the limit")
        if answer["dry_run"]:
            say("nothing was changed; add --apply to do it")
    if any(each["outcome"] == "refused" for each in answer["outcomes"]) and not answer["dry_run"]:
        raise click.exceptions.Exit(ExitCode.REFUSED)


@daemon_command(commands, "release", "a2a_lease_released", "task_id")
@task_argument
@click.option("--lease-id", required=True, help="The lease to give back.")
@reason_option
def release(call: Invocation, *, task_id: str, lease_id: str, reason: str) -> None:
    """Give back a task that the caller has leased and not started."""
    answer = call.ask("release_a2a_lease", task_id=task_id, lease_id=lease_id, reason=reason)
    call.show(answer, f"released {answer['task_id']}")


@daemon_command(commands, "renew", "a2a_lease_renewed", "task_id", "lease")
@task_argument
@click.option("--lease-id", required=True, help="The lease to renew.")
def renew(call: Invocation, *, task_id: str, lease_id: str) -> None:
    """Report that the caller is still working on a task that it has leased."""
    answer = call.ask("renew_a2a_lease", task_id=task_id, lease_id=lease_id)
    call.show(answer, f"renewed {answer['task_id']}", f"attempt {answer['lease']['attempt']}")


@daemon_command(commands, "retry-stale", "a2a_auto_retry", "report")
@click.option("--enable", "enabled", is_flag=True, help="Apply it. Without this, a dry run.")
@click.option(
    "--min-lease-age-ms",
    type=click.IntRange(min=0),
    default=300_000,
    show_default=True,
    help="Age from which a lease is stale.",
)
@click.option(
    "--max-attempts",
    type=click.IntRange(min=0),
    default=3,
    show_default=True,
    help="Skip tasks that had this many attempts.",
)
@click.option(
    "--max-requeues", type=click.IntRange(min=0), default=1, show_default=True, help="Maximum number of requeued tasks."
)
@click.option(
    "--scan-limit",
    type=click.IntRange(min=0),
    default=100,
    show_default=True,
    help="Maximum number of examined leases.",
)
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


@daemon_command(commands, "compact", "a2a_compacted", "dropped")
def compact(call: Invocation) -> None:
    """Merge the journal's sealed history into a snapshot.

    Drops nothing that is queued, leased, following or not yet drained. Needs the capability a2a.compact.
    """
    dropped = call.ask("compact_a2a", within_s=COMPACT_S)["dropped"]
    call.show({"dropped": dropped}, f"dropped {dropped} a2a event(s)")


@daemon_command(push, "list", "a2a_pushes", "count", "dead", "pushes")
@click.option("--dead", is_flag=True, help="Only configurations that were given up.")
@limit_option(20, 1_000)
def list_pushes(call: Invocation, *, dead: bool, limit: int) -> None:
    """List push configurations with the state of their deliveries, those given up first.

    Only the host of a webhook is shown: its path, its token and its credentials are secrets of its owner.
    """
    answer = call.ask("a2a_pushes", dead=dead or None, limit=limit)
    title = f"{answer['count']} push configurations, {answer['dead']} given up"
    empty = "there is no push configuration"
    call.show_table(answer, PUSH_COLUMNS, map(push_row, answer["pushes"]), title=title, empty=empty)


@daemon_command(push, "retry", "a2a_push_retried", "push")
@task_argument
@click.argument("push_id")
def retry_push(call: Invocation, *, task_id: str, push_id: str) -> None:
    """Retry a push configuration at once, from the step at which it was given up, and in order."""
    answer = call.ask("retry_a2a_push", task_id=task_id, push_id=push_id)
    if not call.answer(answer):
        found = answer["push"]
        say(f"{found['push_id']} is tried again, from generation {found['delivered'] + 1} on")


def _repair(call: Invocation, task_id: str, reason: str, command: dict[str, Any]) -> None:
    given = {name: value for name, value in command.items() if value is not None}
    answer = call.ask("repair_a2a_task", request={"task_id": task_id, "command": given, "reason": reason})
    outcome = answer["outcome"]
    message = f"it is {outcome['state'].replace('_', ' ')} now, after {outcome['attempt']} attempt(s)"
    call.show(answer, f"{outcome['action']} {outcome['task_id']}", message)


commands.add_command(push)
