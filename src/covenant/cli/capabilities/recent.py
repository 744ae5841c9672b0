"""`covenant capabilities recent`."""

from __future__ import annotations

import click

from covenant.cli.ages import age, distance
from covenant.cli.calling import Call, calls
from covenant.cli.output import brief, console, say, shape, table
from covenant.daemon.environment import now_ms


@click.command("recent", epilog=shape("capability_list", "limit", "capabilities"))
@click.option("--limit", "-n", type=click.IntRange(min=1), default=10, show_default=True, help="Most rows.")
@calls
def command(call: Call, *, limit: int) -> None:
    """List the newest grants that concern the caller; to the operator, all."""
    answer = call.ask("recent_capabilities", limit=limit)
    if call.answer({"kind": "capability_list", "limit": limit, "capabilities": answer["capabilities"]}):
        return
    if not answer["capabilities"]:
        say("nothing is granted; grant with `covenant capabilities grant ACTION --to NAME@HOST`")
        return
    now = now_ms()
    rows = table("", "who", "may", "granted", "state", "scope", "signature")
    rows.columns[-1].overflow = "fold"
    for grant in answer["capabilities"]:
        state = grant["effective"]
        if state == "live" and grant["expires_at"] is not None:
            state = f"ends {distance(grant['expires_at'] - now)}"
        rows.add_row(
            grant["subject"]["display"],
            grant["action"],
            f"{age(now - grant['granted_at'])} ago",
            state,
            brief(str(grant["scope"])) if grant["scope"] else "",
            grant["signature_b58"],
            style="" if grant["effective"] == "live" else "dim",
        )
    console().print(rows)
