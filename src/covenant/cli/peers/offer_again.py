"""`covenant peers offer-again`."""

from __future__ import annotations

import click

from covenant.cli.calling import Call, calls
from covenant.cli.output import put, shape
from covenant.cli.peers.telling import delegation_line


@click.command("offer-again", epilog=shape("delegation", "delegation"))
@click.argument("delegation")
@calls
def command(call: Call, *, delegation: str) -> None:
    """Offer a lost delegation again, under the same id: a provider that has it does not begin it twice."""
    answer = call.ask("offer_again", delegationId=delegation)
    if not call.answer(answer):
        put(delegation_line(answer["delegation"]))
