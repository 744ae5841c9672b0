"""`covenant peers force-error`."""

from __future__ import annotations

import click

from covenant.cli.calling import Call, calls
from covenant.cli.output import put, shape
from covenant.cli.peers.telling import delegation_line


@click.command("force-error", epilog=shape("delegation", "delegation"))
@click.argument("delegation")
@click.option("--reason", required=True, help="Why; it stays in the audit.")
@calls
def command(call: Call, *, delegation: str, reason: str) -> None:
    """Give a lost delegation up: its task fails with `provider_lost`. What its provider may still do is not used."""
    answer = call.ask("force_delegation", delegationId=delegation, reason=reason)
    if not call.answer(answer):
        put(delegation_line(answer["delegation"]))
