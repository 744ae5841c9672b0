"""`covenant a2a status`."""

from __future__ import annotations

from typing import Any

import click

from covenant.cli.a2a.queue import asked, filters, shown, status
from covenant.cli.calling import Call, calls
from covenant.cli.output import console, shape
from covenant.daemon.environment import now_ms


@click.command(
    "status",
    epilog=shape(
        "a2a_status", "limit", "min_lease_age_ms", "deadline_within_ms", "state_filter", "tasks", "results", "counts?"
    ),
)
@filters
@calls
def command(call: Call, *, counts: bool, **given: Any) -> None:
    """Show queued tasks, leases and results that wait to be drained.

    Leases whose holder is lost come first, then the longest held, then queued tasks, oldest first.
    """
    query = asked(**given)
    answer = call.ask("a2a_queue", **query)
    if not call.answer(status(query, answer, counts=counts)):
        console().print(shown(answer, now_ms()))
