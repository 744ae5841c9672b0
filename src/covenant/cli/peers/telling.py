"""Peers and delegations in words, the same in every command."""

from __future__ import annotations

from typing import Any, Final

from covenant.cli.ages import age
from covenant.cli.output import brief

ELSEWHERE: Final = "⇄"
STYLES: Final = {
    "completed": "green",
    "failed": "red",
    "rejected": "red",
    "timeout": "red",
    "lost": "bold red",
    "cancelled": "dim",
}


def peer_line(peer: dict[str, Any]) -> str:
    where = peer["url"] or "no address; it fetches"
    return f"{peer['name']}  {peer['id']}  {peer['trustLevel']}  {where}"


def troubles(peer: dict[str, Any]) -> str:
    """What an operator should look at."""
    found = []
    if peer["denied"]:
        found.append("denied")
    if peer["conflict"]:
        found.append(peer["conflict"])
    waiting = peer["waiting"]
    if waiting.get("count"):
        why = f" ({brief(waiting['failure'], 80)})" if waiting.get("failure") else ""
        found.append(f"{waiting['count']} messages wait{why}")
    return ", ".join(found)


def delegation_line(delegation: dict[str, Any]) -> str:
    way = f"{ELSEWHERE} to" if delegation["role"] == "requester" else "from"
    said = f"{delegation['state']} {delegation['id']} {way} {delegation['peer']}/{delegation['profile']}"
    why = delegation["code"] or ""
    return f"{said} {why}".rstrip()


def spent(delegation: dict[str, Any]) -> str:
    used = delegation["tokenUsage"]["total"]
    return f"{used} of {delegation['maxTokenBudget']}" + (" overspent" if delegation["overspent"] else "")


def seen(at_ms: int | None, now_ms: int) -> str:
    return f"{age(now_ms - at_ms)} ago" if at_ms else "never"
