"""`covenant a2a retry-stale`."""

from __future__ import annotations

from typing import Any

import click

from covenant.cli.ages import age
from covenant.cli.calling import Call, calls
from covenant.cli.output import console, put, say, shape, table


@click.command("retry-stale", epilog=shape("a2a_auto_retry", "report"))
@click.option("--enable", "enabled", is_flag=True, help="Do it. Without this, only say what would be done.")
@click.option("--min-lease-age-ms", type=click.IntRange(min=0), default=300_000, show_default=True, help="Stale from.")
@click.option("--max-attempts", type=click.IntRange(min=0), default=3, show_default=True, help="Leave older tasks be.")
@click.option("--max-requeues", type=click.IntRange(min=0), default=1, show_default=True, help="Most tasks requeued.")
@click.option("--scan-limit", type=click.IntRange(min=0), default=100, show_default=True, help="Most leases looked at.")
@calls
def command(call: Call, **policy: Any) -> None:
    """Requeue stale leases of work that its sender declared idempotent under a key.

    With --enable it needs the capability a2a.repair.requeue.
    """
    report = call.ask("retry_a2a_stale", policy=policy)["report"]
    if call.answer({"kind": "a2a_auto_retry", "report": report}):
        return
    verb, chosen = ("requeued", report["requeued"]) if policy["enabled"] else ("would requeue", report["would_requeue"])
    counted = f"considered {report['considered']} task(s), requeued {len(report['requeued'])}"
    put(f"{counted}, skipped {len(report['skipped'])}")
    if chosen or report["skipped"]:
        rows = table("", "task", "try", "lease age", "what", "why")
        for task in chosen:
            rows.add_row(task["task_id"], str(task["attempt"]), "", verb, f"key {task['idempotency_key']!r}")
        for task in report["skipped"]:
            if task["reason"] != "disabled":
                held = age(task["lease_age_ms"]) if "lease_age_ms" in task else ""
                rows.add_row(task["task_id"], str(task["attempt"]), held, "skipped", task["reason"].replace("_", " "))
        console().print(rows)
    if not policy["enabled"]:
        say("nothing was changed; add --enable to do it")
