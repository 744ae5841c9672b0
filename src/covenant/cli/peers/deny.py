"""`covenant peers deny`."""

from __future__ import annotations

import click

from covenant.cli.calling import Call, calls
from covenant.cli.output import put, shape
from covenant.cli.peers.telling import peer_line


@click.command("deny", epilog=shape("peer", "peer"))
@click.argument("peer")
@calls
def command(call: Call, *, peer: str) -> None:
    """Take nothing from a peer any more, and keep what is known of it."""
    answer = call.ask("change_peer", peerId=peer, denied=True)
    if not call.answer(answer):
        put(peer_line(answer["peer"]))
