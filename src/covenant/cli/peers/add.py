"""`covenant peers add`."""

from __future__ import annotations

import click

from covenant.cli.calling import Call, calls
from covenant.cli.output import put, say, shape
from covenant.cli.peers.telling import peer_line


@click.command("add", epilog=shape("peer", "peer", "note?"))
@click.argument("url", required=False)
@click.option("--name", metavar="NAME", help="What to call it here. Default: what it calls itself.")
@click.option("--id", "peer_id", metavar="ID", help="Its id, if you were told: what answers at the URL must prove it.")
@calls
def command(call: Call, *, url: str | None, name: str | None, peer_id: str | None) -> None:
    """Add another instance as a peer, by its URL; or by --id and --name, if it cannot be called and fetches.

    It is asked for its keys and challenged to prove them. Both sides add each other before they can delegate.

    \b
        covenant peers add https://lab.example.com --name lab
    """
    answer = call.ask("add_peer", url=url, id=peer_id, name=name)
    if call.answer(answer):
        return
    put(peer_line(answer["peer"]))
    if answer.get("note"):
        say(answer["note"])
