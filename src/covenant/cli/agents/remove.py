"""`covenant agents remove`."""

from __future__ import annotations

import click

from covenant.cli.agents.whose import tenant_option
from covenant.cli.calling import Call, calls
from covenant.cli.output import put, shape


@click.command("remove", epilog=shape("agent_removed", "tenant", "agent_id"))
@click.argument("agent_id", metavar="ID")
@tenant_option
@calls
def command(call: Call, *, agent_id: str, tenant: str) -> None:
    """Remove a stored agent. Tasks for it stay in the ledger."""
    answer = call.ask("remove_agent", tenant=tenant, agent_id=agent_id)
    if not call.answer(answer):
        put(f"removed {answer['agent_id']}@{answer['tenant']}")
