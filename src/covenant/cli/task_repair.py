"""`covenant a2a`: repair of tasks, one by one or many at once, and of push notifications."""

from __future__ import annotations

from typing import Any, Final

import click

from covenant.cli.completion import task_argument
from covenant.cli.options import CommandGroup, Invocation, daemon_command
from covenant.cli.task_tables import PUSH_COLUMNS, push_row
from covenant.cli.terminal import age, print_table, put, say

COMPACT_S: Final = 3_600.0

commands: Final = CommandGroup("a2a")
push: Final = CommandGroup(
    "push", help="Push notifications: what is owed to webhooks, and what was given up.", no_args_is_help=True
)

lease_option: Final = click.option("--lease-id", help="Repair only if this is still the lease that you saw.")
reason_option: Final = click.option("--reason", required=True, help="Why, for the audit.")


@daemon_command(commands, "requeue", "a2a_repaired", "outcome")
@task_argument
@reason_option
@click.option(
    "--duplicate-risk",
    required=True,
    type=click.Choice(("idempotent", "operator-accepted", "operator_accepted")),
    help="Why the work may run again: it is idempotent, or you accept that it may happen twice.",
)
@lease_option
def requeue(call: Invocation, *, task_id: str, reason: str, duplicate_risk: str, lease_id: str | None) -> None:
    """Give a leased task back to the queue: its holder will not come back.

    Needs the capability a2a.repair.requeue, of the operator too: `covenant capabilities grant a2a.repair.requeue`.
    """
    risk = duplicate_risk.replace("-", "_")
    _repair(call, task_id, reason, {"action": "requeue", "lease_id": lease_id, "duplicate_risk": risk})


@daemon_command(commands, "force-error", "a2a_repaired", "outcome")
@task_argument
@reason_option
@click.option("--message", required=True, help="The error that the sender of the task is told.")
@lease_option
def force_error(call: Invocation, *, task_id: str, reason: str, message: str, lease_id: str | None) -> None:
    """End a leased task with an error result for its sender.

    Needs the capability a2a.repair.force_error, of the operator too:
    `covenant capabilities grant a2a.repair.force_error`.
    """
    _repair(call, task_id, reason, {"action": "force_error", "lease_id": lease_id, "message": message})


@daemon_command(commands, "cancel", "a2a_task_canceled", "task_id", "canceled", "ending", "result")
@task_argument
@reason_option
def cancel(call: Invocation, *, task_id: str, reason: str) -> None:
    """End a task that is queued, waits or is worked on. An ended task stays as it is."""
    answer = call.ask("cancel_a2a_task", task_id=call.task_id(task_id), reason=reason)
    said = [] if answer["canceled"] else [f"it had ended before: {answer['ending']}"]
    call.show(answer, f"{'canceled' if answer['canceled'] else 'unchanged'} {answer['task_id']}", *said)


@daemon_command(commands, "release", "a2a_lease_released", "task_id")
@task_argument
@click.option("--lease-id", required=True, help="The lease to give back.")
@reason_option
def release(call: Invocation, *, task_id: str, lease_id: str, reason: str) -> None:
    """Give back a task that the caller has leased and not begun."""
    answer = call.ask("release_a2a_lease", task_id=call.task_id(task_id), lease_id=lease_id, reason=reason)
    call.show(answer, f"released {answer['task_id']}")


@daemon_command(commands, "renew", "a2a_lease_renewed", "task_id", "lease")
@task_argument
@click.option("--lease-id", required=True, help="The lease whose holder is still at work.")
def renew(call: Invocation, *, task_id: str, lease_id: str) -> None:
    """Say that the caller is still at work on a task that it has leased."""
    answer = call.ask("renew_a2a_lease", task_id=call.task_id(task_id), lease_id=lease_id)
    call.show(answer, f"renewed {answer['task_id']}", f"attempt {answer['lease']['attempt']}")


@daemon_command(commands, "retry-stale", "a2a_auto_retry", "report")
@click.option("--enable", "enabled", is_flag=True, help="Do it. Without this, only say what would be done.")
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
    help="Leave tasks alone that had this many attempts.",
)
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


@daemon_command(commands, "compact", "a2a_compacted", "dropped")
def compact(call: Invocation) -> None:
    """Merge the journal's sealed history into a snapshot.

    Drops nothing that is queued, leased, following or not yet drained. Needs the capability a2a.compact.
    """
    dropped = call.ask("compact_a2a", within_s=COMPACT_S)["dropped"]
    call.show({"dropped": dropped}, f"dropped {dropped} a2a event(s)")


@daemon_command(push, "list", "a2a_pushes", "count", "dead", "pushes")
@click.option("--dead", is_flag=True, help="Only configurations that were given up.")
@click.option("--limit", type=int, help="Most rows (default: 20).")
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
@task_argument
@click.argument("push_id")
def retry_push(call: Invocation, *, task_id: str, push_id: str) -> None:
    """Try a push configuration again, at once: from the step it was given up at, and in order."""
    answer = call.ask("retry_a2a_push", task_id=call.task_id(task_id), push_id=push_id)
    if not call.answer(answer):
        found = answer["push"]
        say(f"{found['push_id']} is tried again, from generation {found['delivered'] + 1} on")


def _repair(call: Invocation, task_id: str, reason: str, command: dict[str, Any]) -> None:
    task_id = call.task_id(task_id)
    given = {name: value for name, value in command.items() if value is not None}
    answer = call.ask("repair_a2a_task", request={"task_id": task_id, "command": given, "reason": reason})
    outcome = answer["outcome"]
    said = f"it is {outcome['state'].replace('_', ' ')} now, after {outcome['attempt']} attempt(s)"
    call.show(answer, f"{outcome['action']} {outcome['task_id']}", said)


commands.add_command(push)
