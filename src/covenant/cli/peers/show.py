"""`covenant peers show`."""

from __future__ import annotations

import click

from covenant.cli.calling import Call, calls
from covenant.cli.output import put, shape
from covenant.cli.peers.telling import peer_line, seen, troubles
from covenant.daemon.environment import now_ms


@click.command("show", epilog=shape("peer", "peer"))
@click.argument("peer")
@calls
def command(call: Call, *, peer: str) -> None:
    """Show a peer: by its name, its id, or the beginning of its id."""
    answer = call.ask("show_peer", peerId=peer)
    if call.answer(answer):
        return
    found, now = answer["peer"], now_ms()
    put(peer_line(found))
    put(f"heard {seen(found['lastSeen'], now)}, verified {seen(found['verifiedAtMs'], now)}")
    for profile in found["capabilities"]:
        put(f"  {profile['name']}  {profile['maxTokenBudget']} tokens  {profile.get('description', '')}")
    if trouble := troubles(found):
        put(trouble)
