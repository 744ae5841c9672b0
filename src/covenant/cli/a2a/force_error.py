"""`covenant a2a force-error`."""

from __future__ import annotations

import click

from covenant.cli.a2a.repairs import repair
from covenant.cli.calling import Call, calls
from covenant.cli.output import shape


@click.command("force-error", epilog=shape("a2a_repaired", "outcome"))
@click.argument("task_id")
@click.option("--reason", required=True, help="Why, for the audit.")
@click.option("--message", required=True, help="The error that the sender of the task is told.")
@click.option("--lease-id", help="Only if this is still the lease: what you saw is what you repair.")
@calls
def command(call: Call, *, task_id: str, reason: str, message: str, lease_id: str | None) -> None:
    """End a leased task with an error result for its sender.

    Needs the capability a2a.repair.force_error.
    """
    repair(call, task_id, reason, {"action": "force_error", "lease_id": lease_id, "message": message})
