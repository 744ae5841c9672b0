"""`covenant peers delegations`."""

from __future__ import annotations

import click

from covenant.cli.ages import age
from covenant.cli.calling import Call, calls
from covenant.cli.output import brief, console, put, say, shape, table
from covenant.cli.peers.telling import ELSEWHERE, STYLES, delegation_line, spent
from covenant.daemon.environment import now_ms

STATUSES = ["pending", "running", "completed", "failed", "cancelled", "timeout", "lost"]


@click.command("delegations", epilog=shape("delegations", "delegations", "total"))
@click.argument("delegation", required=False)
@click.option("--peer", metavar="PEER", help="Only those with this peer.")
@click.option("--status", type=click.Choice(STATUSES), help="Only those that stand so.")
@click.option("--role", type=click.Choice(["requester", "provider"]), help="Only those that we asked for, or work on.")
@click.option("--limit", type=click.IntRange(1, 100), default=20, show_default=True, help="At most this many.")
@calls
def command(
    call: Call, *, delegation: str | None, peer: str | None, status: str | None, role: str | None, limit: int
) -> None:
    """List delegations to and from peers, lost ones first; or show one, by the id of its task."""
    if delegation is not None:
        _show(call, delegation)
        return
    answer = call.ask("list_delegations", peerId=peer, status=status, role=role, limit=limit)
    if call.answer(answer):
        return
    now = now_ms()
    rows = table("", "state", "task", "with", "profile", "tokens", "moved", "")
    for each in answer["delegations"]:
        way = f"{ELSEWHERE} {each['peer']}" if each["role"] == "requester" else f"from {each['peer']}"
        rows.add_row(
            each["state"],
            each["id"],
            way,
            brief(each["profile"], 64),
            spent(each),
            f"{age(now - each['movedAtMs'])} ago",
            brief(each["reason"] or each["message"] or "", 60),
            style=STYLES.get(each["state"], ""),
        )
    console().print(rows)
    if any(each["state"] == "lost" for each in answer["delegations"]):
        say(f"lost ones wait for you: {call.again} peers offer-again ID, or force-error ID --reason WHY")


def _show(call: Call, delegation: str) -> None:
    answer = call.ask("show_delegation", delegationId=delegation)
    if call.answer(answer):
        return
    found = answer["delegation"]
    put(delegation_line(found))
    put(f"{spent(found)} tokens, {'proven' if found['proven'] else 'not proven'}")
    for line in (found["reason"], answer.get("error"), answer.get("result")):
        if line:
            put(line)
