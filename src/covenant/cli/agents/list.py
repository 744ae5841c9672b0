"""`covenant agents list`."""

from __future__ import annotations

import click

from covenant.cli.agents.whose import tenant_option
from covenant.cli.calling import Call, calls
from covenant.cli.output import brief, console, shape, table


@click.command("list", epilog=shape("agent_list", "tenant", "count", "agents"))
@tenant_option
@calls
def command(call: Call, *, tenant: str) -> None:
    """List a tenant's agents: index, those of code and files, then the stored ones, the oldest first."""
    answer = call.ask("list_agents", tenant=tenant)
    if call.answer(answer):
        return
    rows = table("", "agent", "kind", "from", "name", "what it does")
    for agent in answer["agents"]:
        made = agent["agent_def"]
        purpose = brief(made["description"] or made["goal"] or made["role"])
        rows.add_row(agent["id"], agent["kind"], agent["source"], brief(agent["name"]), purpose)
    console().print(rows)
