"""`covenant tenants limit`."""

from __future__ import annotations

import click

from covenant.cli.calling import Call, calls
from covenant.cli.output import put, shape
from covenant.cli.tenants.bounds import bounds
from covenant.cli.tenants.list import limits_of


@click.command("limit", epilog=shape("tenant_changed", "tenant"))
@click.argument("name")
@bounds
@calls
def command(call: Call, *, name: str, **limits: int) -> None:
    """Change how much a tenant may ask for, all limits at once: what is not given is the daemon's default again."""
    answer = call.ask("change_tenant", name=name, limits=limits)
    if not call.answer(answer):
        put(f"{answer['tenant']['name']}: {limits_of(answer['tenant'])}")
