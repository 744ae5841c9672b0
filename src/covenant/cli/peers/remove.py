"""`covenant peers remove`."""

from __future__ import annotations

import click

from covenant.cli.calling import Call, calls
from covenant.cli.output import put, shape


@click.command("remove", epilog=shape("peer_removed", "id", "name"))
@click.argument("peer")
@calls
def command(call: Call, *, peer: str) -> None:
    """Remove a peer. Nothing is taken from it any more, and nothing that waits is sent to it."""
    answer = call.ask("remove_peer", peerId=peer)
    if not call.answer(answer):
        put(f"removed {answer['name']}, {answer['id']}")
