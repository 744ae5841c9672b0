"""`covenant peers cancel`."""

from __future__ import annotations

import click

from covenant.cli.calling import Call, calls
from covenant.cli.output import put, shape
from covenant.cli.peers.telling import delegation_line


@click.command("cancel", epilog=shape("delegation", "delegation"))
@click.argument("delegation")
@click.option("--reason", default="", help="What its provider is told.")
@calls
def command(call: Call, *, delegation: str, reason: str) -> None:
    """Cancel a delegation. Its provider is told as soon as it can be, and stops."""
    answer = call.ask("cancel_delegation", delegationId=delegation, reason=reason)
    if not call.answer(answer):
        put(delegation_line(answer["delegation"]))
