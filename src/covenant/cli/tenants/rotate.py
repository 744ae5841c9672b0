"""`covenant tenants rotate`."""

from __future__ import annotations

import click

from covenant.cli.calling import Call, calls
from covenant.cli.output import put, say, shape


@click.command("rotate", epilog=shape("tenant_rotated", "tenant", "token"))
@click.argument("name")
@calls
def command(call: Call, *, name: str) -> None:
    """Give a tenant a new token and print it. The old one is refused from then on, and its open streams end."""
    answer = call.ask("rotate_tenant", name=name)
    if call.answer(answer):
        return
    put(answer["token"])
    say(f"this is the token of {answer['tenant']['name']} now; the old one is refused from here on")
