"""A group of commands that are loaded only when one of them is run: starting costs what the command needs.

Each command is the attribute `command` of its own module.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module

import click


class LazyGroup(click.Group):
    """`modules` maps each command's name to its module, in the order that help lists them."""

    def __init__(self, name: str, modules: Mapping[str, str], meaning: str) -> None:
        super().__init__(name, help=meaning, no_args_is_help=True)
        self._modules = modules

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002  (click's signature)
        return list(self._modules)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002  (as above)
        module = self._modules.get(cmd_name)
        if module is None:
            return None
        command = import_module(module).command
        assert isinstance(command, click.Command)
        return command
