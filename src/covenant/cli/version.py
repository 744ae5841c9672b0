"""`covenant version`."""

from __future__ import annotations

import click

import covenant
from covenant.cli.output import put, put_json, shape


@click.command("version", epilog=shape("version", "version"))
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def command(*, as_json: bool) -> None:
    """Print the version."""
    if as_json:
        put_json({"kind": "version", "version": covenant.__version__})
    else:
        put(f"covenant {covenant.__version__}")
