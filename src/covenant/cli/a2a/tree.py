"""`covenant a2a tree`."""

from __future__ import annotations

from typing import Any, Final

import click

from covenant.cli.calling import Call, calls
from covenant.cli.output import brief, console, shape
from covenant.daemon.environment import now_ms
from covenant.model.usage import tokens_of

ELSEWHERE: Final = "⇄"
"""Before the place of a task that is done elsewhere."""
BY_ADDRESS: Final = "remote.url"
BY_PEER: Final = "remote.peer"
"""As whom agents are known that no catalogue has."""


@click.command("tree", epilog=shape("a2a_tree", "tree"))
@click.argument("task_id")
@calls
def command(call: Call, *, task_id: str) -> None:
    """Draw a task and all that were sent as its parts.

    Each with its state, its agent, the attempt if it is not the first, how long it took or has taken so far, and its
    tokens with those of everything below it. ⇄ marks what is done elsewhere, and where that is.
    """
    answer = call.ask("a2a_tree", task_id=task_id)
    if not call.answer(answer):
        console().print(_drawn(answer["tree"]))


def _drawn(root: dict[str, Any]) -> Any:
    from rich.tree import Tree

    top = Tree(_label(root))
    open_nodes = [(top, root)]
    while open_nodes:  # not recursive: a chain of tasks may be longer than the stack
        branch, node = open_nodes.pop()
        open_nodes.extend((branch.add(_label(child)), child) for child in node["children"])
    return top


def _label(node: dict[str, Any]) -> Any:
    from rich.text import Text

    task = node["task"]
    if task is None:
        return Text(f"{node['task_id']} (not sent here)", "dim")
    state = _state(node)
    style = {"ok": "green", "completed": "green", "error": "red", "failed": "red"}.get(state, "yellow")
    return Text.assemble(
        (state, style),
        " ",
        node["task_id"],
        " ",
        *_agent(node),
        (_facts(node), "dim"),
        " ",
        brief(task["intent_text"]),
    )


def _agent(node: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    """Its name; one elsewhere as the caller named it, and where it is."""
    shown: str = node["task"]["recipient"]["display"]
    if not node.get("remote"):
        return ((shown, "bold"),)
    if shown.startswith(f"{BY_ADDRESS}@"):
        shown = (node["task"].get("target") or {}).get("name") or ""
    elif shown.startswith(f"{BY_PEER}@"):
        shown = brief(node.get("profile") or "", 64)
    place = f"{ELSEWHERE} {node.get('url') or node.get('provider') or 'elsewhere'}"
    return ((f"{shown} ", "bold"), (place, "cyan")) if shown else ((place, "cyan"),)


def _state(node: dict[str, Any]) -> str:
    if node.get("holder_lost"):
        return "holder lost"
    state: str = node["result_status"] or node["state"].replace("_", " ")
    told = node.get("a2a_state")
    # How it ended says more than that it did not succeed.
    return told if told in ("canceled", "rejected", "input-required", "auth-required") else state


def _facts(node: dict[str, Any]) -> str:
    facts = []
    if node["attempt"] > 1:
        facts.append(f"attempt {node['attempt']}")
    if node["created_at_ms"] is not None:
        until_ms = node["updated_at_ms"] if node.get("result_status") else now_ms()
        took = _took(until_ms - node["created_at_ms"])
        facts.append(took if node.get("result_status") else f"{took} so far")
    tokens = tokens_of(node.get("usage_total") or {})
    if tokens:
        facts.append(f"{tokens:g} tokens")
    return f" ({', '.join(facts)})" if facts else ""


def _took(ms: int) -> str:
    """As exactly as it matters: 8ms, 3.2s, 2m 05s, 3h 07m."""
    ms = max(0, ms)
    if ms < 1_000:
        return f"{ms}ms"
    if ms < 60_000:
        return f"{ms / 1_000:.1f}s"
    minutes, seconds = divmod(ms // 1_000, 60)
    return f"{minutes}m {seconds:02}s" if minutes < 60 else f"{minutes // 60}h {minutes % 60:02}m"
