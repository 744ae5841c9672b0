"""`covenant settings show`: what is in force, and where it came from. Needs no daemon."""

from __future__ import annotations

import click

from covenant.cli.calling import said_before
from covenant.cli.failures import Failure
from covenant.cli.output import console, put_json, shape, table


@click.command("show", epilog=shape("settings", "settings"))
@click.option("--home", metavar="FOLDER", help="The home whose settings.toml is read.")
@click.option("--json", "as_json", is_flag=True, help="Answer with one JSON object.")
def command(*, home: str | None, as_json: bool) -> None:
    """Show every setting: its value, where that came from, and what it means.

    A value that is not allowed is an error here, as it is for `covenant serve`.
    """
    from covenant.daemon.environment import environment
    from covenant.daemon.loading import load, rows
    from covenant.model.errors import SettingsError

    try:
        loaded = load({}, environment(), home=said_before("home", home))
    except SettingsError as error:
        raise Failure("bad_setting", str(error)) from error
    if as_json:
        put_json({"kind": "settings", "settings": [row._asdict() for row in rows(loaded)]})
        return
    made = table("", "setting", "value", "from", "meaning")
    for row in rows(loaded):
        value = ",".join(row.value) if isinstance(row.value, tuple) else str(row.value)
        made.add_row(row.name, value, row.source, row.meaning, style="" if row.source == "default" else "bold")
    console().print(made)
