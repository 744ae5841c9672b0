"""`covenant a2a tree`."""

from __future__ import annotations

from typing import Any, Final

import click

from covenant.cli.ages import age
from covenant.cli.calling import Call, calls
from covenant.cli.output import brief, console, shape
from covenant.model.usage import tokens_of

ELSEWHERE: Final = "⇄"
"""Before a task that is done elsewhere."""


@click.command("tree", epilog=shape("a2a_tree", "tree"))
@click.argument("task_id")
@calls
def command(call: Call, *, task_id: str) -> None:
    """Draw a task and all that were sent as its parts.

    Each with its state, its agent, the attempt if it is not the first, how long it has taken, and its tokens with those
    of everything below it. ⇄ marks what is done elsewhere.
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
    where = f" {ELSEWHERE} {node.get('url')}" if node.get("remote") else ""
    return Text.assemble(
        (state, style),
        " ",
        node["task_id"],
        " ",
        (task["recipient"]["display"], "bold"),
        (where, "cyan"),
        (_facts(node), "dim"),
        " ",
        brief(task["intent_text"]),
    )


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
    if node.get("result_status") and node["created_at_ms"] is not None:
        facts.append(age(node["updated_at_ms"] - node["created_at_ms"]))
    tokens = tokens_of(node.get("usage_total") or {})
    if tokens:
        facts.append(f"{tokens:g} tokens")
    return f" ({', '.join(facts)})" if facts else ""
