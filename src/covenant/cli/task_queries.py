"""Looking at tasks: `covenant a2a status`, `list`, `export`, `show`, `tree`, `frames`, `watch`, and `covenant logs`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

import click

from covenant.cli.daemon_client import Answer, Invocation, daemon_command, task_argument
from covenant.cli.options import CommandGroup, Duration, Function, ended_by_ctrl_c, follow_option, limit_option
from covenant.cli.task_tables import (
    facts_table,
    frame_text,
    lease_table,
    log_text,
    queue_tables,
    summary,
    tree_of,
    update_line,
    update_table,
)
from covenant.cli.terminal import ago, brief, console, print_table, put, say
from covenant.ledger.machine.states import LEASED, LIVE_NAMES

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


def queue_options(function: Function) -> Function:
    """The options that filter the queue. Filters apply before the limit."""
    for option in (
        click.option("--state", "state_filter", type=click.Choice(STATES), help="Only tasks in this state."),
        click.option(
            "--deadline-within-ms",
            type=click.IntRange(min=0),
            help="Only tasks whose deadline has passed or comes within this time.",
        ),
        click.option(
            "--min-lease-age-ms",
            type=click.IntRange(min=0),
            help="Leave out leases younger than this. Queued tasks stay.",
        ),
        click.option("--counts", is_flag=True, help="With --json: add the counts of tasks and results."),
        limit_option(10),
    ):
        function = option(function)
    return function


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
        with ended_by_ctrl_c():
            _follow_task(call, answer["task"]["id"], answer)


def _follow_task(call: Invocation, task_id: str, answer: Answer) -> None:
    """With --json, one object for each change."""
    while answer["result"] is None or _seen(answer) < answer["generation"]:
        seen = _seen(answer)
        answer = call.ask_on("show_a2a_task", FOLLOW_MS, task_id=task_id, after=seen)
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
        with ended_by_ctrl_c():
            _keep_up(call, screen, answer, max(every_ms, 100) / 1000, given)


def _keep_up(call: Invocation, screen: Console, answer: Answer, every_s: float, given: dict[str, Any]) -> None:
    """On a terminal, one table whose ages go on. In a pipe, a new table for each change."""
    if screen.is_terminal:
        from rich.live import Live

        with Live(
            get_renderable=lambda: queue_tables(answer), console=screen, refresh_per_second=1 / every_s, screen=True
        ) as live:
            while True:
                answer = _another(call, answer, every_s, given)
                live.refresh()
    while True:
        answer = _another(call, answer, every_s, given)
        screen.print(queue_tables(answer))


def _another(call: Invocation, seen: Answer, every_s: float, given: dict[str, Any]) -> Answer:
    """The queue once it has changed, but not before `every_ms` is over."""
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
    answer = call.ask_on("a2a_queue", wait_ms, after=after, **query)
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
    with ended_by_ctrl_c():
        while True:
            if not call.answer(answer):
                for line in answer["lines"]:
                    put(log_text(line))
            if not follow or answer["ended"]:
                break
            answer = call.ask_on("a2a_task_log", FOLLOW_MS, task_id=task_id, after=answer["next"], limit=1_000)
            while call.json and not answer["lines"] and not answer["ended"]:
                answer = call.ask_on("a2a_task_log", FOLLOW_MS, task_id=task_id, after=answer["next"], limit=1_000)
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
    if call.answer(answer):
        return
    if not answer["items"]:
        say("nothing needs you")
        return
    print_table(("what", "since", "detail", "mended by"), map(_need, answer["items"]))


def _need(item: dict[str, Any]) -> tuple[str, ...]:
    style = "red" if item["severity"] == "bad" else "yellow"
    since = ago(item["since_ms"]) if item.get("since_ms") else ""
    text = brief(f"{item['title']}: {item['detail']}", 100)
    return style, item["what"].replace("_", " "), since, text, item.get("command", "")
