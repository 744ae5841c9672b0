"""Whose agents a command is about."""

from __future__ import annotations

from typing import Final

import click

tenant_option: Final = click.option(
    "--tenant", metavar="NAME", default="default", show_default=True, help="Whose catalogue."
)
