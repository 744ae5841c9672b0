"""`covenant tenants enable`."""

from __future__ import annotations

import click

from covenant.cli.calling import Call, calls
from covenant.cli.output import put, shape


@click.command("enable", epilog=shape("tenant_changed", "tenant"))
@click.argument("name")
@calls
def command(call: Call, *, name: str) -> None:
    """Let a disabled tenant call again, with the token it had."""
    answer = call.ask("change_tenant", name=name, disabled=False)
    if not call.answer(answer):
        put(f"enabled {answer['tenant']['name']}")
