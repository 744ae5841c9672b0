"""Shared by commands: their groups, options and arguments, and how this program was called."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, Final

import click

from covenant.cli.terminal import UNITS_MS, Output, json_shape
from covenant.daemon.environment import environment, find_home

Function = Callable[..., None]

_DURATION: Final = re.compile(r"(\d{1,12})(ms|s|m|h|d)")


class SuggestingGroup(click.Group):
    """A group that suggests the nearest command for an unknown one.

    A verb without its noun (`covenant status`) names the noun: `a2a status`.
    """

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as wrong:
            from covenant.model.errors import did_you_mean

            noun = self._noun_of(ctx, args[0])
            meant = f"; did you mean {noun} {args[0]}?" if noun else did_you_mean(args[0], self.list_commands(ctx))
            raise click.UsageError(f"{wrong.message.rstrip('.')}{meant}" if meant else wrong.message, ctx) from None

    def _noun_of(self, ctx: click.Context, verb: str) -> str | None:
        """The first group that has a command of this name."""
        for noun in self.list_commands(ctx):
            group = self.get_command(ctx, noun)
            if isinstance(group, click.Group) and verb in group.list_commands(ctx):
                return noun
        return None


class CommandGroup(SuggestingGroup):
    """A group whose help lists its commands in the order of their definition."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002  (click's signature)
        return list(self.commands)


def combined(*options: Callable[[Function], Function]) -> Callable[[Function], Function]:
    """Several options and arguments as one decorator. Help lists them in this order."""

    def decorate(function: Function) -> Function:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


def make_command(
    group: click.Group | None, name: str, run: Function, epilog: str, *last: Callable[[Function], Function]
) -> click.Command:
    """A command, added to its group if it has one. `run` has its own options; help lists `last` after them."""
    own = run.__dict__.pop("__click_params__", [])
    combined(*last)(run)
    run.__dict__.setdefault("__click_params__", []).extend(own)
    made = click.command(name, epilog=epilog)(run)
    if group is not None:
        group.add_command(made)
    return made


def local_command(group: click.Group | None, name: str, kind: str, *fields: str) -> Callable[[Function], click.Command]:
    """Makes a function a command that needs no daemon. It gets an `Output` first, then its own arguments.

    `kind` and `fields` say what the command answers with --json.
    """

    def decorate(function: Function) -> click.Command:
        @wraps(function)
        def run(*, as_json: bool, **own: Any) -> None:
            function(Output(kind, as_json=as_json), **own)

        return make_command(group, name, run, json_shape(kind, *fields), json_option())

    return decorate


def given_before(ctx: click.Context, param: click.Parameter, given: str | None) -> str | None:
    """The callback of an option that may also stand right after `covenant`."""
    return given if given is not None else ctx.find_root().params.get(param.name or "")


def home_option(meaning: str = "The daemon's home.", *, fallback: bool = True) -> Callable[[Function], Function]:
    where = " Default: COVENANT_HOME, else ~/.covenant." if fallback else ""
    return click.option("--home", metavar="FOLDER", callback=given_before, help=meaning + where)


def token_option(
    meaning: str = "Call as the holder of this token instead of as operator.",
) -> Callable[[Function], Function]:
    return click.option("--token-file", metavar="FILE", callback=given_before, help=meaning)


def certificate_option(whom: str) -> Callable[[Function], Function]:
    meaning = f"A client certificate that stands for {whom}, instead of a token: its file, or one of its names."
    return click.option("--certificate", metavar="FILE|NAME", help=meaning, callback=_read_certificate)


def _read_certificate(_ctx: click.Context, _param: click.Parameter, given: str | None) -> str | None:
    """The name by which a certificate is known: sha256:…, dns:…, uri:… or email:…."""
    if given is None or not Path(given).is_file():
        return given
    from covenant.seal.certificates import certificate_names_of_pem

    try:
        return certificate_names_of_pem(Path(given).read_bytes())[0]
    except (OSError, ValueError) as error:
        raise click.UsageError(f"{given} holds no certificate in PEM: {error}") from error


def json_option(meaning: str = "Answer with one JSON object.") -> Callable[[Function], Function]:
    return click.option("--json", "as_json", is_flag=True, help=meaning)


def limit_option(default: int, most: int | None = None) -> Callable[[Function], Function]:
    count = click.IntRange(1, most)
    return click.option("--limit", "-n", type=count, default=default, show_default=True, help="Maximum number of rows.")


def follow_option(meaning: str) -> Callable[[Function], Function]:
    return click.option(
        "--follow", "-f", is_flag=True, help=f"{meaning} Ctrl-C ends it; a restart of the daemon does not."
    )


def given_home(home: str | None) -> Path:
    return find_home(home, environment())[0]


class Duration(click.ParamType[int]):
    """A number with its unit, as milliseconds."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        match = _DURATION.fullmatch(str(value).strip())
        if match is None:
            self.fail(f"{value!r} is no duration; write 500ms, 30s, 5m, 2h or 1d", param, ctx)
        return int(match[1]) * UNITS_MS[match[2]]


def _output_file(_ctx: click.Context, _param: click.Parameter, given: str | None) -> str | None:
    return None if given == "-" else given


file_argument: Final = click.argument(
    "file",
    required=False,
    metavar="[FILE]",
    type=click.Path(dir_okay=False, writable=True, allow_dash=True),
    callback=_output_file,
)
replace_option: Final = click.option(
    "--replace", "--force", "replace", is_flag=True, help="Overwrite an existing FILE."
)


def read_text(given: str) -> str:
    """A text argument as it stands; for `-`, all of standard input."""
    if given != "-":
        return given
    return sys.stdin.buffer.read().decode("utf-8", "replace").removesuffix("\n")


def program() -> str:
    """The words that call this program from the current folder."""
    called = Path(sys.argv[0])
    found = shutil.which("covenant")
    if found is not None and Path(found).resolve() == called.resolve():
        return "covenant"
    return shlex.quote(short_path(called.absolute()))


def short_path(path: Path) -> str:
    """The path from the current folder if it is below that, else the path as it is."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative
