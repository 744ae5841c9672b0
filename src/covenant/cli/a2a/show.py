"""`covenant a2a show`."""

from __future__ import annotations

from typing import Any

import click

from covenant.cli.a2a.queue import content_text, summary
from covenant.cli.ages import age, distance
from covenant.cli.calling import Call, calls
from covenant.cli.output import brief, clean, console, shape, table
from covenant.daemon.environment import now_ms


@click.command(
    "show",
    epilog=shape(
        "a2a_task",
        "task",
        "state",
        "a2a_state",
        "attempt",
        "turn",
        "generation",
        "created_at_ms",
        "updated_at_ms",
        "leases",
        "updates",
        "result",
        "cause",
        "holder_lost",
        "truncated?",
    ),
)
@click.argument("task_id")
@calls
def command(call: Call, *, task_id: str) -> None:
    """Show everything about one task: its state, its leases, its updates, its result."""
    answer = call.ask("show_a2a_task", task_id=task_id)
    if call.answer(answer):
        return
    now = now_ms()
    screen = console()
    screen.print(_facts(answer, now))
    if answer["leases"]:
        screen.print(_leases(answer["leases"], now))
    if answer["updates"]:
        screen.print(_updates(answer["updates"], now))


def _facts(shown: dict[str, Any], now: int) -> Any:
    from rich.text import Text

    task = shown["task"]
    state = shown["state"].replace("_", " ")
    facts = {
        "task": task["id"],
        "state": f"{state}, its holder is lost" if shown.get("holder_lost") else state,
        "cause": shown.get("cause"),
        "from": task["sender"]["display"],
        "to": task["recipient"]["display"],
        "kind": task.get("task_kind"),
        "parent": task.get("parent"),
        "key": (task.get("idempotency") or {}).get("key"),
        "deadline": distance(task["deadline_ms"] - now) if task.get("deadline_ms") else None,
        "accepted": f"{age(now - shown['created_at_ms'])} ago",
        "attempts": str(shown["attempt"]),
        "intent": task["intent_text"],
    }
    result = shown.get("result")
    if result:
        facts["result"] = f"{result['status']}: {summary(result)}"
    rows = table("", "what", "value")
    rows.show_header = False
    for name, value in facts.items():
        if value is not None:
            rows.add_row(Text(name, "bold"), Text(clean(str(value))))
    return rows


def _leases(leases: list[dict[str, Any]], now: int) -> Any:
    rows = table("leases", "try", "lease", "held by", "since", "ended", "outcome")
    for lease in leases:
        ended = lease.get("ended_at_ms")
        rows.add_row(
            str(lease["attempt"]),
            lease["lease_id"],
            lease["leased_to"]["display"],
            f"{age(now - lease['leased_at_ms'])} ago",
            f"{age(now - ended)} ago" if ended else "",
            brief(" ".join(filter(None, (lease.get("outcome") or "live", lease.get("reason"))))),
        )
    return rows


def _updates(updates: list[dict[str, Any]], now: int) -> Any:
    rows = table("updates", "gen", "when", "kind", "says")
    for update in updates:
        when = f"{age(now - update['ts_ms'])} ago"
        rows.add_row(str(update["generation"]), when, update["kind"], brief(_said(update.get("body"))))
    return rows


def _said(body: Any) -> str:
    match body:
        case {"text": str(text)}:
            return text
        case {"parts": list(parts)}:
            return content_text(parts)
        case None:
            return ""
        case _:
            return str(body)
