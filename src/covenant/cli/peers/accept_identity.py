"""`covenant peers accept-identity`."""

from __future__ import annotations

import click

from covenant.cli.calling import Call, calls
from covenant.cli.output import put, shape
from covenant.cli.peers.telling import peer_line


@click.command("accept-identity", epilog=shape("peer", "peer"))
@click.argument("peer")
@click.argument("new_id")
@calls
def command(call: Call, *, peer: str, new_id: str) -> None:
    """Vouch that a peer goes by another id now, though its old key does not say so.

    It keeps its name and its delegations, and is a mere peer until it is verified again. Compare the id with its
    operator first, by another way than the network.
    """
    answer = call.ask("succeed_peer", peerId=peer, newId=new_id)
    if not call.answer(answer):
        put(peer_line(answer["peer"]))
