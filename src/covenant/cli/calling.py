"""What every command that talks to the daemon shares: --home, --token-file, --json, and one connection."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import Any

import click

from covenant.cli.connection import Connection
from covenant.cli.failures import Failure, Unreachable
from covenant.cli.output import put_json
from covenant.daemon.environment import TOKEN_VARIABLE, environment, find_home


class Call:
    """One run of a command: how it was asked to answer, and its connection."""

    def __init__(self, connection: Connection, *, home: str | None, token_file: str | None, as_json: bool) -> None:
        self._said = (home, token_file)
        self.json = as_json
        self.ask = connection.ask

    @property
    def again(self) -> str:
        """How to call as the same caller once more, up to the command."""
        from covenant.cli.program import again

        return again(*self._said)

    def answer(self, value: Mapping[str, Any]) -> bool:
        """Write the JSON object if one was asked for; False if people are to be answered instead."""
        if self.json:
            put_json(value)
        return self.json


def calls(function: Callable[..., None]) -> Callable[..., None]:
    """Give a command its `Call` as first argument, and the options that make it."""

    @click.option("--home", metavar="FOLDER", help="The daemon's home. Default: COVENANT_HOME, else ~/.covenant.")
    @click.option("--token-file", metavar="FILE", help="Call as the holder of this token instead of as operator.")
    @click.option("--json", "as_json", is_flag=True, help="Answer with one JSON object.")
    @wraps(function)
    def run(*, home: str | None, token_file: str | None, as_json: bool, **own: Any) -> None:
        variables = environment()
        home, token_file = said_before("home", home), said_before("token_file", token_file)
        folder, _ = find_home(home, variables)
        token = read_token(folder, token_file, variables)
        with Connection(folder, token) as connection:
            function(Call(connection, home=home, token_file=token_file, as_json=as_json), **own)

    return run


def said_before(name: str, value: str | None) -> str | None:
    """The value of an option that may also stand right after `covenant`."""
    if value is not None:
        return value
    first: str | None = click.get_current_context().find_root().params.get(name)
    return first


def read_token(home: Path, token_file: str | None, variables: Mapping[str, str]) -> str:
    """The named file's token, else the environment's, else the operator's."""
    if token_file is not None:
        path = Path(token_file).expanduser()
    elif variables.get(TOKEN_VARIABLE):
        return variables[TOKEN_VARIABLE].strip()
    else:
        path = home / "operator.token"
    try:
        return path.read_text(encoding="ascii").strip()
    except FileNotFoundError as error:
        if token_file is None and not (home / "sock").exists():
            raise Unreachable(
                "daemon_unreachable", f"no daemon has run in {home}; start one with `covenant serve --home {home}`"
            ) from error
        raise Failure("no_token", f"there is no token in {path}; name another with --token-file") from error
    except (OSError, UnicodeDecodeError) as error:
        raise Failure("no_token", f"the token in {path} cannot be read: {error}") from error
