"""`covenant identities rotate`."""

from __future__ import annotations

import click

from covenant.cli.calling import Call, calls
from covenant.cli.output import put, say, shape


@click.command("rotate", epilog=shape("identity_token_rotated", "display", "token_b58"))
@click.argument("which", required=False)
@calls
def command(call: Call, *, which: str | None) -> None:
    """Give WHICH a new token, and end the old one. Default: the operator's own, which is saved in the home."""
    answer = call.ask("rotate_token", identity=which)
    if call.answer({"kind": "identity_token_rotated", "display": answer["display"], "token_b58": answer["token_b58"]}):
        return
    put(answer["token_b58"])
    say(f"this is the token of {answer['display']} now; the old one is refused from here on")
