"""`covenant prove`: the durability kit, which needs no daemon of ours."""

from __future__ import annotations

from typing import Any

import click

from covenant.cli.terminal import json_shape
from covenant.prove.command_options import MEANING, OPTIONS, Option


def _click_option(option: Option) -> click.Option:
    names = [f"--{option.name}", "as_json" if option.name == "json" else option.name.replace("-", "_")]
    if option.metavar is None:
        return click.Option(names, is_flag=True, help=option.meaning)
    return click.Option(
        names,
        metavar=option.metavar,
        help=option.meaning,
        default=None if option.many else option.default,
        show_default=option.default is not None,
        multiple=option.many,
        type=click.Choice(option.choices) if option.choices else type(option.default or ""),
    )


def _run(*, as_json: bool, **chosen: Any) -> None:
    from covenant.prove.command import run, wrong_usage

    chosen["json"] = as_json
    if wrong := wrong_usage(chosen):
        raise click.UsageError(wrong)
    click.get_current_context().exit(run(chosen))


prove = click.Command(
    "prove",
    params=[_click_option(option) for option in OPTIONS],
    callback=_run,
    help=MEANING,
    epilog=json_shape(
        "durability", "server", "version", "speaks", "command", "card", "extent", "began", "seconds", "findings"
    ),
)
