"""`covenant peers config`."""

from __future__ import annotations

import click

from covenant.cli.calling import Call, calls
from covenant.cli.output import put, shape


@click.command("config", epilog=shape("peer_config", "id", "name", "config"))
@calls
def command(call: Call) -> None:
    """Show the settings of peers in force, and who this instance is."""
    answer = call.ask("peer_config")
    if call.answer(answer):
        return
    put(f"{answer['name']}  {answer['id']}")
    for name, value in answer["config"].items():
        put(f"{name} = {value}")
