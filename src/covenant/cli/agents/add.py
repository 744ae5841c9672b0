"""`covenant agents add`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import click

from covenant.cli.agents.whose import tenant_option
from covenant.cli.calling import Call, calls
from covenant.cli.failures import Failure
from covenant.cli.output import put, say, shape

KINDS = ("worker", "model", "process", "remote", "peer")


@click.command("add", epilog=shape("agent_added", "tenant", "agent"))
@click.argument("agent_id", metavar="[ID]", required=False)
@tenant_option
@click.option(
    "--file", metavar="FILE", help="Its constitution, in JSON or TOML. The options below change what it says."
)
@click.option("--kind", type=click.Choice(KINDS), help="Who does its work. Default, without a file: worker.")
@click.option("--name", metavar="TEXT", help="Its name for people.")
@click.option("--description", metavar="TEXT", help="What it does.")
@click.option("--skill", "skills", multiple=True, metavar="ID", help="What its card says it can do. May be repeated.")
@click.option("--command", "program", metavar="WORDS", help="The program of a process agent, as in a shell.")
@click.option("--replace", is_flag=True, help="In place of the stored agent with this id.")
@calls
def command(call: Call, *, agent_id: str | None, tenant: str, file: str | None, replace: bool, **given: Any) -> None:
    """Store an agent for a tenant: from a file, or by a few options.

    \b
        covenant agents add summarizer --tenant acme --description "Summarises a text"
        covenant identities enroll summarizer@acme        # the token of its worker
    """
    if file is None and agent_id is not None and agent_id.endswith((".json", ".toml")):
        raise click.UsageError(f"an id has no dot in it; to read a file: --file {shlex.quote(agent_id)}")
    definition: dict[str, Any] = _read(file) if file is not None else {"kind": "worker"}
    if agent_id is not None:
        definition["id"] = agent_id
    if "id" not in definition:
        raise click.UsageError("say which: ID, or a file with an id")
    for key in ("kind", "name", "description"):
        if given[key] is not None:
            definition[key] = given[key]
    if given["skills"]:
        definition["skills"] = list(given["skills"])
    if given["program"] is not None:
        definition["command"] = shlex.split(given["program"])
        definition["kind"] = given["kind"] or "process"
    answer = call.ask("add_agent", tenant=tenant, agent_def=definition, replace=replace or None)
    if call.answer(answer):
        return
    agent = answer["agent"]
    put(f"{'replaced' if replace else 'added'} {agent['id']}@{answer['tenant']} ({agent['kind']})")
    if agent["kind"] == "worker" and not replace:
        say(f"its worker gets a token with: {call.again} identities enroll {agent['id']}@{answer['tenant']}")


def _read(file: str) -> dict[str, Any]:
    from covenant.daemon.agent_files import read_definition
    from covenant.model.errors import Invalid

    try:
        return read_definition(Path(file).expanduser())
    except Invalid as invalid:
        raise Failure(invalid.code, f"{file}: {invalid.message}") from invalid
