"""`covenant peers trust`."""

from __future__ import annotations

import click

from covenant.cli.calling import Call, calls
from covenant.cli.output import put, shape
from covenant.cli.peers.telling import peer_line


@click.command("trust", epilog=shape("peer", "peer"))
@click.argument("peer")
@click.argument("level", type=click.Choice(["peer", "verified", "trusted"]), default="trusted")
@calls
def command(call: Call, *, peer: str, level: str) -> None:
    """Say how far a peer is trusted.

    A mere `peer` may ask what there is; one that is `verified` (it proved its key) may delegate within limits; one that
    is `trusted` may do so ten times as often. Only an operator says `trusted`.
    """
    answer = call.ask("trust_peer", peerId=peer, trustLevel=level)
    if not call.answer(answer):
        put(peer_line(answer["peer"]))
