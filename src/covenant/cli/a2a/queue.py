"""The queue as `status` and `watch` ask for it and show it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import click

from covenant.cli.ages import age, distance
from covenant.cli.output import brief, table

if TYPE_CHECKING:
    from rich.console import RenderableType

STATES: Final = ("queued", "in_flight", "in-flight")


def filters(function: Callable[..., None]) -> Callable[..., None]:
    """The options that choose what is shown. Filters apply before the limit."""
    for option in (
        click.option(
            "--state", "state_filter", type=click.Choice(STATES), help="Only queued tasks, or only those in flight."
        ),
        click.option(
            "--deadline-within-ms",
            type=click.IntRange(min=0),
            help="Only tasks whose deadline has passed or comes within this time.",
        ),
        click.option(
            "--min-lease-age-ms",
            type=click.IntRange(min=0),
            help="Leave out leases younger than this. Queued tasks stay.",
        ),
        click.option("--counts", is_flag=True, help="With --json: add how much there is of everything."),
        click.option("--limit", "-n", type=click.IntRange(min=1), default=10, show_default=True, help="Most rows."),
    ):
        function = option(function)
    return function


def asked(
    *, limit: int, min_lease_age_ms: int | None, deadline_within_ms: int | None, state_filter: str | None
) -> dict[str, Any]:
    """The filters as the daemon takes them, in the order in which they are told again."""
    return {
        "limit": limit,
        "min_lease_age_ms": min_lease_age_ms,
        "deadline_within_ms": deadline_within_ms,
        "state_filter": state_filter.replace("-", "_") if state_filter else None,
    }


def shown(answer: dict[str, Any], now_ms: int) -> RenderableType:
    """Tasks and waiting results as tables, what needs the operator first and in colour."""
    from rich.console import Group

    tasks, results = answer["tasks"], answer["results"]
    counts = _counts(answer.get("counts"))
    if not tasks and not results:
        return f"nothing is queued, in flight or waiting to be drained{f'; {counts}' if counts else ''}"
    parts: list[RenderableType] = []
    if tasks:
        parts.append(_tasks(tasks, now_ms))
    if results:
        parts.append(_results(results))
    if counts:
        parts.append(counts)
    return Group(*parts)


def status(query: dict[str, Any], answer: dict[str, Any], *, counts: bool) -> dict[str, Any]:
    """The queue as one object for supervisors."""
    found = {"kind": "a2a_status", **query, "tasks": answer["tasks"], "results": answer["results"]}
    return {**found, "counts": answer.get("counts")} if counts else found


def _counts(counts: dict[str, int] | None) -> str:
    """What there is in all; of what is rare, only what there is."""
    if counts is None:
        return ""
    names = {
        "queued": "queued",
        "in_flight": "in flight",
        "holders_lost": "lost",
        "delegations_lost": "lost at peers (see covenant peers delegations)",
        "parked": "parked",
        "following": "following",
        "result_pending": "undrained",
        "cached": "results kept for the same work",
    }
    return ", ".join(f"{counts[name]} {words}" for name, words in names.items() if counts[name])


def _tasks(tasks: list[dict[str, Any]], now_ms: int) -> RenderableType:
    from rich.text import Text

    made = table("tasks", "state", "task", "from", "to", "try", "held", "deadline", "intent")
    for entry in tasks:
        task = entry["task"]
        deadline = task.get("deadline_ms")
        made.add_row(
            _state(entry),
            task["id"],
            task["sender"]["display"],
            task["recipient"]["display"],
            str(entry["attempt"]),
            _held(entry, now_ms),
            Text(distance(deadline - now_ms), "red" if deadline < now_ms else "") if deadline else "",
            Text(brief(task["intent_text"])),
        )
    return made


def _state(entry: dict[str, Any]) -> RenderableType:
    from rich.text import Text

    if entry.get("holder_lost"):
        return Text("holder lost", "bold red")
    return Text(entry["state"].replace("_", " "), "yellow" if entry["state"] == "in_flight" else "green")


def _held(entry: dict[str, Any], now_ms: int) -> str:
    leased_at_ms = entry.get("leased_at_ms")
    if leased_at_ms is None:
        return ""
    touched_ms = max(leased_at_ms, entry.get("renewed_at_ms") or 0)
    return f"{age(now_ms - touched_ms)} by {entry['leased_to']['display']}"


def _results(results: list[dict[str, Any]]) -> RenderableType:
    from rich.text import Text

    made = table("results waiting to be drained", "status", "task", "says")
    for result in results:
        style = "green" if result["status"] == "ok" else "red"
        made.add_row(Text(result["status"], style), result["task_id"], Text(brief(summary(result))))
    return made


def summary(result: dict[str, Any]) -> str:
    """A result in one line: its error, else its text."""
    if result.get("error_message"):
        return str(result["error_message"])
    return content_text(result["content"])


def content_text(content: list[dict[str, Any]]) -> str:
    """What blocks of content say: text as it is, anything else as JSON."""
    import json

    said: list[str] = []
    for block in content:
        match block:
            case {"type": "text", "text": str(text)}:
                said.append(text)
            case {"type": "json", "value": value}:
                said.append(json.dumps(value, ensure_ascii=False))
            case _:
                said.append(json.dumps(block, ensure_ascii=False))
    return "\n".join(said)
