"""`covenant a2a tree`."""

from __future__ import annotations

from typing import Any

import click

from covenant.cli.calling import Call, calls
from covenant.cli.output import brief, console, shape


@click.command("tree", epilog=shape("a2a_tree", "tree"))
@click.argument("task_id")
@calls
def command(call: Call, *, task_id: str) -> None:
    """Draw a task and all that were sent as its parts."""
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
    state = node["result_status"] or node["state"].replace("_", " ")
    style = {"ok": "green", "error": "red"}.get(state, "yellow")
    return Text.assemble(
        (state, style),
        " ",
        node["task_id"],
        " ",
        (task["recipient"]["display"], "bold"),
        " ",
        brief(task["intent_text"]),
    )
