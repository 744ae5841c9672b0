"""`covenant peers proof`."""

from __future__ import annotations

import json

import click

from covenant.cli.calling import Call, calls
from covenant.cli.output import put, shape


@click.command("proof", epilog=shape("delegation_proof", "offer", "result", "transcript", "proof"))
@click.argument("delegation")
@calls
def command(call: Call, *, delegation: str) -> None:
    """Write all that proves a delegation's result, for `covenant peers verify-proof` or for somebody else.

    \b
        covenant peers proof ID > proof.json
    """
    answer = call.ask("delegation_proof", delegationId=delegation)
    if not call.answer(answer):
        put(json.dumps(answer, ensure_ascii=False, indent=2))
