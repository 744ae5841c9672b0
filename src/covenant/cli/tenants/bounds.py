"""How much a tenant may ask for, as options."""

from __future__ import annotations

from collections.abc import Callable

import click

BOUND_MAX = 1_000_000


def bounds(function: Callable[..., None]) -> Callable[..., None]:
    """The three limits. What is not given is the daemon's own default."""
    count = click.IntRange(0, BOUND_MAX)
    for option in (
        click.option("--burst", type=count, default=0, help="Requests that may come at once. 0: a minute's."),
        click.option("--rate-per-min", type=count, default=0, help="Requests a minute. 0: as the settings say."),
        click.option("--concurrency", type=count, default=0, help="Sends and streams at once. 0: as the settings say."),
    ):
        function = option(function)
    return function
