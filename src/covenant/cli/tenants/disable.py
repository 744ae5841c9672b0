"""`covenant tenants disable`."""

from __future__ import annotations

import click

from covenant.cli.calling import Call, calls
from covenant.cli.output import put, shape


@click.command("disable", epilog=shape("tenant_changed", "tenant"))
@click.argument("name")
@calls
def command(call: Call, *, name: str) -> None:
    """Let nobody speak for a tenant any more. Ends its open streams at once; its tasks go on."""
    answer = call.ask("change_tenant", name=name, disabled=True)
    if not call.answer(answer):
        put(f"disabled {answer['tenant']['name']}")
