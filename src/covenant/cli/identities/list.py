"""`covenant identities list`."""

from __future__ import annotations

import click

from covenant.cli.ages import age
from covenant.cli.calling import Call, calls
from covenant.cli.output import console, say, shape, table
from covenant.daemon.environment import now_ms


@click.command(
    "list",
    epilog=shape(
        "identity_list",
        "limit",
        "filter_pubkey_prefix",
        "matched_count",
        "identities",
        "operator_pubkey_b58",
        "truncated",
    ),
)
@click.option("--limit", "-n", type=click.IntRange(min=1), default=20, show_default=True, help="Most rows.")
@click.option("--prefix", metavar="TEXT", help="Only those whose name, pubkey or token starts so.")
@click.option("--live-only", is_flag=True, help="Only those that may call.")
@click.option("--revoked-only", is_flag=True, help="Only those that may not any more.")
@calls
def command(call: Call, *, limit: int, prefix: str | None, live_only: bool, revoked_only: bool) -> None:
    """List identities, newest first."""
    if live_only and revoked_only:
        raise click.UsageError("--live-only and --revoked-only exclude each other")
    status = "live" if live_only else "revoked" if revoked_only else None
    answer = call.ask("list_identities", limit=limit, prefix=prefix, status=status)
    listed = {
        "kind": "identity_list",
        "limit": limit,
        "filter_pubkey_prefix": prefix,
        "matched_count": len(answer["identities"]),
        "identities": answer["identities"],
        "operator_pubkey_b58": answer["operator_pubkey_b58"],
        "truncated": answer["truncated"],
    }
    if call.answer(listed):
        return
    if not answer["identities"]:
        say("no matching identities")
        return
    now = now_ms()
    rows = table("", "who", "pubkey", "token", "enrolled", "state")
    for row in answer["identities"]:
        who, revoked_at = row["agent_id"], row["revoked_at"]
        name = who["display"] + (" (self)" if who["pubkey"] == answer["operator_pubkey_b58"] else "")
        rows.add_row(
            name,
            who["pubkey"],
            f"{row['token_prefix']}…",
            f"{age(now - row['registered_at'])} ago",
            "live" if revoked_at is None else f"revoked {age(now - revoked_at)} ago",
            style="" if revoked_at is None else "dim",
        )
    console().print(rows)
    if answer["truncated"]:
        say("there are more; raise --limit or narrow with --prefix")
