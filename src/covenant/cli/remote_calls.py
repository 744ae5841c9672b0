"""What the commands that call other agents share: whom they call, with which token, and what becomes of a failure."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from covenant.cli.calling import said_before
from covenant.cli.failures import Failure, Refused, Unreachable
from covenant.daemon.environment import environment, find_home

if TYPE_CHECKING:
    from covenant.daemon.connecting import Options

A = TypeVar("A")


def calls_out(function: Callable[..., None]) -> Callable[..., None]:
    """Give a command the `Options` to call with as its first argument, and the options that make them."""

    @click.option("--token-env", metavar="NAME", help="The variable of the environment that has the agent's token.")
    @click.option("--token-file", metavar="FILE", help="The file that has it.")
    @click.option("--header", "headers", multiple=True, metavar="NAME:VALUE", help="Sent along, to this host alone.")
    @click.option(
        "--home", metavar="FOLDER", help="Where a2a_agents.json is. Default: COVENANT_HOME, else ~/.covenant."
    )
    @click.option("--json", "as_json", is_flag=True, help="Answer with one JSON object.")
    @wraps(function)
    def run(
        *,
        target: str,
        token_env: str | None,
        token_file: str | None,
        headers: tuple[str, ...],
        home: str | None,
        as_json: bool,
        **own: Any,
    ) -> None:
        from covenant.daemon.connecting import Options

        folder, _ = find_home(said_before("home", home), environment())
        options = Options(
            token=_token(said_before("token_file", token_file)),
            token_env=token_env,
            headers=dict(_header(each) for each in headers),
            allow_private=_allowed(target, folder),
            home=folder,
            meant=True,
        )
        function(options, target=target, as_json=as_json, **own)

    return run


def told(
    work: Callable[[], Coroutine[Any, Any, A]],
    target: str,
    options: Options,
    *,
    canceled: Callable[[], str] = lambda: "canceled",
) -> A:
    """Runs it, and tells its failures as a command does, with what can be done about them.

    `canceled`: what is said after a Ctrl-C.
    """
    import asyncio

    from covenant.model.errors import CovenantError, Refusal
    from covenant.outbound.failures import CallFailed
    from covenant.outbound.following import not_sent
    from covenant.outbound.remote_errors import RemoteError

    try:
        return asyncio.run(work())
    except KeyboardInterrupt:
        raise Failure("canceled", canceled()) from None
    except CallFailed as error:
        kind = Unreachable if not_sent(error) else Failure
        raise kind(
            error.code, f"{error.message} ({error.detail})" if error.detail != error.message else error.message
        ) from error
    except (Refusal, RemoteError) as error:
        detail = getattr(error, "detail", error.message)
        raise Refused(error.code, f"{detail}{_advice(error.code, target, options)}") from error
    except CovenantError as error:
        raise Failure("failed", str(error)) from error


def _advice(code: str, target: str, options: Options) -> str:
    """What to do about it, where that can be known."""
    from covenant.daemon.connecting import find_entry
    from covenant.daemon.whereabouts import url_in

    folder = Path(options.home or "")
    base = url_in(folder) if code == "unknown_remote" else None
    if base is not None:
        return f"; the daemon of this home has its own agents at {base}/v1/a2a/agents/NAME"
    if code != "unauthenticated" or options.token is not None or options.token_env is not None:
        return ""
    if "://" in target:
        return "; name its token with --token-file FILE or --token-env NAME"
    missing = find_entry(target, folder).missing(environment())
    if missing is not None:
        return f"; the entry {target!r} has its token in the variable {missing}, which is not set"
    return f"; the entry {target!r} needs an auth with a token or token_env"


def _allowed(target: str, home: Path) -> tuple[str, ...]:
    """What the home's settings allow besides the host that was typed. A target that cannot be called is wrong usage."""
    from covenant.daemon.loading import load
    from covenant.model.errors import SettingsError
    from covenant.outbound.location import Unreadable, read_url

    try:
        allow = load({}, environment(), home=home).settings.outbound.allow
    except SettingsError as error:
        raise Failure("bad_settings", str(error)) from error
    if "://" in target:
        try:
            read_url(target)
        except Unreadable as error:
            raise click.UsageError(f"{target!r} cannot be called: {error}") from error
    return allow


def _token(token_file: str | None) -> str | None:
    if token_file is None:
        return None
    path = Path(token_file).expanduser()
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise Failure("no_token", f"the token in {path} cannot be read: {error}") from error


def _header(text: str) -> tuple[str, str]:
    name, colon, value = text.partition(":")
    if not colon or not name.strip():
        raise click.UsageError(f"--header takes NAME:VALUE, not {text!r}")
    return name.strip(), value.strip()
