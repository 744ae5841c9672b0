"""`covenant capabilities revoke`."""

from __future__ import annotations

import click

from covenant.cli.calling import Call, calls
from covenant.cli.output import put, shape


@click.command("revoke", epilog=shape("capability_revoked", "signature_b58", "removed"))
@click.argument("signature")
@calls
def command(call: Call, *, signature: str) -> None:
    """Revoke the grant with this SIGNATURE, as `covenant capabilities recent` shows it.

    One that is gone already is no error.
    """
    answer = call.ask("revoke_capability", signature_b58=signature)
    if not call.answer(answer):
        put(f"revoked {signature}" if answer["removed"] else f"there is no live grant {signature}")
