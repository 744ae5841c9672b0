"""`covenant peers list`."""

from __future__ import annotations

import click

from covenant.cli.calling import Call, calls
from covenant.cli.output import console, say, shape, table
from covenant.cli.peers.telling import seen, troubles
from covenant.daemon.environment import now_ms


@click.command("list", epilog=shape("peers", "peers", "total", "id", "name"))
@click.option("--trust", type=click.Choice(["peer", "verified", "trusted"]), help="Only those trusted so far.")
@click.option("--limit", type=click.IntRange(1, 100), default=100, show_default=True, help="At most this many.")
@calls
def command(call: Call, *, trust: str | None, limit: int) -> None:
    """List the instances that this one knows, and how it is known itself."""
    answer = call.ask("list_peers", trustLevel=trust, limit=limit)
    if call.answer(answer):
        return
    say(f"this is {answer['name']}, {answer['id']}")
    now = now_ms()
    rows = table("", "name", "trust", "status", "heard", "where", "id", "")
    for peer in answer["peers"]:
        rows.add_row(
            peer["name"],
            peer["trustLevel"],
            peer["status"],
            seen(peer["lastSeen"], now),
            peer["url"] or "fetches by itself",
            peer["id"],
            troubles(peer),
            style="red" if peer["conflict"] else "dim" if peer["denied"] else "",
        )
    if answer["peers"]:
        console().print(rows)
    else:
        say("no peers; add one with: covenant peers add https://HOST")
