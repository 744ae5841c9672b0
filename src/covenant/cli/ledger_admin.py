"""`covenant ledger`: the ledger that one daemon has for itself, or several share."""

from __future__ import annotations

from typing import Any, Final

from covenant.cli.options import CommandGroup, Invocation, daemon_command
from covenant.cli.terminal import ago, print_table

ledger: Final = CommandGroup(
    "ledger", help="The ledger: the daemons that share it, and its database.", no_args_is_help=True
)


@daemon_command(ledger, "nodes", "node_list", "nodes")
def nodes(call: Invocation) -> None:
    """List the daemons that serve this ledger: one, unless it is on PostgreSQL."""
    answer = call.ask("list_nodes")
    if not call.answer(answer):
        print_table(("node", "state", "started", "seen", "leases", "boot"), map(_row, answer["nodes"]))


def _row(node: dict[str, Any]) -> tuple[str, ...]:
    style, state = ("", "alive") if node["alive"] else ("red", "lost")
    times = (ago(node["started_at_ms"]), ago(node["seen_at_ms"]))
    return style, node["node"], state, *times, str(node["leases"]), node["boot"][:8]
