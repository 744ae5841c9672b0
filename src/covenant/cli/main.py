"""The entry point `covenant`: which commands there are, and where each is defined.

Exit codes: 0 done, 1 refused or failed, 2 wrong usage, 3 no daemon to talk to, 4 not checked. Data goes to stdout,
messages for people to stderr. With `--json` stdout holds exactly one JSON object, also for a refusal or wrong usage.
"""

from __future__ import annotations

import errno
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import click
from click.shell_completion import get_completion_class

import covenant
from covenant.cli.options import SuggestingGroup, json_option, local_command
from covenant.cli.terminal import Failure, Output, json_shape, put_json

COMMANDS: Final = {
    "serve": "serve.serve",
    "ui": "serve.ui",
    "a2a": "tasks.a2a",
    "logs": "task_queries.logs",
    "attention": "task_queries.attention",
    "capabilities": "access_control.capabilities",
    "audit": "access_control.audit",
    "identities": "access_control.identities",
    "tenants": "tenants.tenants",
    "agents": "agents.agents",
    "schedules": "agents.schedules",
    "files": "files.files",
    "call": "a2a_servers.call",
    "card": "a2a_servers.card",
    "peers": "peers.peers",
    "mcp": "serve.mcp",
    "init": "homes.init",
    "settings": "homes.settings",
    "doctor": "homes.doctor",
    "passphrase": "homes.passphrase",
    "prove": "a2a_servers.prove",
    "backup": "ledger_admin.backup",
    "restore": "ledger_admin.restore",
    "ledger": "ledger_admin.ledger",
    "drain": "serve.drain",
    "completion": "main.completion",
    "version": "main.version",
}
"""The commands: for each the module in this package, and its name there. Help lists them in this order."""

JSON_ASKED: Final = "covenant.json_asked"
SHELLS: Final = ("bash", "zsh", "fish")
MEANING: Final = """A durable agent-to-agent exchange.

`covenant serve` runs the daemon, `call` and `card` talk to other agents, and `prove` tries any A2A server. `init`,
`settings`, `doctor`, `passphrase`, `restore` and a few commands of `ledger` and `peers` work on a home without a
daemon. The other commands talk to the daemon over the socket in its home (--home, COVENANT_HOME, else ~/.covenant) with
the operator's token (--token-file, COVENANT_TOKEN, else operator.token in the home).
"""


class LazyGroup(SuggestingGroup):
    """Imports the module of a command when the command is run: a start loads only what that command needs."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002  (click's signature)
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002  (as above)
        if cmd_name not in COMMANDS:
            return None
        module, _, name = COMMANDS[cmd_name].partition(".")
        command = getattr(import_module(f"covenant.cli.{module}"), name)
        assert isinstance(command, click.Command)
        return command

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[JSON_ASKED] = "--json" in args
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except click.UsageError as wrong:
            if ctx.meta[JSON_ASKED]:
                put_json({"kind": "error", "code": "wrong_usage", "message": wrong.format_message()})
            raise
        except OSError as error:
            # Commands catch the errors of their own files; click ends quietly if the reader of a pipe is gone.
            if error.errno != errno.ENOSPC:
                raise
            raise Failure("cannot_write", f"standard output cannot be written: {error.strerror}; make room") from error


command: Final = LazyGroup("covenant", help=MEANING, no_args_is_help=True)
# Every command takes these two as well; here they can be given once, before the command.
command.params += [
    click.Option(["--home"], metavar="FOLDER", help="The daemon's home."),
    click.Option(["--token-file"], metavar="FILE", help="Call as the holder of this token."),
]
click.version_option(covenant.__version__, prog_name="covenant", message="%(prog)s %(version)s")(command)


@click.command("version", epilog=json_shape("version", "version"))
@json_option("One JSON object.")
def version(*, as_json: bool) -> None:
    """Print the version."""
    Output("version", as_json=as_json).show({"version": covenant.__version__}, f"covenant {covenant.__version__}")


@local_command(None, "completion", "completion", "shell", "script")
@click.argument("shell", type=click.Choice(SHELLS))
def completion(output: Output, *, shell: str) -> None:
    """Print the script that makes a shell complete commands, task ids, agents and identities.

    \b
        covenant completion bash > ~/.local/share/bash-completion/completions/covenant
        covenant completion zsh > "${fpath[1]}/_covenant"
        covenant completion fish > ~/.config/fish/completions/covenant.fish

    For one session: eval "$(covenant completion bash)".
    """
    made = get_completion_class(shell)
    assert made is not None
    script = made(command, {}, "covenant", "_COVENANT_COMPLETE").source()
    output.show({"shell": shell, "script": script}, script)


def main() -> None:
    if sys.stdout is None:  # closed by the caller: `>&-`
        sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115  (open to the end)
    command(prog_name="covenant")
