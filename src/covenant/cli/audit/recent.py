"""`covenant audit recent`."""

from __future__ import annotations

from typing import Any

import click

from covenant.cli.ages import age
from covenant.cli.calling import Call, calls
from covenant.cli.output import brief, console, say, shape, table
from covenant.daemon.environment import now_ms


@click.command("recent", epilog=shape("audit_recent", "limit", "since_ms", "events"))
@click.option("--limit", "-n", type=click.IntRange(min=1), default=50, show_default=True, help="Most rows.")
@click.option("--since-ms", type=click.IntRange(min=0), help="Only rows from this epoch millisecond on.")
@calls
def command(call: Call, *, limit: int, since_ms: int | None) -> None:
    """List audit rows that the caller's doings left; to the operator, all."""
    answer = call.ask("recent_audit", limit=limit, since_ms=since_ms)
    if call.answer({"kind": "audit_recent", "limit": limit, "since_ms": since_ms, "events": answer["events"]}):
        return
    if not answer["events"]:
        say("no audit rows")
        return
    now = now_ms()
    rows = table("", "when", "who", "what", "details")
    for event in answer["events"]:
        kind = event["kind"]
        rows.add_row(
            f"{age(now - event['timestamp_ms'])} ago",
            event["issuer"]["display"],
            kind["type"].replace("_", " "),
            brief(_details(kind), 100),
            style="red" if _refused(kind) else "",
        )
    console().print(rows)


def _details(kind: dict[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in kind.items() if name != "type" and value not in (None, [], {}))


def _refused(kind: dict[str, Any]) -> bool:
    return kind.get("passed") is False or kind["type"].endswith(("_rejected", "_failed", "_mismatch", "_required"))
