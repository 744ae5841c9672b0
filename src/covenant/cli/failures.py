"""How a command fails: each failure has its exit code, and is one JSON object where JSON was asked for."""

from __future__ import annotations

import enum
from typing import IO, Any

import click

from covenant.cli.output import put_json, say


class ExitCode(enum.IntEnum):
    OK = 0
    REFUSED = 1
    USAGE = 2
    UNREACHABLE = 3
    UNCHECKED = 4


class Failure(click.ClickException):
    exit_code = ExitCode.REFUSED

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        context = click.get_current_context(silent=True)  # gone by the time that `show` is called
        self._as_json = context is not None and bool(context.params.get("as_json"))

    def show(self, file: IO[Any] | None = None) -> None:  # noqa: ARG002  (click's signature)
        if self._as_json:
            put_json({"kind": "error", "code": self.code, "message": self.message})
        say(f"covenant: {self.message}")


class Refused(Failure):
    """The daemon understood, and said no."""


class Unreachable(Failure):
    """Nobody answers on the socket."""

    exit_code = ExitCode.UNREACHABLE
