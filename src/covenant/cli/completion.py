"""`covenant completion`: the shell completes commands, options, and what the daemon knows: tasks, agents, identities.

The query to the daemon for a completion is bounded in count and time. Without a daemon nothing is proposed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import click
from click.shell_completion import CompletionItem, get_completion_class

from covenant.cli.daemon_client import Answer, DaemonClient, read_token
from covenant.cli.options import json_option
from covenant.cli.terminal import brief, json_shape, put, put_json
from covenant.daemon.environment import environment, find_home

SHELLS: Final = ("bash", "zsh", "fish")
VARIABLE: Final = "_COVENANT_COMPLETE"
ASK_S: Final = 2.0
PROPOSED_MAX: Final = 50

Complete = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]


@click.command("completion", epilog=json_shape("completion", "shell", "script"))
@click.argument("shell", type=click.Choice(SHELLS))
@json_option()
def completion(*, shell: str, as_json: bool) -> None:
    """Print the script that makes a shell complete commands, task ids, agents and identities.

    \b
        covenant completion bash > ~/.local/share/bash-completion/completions/covenant
        covenant completion zsh > "${fpath[1]}/_covenant"
        covenant completion fish > ~/.config/fish/completions/covenant.fish

    For one session: eval "$(covenant completion bash)".
    """
    from covenant.cli.main import command

    made = get_completion_class(shell)
    assert made is not None
    script = made(command, {}, "covenant", VARIABLE).source()
    if as_json:
        put_json({"kind": "completion", "shell": shell, "script": script})
    else:
        put(script)


def _completes(kind: str, items: Callable[[Answer], Iterable[tuple[str, str]]], **asked: Any) -> Complete:
    """Proposes what the daemon answers: pairs of a value and its description."""

    def complete(context: click.Context, _parameter: click.Parameter, begun: str) -> list[CompletionItem]:
        try:
            answer = _ask(context, kind, **{name: given(context, begun) for name, given in asked.items()})
            found = [(value, word) for value, word in items(answer) if value.startswith(begun)]
        except Exception:  # noqa: BLE001  (whatever it is, the person is typing: nothing is proposed)
            return []
        return [CompletionItem(value, help=brief(word)) for value, word in found[:PROPOSED_MAX]]

    return complete


def _ask(context: click.Context, kind: str, **fields: Any) -> Answer:
    variables = environment()
    home = _given(context, "home")
    folder, _ = find_home(home, variables)
    with DaemonClient(folder, read_token(folder, _given(context, "token_file"), variables)) as client:
        return client.ask(kind, within_s=ASK_S, **fields)


def _given(context: click.Context, name: str) -> str | None:
    found: str | None = context.params.get(name) or context.find_root().params.get(name)
    return found


def _tasks(answer: Answer) -> Iterator[tuple[str, str]]:
    for task in answer["tasks"]:
        yield task["task_id"], f"{task['state']} {task['agent']} {task['intent']}"


def _agents(answer: Answer) -> Iterator[tuple[str, str]]:
    for agent in answer["agents"]:
        yield agent["id"], f"{agent['kind']} {agent['name']}"


def _identities(answer: Answer) -> Iterator[tuple[str, str]]:
    for identity in answer["identities"]:
        yield identity["agent_id"]["display"], ""


complete_tasks: Final = _completes(
    "find_a2a_tasks", _tasks, id=lambda _, begun: begun or None, limit=lambda _context, _begun: PROPOSED_MAX
)
complete_agents: Final = _completes(
    "list_agents", _agents, tenant=lambda context, _: context.params.get("tenant") or "default"
)
complete_identities: Final = _completes("list_identities", _identities)

task_argument: Final = click.argument("task_id", shell_complete=complete_tasks)
