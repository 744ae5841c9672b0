"""`covenant peers messages`."""

from __future__ import annotations

import click

from covenant.cli.ages import age
from covenant.cli.calling import Call, calls
from covenant.cli.output import console, shape, table
from covenant.daemon.environment import now_ms


@click.command("messages", epilog=shape("peer_messages", "messages", "total"))
@click.option("--peer", metavar="PEER", help="Only those to and from this peer.")
@click.option("--type", "typ", metavar="TYPE", help="Only those of this type, such as delegation_offer.")
@click.option("--limit", type=click.IntRange(1, 100), default=20, show_default=True, help="At most this many.")
@calls
def command(call: Call, *, peer: str | None, typ: str | None, limit: int) -> None:
    """List what went to and fro lately, the newest first. What it said is sealed, and not here."""
    answer = call.ask("list_peer_messages", peerId=peer, type=typ, limit=limit)
    if call.answer(answer):
        return
    now = now_ms()
    rows = table("", "when", "", "type", "peer", "of")
    for each in answer["messages"]:
        rows.add_row(
            f"{age(now - each['atMs'])} ago", each["direction"], each["type"], each["peer"], each.get("offerId", "")
        )
    console().print(rows)
