"""`covenant capabilities grant`."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import islice
from typing import Any, Final

import click

from covenant.cli.calling import Call, calls
from covenant.cli.failures import Failure
from covenant.cli.output import put, shape

PREFIXES: Final = ("a2a.send.", "a2a.recv.", "a2a.respond.")
MATCHES_MAX: Final = 16
PUBKEY_LENGTH_MIN: Final = 43
"""The shortest base58 of 32 bytes that is not mostly zeros: what is as long is a key, not the start of one."""


@click.command(
    "grant", epilog=shape("capability_granted", "subject_display", "action", "signature_b58", "scope", "expires_at")
)
@click.argument("action")
@click.option("--to", metavar="NAME@HOST", help="Whose capability it is. Default: the operator's own.")
@click.option("--scope", metavar="JSON", help='What it is pinned to, such as {"task_id": "…", "max_uses": 1}.')
@click.option("--expires-at", type=click.IntRange(min=1), metavar="MS", help="Epoch millisecond when it ends.")
@calls
def command(call: Call, *, action: str, to: str | None, scope: str | None, expires_at: int | None) -> None:
    """Grant ACTION, such as a2a.send.bob@host, a2a.respond.alice@host, a2a.repair.requeue or a2a.compact.

    In a2a.send.…, a2a.recv.… and a2a.respond.… the start of an enrolled identity's pubkey stands for all of it.
    """
    pinned = _scope(scope)
    answer = call.ask("grant_capability", action=_expanded(call, action), to=to, scope=pinned, expires_at=expires_at)
    if not call.answer(answer):
        put(f"granted: {answer['subject_display']} → {answer['action']}")
        put(f"signature: {answer['signature_b58']}")


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


def _expanded(call: Call, action: str) -> str:
    """The action with a key's start spelled out: a tail without `.` or `@` is no display."""
    for prefix in PREFIXES:
        tail = action.removeprefix(prefix)
        if tail != action and tail and "." not in tail and "@" not in tail and len(tail) < PUBKEY_LENGTH_MIN:
            return prefix + _pubkey(call, tail)
    return action


def _pubkey(call: Call, start: str) -> str:
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
