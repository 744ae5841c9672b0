"""`covenant a2a watch`."""

from __future__ import annotations

import time
from typing import Any

import click

from covenant.cli.a2a.queue import asked, filters, shown, status
from covenant.cli.ages import Duration
from covenant.cli.calling import Call, calls
from covenant.cli.output import console, shape
from covenant.daemon.environment import now_ms


@click.command(
    "watch",
    epilog=shape(
        "a2a_status", "limit", "min_lease_age_ms", "deadline_within_ms", "state_filter", "tasks", "results", "counts?"
    ),
)
@filters
@click.option("--every", "every_ms", type=Duration(), default="1s", show_default=True, help="Pause between two looks.")
@click.option("--once", is_flag=True, help="Look once, and end.")
@calls
def command(call: Call, *, every_ms: int, once: bool, counts: bool, **given: Any) -> None:
    """Watch the queue: a table that keeps itself up to date. Ctrl-C ends it.

    With --json it looks once.
    """
    query = asked(**given)
    answer = call.ask("a2a_queue", **query)
    if call.answer(status(query, answer, counts=counts)):
        return
    screen = console()
    if once:
        screen.print(shown(answer, now_ms()))
        return
    from rich.live import Live

    with Live(shown(answer, now_ms()), console=screen, auto_refresh=False, screen=screen.is_terminal) as live:
        try:
            while True:
                time.sleep(max(every_ms, 100) / 1000)
                live.update(shown(call.ask("a2a_queue", **query), now_ms()), refresh=True)
        except KeyboardInterrupt:
            return
