"""`covenant peers allow`."""

from __future__ import annotations

import click

from covenant.cli.calling import Call, calls
from covenant.cli.output import put, shape
from covenant.cli.peers.telling import peer_line


@click.command("allow", epilog=shape("peer", "peer"))
@click.argument("peer")
@calls
def command(call: Call, *, peer: str) -> None:
    """Take messages from a peer that was denied."""
    answer = call.ask("change_peer", peerId=peer, denied=False)
    if not call.answer(answer):
        put(peer_line(answer["peer"]))
