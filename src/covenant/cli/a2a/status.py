"""`covenant a2a status`."""

from __future__ import annotations

from typing import Any

import click

from covenant.cli.a2a.queue import asked, filters, shown
from covenant.cli.calling import Call, calls
from covenant.cli.output import console, shape
from covenant.daemon.environment import now_ms


@click.command(
    "status",
    epilog=shape("a2a_status", "limit", "min_lease_age_ms", "deadline_within_ms", "state_filter", "tasks", "results"),
)
@filters
@calls
def command(call: Call, **given: Any) -> None:
    """Show queued tasks, leases and results that wait to be drained.

    Leases whose holder is lost come first, then the longest held, then queued tasks, oldest first.
    """
    query = asked(**given)
    answer = call.ask("a2a_queue", **query)
    status = {"kind": "a2a_status", **query, "tasks": answer["tasks"], "results": answer["results"]}
    if not call.answer(status):
        console().print(shown(answer, now_ms()))
