"""Shared by commands: options, the invocation of a command that asks the daemon, and how this program was called."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import wraps
from pathlib import Path
from typing import IO, Any, Final

import click

from covenant.cli.daemon_client import ANSWER_S, Answer, DaemonClient, read_token
from covenant.cli.terminal import UNITS_MS, Failure, Unreachable, json_shape, put, put_json, say
from covenant.daemon.environment import environment, find_home

Function = Callable[..., None]

AWAY_S: Final = (0.1, 2.0)
"""The shortest and the longest pause of a following command while its daemon is down."""
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
        """The first of its groups that has a command of this name."""
        for noun in self.list_commands(ctx):
            group = self.get_command(ctx, noun)
            if isinstance(group, click.Group) and verb in group.list_commands(ctx):
                return noun
        return None


class CommandGroup(SuggestingGroup):
    """A group whose help lists its commands in the order of their definition."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002  (click's signature)
        return list(self.commands)


class Invocation:
    """One run of a command that asks the daemon: its connection, and how it was asked to answer."""

    def __init__(
        self, client: DaemonClient, kind: str, *, home: str | None, token_file: str | None, as_json: bool
    ) -> None:
        self._kind = kind
        self._caller = (("--home", home), ("--token-file", token_file))
        self.json = as_json
        self._client = client
        self._answered = False

    @property
    def again(self) -> str:
        """How to call this program again as the same caller, up to the command."""
        given = (f"{name} {shlex.quote(value)}" for name, value in self._caller if value is not None)
        return " ".join([program(), *given])

    @property
    def token(self) -> str:
        """The headers for requests to the daemon's HTTP server."""
        return self._client.token

    def ask(self, kind: str, *, within_s: float = ANSWER_S, **fields: Any) -> Answer:
        answer = self._client.ask(kind, within_s=within_s, **fields)
        self._answered = True
        return answer

    def ask_waiting(self, kind: str, wait_ms: int | None, **fields: Any) -> Answer:
        """Send a request that the daemon may take `wait_ms` to answer."""
        return self.ask(kind, within_s=ANSWER_S + (wait_ms or 0) / 1000, wait_ms=wait_ms, **fields)

    def ask_on(self, kind: str, wait_ms: int, **fields: Any) -> Answer:
        """The same for a command that keeps asking: it waits while the daemon is down, and asks again. A daemon that is
        down at the first request is a failure.
        """
        failures = 0
        while True:
            try:
                answer = self.ask_waiting(kind, wait_ms, **fields)
            except Failure as failure:
                gone = isinstance(failure, Unreachable) or failure.code in ("stopping", "outcome_unknown")
                if not gone or not (self._answered or failures):
                    raise
                failures += 1
                if failures == 1:
                    say("covenant: the daemon is away; waiting for it")
                self._client.close()
                _pause_while_away(failures)
                continue
            if failures:
                say("covenant: the daemon is back")
            return answer

    def answer(self, value: Mapping[str, Any], *, kind: str | None = None) -> bool:
        """Write the JSON object if one was asked for; False if people are to be answered instead."""
        if self.json:
            put_json({"kind": kind or self._kind, **{name: each for name, each in value.items() if name != "kind"}})
        return self.json

    def show(self, value: Mapping[str, Any], data: str, *talk: str) -> None:
        """Answer with the JSON object, or with a line of data on stdout and messages on stderr."""
        if self.answer(value):
            return
        put(data)
        for line in talk:
            say(line)


def _pause_while_away(failures: int) -> None:
    from covenant.model.rate_limits import Backoff

    time.sleep(Backoff(*AWAY_S).pause(failures))


def daemon_command(group: click.Group, name: str, kind: str, *fields: str, epilog: str = "") -> Callable[..., Function]:
    """Make a function a command that asks the daemon. It gets an `Invocation` first, then its own arguments.

    `kind` and `fields` say what the command answers with --json.
    """

    def decorate(function: Function) -> Function:
        @wraps(function)
        def run(*, home: str | None, token_file: str | None, as_json: bool, **own: Any) -> None:
            variables = environment()
            home, token_file = given_before("home", home), given_before("token_file", token_file)
            folder, _ = find_home(home, variables)
            with DaemonClient(folder, read_token(folder, token_file, variables)) as client:
                function(Invocation(client, kind, home=home, token_file=token_file, as_json=as_json), **own)

        # The function's own options are already on `run`. These three stand after them in help, so they go first.
        own_options = run.__dict__.pop("__click_params__", [])
        for option in (json_option(), token_option, home_option()):
            option(run)
        run.__dict__.setdefault("__click_params__", []).extend(own_options)
        group.command(name, epilog=json_shape(kind, *fields) + epilog)(run)
        return run

    return decorate


def home_option(meaning: str = "The daemon's home.", *, fallback: bool = True) -> Callable[[Function], Function]:
    where = " Default: COVENANT_HOME, else ~/.covenant." if fallback else ""
    return click.option("--home", metavar="FOLDER", help=meaning + where)


token_option: Final = click.option(
    "--token-file", metavar="FILE", help="Call as the holder of this token instead of as operator."
)


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


@contextmanager
def ended_by_ctrl_c() -> Iterator[None]:
    """Ctrl-C ends a command that a person watches, and is no failure."""
    with suppress(KeyboardInterrupt):
        yield


def given_before(name: str, value: str | None) -> str | None:
    """The value of an option that may also stand right after `covenant`."""
    if value is not None:
        return value
    first: str | None = click.get_current_context().find_root().params.get(name)
    return first


def given_home(home: str | None) -> Path:
    return find_home(given_before("home", home), environment())[0]


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


def check_output(call: Invocation, file: str | None, *, replace: bool) -> None:
    """Checks, before anything is asked for, that FILE may be written to; for None, standard output."""
    if file is None and call.json:
        raise click.UsageError("--json says what was written: name a FILE")
    if file is not None and not replace and Path(file).is_file():
        raise Failure("file_exists", f"{file} is there already; name another one, or give --replace")


@contextmanager
def written(path: Path) -> Iterator[IO[bytes]]:
    """Writes a file that only its owner can read, and that gets its name once it is complete and on disk.

    A device or a pipe is written to directly.
    """
    try:
        if path.exists() and not path.is_file():
            with path.open("wb") as target:
                yield target
            return
        number, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with os.fdopen(number, "wb") as target:
                yield target
                target.flush()
                os.fsync(target.fileno())
            Path(name).replace(path)
        except BaseException:
            with suppress(OSError):
                Path(name).unlink()
            raise
    except OSError as error:
        raise Failure("cannot_write", f"{path}: {error.strerror or error}") from error


def write_lines(
    call: Invocation, file: str | None, items: Iterable[Mapping[str, Any]], what: str, *, replace: bool
) -> None:
    """One JSON object a line, to the file or to standard output."""
    check_output(call, file, replace=replace)
    lines = (json.dumps(item, ensure_ascii=False, separators=(",", ":")) + "\n" for item in items)
    if file is None:
        sys.stdout.writelines(lines)
        return
    count = 0
    with written(Path(file)) as target:
        for line in lines:
            target.write(line.encode())
            count += 1
    if not call.answer({"file": file, "count": count}):
        put(f"wrote {count} {what} to {file}")


def read_text(given: str) -> str:
    """A text argument as it stands; for `-`, all of standard input."""
    if given != "-":
        return given
    return sys.stdin.buffer.read().decode("utf-8", "replace").removesuffix("\n")


def purge_command(group: click.Group, ask: str, kind: str, what: str, meaning: str) -> None:
    """Add a command `purge` that removes entries older than a moment or an age."""

    @daemon_command(group, "purge", kind, "before_ms", "purged")
    @click.option("--before-ms", type=click.IntRange(min=0), help="Drop entries older than this epoch millisecond.")
    @click.option("--older-than-ms", type=click.IntRange(min=0), help="Drop entries older than this many milliseconds.")
    def purge(call: Invocation, *, before_ms: int | None, older_than_ms: int | None) -> None:
        from covenant.daemon.environment import now_ms

        if (before_ms is None) == (older_than_ms is None):
            raise click.UsageError("say how old: either --before-ms or --older-than-ms")
        moment_ms = before_ms if before_ms is not None else max(0, now_ms() - (older_than_ms or 0))
        answer = call.ask(ask, before_ms=moment_ms)
        call.show({"before_ms": answer["before_ms"], "purged": answer["purged"]}, f"purged {answer['purged']} {what}")

    group.commands["purge"].help = meaning


def program() -> str:
    """How to call this program again from here."""
    called = Path(sys.argv[0])
    found = shutil.which("covenant")
    if found is not None and Path(found).resolve() == called.resolve():
        return "covenant"
    return shlex.quote(near(called.absolute()))


def near(path: Path) -> str:
    """The shortest form of a path from the current folder."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative
