"""`covenant agents` and `schedules`: the agents in each tenant's catalogue, and tasks that they get at set times."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any, Final

import click

from covenant.cli.daemon_client import Invocation, complete_agents, daemon_command
from covenant.cli.options import CommandGroup, Duration, combined
from covenant.cli.terminal import Failure, ago, brief, put
from covenant.model.kinds import ENROLLED_KINDS, STORED_KINDS

agents: Final = CommandGroup("agents", help="Agents: the catalogue of each tenant.", no_args_is_help=True)
schedules: Final = CommandGroup(
    "schedules", help="Schedules: tasks that agents get at set times.", no_args_is_help=True
)

tenant_option: Final = click.option(
    "--tenant", metavar="NAME", default="default", show_default=True, help="The tenant whose catalogue it is."
)


@daemon_command(agents, "add", "agent_added", "tenant", "agent")
@click.argument("agent_id", metavar="[ID]", required=False)
@tenant_option
@click.option("--file", metavar="FILE", help="The agent's definition, in JSON or TOML. The options below override it.")
@click.option(
    "--kind",
    type=click.Choice(STORED_KINDS),
    help="The kind: how the agent's work is done. Default, without a file: worker.",
)
@click.option("--name", metavar="TEXT", help="The agent's name, for people.")
@click.option("--description", metavar="TEXT", help="What the agent does.")
@click.option("--skill", "skills", multiple=True, metavar="ID", help="A skill on the agent's card. May be repeated.")
@click.option("--command", "program", metavar="WORDS", help="The program of a process agent, as in a shell.")
@click.option("--url", metavar="URL", help="The URL of a remote agent, or of its card.")
@click.option("--replace", is_flag=True, help="Replace the stored agent with this id.")
def add(call: Invocation, *, agent_id: str | None, tenant: str, file: str | None, replace: bool, **given: Any) -> None:
    """Store an agent for a tenant, from a file or from options.

    \b
        covenant agents add summarizer --tenant acme --description "Summarises a text"
        covenant identities enroll summarizer@acme        # the token of its worker
        covenant agents add weather --kind remote --url https://weather.example/a2a
    """
    definition = _definition(agent_id, file, given)
    answer = call.ask("add_agent", tenant=tenant, agent_def=definition, replace=replace or None)
    agent = answer["agent"]
    who = f"{agent['id']}@{answer['tenant']}"
    messages = []
    if agent["kind"] in ENROLLED_KINDS and not replace:
        messages.append(f"its worker gets a token with: {call.program} identities enroll {who}")
    call.show(answer, f"{'replaced' if replace else 'added'} {who} ({agent['kind']})", *messages)


@daemon_command(agents, "list", "agent_list", "tenant", "count", "agents")
@tenant_option
def list_agents(call: Invocation, *, tenant: str) -> None:
    """List a tenant's agents: index, agents from code and files, then stored agents, the oldest first."""
    answer = call.ask("list_agents", tenant=tenant)
    call.show_table(answer, ("agent", "kind", "from", "name", "what it does"), map(_agent_row, answer["agents"]))


def _agent_row(agent: dict[str, Any]) -> tuple[str, ...]:
    definition = agent["agent_def"]
    purpose = brief(definition["description"] or definition["goal"] or definition["role"])
    source = f"{agent['source']} at {', '.join(agent['nodes'])}" if agent.get("nodes") else agent["source"]
    return "", agent["id"], agent["kind"], source, brief(agent["name"]), purpose


@daemon_command(agents, "show", "agent", "tenant", "agent", "identity")
@click.argument("agent_id", metavar="ID", shell_complete=complete_agents)
@tenant_option
def show(call: Invocation, *, agent_id: str, tenant: str) -> None:
    """Show an agent: its identity in the ledger, its source, and its whole definition."""
    answer = call.ask("show_agent", tenant=tenant, agent_id=agent_id)
    if call.answer(answer):
        return
    agent, who = answer["agent"], answer["identity"]
    put(f"{who['display']}  {who['pubkey']}")
    changed = f", changed {ago(agent['updated_at_ms'])}" if agent["updated_at_ms"] else ""
    put(f"{agent['kind']}, {agent['source']}{changed}")
    if agent.get("nodes"):
        put(f"served by {', '.join(agent['nodes'])}")
    put(json.dumps(agent["agent_def"], ensure_ascii=False, indent=2))


@daemon_command(agents, "remove", "agent_removed", "tenant", "agent_id")
@click.argument("agent_id", metavar="ID", shell_complete=complete_agents)
@tenant_option
def remove(call: Invocation, *, agent_id: str, tenant: str) -> None:
    """Remove a stored agent. Tasks for it stay in the ledger."""
    answer = call.ask("remove_agent", tenant=tenant, agent_id=agent_id)
    call.show(answer, f"removed {answer['agent_id']}@{answer['tenant']}")


def _definition(agent_id: str | None, file: str | None, given: dict[str, Any]) -> dict[str, Any]:
    """The file's definition, changed by the options."""
    if file is None and agent_id is not None and agent_id.endswith((".json", ".toml")):
        raise click.UsageError(f"an agent's ID has no dot; to give a file, use --file {shlex.quote(agent_id)}")
    definition: dict[str, Any] = _read(file) if file is not None else {"kind": "worker"}
    if agent_id is not None:
        definition["id"] = agent_id
    if "id" not in definition:
        raise click.UsageError("no agent is named; give an ID, or --file with a definition that has an id")
    definition |= {key: given[key] for key in ("kind", "name", "description") if given[key] is not None}
    if given["skills"]:
        definition["skills"] = list(given["skills"])
    if given["program"] is not None:
        try:
            definition["command"] = shlex.split(given["program"])
        except ValueError as error:
            raise click.UsageError(f"--command cannot be read: {error}; quote it as in a shell") from error
        definition["kind"] = given["kind"] or "process"
    if given["url"] is not None:
        definition["url"] = given["url"]
        definition["kind"] = given["kind"] or "remote"
    return definition


def _read(file: str) -> dict[str, Any]:
    from covenant.daemon.agent_files import read_definition
    from covenant.model.errors import Invalid

    try:
        return read_definition(Path(file).expanduser())
    except Invalid as invalid:
        raise Failure(invalid.code, f"{file}: {invalid.message}") from invalid


schedule_arguments: Final = combined(
    click.argument("agent_id", metavar="AGENT", shell_complete=complete_agents),
    click.argument("schedule_id", metavar="SCHEDULE"),
    tenant_option,
)


@daemon_command(schedules, "list", "schedule_list", "tenant", "count", "schedules")
@tenant_option
@click.option("--agent", "agent_id", metavar="ID", default="", help="Only schedules of this agent.")
def list_schedules(call: Invocation, *, tenant: str, agent_id: str) -> None:
    """List the schedules of a tenant's agents, each with its next run in its own time zone."""
    answer = call.ask("list_schedules", tenant=tenant, agent_id=agent_id)
    columns = ("agent", "schedule", "when", "time zone", "next run", "from")
    call.show_table(answer, columns, map(_schedule_row, answer["schedules"]), empty="there is no schedule")


@daemon_command(schedules, "show", "schedule", "tenant", "schedule")
@schedule_arguments
def show_schedule(call: Invocation, **which: Any) -> None:
    """Show a schedule and its next runs."""
    answer = call.ask("show_schedule", **which)
    if call.answer(answer):
        return
    schedule = answer["schedule"]
    put(f"{schedule['agent_id']}/{schedule['id']}: {_when(schedule)}, time zone {schedule['time_zone']}")
    put(f"the text of its tasks is {schedule['text'] or schedule['id']!r}; its definition is {schedule['source']}")
    if schedule["catch_up_s"]:
        put(f"runs moments that were missed, up to {schedule['catch_up_s']} seconds later")
    else:
        put("skips moments that passed while no daemon was up")
    if schedule["paused_at_ms"] is not None:
        put(f"paused {ago(schedule['paused_at_ms'])}")
    for moment in schedule["upcoming"]:
        put(f"next: {moment['local']}")


@daemon_command(schedules, "add", "schedule", "tenant", "schedule")
@schedule_arguments
@click.option("--cron", metavar="FIELDS", default="", help="Minute, hour, day, month and weekday, as in crontab.")
@click.option("--every", metavar="DURATION", type=Duration(), default=0, help="The interval, at least 1s.")
@click.option("--time-zone", metavar="NAME", default="UTC", show_default=True, help="A name such as Europe/Berlin.")
@click.option("--text", metavar="TEXT", default="", help="The text of the task. Default: the schedule's id.")
@click.option(
    "--catch-up", metavar="DURATION", type=Duration(), default=0, help="Run missed moments that are at most this old."
)
def add_schedule(
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
    _show_change(call, answer, "added")


@daemon_command(schedules, "pause", "schedule", "tenant", "schedule")
@schedule_arguments
def pause(call: Invocation, **which: Any) -> None:
    """Pause a schedule until it is resumed, even across restarts. Moments that pass meanwhile are never run."""
    _show_change(call, call.ask("pause_schedule", **which), "paused")


@daemon_command(schedules, "resume", "schedule", "tenant", "schedule")
@schedule_arguments
def resume(call: Invocation, **which: Any) -> None:
    """Resume a schedule. Its next run is at its next moment."""
    _show_change(call, call.ask("resume_schedule", **which), "resumed")


@daemon_command(schedules, "run-now", "schedule_run", "tenant", "agent_id", "schedule_id", "task_id")
@schedule_arguments
def run_now(call: Invocation, **which: Any) -> None:
    """Run a schedule now, paused or not, and print the id of the task."""
    answer = call.ask("run_schedule", **which)
    call.show(answer, answer["task_id"], f"look at it with: {call.program} a2a show {answer['task_id']}")


@daemon_command(schedules, "remove", "schedule_removed", "tenant", "agent_id", "schedule_id")
@schedule_arguments
def remove_schedule(call: Invocation, **which: Any) -> None:
    """Remove a schedule from a stored agent. The tasks of its runs stay in the ledger."""
    answer = call.ask("remove_schedule", **which)
    call.show(answer, f"removed {answer['agent_id']}/{answer['schedule_id']}")


def _show_change(call: Invocation, answer: dict[str, Any], done: str) -> None:
    schedule = answer["schedule"]
    following = "when it is resumed" if schedule["paused_at_ms"] is not None else _next(schedule)
    call.show(answer, f"{done} {schedule['agent_id']}/{schedule['id']}; next run: {following}")


def _when(schedule: dict[str, Any]) -> str:
    return schedule["cron"] or f"every {schedule['every_s']} s"


def _next(schedule: dict[str, Any]) -> str:
    if schedule["paused_at_ms"] is not None:
        return f"paused {ago(schedule['paused_at_ms'])}"
    return schedule["upcoming"][0]["local"] if schedule["upcoming"] else "none"


def _schedule_row(schedule: dict[str, Any]) -> tuple[str, ...]:
    style = "dim" if schedule["paused_at_ms"] is not None else ""
    which = (schedule["agent_id"], schedule["id"], brief(_when(schedule)), schedule["time_zone"])
    return style, *which, _next(schedule), schedule["source"]
