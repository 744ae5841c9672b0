"""`covenant agents`: the agents in each tenant's catalogue."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any, Final

import click

from covenant.cli.daemon_client import Invocation, complete_agents, daemon_command
from covenant.cli.options import CommandGroup
from covenant.cli.terminal import Failure, ago, brief, print_table, put
from covenant.model.kinds import STORED_KINDS

agents: Final = CommandGroup("agents", help="Agents: the catalogue of each tenant.", no_args_is_help=True)

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
    talk = []
    if agent["kind"] == "worker" and not replace:
        talk.append(f"its worker gets a token with: {call.again} identities enroll {who}")
    call.show(answer, f"{'replaced' if replace else 'added'} {who} ({agent['kind']})", *talk)


@daemon_command(agents, "list", "agent_list", "tenant", "count", "agents")
@tenant_option
def list_agents(call: Invocation, *, tenant: str) -> None:
    """List a tenant's agents: index, agents from code and files, then stored agents, the oldest first."""
    answer = call.ask("list_agents", tenant=tenant)
    if call.answer(answer):
        return
    rows = []
    for agent in answer["agents"]:
        made = agent["agent_def"]
        purpose = brief(made["description"] or made["goal"] or made["role"])
        source = " ".join((agent["source"], *(["at", ", ".join(agent["nodes"])] if agent.get("nodes") else ())))
        rows.append(("", agent["id"], agent["kind"], source, brief(agent["name"]), purpose))
    print_table(("agent", "kind", "from", "name", "what it does"), rows)


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
        definition["command"] = shlex.split(given["program"])
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
