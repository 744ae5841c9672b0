"""Any A2A server: `covenant call` and `card get` call its agents, `covenant prove` tries its durability."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Coroutine, Iterator
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from covenant.cli.daemon_client import complete_agents, complete_tasks, connect, read_token, read_token_file
from covenant.cli.options import (
    CommandGroup,
    Duration,
    Function,
    given_home,
    home_option,
    local_command,
    read_text,
    token_option,
)
from covenant.cli.terminal import ExitCode, Failure, Output, Unreachable, brief, json_shape, put, say
from covenant.daemon.environment import environment
from covenant.prove.command_options import MEANING, OPTIONS, Option

if TYPE_CHECKING:
    from covenant.daemon.connect import Options
    from covenant.model.agent_card import RemoteCard
    from covenant.model.task_view import RemoteEvent
    from covenant.outbound.remote.remote_client import RemoteStream
    from covenant.outbound.remote.remote_task import Reply

A = TypeVar("A")

AGENTS_PATH: Final = "/v1/a2a/agents/"
NO_AGENT: Final = "unknown_task"
"""A2A uses the same code for an unknown agent."""
NO_CARD: Final = "no_card"
TIMED_OUT: Final = "timed_out"
ID_LENGTH: Final = 36
"""The length of a UUID. A shorter text is the beginning of one."""
_AGENT_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}").fullmatch

card: Final = CommandGroup("card", help="Agent cards, of any agent.", no_args_is_help=True)


def remote_command(function: Function) -> Function:
    """Adds the options for calls to a command, which gets them as `Options` in its second argument."""

    @click.option("--token-env", metavar="NAME", help="The environment variable with the agent's token.")
    @token_option("The file with the agent's token.")
    @click.option(
        "--header", "headers", multiple=True, metavar="NAME:VALUE", help="A header to send, only to this host."
    )
    @home_option("Where a2a_agents.json is.")
    @wraps(function)
    def run(
        output: Output,
        *,
        target: str,
        token_env: str | None,
        token_file: str | None,
        headers: tuple[str, ...],
        home: str | None,
        **own: Any,
    ) -> None:
        from covenant.daemon.connect import Options

        folder, name = given_home(home), target
        token = read_token_file(Path(token_file).expanduser()) if token_file is not None else None
        own_url = _own_agent(target, folder)
        if own_url is not None:
            target = own_url
            token = read_token(folder, token_file, environment()) if token_env is None else token
            if 0 < len(own.get("task_id") or "") < ID_LENGTH and token_file is None and token_env is None:
                with connect(folder) as client:
                    own["task_id"] = client.ask("show_a2a_task", task_id=own["task_id"])["task"]["id"]
        options = Options(
            token=token,
            token_env=token_env,
            headers=dict(_header(each) for each in headers),
            allow_private=_allowed(target, folder),
            home=folder,
            typed_by_user=True,
        )
        try:
            function(output, options, target=target, **own)
        except Failure as failure:
            raise _explained(
                failure, name if own_url is not None else None, folder, answers=own.get("task_id")
            ) from failure

    return run


def _explained(failure: Failure, own_agent: str | None, folder: Path, *, answers: str | None) -> Failure:
    """The failure, with advice if it is about an agent of the daemon in this home, or may be meant so.

    `answers`: the task that the call answers, if any.
    """
    from covenant.daemon.home import url_in

    code, text = failure.code, failure.message
    if (code == "connect_failed" and own_agent) or (code == "unknown_remote" and url_in(folder) is None):
        text = f"{text}; for an agent of {folder}, start its daemon: covenant serve --home {folder}"
    elif code == NO_CARD and own_agent:
        text = f"the daemon in {folder} has no agent {own_agent!r}; `covenant agents list` lists what there is"
    elif code == NO_AGENT and own_agent and not answers and (display := _mailbox_of(own_agent, folder)) is not None:
        way_out = f"covenant a2a send --to {display} --wait MESSAGE"
        text = f"{display} is an identity of the mailbox, and no agent; send it a task: {way_out}"
    return type(failure)(code, text)


@local_command(None, "call", "remote_reply", "state", "text", "task_id", "context_id", "artifacts", "usage", "way")
@click.argument("target", metavar="NAME|URL", shell_complete=complete_agents)
@click.argument("message")
@click.option("--stream", "as_it_comes", is_flag=True, help="Write the answer as it comes.")
@click.option("--poll", is_flag=True, help="Poll the task, even if the agent can stream.")
@click.option(
    "--timeout", "timeout_ms", type=Duration(), metavar="5m", help="Longest wait. Default: 5m, or the entry's."
)
@click.option(
    "--task",
    "task_id",
    metavar="ID",
    shell_complete=complete_tasks,
    help="Answer the question of this task. For an agent of this home, the beginning of the id is enough.",
)
@click.option("--context", "context_id", metavar="ID", help="The context that the message belongs to.")
@click.option("--key", "idempotency_key", help="Idempotency key: a repeated send under it is the same task.")
@remote_command
def call(
    output: Output, options: Options, *, target: str, message: str, as_it_comes: bool, poll: bool, **given: Any
) -> None:
    """Send MESSAGE to an agent, and wait for its answer; `-` reads the message from standard input.

    The agent is named by its URL, by the URL of its card, or by a name: one in a2a_agents.json, else that of an agent
    of the daemon in this home, which is called with the operator's token. A remote agent gets the message, its own
    token, and nothing else. Ctrl-C and a timeout cancel its task. Exits with 1 unless the task completed.
    """
    text = read_text(message)
    timeout_ms = given.pop("timeout_ms")
    given |= {"timeout_s": timeout_ms / 1000 if timeout_ms is not None else None, "stream": False if poll else None}
    progress = Progress(live=as_it_comes and not output.json)

    async def converse() -> tuple[Reply, str]:
        from covenant.daemon.connect import open_remote

        async with await open_remote(target, options) as remote:
            stream = progress.stream = remote.stream(text, **given, troubled=progress.troubled)
            async for event in stream:
                progress.show(event)
            return stream.reply, f"{remote.interface.binding} {remote.interface.version}"

    try:
        reply, spoken = _run(converse, target, options, canceled=lambda: f"canceled{progress.cancel_note}")
    except Failure as failure:
        if failure.code != TIMED_OUT or not progress.status_text:
            raise
        raise Failure(failure.code, f"{failure.message}; its last status: {progress.status_text}") from failure
    if not output.answer(_reply_object(reply, spoken)):
        progress.end(reply)
    if not reply.ok:
        raise click.exceptions.Exit(ExitCode.REFUSED)


@local_command(card, "get", "remote_card", "url", "card", "ways", "signed_by")
@click.argument("target", metavar="NAME|URL", shell_complete=complete_agents)
@click.option("--verify", is_flag=True, help="Demand a signature by a key from the card's own host, and check it.")
@remote_command
def get(output: Output, options: Options, *, target: str, verify: bool) -> None:
    """Fetch an agent's card and show it: its name, its skills and its interfaces.

    The agent is named by its URL, by the URL of its card, or by a name: one in a2a_agents.json, else that of an agent
    of the daemon in this home.
    """

    async def fetch() -> RemoteCard:
        from covenant.daemon.connect import open_card

        return await open_card(target, options, verify=verify)

    found = _run(fetch, target, options)
    if not output.answer(_card_object(found)):
        for line in _card_lines(found):
            put(line)


class Progress:
    """Writes progress to stderr if that is a terminal and, if `live`, the answer to stdout as it comes."""

    def __init__(self, *, live: bool) -> None:
        self._live = live
        self._watched = sys.stderr.isatty()
        self._wrote: list[str] = []
        self._artifacts: dict[str, _ChunkedText] = {}
        self._state: str | None = None
        self.status_text = ""
        """The last status of the task that has a text, such as why it waits."""
        self.stream: RemoteStream | None = None

    @property
    def cancel_note(self) -> str:
        return self.stream.cancel_note if self.stream is not None else ""

    def show(self, event: RemoteEvent) -> None:
        from covenant.model.task_view import RemoteArtifact, RemoteStatus, RemoteTask

        if isinstance(event, RemoteArtifact):
            if self._live:
                written = self._artifacts.setdefault(event.update.artifact_id, _ChunkedText())
                self._write(written.add(event.text, append=event.update.append))
        elif not isinstance(event, RemoteStatus | RemoteTask):
            if self._live:
                self._write(event.text)
        elif not event.state.terminal:
            self.status_text = event.text or self.status_text
            if not self._watched:
                return
            status = f"{event.state.value}: {brief(event.text)}" if event.text else event.state.value
            if status != self._state:
                self._state = status
                say(f"· {status}")

    def _write(self, text: str) -> None:
        if text:
            self._wrote.append(text)
            put(text, nl=False)

    def troubled(self, why: str) -> None:
        if self._watched:
            self._state = None
            say(f"· {why}; asking again")

    def end(self, reply: Reply) -> None:
        from covenant.model.content import Json, Text

        for written in self._artifacts.values():
            self._write(written.end())
        wrote = "".join(self._wrote)
        if wrote and not wrote.endswith("\n"):
            click.echo()
        if reply.text and reply.text.strip() not in wrote:
            put(reply.text)
        if reply.waits:
            say(f"covenant: the task waits for you ({reply.state.value}); answer with --task {reply.task_id}")
        elif not reply.ok:
            say(f"covenant: the task was not completed: {reply.state.value}")
        for artifact in reply.artifacts:
            if not all(isinstance(part, Text | Json) for part in artifact.parts):
                say(f"· made {artifact.name or artifact.artifact_id}; --json shows it")


class _ChunkedText:
    """Writes an artifact that comes in chunks.

    A second attempt at a task begins its text again. While it repeats the text that is written already, nothing is
    written; once it differs, its whole text is written on a new line.
    """

    def __init__(self) -> None:
        self._shown: list[str] = []
        self._again: str | None = None
        """The text of a later attempt, while it only repeats the text that is shown."""

    def add(self, text: str, *, append: bool) -> str:
        """The text to write now."""
        if append and self._again is None:
            self._shown.append(text)
            return text
        shown = "".join(self._shown)
        again = (self._again or "") + text if append else text
        if shown.startswith(again):
            self._again = again if again != shown else None
            return ""
        self._shown, self._again = [again], None
        return again[len(shown) :] if again.startswith(shown) else f"\n{again}"

    def end(self) -> str:
        """The text to write at the end: the last attempt counts, even if its text is shorter."""
        return f"\n{self._again}" if self._again is not None else ""


def _reply_object(reply: Reply, spoken: str) -> dict[str, Any]:
    import msgspec

    return {
        "state": reply.state.value,
        "text": reply.text,
        "task_id": reply.task_id,
        "context_id": reply.context_id,
        "artifacts": msgspec.to_builtins(reply.artifacts),
        "usage": reply.usage,
        "way": spoken,
    }


def _card_object(found: RemoteCard) -> dict[str, Any]:
    import msgspec

    return {
        "url": found.url,
        "card": found.fields,
        "ways": msgspec.to_builtins(found.interfaces),
        "signed_by": found.signed_by,
    }


def _card_lines(found: RemoteCard) -> Iterator[str]:
    yield f"{found.name} {found.version}"
    if found.description:
        yield f"  {found.description}"
    yield f"  card:      {found.url}"
    for each in found.interfaces:
        yield f"  called by: {each.binding} {each.version} at {each.url}"
    yield f"  streams:   {'yes' if found.streaming else 'no' if found.streaming is False else 'not said'}"
    wanted = ", ".join(each.header or each.scheme for each in found.credentials)
    yield f"  wants:     {wanted or 'no credential'}"
    if found.signed_by is not None:
        yield f"  signed by: {found.signed_by}"
    for skill in found.skills:
        yield f"  - {skill.name}: {skill.description}" if skill.description else f"  - {skill.name}"


def _run(
    work: Callable[[], Coroutine[Any, Any, A]],
    target: str,
    options: Options,
    *,
    canceled: Callable[[], str] = lambda: "canceled",
) -> A:
    """Runs a call, and turns its failures into those of a command, with advice. `canceled`: the text after Ctrl-C."""
    import asyncio

    from covenant.model.errors import CovenantError, Refusal
    from covenant.outbound.call_errors import CallFailed, RemoteError

    try:
        return asyncio.run(work())
    except KeyboardInterrupt:
        raise Failure("canceled", canceled()) from None
    except CallFailed as error:
        kind = Failure if error.sent else Unreachable
        detail = f" ({error.detail})" if error.detail != error.message else ""
        about = "" if error.sent else f"{target}: "
        raise kind(error.code, f"{about}{error.message}{detail}") from error
    except (Refusal, RemoteError) as error:
        detail = getattr(error, "detail", error.message)
        raise Failure(error.code, f"{detail}{_advice(error.code, target, options)}") from error
    except CovenantError as error:
        raise Failure("failed", str(error)) from error


def _advice(code: str, target: str, options: Options) -> str:
    """Advice on a failure, if there is one."""
    from covenant.daemon.connect import find_entry

    folder = Path(options.home or "")
    if code != "unauthenticated":
        return ""
    if options.token is not None or options.token_env is not None:
        return "; it does not accept the token that it was given"
    if "://" in target:
        return "; name its token with --token-file FILE or --token-env NAME"
    missing = find_entry(target, folder).missing_variable(environment())
    if missing is not None:
        return f"; the entry {target!r} has its token in the variable {missing}, which is not set"
    return f"; the entry {target!r} needs an auth with a token or token_env"


def _own_agent(target: str, home: Path) -> str | None:
    """The URL of an agent of the daemon in this home.

    Names in a2a_agents.json come first, also if their entry is wrong.
    """
    from covenant.daemon.home import url_in
    from covenant.outbound.remote.remote_registry import RemoteRegistry

    if _AGENT_NAME(target) is None or (base := url_in(home)) is None:
        return None
    registry = RemoteRegistry(home)
    return None if registry.has(target) else f"{base}{AGENTS_PATH}{target}"


def _mailbox_of(name: str, home: Path) -> str | None:
    """The identity of the mailbox with the name of this agent, if the operator of this home sees one."""
    try:
        with connect(home) as client:
            found = client.ask("list_identities", limit=1, prefix=f"{name}@", status="live")["identities"]
    except Failure:
        return None
    return str(found[0]["agent_id"]["display"]) if found else None


def _allowed(target: str, home: Path) -> tuple[str, ...]:
    """The places that the settings allow beside the typed host. A target that cannot be called is wrong usage."""
    from covenant.daemon.settings_loader import load
    from covenant.model.errors import SettingsError
    from covenant.outbound.urls import InvalidUrl, read_url

    try:
        allow = load({}, environment(), home=home).settings.outbound.allow
    except SettingsError as error:
        raise Failure("bad_settings", str(error)) from error
    if "://" in target:
        try:
            read_url(target)
        except InvalidUrl as error:
            raise click.UsageError(f"{target!r} cannot be called: {error}") from error
    return allow


def _header(text: str) -> tuple[str, str]:
    name, colon, value = text.partition(":")
    if not colon or not name.strip():
        raise click.UsageError(f"--header takes NAME:VALUE, not {text!r}")
    return name.strip(), value.strip()


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


def _prove(*, as_json: bool, **chosen: Any) -> None:
    from covenant.prove.command import run, wrong_usage

    chosen["json"] = as_json
    if wrong := wrong_usage(chosen):
        raise click.UsageError(wrong)
    click.get_current_context().exit(run(chosen))


prove = click.Command(
    "prove",
    params=[_click_option(option) for option in OPTIONS],
    callback=_prove,
    help=MEANING,
    epilog=json_shape(
        "durability", "server", "version", "speaks", "command", "card", "extent", "began", "seconds", "findings"
    ),
)
