"""`covenant audit`: the rows of the audit, and whether they are all there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final, TypeVar

import click

from covenant.cli.daemon_client import Invocation, daemon_command, purge_command, write_lines
from covenant.cli.options import (
    CommandGroup,
    ended_by_ctrl_c,
    file_argument,
    follow_option,
    limit_option,
    replace_option,
)
from covenant.cli.terminal import ExitCode, ago, brief, clock_time, print_table, put, say

VERIFY_S: Final = 3_600.0
Command = TypeVar("Command", bound=Callable[..., object])

FOLLOW_MS: Final = 10_000
ROWS_MAX: Final = 1_000

audit: Final = CommandGroup(
    "audit", help="The audit: admitted and refused callers, grants and repairs.", no_args_is_help=True
)


def filter_options(command: Command) -> Command:
    for option in (
        click.option("--type", "kind", help="Only rows of this kind: for example authentication_failed."),
        click.option("--issuer", help="Only rows whose issuer's name begins with this."),
        click.option("--since-ms", type=click.IntRange(min=0), help="Only rows from this epoch millisecond on."),
        click.option("--before-ms", type=click.IntRange(min=0), help="Only rows before this epoch millisecond."),
    ):
        command = option(command)
    return command


@daemon_command(audit, "recent", "audit_recent", "limit", "since_ms", "events")
@limit_option(50)
@filter_options
@follow_option("Continue with new rows.")
def recent(call: Invocation, *, limit: int, follow: bool, kind: str | None, **asked: Any) -> None:
    """List the audit rows of the caller, the newest at the end. The operator sees all rows.

    With --json and --follow it prints an object whenever rows were written.
    """
    asked["type"], since_ms = kind, asked["since_ms"]
    events = _newest(call, limit, asked)
    if not call.answer({"limit": limit, "since_ms": since_ms, "events": events}):
        if events:
            print_table(("when", "who", "what", "details"), map(_row, events))
        else:
            say("no audit rows")
    if follow:
        with ended_by_ctrl_c():
            _follow(call, events, asked)


def _newest(call: Invocation, limit: int, asked: dict[str, Any]) -> list[dict[str, Any]]:
    """Says that there may be more rows: with a filter, the daemon looks at a bounded number of rows for one answer."""
    found: list[dict[str, Any]] = []
    below = None
    while True:
        page = call.ask("recent_audit", limit=limit - len(found), below=below, **asked)
        found = [*page["events"], *found]
        below = page["next"]
        if below is None or len(found) == limit:
            return found


@daemon_command(audit, "export", "audit_exported", "file", "count")
@file_argument
@filter_options
@replace_option
def export(call: Invocation, *, file: str | None, replace: bool, kind: str | None, **asked: Any) -> None:
    """Write all audit rows that match the filters to FILE: one JSON object a line, the newest first.

    Without FILE, or with `-`, it writes to standard output. FILE appears when it is complete; only its owner can read
    it.
    """
    write_lines(call, file, _all(call, asked | {"type": kind}), "audit row(s)", replace=replace)


def _all(call: Invocation, asked: dict[str, Any]) -> Iterator[dict[str, Any]]:
    below = None
    while True:
        page = call.ask("recent_audit", limit=ROWS_MAX, below=below, **asked)
        yield from reversed(page["events"])
        below = page["next"]
        if below is None:
            return


def _follow(call: Invocation, events: list[dict[str, Any]], asked: dict[str, Any]) -> None:
    after = None
    while True:
        if events:
            asked["since_ms"], after = events[-1]["timestamp_ms"], events[-1]["id"]
        events = call.ask_on("recent_audit", FOLLOW_MS, limit=ROWS_MAX, after=after, **asked)["events"]
        if not events or call.answer({"limit": ROWS_MAX, "since_ms": asked["since_ms"], "events": events}):
            continue
        for event in events:
            _, _, *cells = _row(event)
            put(" ".join((clock_time(event["timestamp_ms"]), *cells)))


@daemon_command(audit, "verify", "audit_integrity", "report")
def verify(call: Invocation) -> None:
    """Check every audit row against the hash chain. Exits with 1 if one was changed, moved or is missing."""
    report = call.ask("verify_audit_integrity", within_s=VERIFY_S)["report"]
    if not call.answer({"report": report}):
        put(f"{'valid' if report['valid'] else 'INVALID'}: {report['events']} row(s), root {report['root_hash_hex']}")
        for failure in report["failures"]:
            say(failure)
    if not report["valid"]:
        raise click.exceptions.Exit(ExitCode.REFUSED)


purge_command(
    audit,
    "purge_audit",
    "audit_purged",
    "audit row(s)",
    "Drop old audit rows. A marker row says how many, and where the chain is anchored now.",
)


def _row(event: dict[str, Any]) -> tuple[str, ...]:
    kind, who = event["kind"], event["issuer"]["display"]
    style = "red" if _refused(kind) else ""
    return style, ago(event["timestamp_ms"]), who, kind["type"].replace("_", " "), brief(_details(kind), 100)


def _details(kind: dict[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in kind.items() if name != "type" and value not in (None, [], {}))


def _refused(kind: dict[str, Any]) -> bool:
    return kind.get("passed") is False or kind["type"].endswith(("_rejected", "_failed", "_mismatch", "_required"))
