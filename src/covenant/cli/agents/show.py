"""`covenant agents show`."""

from __future__ import annotations

import json

import click

from covenant.cli.agents.whose import tenant_option
from covenant.cli.ages import age
from covenant.cli.calling import Call, calls
from covenant.cli.output import put, shape
from covenant.daemon.environment import now_ms


@click.command("show", epilog=shape("agent", "tenant", "agent", "identity"))
@click.argument("agent_id", metavar="ID")
@tenant_option
@calls
def command(call: Call, *, agent_id: str, tenant: str) -> None:
    """Show an agent: who it is in the ledger, where it is kept, and its whole constitution."""
    answer = call.ask("show_agent", tenant=tenant, agent_id=agent_id)
    if call.answer(answer):
        return
    agent, who = answer["agent"], answer["identity"]
    put(f"{who['display']}  {who['pubkey']}")
    changed = f", changed {age(now_ms() - agent['updated_at_ms'])} ago" if agent["updated_at_ms"] else ""
    put(f"{agent['kind']}, {agent['source']}{changed}")
    put(json.dumps(agent["agent_def"], ensure_ascii=False, indent=2))
