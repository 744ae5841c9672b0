"""`covenant peers verify`."""

from __future__ import annotations

import click

from covenant.cli.calling import Call, calls
from covenant.cli.output import put, shape
from covenant.cli.peers.telling import peer_line


@click.command("verify", epilog=shape("peer", "peer"))
@click.argument("peer")
@calls
def command(call: Call, *, peer: str) -> None:
    """Challenge a peer to prove its key. It is `verified` when it has."""
    answer = call.ask("verify_peer", peerId=peer)
    if not call.answer(answer):
        put(peer_line(answer["peer"]))
