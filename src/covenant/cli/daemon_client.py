"""The client of the daemon's socket, and the commands and completions that use it.

Every wait is bounded. The first request of a command opens its connection. A completion has a bound in count and time,
and proposes nothing if there is no daemon.
"""

from __future__ import annotations

import json
import shlex
import socket
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import Any, Final, Self

import click
from click.shell_completion import CompletionItem

from covenant.cli.options import Function, given_home, home_option, json_option, make_command, program, token_option
from covenant.cli.terminal import Failure, Output, Unreachable, brief, complete_file, json_shape, put, say
from covenant.daemon.environment import TOKEN_VARIABLE, environment, find_home, now_ms
from covenant.wire.ipc_frames import HEADER_BYTES, encode_frame, frame_length

ANSWER_BYTES_MAX: Final = 64 * 1024 * 1024
"""The largest frame that a daemon can be set to send."""
ANSWER_S: Final = 30.0
"""How long an answer may take, in addition to the wait that the request itself asks for."""
CONNECT_S: Final = 5.0
RECONNECT_PAUSES_S: Final = (0.1, 2.0)
"""The shortest and the longest pause of a following command while its daemon is down."""
COMPLETION_S: Final = 2.0
LISTED_BY: Final = {
    "unknown_task": "a2a list",
    "unknown_identity": "identities list",
    "unknown_grant": "capabilities recent",
    "unknown_tenant": "tenants list",
    "unknown_peer": "peers list",
    "unknown_delegation": "peers delegations",
}
"""The command that lists what a wrong name or id may have meant."""
PROPOSED_MAX: Final = 50

Answer = dict[str, Any]
Complete = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]


class DaemonClient:
    def __init__(self, home: Path, token: str) -> None:
        self._home = home
        self.token = token
        self._socket: socket.socket | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connection. The next request opens another one."""
        if self._socket is not None:
            self._socket.close()
        self._socket = None

    def ask(self, kind: str, *, within_s: float = ANSWER_S, **fields: Any) -> Answer:
        """Sends one request, without the fields that are None. Raises `Failure` with the daemon's refusal."""
        if self._socket is None:
            self._socket = self._open()
        request = {"kind": kind, **{name: value for name, value in fields.items() if value is not None}}
        answer = _exchange(self._socket, request, within_s)
        if answer.get("kind") == "error":
            code, message = str(answer.get("code", "error")), str(answer.get("message", "refused"))
            advice = f"; `covenant {LISTED_BY[code]}` lists what there is" if code in LISTED_BY else ""
            raise Failure(code, f"{message}{advice}")
        return answer

    def wait_closed(self, within_s: float) -> None:
        if self._socket is None:
            return
        self._socket.settimeout(within_s)
        try:
            while self._socket.recv(HEADER_BYTES):
                pass
        except TimeoutError:
            raise Unreachable("daemon_unreachable", f"the daemon has not stopped within {within_s:.0f} s") from None
        except OSError:
            pass  # closed, with an error

    def _open(self) -> socket.socket:
        opened = _connect(self._home)
        try:
            answer = _exchange(opened, {"kind": "authenticate", "token_b58": self.token}, ANSWER_S)
            if answer.get("kind") != "authenticated":
                reason = answer.get("reason") or answer.get("message") or "the token was not accepted"
                raise Failure(
                    "unknown_token",
                    f"{reason}; name a token with --token-file or COVENANT_TOKEN, or name none to be the operator",
                )
        except BaseException:
            opened.close()
            raise
        return opened


def connect(home: Path, token_file: str | None = None) -> DaemonClient:
    return DaemonClient(home, read_token(home, token_file, environment()))


def read_token(home: Path, token_file: str | None, variables: Mapping[str, str]) -> str:
    """The named file's token, else the environment's, else the operator's."""
    if token_file is not None:
        path = Path(token_file).expanduser()
    elif variables.get(TOKEN_VARIABLE):
        return _checked_token(variables[TOKEN_VARIABLE], TOKEN_VARIABLE)
    else:
        path = home / "operator.token"
    if token_file is None and not path.exists() and not (home / "sock").exists():
        raise Unreachable(
            "daemon_unreachable", f"no daemon has run in {home}; start one with `covenant serve --home {home}`"
        )
    return read_token_file(path)


def read_token_file(path: Path) -> str:
    try:
        return _checked_token(path.read_text(encoding="utf-8", errors="replace"), str(path))
    except FileNotFoundError as error:
        raise Failure("no_token", f"there is no token in {path}; name another with --token-file") from error
    except OSError as error:
        raise Failure("no_token", f"the token in {path} cannot be read: {error.strerror or error}") from error


def _checked_token(text: str, named: str) -> str:
    token = text.strip()
    if not token or not token.isascii():
        raise Failure("no_token", f"{named} holds no token; name a file with one with --token-file")
    return token


def _exchange(opened: socket.socket, request: Mapping[str, Any], within_s: float) -> Answer:
    body = json.dumps(request, ensure_ascii=False).encode("utf-8", "surrogatepass")
    opened.settimeout(within_s)
    try:
        # A daemon that refuses a frame closes early: its refusal is still there to be read.
        with suppress(BrokenPipeError, ConnectionResetError):
            opened.sendall(encode_frame(body))
        length = frame_length(_read(opened, HEADER_BYTES))
        if length > ANSWER_BYTES_MAX:
            raise Unreachable("daemon_unreachable", "the answer is larger than any answer of a daemon")
        answer = json.loads(_read(opened, length))
    except TimeoutError:
        raise Unreachable(
            "daemon_unreachable",
            f"no answer within {within_s:.0f} s; the request may still be carried out. Look before you repeat it",
        ) from None
    except (OSError, ValueError) as error:
        raise Unreachable(
            "daemon_unreachable", f"the daemon went away before it answered ({error}); start it with `covenant serve`"
        ) from error
    if not isinstance(answer, dict):
        raise Unreachable("daemon_unreachable", "the answer is no JSON object; is this a covenant daemon?")
    return answer


def _connect(home: Path) -> socket.socket:
    path = home / "sock"
    opened = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    opened.settimeout(CONNECT_S)
    try:
        opened.connect(str(path))
    except OSError as error:
        opened.close()
        raise Unreachable(
            "daemon_unreachable",
            f"no daemon answers on {path} ({error.strerror or error}); start it with `covenant serve --home {home}`",
        ) from error
    return opened


def _read(opened: socket.socket, length: int) -> bytes:
    parts: list[bytes] = []
    while length > 0:
        part = opened.recv(min(length, 1 << 20))
        if not part:
            raise ConnectionError("the connection was closed")
        parts.append(part)
        length -= len(part)
    return b"".join(parts)


class Invocation(Output):
    """One run of a command that asks the daemon: its connection, and how it was asked to answer."""

    def __init__(
        self, client: DaemonClient, kind: str, *, home: str | None, token_file: str | None, as_json: bool
    ) -> None:
        super().__init__(kind, as_json=as_json)
        self._caller = (("--home", home), ("--token-file", token_file))
        self.client = client
        self._answered = False

    @property
    def program(self) -> str:
        """The words that call this program as the same caller, up to the command."""
        given = (f"{name} {shlex.quote(value)}" for name, value in self._caller if value is not None)
        return " ".join([program(), *given])

    def ask(self, kind: str, *, within_s: float = ANSWER_S, **fields: Any) -> Answer:
        answer = self.client.ask(kind, within_s=within_s, **fields)
        self._answered = True
        return answer

    def ask_waiting(self, kind: str, wait_ms: int | None, **fields: Any) -> Answer:
        """Sends a request that the daemon may take `wait_ms` to answer."""
        return self.ask(kind, within_s=ANSWER_S + (wait_ms or 0) / 1000, wait_ms=wait_ms, **fields)

    def ask_through_restarts(self, kind: str, wait_ms: int, **fields: Any) -> Answer:
        """Sends a request as `ask_waiting` does, for a command that follows something: repeats it after a restart.

        If the daemon is down at the command's first request, the command fails.
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
                self.client.close()
                from covenant.model.rate_limits import Backoff

                time.sleep(Backoff(*RECONNECT_PAUSES_S).pause(failures))
                continue
            if failures:
                say("covenant: the daemon is back")
            return answer


def daemon_command(
    group: click.Group | None, name: str, kind: str, *fields: str, epilog: str = ""
) -> Callable[[Function], click.Command]:
    """Makes a function a command that asks the daemon. It gets an `Invocation` first, then its own arguments.

    `kind` and `fields` say what the command answers with --json.
    """

    def decorate(function: Function) -> click.Command:
        @wraps(function)
        def run(*, home: str | None, token_file: str | None, as_json: bool, **own: Any) -> None:
            with connect(given_home(home), token_file) as client:
                function(Invocation(client, kind, home=home, token_file=token_file, as_json=as_json), **own)

        shape = json_shape(kind, *fields) + epilog
        return make_command(group, name, run, shape, home_option(), token_option(), json_option())

    return decorate


def check_output(call: Invocation, file: str | None, *, replace: bool) -> None:
    """Checks that the output can go to this file, or for None to standard output. Called before the first request."""
    if file is None and call.json:
        raise click.UsageError("--json says what was written: name a FILE")
    if file is not None and not replace and Path(file).is_file():
        raise Failure("file_exists", f"{file} is there already; name another one, or give --replace")


def write_lines(
    call: Invocation, file: str | None, items: Iterable[Mapping[str, Any]], what: str, *, replace: bool
) -> None:
    """One JSON object a line, to the file or to standard output."""
    check_output(call, file, replace=replace)
    lines = (json.dumps(item, ensure_ascii=False, separators=(",", ":")) + "\n" for item in items)
    if file is None:
        sys.stdout.writelines(lines)
        sys.stdout.flush()
        return
    count = 0
    with complete_file(Path(file)) as target:
        for line in lines:
            target.write(line.encode())
            count += 1
    if not call.answer({"file": file, "count": count}):
        put(f"wrote {count} {what} to {file}")


def purge_command(group: click.Group, ask: str, kind: str, what: str, meaning: str) -> None:
    """Adds a command `purge` that removes entries older than a moment or an age."""

    @daemon_command(group, "purge", kind, "before_ms", "purged")
    @click.option("--before-ms", type=click.IntRange(min=0), help="Drop entries older than this epoch millisecond.")
    @click.option("--older-than-ms", type=click.IntRange(min=0), help="Drop entries older than this many milliseconds.")
    def purge(call: Invocation, *, before_ms: int | None, older_than_ms: int | None) -> None:
        if (before_ms is None) == (older_than_ms is None):
            raise click.UsageError("say how old: either --before-ms or --older-than-ms")
        moment_ms = before_ms if before_ms is not None else max(0, now_ms() - (older_than_ms or 0))
        answer = call.ask(ask, before_ms=moment_ms)
        call.show({"before_ms": answer["before_ms"], "purged": answer["purged"]}, f"purged {answer['purged']} {what}")

    purge.help = meaning


def _completes(
    kind: str, listed: str, propose: Callable[[Answer], tuple[str, str]], **fields: Callable[[click.Context, str], Any]
) -> Complete:
    """Proposes what the daemon lists under a name of its answer: each with a value and its description."""

    def complete(context: click.Context, _parameter: click.Parameter, begun: str) -> list[CompletionItem]:
        try:
            folder, _ = find_home(_given(context, "home"), environment())
            request = {name: given(context, begun) for name, given in fields.items()}
            with connect(folder, _given(context, "token_file")) as client:
                answer = client.ask(kind, within_s=COMPLETION_S, **request)
            found = [(value, word) for value, word in map(propose, answer[listed]) if value.startswith(begun)]
        except Exception:  # noqa: BLE001  (whatever it is, the person is typing: nothing is proposed)
            return []
        return [CompletionItem(value, help=brief(word)) for value, word in found[:PROPOSED_MAX]]

    return complete


def _given(context: click.Context, name: str) -> str | None:
    found: str | None = context.params.get(name) or context.find_root().params.get(name)
    return found


complete_tasks: Final = _completes(
    "find_a2a_tasks",
    "tasks",
    lambda task: (task["task_id"], f"{task['state']} {task['agent']} {task['intent']}"),
    id=lambda _, begun: begun or None,
    limit=lambda _context, _begun: PROPOSED_MAX,
)
complete_agents: Final = _completes(
    "list_agents",
    "agents",
    lambda agent: (agent["id"], f"{agent['kind']} {agent['name']}"),
    tenant=lambda context, _: context.params.get("tenant") or "default",
)
complete_identities: Final = _completes(
    "list_identities", "identities", lambda identity: (identity["agent_id"]["display"], "")
)

task_argument: Final = click.argument("task_id", shell_complete=complete_tasks)
