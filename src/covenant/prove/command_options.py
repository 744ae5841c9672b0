"""The options of `covenant prove`: one table, read by both of its command lines."""

from __future__ import annotations

import argparse
from typing import Any, Final, NamedTuple


class Option(NamedTuple):
    name: str
    metavar: str | None
    """None for a flag."""
    meaning: str
    default: Any = None
    required: bool = False
    many: bool = False
    choices: tuple[str, ...] = ()


OPTIONS: Final = (
    Option(
        "command", "COMMAND", "How the server is started; {port} and {home} are filled in. No shell.", required=True
    ),
    Option("card", "URL", "Where its agent card is; {port} is filled in.", required=True),
    Option("row", "NAME", "Try this row alone; may be given several times.", many=True),
    Option("token-file", "FILE", "A bearer token for each call; {home} is filled in."),
    Option("protocol-version", "VERSION", "Speak this version of A2A.", choices=("1.0", "0.3")),
    Option("binding", "BINDING", "Speak this binding.", choices=("JSONRPC", "HTTP+JSON")),
    Option("idempotency-header", "NAME", "The server's header for repeated sends; else the messageId is tried."),
    Option("at-least-once", None, "The agent's work is declared as safe to repeat."),
    Option("name", "NAME", "What to call the server in the report; else as its card does."),
    Option("bound", "SECONDS", "The time within which each promise must hold.", 20.0),
    Option("start-bound", "SECONDS", "The time within which the server must show its card.", 60.0),
    Option("row-bound", "SECONDS", "The time limit of a row.", 600.0),
    Option("sends", "N", "The number of sends in the row many-sends.", 1_000),
    Option("senders", "N", "The number of clients in that row that send at once.", 16),
    Option("kills", "N", "The number of kills in that row.", 10),
    Option("junit", "FILE", "Write the findings there as JUnit, too."),
    Option("evidence", None, "Show the evidence of each row."),
    Option("json", None, "Print the report as one JSON object."),
    Option("list", None, "List the rows, and try nothing."),
)

MEANING: Final = """Show which promises an A2A server keeps when it is killed.

The kit starts the server by a command, speaks A2A to it as a stranger does, kills it, and starts it again. It says for
each row whether the promise was kept, was broken, or is not offered. The agent behind the server follows a small
scenario protocol (docs/prove.md). Exit codes: 0 nothing is broken, 1 something is, 4 a row could not be tried."""


def make_parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog, description=MEANING, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for option in OPTIONS:
        more: dict[str, Any] = {"help": option.meaning}
        if option.metavar is None:
            more |= {"action": "store_true"}
        else:
            more |= {"metavar": option.metavar, "default": option.default, "choices": option.choices or None}
            more |= {"type": type(option.default)} if option.default is not None else {}
            more |= {"action": "append", "default": []} if option.many else {}
        parser.add_argument(f"--{option.name}", **more)
    return parser
