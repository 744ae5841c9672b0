"""`covenant peers revoke-tokens`."""

from __future__ import annotations

import click

from covenant.cli.calling import Call, calls
from covenant.cli.output import put, shape


@click.command("revoke-tokens", epilog=shape("peer_tokens_revoked", "id", "revoked"))
@click.argument("peer")
@calls
def command(call: Call, *, peer: str) -> None:
    """Revoke every token that a peer was given. What it has under way goes on."""
    answer = call.ask("revoke_peer_tokens", peerId=peer)
    if not call.answer(answer):
        put(f"revoked {answer['revoked']} tokens of {answer['id']}")
