"""Tasks by filters: `covenant a2a list` and `export`, and the filters that repair takes too."""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator
from typing import Any, Final

import click

from covenant.cli.daemon_client import (
    Answer,
    Invocation,
    complete_agents,
    complete_identities,
    daemon_command,
    write_lines,
)
from covenant.cli.options import CommandGroup, Duration, Function, file_argument, replace_option
from covenant.cli.task_tables import found_table
from covenant.cli.terminal import clean, console, say
from covenant.daemon.environment import now_ms
from covenant.ledger.machine.states import OUTCOME_FILTERS, STATE_FILTERS

PAGE_MAX: Final = 200
FIELDS: Final = (
    "task_id parent context_id tenant agent sender task_kind key origin state a2a_state attempt created_at_ms "
    "updated_at_ms deadline_ms outcome cause lease_id leased_to leased_at_ms holder_lost intent error_message remote"
).split()

commands: Final = CommandGroup("a2a")


class Words(click.ParamType[tuple[str, ...]]):
    """One word or several, with commas between."""

    name = "words"

    def __init__(self, *known: str) -> None:
        self._known = known

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        if isinstance(value, tuple):
            return value
        words = tuple(word.strip().replace("-", "_") for word in str(value).split(","))
        for word in words:
            if word not in self._known:
                from covenant.model.errors import did_you_mean

                listed = ", ".join(self._known)
                self.fail(f"{word!r} is none of {listed}{did_you_mean(word, self._known)}", param, ctx)
        return words

    def shell_complete(
        self,
        ctx: click.Context,  # noqa: ARG002  (click's signature)
        param: click.Parameter,  # noqa: ARG002  (as above)
        incomplete: str,
    ) -> list[click.shell_completion.CompletionItem]:
        return [click.shell_completion.CompletionItem(word) for word in self._known if word.startswith(incomplete)]


def filter_options(function: Function) -> Function:
    """The options that choose tasks: all that are given must hold. `filters` makes a query of them."""
    ago = Duration()
    for option in reversed(
        (
            click.option(
                "--state",
                "states",
                type=Words(*STATE_FILTERS, *OUTCOME_FILTERS),
                metavar="WORD,…",
                help=f"{', '.join(STATE_FILTERS)}; or how it ended: {', '.join(OUTCOME_FILTERS)}.",
            ),
            click.option(
                "--outcome",
                "outcomes",
                type=Words(*OUTCOME_FILTERS),
                metavar="WORD,…",
                help=f"How it ended: {', '.join(OUTCOME_FILTERS)}.",
            ),
            click.option(
                "--agent",
                metavar="NAME[@HOST]",
                shell_complete=complete_agents,
                help="The recipient. Without a host: an agent of the tenant, else of `default`.",
            ),
            click.option("--sender", metavar="NAME@HOST", shell_complete=complete_identities, help="The sender."),
            click.option("--tenant", metavar="NAME", help="The tenant."),
            click.option("--kind", "task_kind", metavar="TEXT", help="The kind of work."),
            click.option("--origin", metavar="WORD", help="The door that it came by: mailbox, a2a, native, …"),
            click.option("--parent", metavar="ID", help="Children of this task."),
            click.option("--context", metavar="ID", help="Tasks of this context."),
            click.option("--key", metavar="TEXT", help="The idempotency key."),
            click.option("--cause", metavar="WORD", help="The cause of its end, as `show` says."),
            click.option("--attempt-min", type=click.IntRange(min=0), help="At least this many attempts."),
            click.option("--since", type=ago, metavar="2h", help="Sent within this time."),
            click.option("--until", type=ago, metavar="1h", help="Sent longer ago than this."),
            click.option("--moved-since", type=ago, metavar="5m", help="Changed within this time."),
            click.option("--text", metavar="TEXT", help="A part of its text; the case of A to Z does not matter."),
        )
    ):
        function = option(function)
    return function


FILTERS: Final = frozenset(
    "states outcomes agent sender tenant task_kind origin parent context key cause attempt_min since until moved_since "
    "text".split()
)


def filters(given: dict[str, Any]) -> dict[str, Any]:
    """The query of the options that were given."""
    now = now_ms()
    query = {
        "state": ",".join(given["states"] or ()) or None,
        "outcome": ",".join(given["outcomes"] or ()) or None,
        "since_ms": now - given["since"] if given["since"] is not None else None,
        "until_ms": now - given["until"] if given["until"] is not None else None,
        "moved_since_ms": now - given["moved_since"] if given["moved_since"] is not None else None,
        **{
            name: given[name]
            for name in "agent sender tenant task_kind origin parent context key cause attempt_min text".split()
        },
    }
    return {name: value for name, value in query.items() if value is not None}


def pages(call: Invocation, query: dict[str, Any], most: int | None) -> Iterator[Answer]:
    """Reads page after page, until there are no more, or until the limit is reached."""
    after, listed = query.pop("after", None), 0
    while most is None or listed < most:
        limit = PAGE_MAX if most is None else min(PAGE_MAX, most - listed)
        answer = call.ask("find_a2a_tasks", limit=limit, after=after, **query)
        yield answer
        listed, after = listed + len(answer["tasks"]), answer["next"]
        if after is None:
            return


@daemon_command(commands, "list", "a2a_found", "tasks", "next", "total", "at_least?")
@filter_options
@click.option(
    "--order", type=click.Choice(("created", "moved")), default="created", show_default=True, help="The order."
)
@click.option("--oldest-first", "ascending", is_flag=True, help="Instead of the newest first.")
@click.option(
    "--limit", "-n", type=click.IntRange(min=1), default=50, show_default=True, help="Maximum number of rows."
)
@click.option("--after", metavar="CURSOR", help="Continue after another list: its `next`.")
@click.option("--count", "only_count", is_flag=True, help="Only print the number of tasks.")
@click.option("--csv", "as_csv", is_flag=True, help="As comma-separated values, with the names of the columns first.")
def list_tasks(
    call: Invocation,
    *,
    limit: int,
    after: str | None,
    only_count: bool,
    as_csv: bool,
    order: str,
    ascending: bool,
    **given: Any,
) -> None:
    """List tasks, live and finished, the newest first.

    \b
        covenant a2a list --state failed --agent clerk --since 2h
        covenant a2a list --state queued --count
    """
    if as_csv and call.json:
        raise click.UsageError("--csv and --json exclude each other; give one of them")
    query = filters(given) | {"order": order, "ascending": ascending or None}
    if only_count:
        answer = call.ask("find_a2a_tasks", limit=1, count=True, **query)
        total = {"tasks": [], "next": None, "total": answer["total"], "at_least": answer.get("at_least", False)}
        call.show(total, f"{'at least ' if answer.get('at_least') else ''}{answer['total']}")
        return
    found = list(pages(call, {**query, "after": after}, limit))
    tasks, more = [task for page in found for task in page["tasks"]], found[-1]["next"]
    if call.answer({"tasks": tasks, "next": more, "total": None}):
        return
    if as_csv:
        write_csv(tasks)
    elif tasks:
        console().print(found_table(tasks))
    else:
        say("no task matches")
    if more is not None:
        say(f"there may be more: --after {more}")


def write_csv(tasks: list[dict[str, Any]]) -> None:
    writer, terminal = csv.writer(sys.stdout), sys.stdout.isatty()
    writer.writerow(FIELDS)
    for task in tasks:
        cells = ["" if task[name] is None else _cell(task[name]) for name in FIELDS]
        writer.writerow([clean(cell) if terminal and isinstance(cell, str) else cell for cell in cells])


def _cell(value: Any) -> Any:
    # A spreadsheet would take such a text for a formula, and anybody may have written it.
    return f"'{value}" if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r")) else value


@daemon_command(commands, "export", "a2a_exported", "file", "count")
@file_argument
@filter_options
@replace_option
def export(call: Invocation, *, file: str | None, replace: bool, **given: Any) -> None:
    """Write all tasks that match the filters to FILE: one JSON object a line, oldest first.

    Without FILE, or with `-`, it writes to standard output. FILE appears when it is complete; only its owner can read
    it.
    """
    query = filters(given) | {"ascending": True}
    tasks = (task for page in pages(call, query, None) for task in page["tasks"])
    write_lines(call, file, tasks, "task(s)", replace=replace)
