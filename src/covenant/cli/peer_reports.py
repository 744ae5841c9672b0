"""`covenant peers messages`, `usage` and `config`: reports on peers."""

from __future__ import annotations

from typing import Final

import click

from covenant.cli.daemon_client import Invocation, daemon_command
from covenant.cli.options import CommandGroup, limit_option
from covenant.cli.terminal import ago, print_table, put, say

commands: Final = CommandGroup("peers")
COLUMNS: Final = ("offers", "accepted", "rejected", "completed", "failed", "cancelled", "timeout", "tokens")


@daemon_command(commands, "messages", "peer_messages", "messages", "total")
@click.option("--peer", metavar="PEER", help="Only messages to and from this peer.")
@click.option("--type", "typ", metavar="TYPE", help="Only messages of this type, such as delegation_offer.")
@limit_option(20, 100)
def messages(call: Invocation, *, peer: str | None, typ: str | None, limit: int) -> None:
    """List the latest messages to and from peers, the newest first. Their contents are sealed, and not shown."""
    answer = call.ask("list_peer_messages", peerId=peer, type=typ, limit=limit)
    if call.answer(answer):
        return
    rows = (
        ("", ago(each["atMs"]), each["direction"], each["type"], each["peer"], each.get("offerId", ""))
        for each in answer["messages"]
    )
    print_table(("when", "", "type", "peer", "of"), rows)


@daemon_command(commands, "config", "peer_config", "id", "name", "config")
def config(call: Invocation) -> None:
    """Show the settings of peers in force, and the id and name of this instance."""
    answer = call.ask("peer_config")
    if call.answer(answer):
        return
    put(f"{answer['name']}  {answer['id']}")
    for name, value in answer["config"].items():
        put(f"{name} = {value}")


@daemon_command(commands, "usage", "peer_usage", "usage", "total", "quotas")
@click.argument("peer", required=False)
@click.option("--profile", metavar="PROFILE", help="Only usage of this profile.")
@click.option(
    "--role",
    type=click.Choice(["requester", "provider"]),
    help="Only delegations that this instance asked for, or worked on.",
)
@click.option(
    "--days", type=click.IntRange(1, 92), default=7, show_default=True, help="Number of days, today included."
)
@limit_option(100, 1000)
def usage(call: Invocation, *, peer: str | None, profile: str | None, role: str | None, days: int, limit: int) -> None:
    """Show how much peers used this instance (provider), and this instance its peers (requester), by profile and day.

    Days are in UTC. An offer counts on the day it was made, its outcome and its tokens on the day it ended.

    \b
        covenant peers usage lab --days 30
    """
    answer = call.ask("peer_usage", peerId=peer, profile=profile, role=role, days=days, limit=limit)
    if call.answer(answer):
        return
    rows = [
        ("", each["day"], each["role"], each["peer"], each["profile"], *(str(each[name]) for name in COLUMNS))
        for each in answer["usage"]
    ]
    if rows:
        print_table(("day", "as", "peer", "profile", *COLUMNS), rows)
    else:
        say("nothing was delegated on these days")
    for quota in answer["quotas"]:
        said = [
            f"{quota[used]} of {quota[most]} {what}"
            for used, most, what in (
                ("acceptedToday", "offersPerDay", "offers"),
                ("tokensToday", "tokensPerDay", "tokens"),
            )
            if quota.get(most) is not None
        ]
        put(f"{quota['peer']} has had {' and '.join(said)} today")
