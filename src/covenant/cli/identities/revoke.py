"""`covenant identities revoke`."""

from __future__ import annotations

import click

from covenant.cli.calling import Call, calls
from covenant.cli.output import put, shape


@click.command("revoke", epilog=shape("identity_revoked", "display", "pubkey_b58", "token_prefix", "revoked_at"))
@click.argument("which")
@click.option("--force", is_flag=True, help="Also if it is the operator's own token. The next start makes a new one.")
@calls
def command(call: Call, *, which: str, force: bool) -> None:
    """Revoke the token of WHICH: name@host, a pubkey, or the start of a token. Ends its open connections."""
    answer = call.ask("revoke_identity", identity=which, force=force)
    if not call.answer(answer):
        put(f"revoked {answer['display']} ({answer['token_prefix']}…)")
