"""`covenant tenants add`."""

from __future__ import annotations

import click

from covenant.cli.calling import Call, calls
from covenant.cli.output import put, say, shape
from covenant.cli.tenants.bounds import bounds


@click.command("add", epilog=shape("tenant_added", "tenant", "token"))
@click.argument("name")
@bounds
@calls
def command(call: Call, *, name: str, **limits: int) -> None:
    """Add a tenant and print its token. The token is told once, and stored nowhere.

    \b
        (umask 077; covenant tenants add acme > acme.token)
    """
    answer = call.ask("add_tenant", name=name, limits=limits)
    if call.answer(answer):
        return
    put(answer["token"])
    say(f"added the tenant {answer['tenant']['name']}; its callers are client@{answer['tenant']['name']}")
