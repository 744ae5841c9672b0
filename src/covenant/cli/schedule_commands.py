"""`covenant schedules`: tasks that agents are given at set times."""

from __future__ import annotations

from typing import Any, Final

import click

from covenant.cli.agents import tenant_option
from covenant.cli.daemon_client import Invocation, complete_agents, daemon_command
from covenant.cli.options import CommandGroup, Duration, Function
from covenant.cli.terminal import ago, brief, print_table, put

schedules: Final = CommandGroup(
    "schedules", help="Schedules: tasks that agents get at set times.", no_args_is_help=True
)


def named(function: Function) -> Function:
    """Which schedule."""
    function = tenant_option(function)
    function = click.argument("schedule_id", metavar="SCHEDULE")(function)
    return click.argument("agent_id", metavar="AGENT", shell_complete=complete_agents)(function)


@daemon_command(schedules, "list", "schedule_list", "tenant", "count", "schedules")
@tenant_option
@click.option("--agent", "agent_id", metavar="ID", default="", help="Only schedules of this agent.")
def list_schedules(call: Invocation, *, tenant: str, agent_id: str) -> None:
    """List the schedules of a tenant's agents, each with its next run in its own time zone."""
    answer = call.ask("list_schedules", tenant=tenant, agent_id=agent_id)
    if not call.answer(answer):
        print_table(("agent", "schedule", "when", "time zone", "next run", "from"), map(_row, answer["schedules"]))


@daemon_command(schedules, "show", "schedule", "tenant", "schedule")
@named
def show(call: Invocation, **which: Any) -> None:
    """Show a schedule and its next runs."""
    answer = call.ask("show_schedule", **which)
    if call.answer(answer):
        return
    schedule = answer["schedule"]
    put(f"{schedule['agent_id']}/{schedule['id']}: {_when(schedule)}, time zone {schedule['time_zone']}")
    put(f"says {schedule['text'] or schedule['id']!r}; its definition is {schedule['source']}")
    if schedule["catch_up_s"]:
        put(f"runs moments that were missed, up to {schedule['catch_up_s']} seconds later")
    else:
        put("skips moments that passed while no daemon was up")
    if schedule["paused_at_ms"] is not None:
        put(f"paused {ago(schedule['paused_at_ms'])}")
    for moment in schedule["upcoming"]:
        put(f"next: {moment['local']}")


@daemon_command(schedules, "add", "schedule", "tenant", "schedule")
@named
@click.option("--cron", metavar="FIELDS", default="", help="Minute, hour, day, month and weekday, as in crontab.")
@click.option("--every", metavar="DURATION", type=Duration(), default=0, help="The interval, at least 1s.")
@click.option("--time-zone", metavar="NAME", default="UTC", show_default=True, help="A name such as Europe/Berlin.")
@click.option("--text", metavar="TEXT", default="", help="The text of the task. Default: the schedule's id.")
@click.option(
    "--catch-up", metavar="DURATION", type=Duration(), default=0, help="Run missed moments that are at most this old."
)
def add(
    call: Invocation, *, agent_id: str, schedule_id: str, tenant: str, every: int, catch_up: int, **given: str
) -> None:
    """Add a schedule to a stored agent. Agents from code or files have their schedules in their own definition.

    \b
        covenant schedules add report weekdays --cron "0 9 * * mon-fri" --time-zone Europe/Berlin
        covenant schedules add probe often --every 30s --catch-up 5m
    """
    for name, value in (("--every", every), ("--catch-up", catch_up)):
        if value % 1000:
            raise click.UsageError(f"{name} counts whole seconds")
    schedule: dict[str, Any] = {**given, "id": schedule_id, "every_s": every // 1000, "catch_up_s": catch_up // 1000}
    answer = call.ask("add_schedule", tenant=tenant, agent_id=agent_id, schedule=schedule)
    _show(call, answer, "added")


@daemon_command(schedules, "pause", "schedule", "tenant", "schedule")
@named
def pause(call: Invocation, **which: Any) -> None:
    """Pause a schedule until it is resumed, even across restarts. Moments that pass meanwhile are never run."""
    _show(call, call.ask("pause_schedule", **which), "paused")


@daemon_command(schedules, "resume", "schedule", "tenant", "schedule")
@named
def resume(call: Invocation, **which: Any) -> None:
    """Resume a schedule. Its next run is at its next moment."""
    _show(call, call.ask("resume_schedule", **which), "resumed")


@daemon_command(schedules, "run-now", "schedule_run", "tenant", "agent_id", "schedule_id", "task_id")
@named
def run_now(call: Invocation, **which: Any) -> None:
    """Run a schedule now, paused or not, and print the id of the task."""
    answer = call.ask("run_schedule", **which)
    call.show(answer, answer["task_id"], f"look at it with: {call.again} a2a show {answer['task_id']}")


@daemon_command(schedules, "remove", "schedule_removed", "tenant", "agent_id", "schedule_id")
@named
def remove(call: Invocation, **which: Any) -> None:
    """Remove a schedule from a stored agent. The tasks of its runs stay in the ledger."""
    answer = call.ask("remove_schedule", **which)
    call.show(answer, f"removed {answer['agent_id']}/{answer['schedule_id']}")


def _show(call: Invocation, answer: dict[str, Any], done: str) -> None:
    schedule = answer["schedule"]
    call.show(answer, f"{done} {schedule['agent_id']}/{schedule['id']}; next run: {_next(schedule)}")


def _when(schedule: dict[str, Any]) -> str:
    return schedule["cron"] or f"every {schedule['every_s']} s"


def _next(schedule: dict[str, Any]) -> str:
    if schedule["paused_at_ms"] is not None:
        return f"paused {ago(schedule['paused_at_ms'])}"
    return schedule["upcoming"][0]["local"] if schedule["upcoming"] else "none"


def _row(schedule: dict[str, Any]) -> tuple[str, ...]:
    style = "dim" if schedule["paused_at_ms"] is not None else ""
    which = (schedule["agent_id"], schedule["id"], brief(_when(schedule)), schedule["time_zone"])
    return style, *which, _next(schedule), schedule["source"]
