"""`covenant capabilities`: grants, and who may do what by them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import islice
from typing import Any, Final

import click

from covenant.cli.daemon_client import Invocation, daemon_command, purge_command
from covenant.cli.options import CommandGroup, limit_option
from covenant.cli.terminal import Failure, ago, brief, console, distance, put, say, table

PREFIXES: Final = ("a2a.send.", "a2a.recv.", "a2a.respond.")
MATCHES_MAX: Final = 16
PUBKEY_LENGTH_MIN: Final = 43
"""The shortest base58 of 32 bytes that are not mostly zeros: a text of this length is a key, not the start of one."""

capabilities: Final = CommandGroup(
    "capabilities", help="Capabilities: grants of actions to identities.", no_args_is_help=True
)


@daemon_command(capabilities, "recent", "capability_list", "limit", "capabilities")
@limit_option(10)
def recent(call: Invocation, *, limit: int) -> None:
    """List the newest grants of the caller. The operator sees all grants."""
    grants = call.ask("recent_capabilities", limit=limit)["capabilities"]
    if call.answer({"limit": limit, "capabilities": grants}):
        return
    if not grants:
        say("nothing is granted; grant with `covenant capabilities grant ACTION --to NAME@HOST`")
        return
    rows = table("", "who", "may", "granted", "state", "scope", "signature")
    rows.columns[-1].overflow = "fold"
    for each in grants:
        state = each["effective"]
        if state == "live" and each["expires_at"] is not None:
            state = f"ends {distance(each['expires_at'])}"
        rows.add_row(
            each["subject"]["display"],
            each["action"],
            ago(each["granted_at"]),
            state,
            brief(str(each["scope"])) if each["scope"] else "",
            each["signature_b58"],
            style="" if each["effective"] == "live" else "dim",
        )
    console().print(rows)


@daemon_command(
    capabilities, "grant", "capability_granted", "subject_display", "action", "signature_b58", "scope", "expires_at"
)
@click.argument("action")
@click.option("--to", metavar="NAME@HOST", help="The identity that gets the capability. Default: the operator.")
@click.option("--scope", metavar="JSON", help='What the grant is limited to, such as {"task_id": "…", "max_uses": 1}.')
@click.option("--expires-at", type=click.IntRange(min=1), metavar="MS", help="Epoch millisecond when the grant ends.")
def grant(call: Invocation, *, action: str, to: str | None, scope: str | None, expires_at: int | None) -> None:
    """Grant ACTION, such as a2a.send.bob@host, a2a.respond.alice@host, a2a.repair.requeue or a2a.compact.

    In a2a.send.…, a2a.recv.… and a2a.respond.… the beginning of an enrolled identity's pubkey is enough.
    """
    pinned = _scope(scope)
    answer = call.ask("grant_capability", action=_expanded(call, action), to=to, scope=pinned, expires_at=expires_at)
    if not call.answer(answer):
        put(f"granted: {answer['subject_display']} → {answer['action']}")
        put(f"signature: {answer['signature_b58']}")


@daemon_command(capabilities, "revoke", "capability_revoked", "signature_b58", "removed")
@click.argument("signature")
def revoke(call: Invocation, *, signature: str) -> None:
    """Revoke the grant with this SIGNATURE, or the beginning of one, as `covenant capabilities recent` shows it.

    It is no error if there is no such grant any more.
    """
    answer = call.ask("revoke_capability", signature_b58=signature)
    found = answer["signature_b58"]
    call.show(answer, f"revoked {found}" if answer["removed"] else f"there is no live grant {found}")


purge_command(
    capabilities,
    "purge_capabilities",
    "capabilities_purged",
    "revoked grant(s)",
    "Forget grants that were revoked long ago.",
)


def _scope(text: str | None) -> dict[str, Any] | None:
    if text is None:
        return None
    try:
        scope = json.loads(text)
    except ValueError as error:
        raise click.UsageError(f"--scope is no JSON: {error}") from error
    if not isinstance(scope, dict):
        raise click.UsageError('--scope must be a JSON object, such as {"max_uses": 1}')
    return scope


def _expanded(call: Invocation, action: str) -> str:
    """The action with a key's start spelled out: a tail without `.` or `@` is no display."""
    for prefix in PREFIXES:
        tail = action.removeprefix(prefix)
        if tail != action and tail and "." not in tail and "@" not in tail and len(tail) < PUBKEY_LENGTH_MIN:
            return prefix + _pubkey(call, tail)
    return action


def _pubkey(call: Invocation, start: str) -> str:
    listed = call.ask("list_identities", prefix=start, limit=1_000)["identities"]
    found = [row for row in listed if row["agent_id"]["pubkey"].startswith(start)]
    live = {row["agent_id"]["pubkey"]: row for row in found if row["revoked_at"] is None}
    if len(live) == 1:
        return str(next(iter(live)))
    if live:
        raise Failure(
            "ambiguous_prefix", f"{start!r} is the start of several keys; write more of it:{_named(live.values())}"
        )
    if found:
        raise Failure("unknown_prefix", f"{start!r} is the start of revoked identities only:{_named(found)}")
    known = call.ask("list_identities", status="live", limit=MATCHES_MAX)["identities"]
    raise Failure("unknown_prefix", f"{start!r} is the start of no enrolled key; these are enrolled:{_named(known)}")


def _named(rows: Iterable[dict[str, Any]]) -> str:
    agents = (row["agent_id"] for row in rows)
    return "".join(f"\n  {agent['pubkey']} {agent['display']}" for agent in islice(agents, MATCHES_MAX))
