"""How much a tenant may ask for, as options."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import click

from covenant.model.tenant import TenantLimits

_MEANINGS: Final = {
    "concurrency": "Turns worked on at once.",
    "rate_per_min": "Requests a minute.",
    "burst": "Requests that may come at once.",
    "connections": "Requests answered at once.",
    "streams": "Open streams.",
    "live_tasks": "Tasks that have not ended.",
    "queued_bytes": "Size of these tasks.",
}


def bounds(function: Callable[..., None]) -> Callable[..., None]:
    """The limits of a tenant. What is not given is the daemon's own default."""
    for name in reversed(TenantLimits.__struct_fields__):
        count = click.IntRange(0, TenantLimits.most(name))
        otherwise = "a minute's" if name == "burst" else "as the settings say"
        help_text = f"{_MEANINGS[name]} 0: {otherwise}."
        function = click.option(f"--{name.replace('_', '-')}", type=count, default=0, help=help_text)(function)
    return function
