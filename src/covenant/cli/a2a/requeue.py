"""`covenant a2a requeue`."""

from __future__ import annotations

import click

from covenant.cli.a2a.repairs import repair
from covenant.cli.calling import Call, calls
from covenant.cli.output import shape


@click.command("requeue", epilog=shape("a2a_repaired", "outcome"))
@click.argument("task_id")
@click.option("--reason", required=True, help="Why, for the audit.")
@click.option(
    "--duplicate-risk",
    required=True,
    type=click.Choice(("idempotent", "operator-accepted", "operator_accepted")),
    help="What makes it right to run the work again: it is idempotent, or you accept that it may happen twice.",
)
@click.option("--lease-id", help="Only if this is still the lease: what you saw is what you repair.")
@calls
def command(call: Call, *, task_id: str, reason: str, duplicate_risk: str, lease_id: str | None) -> None:
    """Give a leased task back to the queue: its holder will not come back.

    Needs the capability a2a.repair.requeue.
    """
    risk = duplicate_risk.replace("-", "_")
    repair(call, task_id, reason, {"action": "requeue", "lease_id": lease_id, "duplicate_risk": risk})
