"""`covenant identities enroll`."""

from __future__ import annotations

import click

from covenant.cli.calling import Call, calls
from covenant.cli.output import put, say, shape


@click.command("enroll", epilog=shape("identity_enrolled", "display", "pubkey_b58", "token_b58", "granted"))
@click.argument("display", metavar="NAME@HOST")
@click.option("--grant", "actions", multiple=True, metavar="ACTION", help="Grant this to it as well. May be repeated.")
@click.option("--pubkey", metavar="B58", help="Its Ed25519 public key. Default: a new one.")
@calls
def command(call: Call, *, display: str, actions: tuple[str, ...], pubkey: str | None) -> None:
    """Enrol an identity and print its token. The token is told once, and stored nowhere.

    Put it where the agent finds it, for its owner alone:

    \b
        (umask 077; covenant identities enroll bob@host --grant a2a.respond.alice@host > bob.token)
    """
    answer = call.ask("enroll_identity", display=display, actions=list(actions), pubkey=pubkey)
    granted = [grant["action"] if isinstance(grant, dict) else grant for grant in answer["granted"]]
    if call.answer(answer):
        return
    put(answer["token_b58"])
    say(f"enrolled {answer['display']} with pubkey {answer['pubkey_b58']}")
    for action in granted:
        say(f"granted {action}")
