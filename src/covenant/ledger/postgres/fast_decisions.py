"""Decisions on what is in memory: written by one statement, whose gate finds what others have changed meanwhile.

Whatever needs more than that is left for a transaction that loads and locks what it reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from covenant.ledger.clock import Clock
from covenant.ledger.machine.commands import (
    Accept,
    Advance,
    Command,
    Drain,
    Interrupt,
    Renew,
    Report,
    Settle,
    Take,
    TaskCommand,
)
from covenant.ledger.machine.decisions import decide
from covenant.ledger.machine.decisions.context import CommandRefused
from covenant.ledger.machine.event_codec import encode_events
from covenant.ledger.postgres.batch_items import Item
from covenant.ledger.postgres.recent_tasks import RecentTasks
from covenant.ledger.postgres.wanted import Missing
from covenant.ledger.postgres.working_set import WorkingSet
from covenant.model.errors import Refusal
from covenant.model.ids import PublicKey
from covenant.model.task import DELEGATION

_BY_HOLDER: Final = (Renew, Interrupt, Report, Advance, Settle)

decode_raws: Final = msgspec.json.Decoder(list[msgspec.Raw]).decode


def is_simple(command: Command[Any]) -> bool:
    """Whether it may be decided on what is in memory."""
    if isinstance(command, Accept):
        task = command.task
        return (
            command.push is None
            and command.recipient_fault is None
            and task.idempotency is None
            and task.origin != DELEGATION
        )
    if isinstance(command, Take):
        return command.recipient is not None and command.request_id is None
    if isinstance(command, Drain):
        return command.sender is not None and command.request_id is None and command.task_id is None
    return isinstance(command, _BY_HOLDER)


def puts_in_line(command: Command[Any]) -> bool:
    """Whether it puts a task into a queue, or a result before its sender: its place must be one of now."""
    return (isinstance(command, Accept) and command.starter is None) or isinstance(command, Settle)


class Heads:
    """How much of which queues and results the commands of a batch take."""

    def __init__(self, batch: Sequence[Item]) -> None:
        self.queues: dict[PublicKey, int] = {}
        self.results: dict[PublicKey, int] = {}
        for item in batch:
            command = item.command
            if isinstance(command, Take) and command.recipient is not None:
                self.queues[command.recipient] = self.queues.get(command.recipient, 0) + command.count
            elif isinstance(command, Drain) and command.sender is not None:
                self.results[command.sender] = self.results.get(command.sender, 0) + command.count


def decide_fast(work: WorkingSet, item: Item, recent: RecentTasks, clock: Clock, new_id: Callable[[], str]) -> bool:
    """False if it needs more, or comes to nothing: an answer without events rests on what may have changed."""
    command = item.command
    if isinstance(command, Accept):
        if recent.get(command.task.id) is not None:
            return False
        work.new_task(command.task.id)
    elif isinstance(command, TaskCommand):
        known = recent.get(command.task_id)
        if known is None:
            return False
        work.load_entry(command.task_id, *known)
    item.ts_ms = clock.now_ms()
    try:
        decision = decide(work, command, item.ts_ms, new_id, clock.ages)
        work.check(decision.events)
        encoded, events = encode_events(decision.events)
    except (Missing, CommandRefused, Refusal):
        return False
    if not events:
        return False
    work.apply(events, [bytes(raw) for raw in decode_raws(encoded)], item.ts_ms)
    item.answer, item.error, item.events = decision.answer, None, events
    if isinstance(command, Accept) and command.starter is not None:
        work.started[command.task.recipient.pubkey] = None
    return True
