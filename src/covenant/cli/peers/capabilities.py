"""`covenant peers capabilities`."""

from __future__ import annotations

import click

from covenant.cli.ages import age
from covenant.cli.calling import Call, calls
from covenant.cli.output import brief, console, put, shape, table
from covenant.daemon.environment import now_ms


@click.command("capabilities", epilog=shape("peer_capabilities", "peer", "capabilities"))
@click.argument("peer", required=False)
@click.option("--fresh", is_flag=True, help="Ask it now, whatever is known already.")
@calls
def command(call: Call, *, peer: str | None, fresh: bool) -> None:
    """Show what a peer offers and how busy it is; without a peer, what this instance offers."""
    answer = call.ask("peer_capabilities", peerId=peer, fresh=fresh or None)
    if call.answer(answer):
        return
    found = answer["capabilities"]
    rows = table("", "profile", "tokens", "description")
    for profile in found["profiles"]:
        about = brief(profile.get("description", ""), 80)
        rows.add_row(brief(profile["name"], 64), str(profile["maxTokenBudget"]), about)
    console().print(rows)
    said = age(now_ms() - found["issuedAtMs"])
    put(f"{found['activeDelegations']} at work, {found['freeSlots']} slots free; said {said} ago")
    if peer:
        put(f"we are {found['trustLevel']} to it")
