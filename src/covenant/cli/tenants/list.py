"""`covenant tenants list`."""

from __future__ import annotations

from typing import Any, Final

import click

from covenant.cli.ages import age
from covenant.cli.calling import Call, calls
from covenant.cli.output import console, shape, table
from covenant.daemon.environment import now_ms


@click.command("list", epilog=shape("tenant_list", "tenants"))
@calls
def command(call: Call) -> None:
    """List tenants, the oldest first."""
    answer = call.ask("list_tenants")
    if call.answer(answer):
        return
    now = now_ms()
    rows = table("", "tenant", "token", "agents", "limits", "added", "state")
    for row in answer["tenants"]:
        rows.add_row(
            row["name"],
            f"{row['token_prefix']}…" if row["token_prefix"] else "none yet",
            str(row["agents"]),
            limits_of(row),
            f"{age(now - row['created_at_ms'])} ago",
            f"disabled {age(now - row['disabled_at_ms'])} ago" if row["disabled"] else "live",
            style="dim" if row["disabled"] else "",
        )
    console().print(rows)


_WORDS: Final = {
    "concurrency": "at once",
    "rate_per_min": "a minute",
    "burst": "in a burst",
    "connections": "connections",
    "streams": "streams",
    "live_tasks": "live tasks",
    "queued_bytes": "bytes queued",
}


def limits_of(tenant: dict[str, Any]) -> str:
    limits = tenant["limits"]
    said = [f"{limits[name]} {words}" for name, words in _WORDS.items() if limits.get(name)]
    return ", ".join(said) or "the daemon's"
