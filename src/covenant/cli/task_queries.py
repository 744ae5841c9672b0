"""Looking at tasks: `covenant a2a status`, `show`, `tree`, `watch`, `frames`, `list`, `export`; `logs`, `attention`."""

from __future__ import annotations

import csv
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import click

from covenant.cli.daemon_client import (
    Answer,
    Invocation,
    complete_agents,
    complete_identities,
    daemon_command,
    task_argument,
    write_lines,
)
from covenant.cli.options import (
    CommandGroup,
    Duration,
    combined,
    file_argument,
    follow_option,
    limit_option,
    replace_option,
)
from covenant.cli.task_tables import (
    facts_table,
    found_table,
    frame_text,
    lease_table,
    log_text,
    queue_tables,
    summary,
    tree_of,
    update_line,
    update_table,
)
from covenant.cli.terminal import ago, brief, clean, console, put, say
from covenant.daemon.environment import now_ms
from covenant.ledger.machine.states import LEASED, LIVE_NAMES, OUTCOME_FILTERS, STATE_FILTERS

if TYPE_CHECKING:
    from rich.console import Console

STATES: Final = (*LIVE_NAMES, LEASED.wire_name.replace("_", "-"))
STATUS_FIELDS: Final = "limit min_lease_age_ms deadline_within_ms state_filter tasks results counts? warnings?".split()
SHOWN_FIELDS: Final = (
    "task state a2a_state attempt turn generation created_at_ms updated_at_ms leases updates result cause holder_lost "
    "truncated?"
).split()

FOLLOW_MS: Final = 10_000
"""How long the daemon waits for something new before it answers that there is nothing."""

commands: Final = CommandGroup("a2a")
PAGE_MAX: Final = 200
FIELDS: Final = (
    "task_id parent context_id tenant agent sender task_kind key origin state a2a_state attempt created_at_ms "
    "updated_at_ms deadline_ms outcome cause lease_id leased_to leased_at_ms holder_lost intent error_message remote"
).split()
AGES: Final = ("since", "until", "moved_since")
PLAIN_FILTERS: Final = "agent sender tenant task_kind origin parent context key cause attempt_min text".split()
FILTERS: Final = frozenset(("states", "outcomes", *AGES, *PLAIN_FILTERS))


queue_options: Final = combined(
    limit_option(10),
    click.option("--counts", is_flag=True, help="With --json: add the counts of tasks and results."),
    click.option(
        "--min-lease-age-ms",
        type=click.IntRange(min=0),
        help="Leave out leases younger than this. Queued tasks stay.",
    ),
    click.option(
        "--deadline-within-ms",
        type=click.IntRange(min=0),
        help="Only tasks whose deadline has passed or comes within this time.",
    ),
    click.option("--state", "state_filter", type=click.Choice(STATES), help="Only tasks in this state."),
)
"""The options that filter the queue. Filters apply before the limit."""


@daemon_command(commands, "status", "a2a_status", *STATUS_FIELDS)
@queue_options
def status(call: Invocation, **given: Any) -> None:
    """Show queued tasks, leases and results that wait to be drained.

    Leases whose holder is lost come first, then the longest held, then queued tasks, oldest first.
    """
    shown, answer = _queue(call, **given)
    if not call.answer(shown):
        console().print(queue_tables(answer))


@daemon_command(commands, "show", "a2a_task", *SHOWN_FIELDS)
@task_argument
@follow_option("Continue with each change of the task, until it has ended.")
def show(call: Invocation, *, task_id: str, follow: bool) -> None:
    """Show everything about one task: its state, its leases, its updates, its result."""
    answer = call.ask("show_a2a_task", task_id=task_id)
    if not call.answer(answer):
        screen = console()
        screen.print(facts_table(answer))
        if answer["leases"]:
            screen.print(lease_table(answer["leases"]))
        if answer["updates"]:
            screen.print(update_table(answer["updates"]))
    if follow:
        with suppress(KeyboardInterrupt):
            _follow_task(call, answer["task"]["id"], answer)


def _follow_task(call: Invocation, task_id: str, answer: Answer) -> None:
    """With --json, one object for each change."""
    while answer["result"] is None or _seen(answer) < answer["generation"]:
        seen = _seen(answer)
        answer = call.ask_through_restarts("show_a2a_task", FOLLOW_MS, task_id=task_id, after=seen)
        if answer["generation"] > seen and not call.answer(answer):
            for update in answer["updates"]:
                if update["generation"] > seen:
                    put(update_line(update))
            if answer["result"] is not None and _seen(answer) >= answer["generation"]:
                put(f"{answer['result']['status']}: {summary(answer['result'])}")


def _seen(answer: Answer) -> int:
    """The last generation in the answer."""
    cut = answer.get("truncated") and answer["updates"]
    return int(answer["updates"][-1]["generation"] if cut else answer["generation"])


@daemon_command(commands, "tree", "a2a_tree", "tree")
@task_argument
def tree(call: Invocation, *, task_id: str) -> None:
    """Draw a task and all its subtasks.

    Each line has the state, the agent, the attempt if it is not the first, the time taken so far, and the tokens with
    those of all subtasks. ⇄ marks remote work, with its place.
    """
    answer = call.ask("a2a_tree", task_id=task_id)
    if not call.answer(answer):
        console().print(tree_of(answer["tree"]))


@daemon_command(commands, "watch", "a2a_status", *STATUS_FIELDS)
@queue_options
@click.option(
    "--every", "every_ms", type=Duration(), default="1s", show_default=True, help="Minimum time between two tables."
)
@click.option("--once", is_flag=True, help="Look once, then exit.")
def watch(call: Invocation, *, every_ms: int, once: bool, **given: Any) -> None:
    """Watch the queue: a table that updates itself. Ctrl-C ends it.

    The daemon reports each change of the queue. A restart of the daemon does not end the command. With --json the
    command looks once.
    """
    shown, answer = _queue(call, **given, wait_ms=FOLLOW_MS)
    if call.answer(shown):
        return
    screen = console()
    if once or not screen.is_terminal:
        screen.print(queue_tables(answer))
    if not once:
        with suppress(KeyboardInterrupt):
            _follow_queue(call, screen, answer, max(every_ms, 100) / 1000, given)


def _follow_queue(call: Invocation, screen: Console, answer: Answer, every_s: float, given: dict[str, Any]) -> None:
    """On a terminal, one table whose ages go on. In a pipe, a new table for each change."""
    if screen.is_terminal:
        from rich.live import Live

        with Live(
            get_renderable=lambda: queue_tables(answer), console=screen, refresh_per_second=1 / every_s, screen=True
        ) as live:
            while True:
                answer = _changed_queue(call, answer, every_s, given)
                live.refresh()
    while True:
        answer = _changed_queue(call, answer, every_s, given)
        screen.print(queue_tables(answer))


def _changed_queue(call: Invocation, seen: Answer, every_s: float, given: dict[str, Any]) -> Answer:
    """The queue once it has changed, but not before `every_s` seconds are over."""
    time.sleep(every_s)
    while True:
        answer = _queue(call, **given, after=seen["next"], wait_ms=FOLLOW_MS)[1]
        if answer["next"] != seen["next"]:
            return answer


def _queue(
    call: Invocation,
    *,
    counts: bool,
    state_filter: str | None,
    after: str | None = None,
    wait_ms: int = 0,
    **given: Any,
) -> tuple[Answer, Answer]:
    """The queue as --json shows it, with the options; and the daemon's whole answer."""
    query: dict[str, Any] = {
        "limit": given["limit"],
        "min_lease_age_ms": given["min_lease_age_ms"],
        "deadline_within_ms": given["deadline_within_ms"],
        "state_filter": state_filter.replace("-", "_") if state_filter else None,
    }
    answer = call.ask_through_restarts("a2a_queue", wait_ms, after=after, **query)
    shown: Answer = {**query, **{name: answer[name] for name in ("tasks", "results", "warnings") if name in answer}}
    return {**shown, "counts": answer.get("counts")} if counts else shown, answer


@daemon_command(None, "logs", "a2a_task_log", "task_id", "lines", "next", "ended", "left_out?")
@task_argument
@follow_option("Continue with new lines, until the task has ended.")
@limit_option(200, 1_000)
def logs(call: Invocation, *, task_id: str, follow: bool, limit: int) -> None:
    """Show the log of a task: its agent's stdout, stderr and logging, and the daemon's own lines.

    Only agents that run in this daemon have one: functions, processes and models. An external worker has its own log.
    The newest lines are kept, in memory and in the home, within bounds. With --json and --follow it prints one object
    for each answer.
    """
    answer = call.ask("a2a_task_log", task_id=task_id, limit=limit)
    task_id = answer["task_id"]
    if answer.get("left_out") and not call.json:
        say(f"{answer['left_out']} older line(s) are not kept")
    with suppress(KeyboardInterrupt):
        while True:
            if not call.answer(answer):
                for line in answer["lines"]:
                    put(log_text(line))
            if not follow or answer["ended"]:
                break
            answer = call.ask_through_restarts(
                "a2a_task_log", FOLLOW_MS, task_id=task_id, after=answer["next"], limit=1_000
            )
            while call.json and not answer["lines"] and not answer["ended"]:
                answer = call.ask_through_restarts(
                    "a2a_task_log", FOLLOW_MS, task_id=task_id, after=answer["next"], limit=1_000
                )
    if not follow and not answer["lines"] and not call.json:
        say("this daemon has logged nothing for this task")


@daemon_command(commands, "frames", "a2a_frames", "task_id", "on", "frames", "left_out?", "lost?")
@task_argument
def frames(call: Invocation, *, task_id: str) -> None:
    """Show the requests and answers of a task, as they were on the wire, without secrets.

    The daemon keeps frames, in memory, if the setting log.frame_bytes_max is more than 0: of calls over HTTP (A2A,
    native, mailbox), gRPC and the local socket that were not refused, and of calls that its agents make to remote
    agents.
    """
    answer = call.ask("a2a_task_frames", task_id=task_id)
    if call.answer(answer):
        return
    if not answer["on"]:
        say("no frames are kept: see the setting log.frame_bytes_max")
        return
    if answer.get("left_out"):
        say(f"{answer['left_out']} older frame(s) are not kept")
    for frame in answer["frames"]:
        put(frame_text(frame))
    if not answer["frames"]:
        say("no frame is kept for this task")


@daemon_command(None, "attention", "a2a_attention", "at_ms", "needs", "items", "numbers")
def attention(call: Invocation) -> None:
    """List everything that needs a person, the worst first, with the command that fixes it."""
    answer = call.ask("show_attention")
    columns = ("what", "since", "detail", "mended by")
    call.show_table(answer, columns, map(_attention_row, answer["items"]), empty="nothing needs you")


def _attention_row(item: dict[str, Any]) -> tuple[str, ...]:
    style = "red" if item["severity"] == "bad" else "yellow"
    since = ago(item["since_ms"]) if item.get("since_ms") else ""
    text = brief(f"{item['title']}: {item['detail']}", 100)
    return style, item["what"].replace("_", " "), since, text, item.get("command", "")


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


filter_options: Final = combined(
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
    click.option("--since", type=Duration(), metavar="2h", help="Sent within this time."),
    click.option("--until", type=Duration(), metavar="1h", help="Sent longer ago than this."),
    click.option("--moved-since", type=Duration(), metavar="5m", help="Changed within this time."),
    click.option("--text", metavar="TEXT", help="A part of its text; the case of A to Z does not matter."),
)
"""The options that choose tasks, all of which must hold. `filters` makes a query of them."""


def filters(given: dict[str, Any]) -> dict[str, Any]:
    """The query that the options of `filter_options` make."""
    now = now_ms()
    query = {
        "state": ",".join(given["states"] or ()) or None,
        "outcome": ",".join(given["outcomes"] or ()) or None,
        **{f"{name}_ms": now - given[name] for name in AGES if given[name] is not None},
        **{name: given[name] for name in PLAIN_FILTERS},
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
@limit_option(50)
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
