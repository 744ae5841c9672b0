"""Decisions from memory: written by one statement, whose gate detects changes by other nodes.

Commands that need more are left to a transaction that loads and locks the rows that it reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

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
from covenant.ledger.postgres.batch_items import BATCH_BYTES_MAX, BATCH_MAX, UNWEIGHED, Item, apply_decision
from covenant.ledger.postgres.batch_state import BatchState
from covenant.ledger.postgres.counters import Counters
from covenant.ledger.postgres.missing_rows import Missing
from covenant.ledger.postgres.recent_tasks import RecentTasks
from covenant.model.errors import Refusal
from covenant.model.ids import PublicKey
from covenant.model.task import DELEGATION, DuplicateSafety

_BY_HOLDER: Final = (Renew, Interrupt, Report, Advance, Settle)


def is_simple(command: Command[Any]) -> bool:
    """Whether a command may be decided from memory."""
    if isinstance(command, Accept):
        task = command.task
        return (
            command.push is None
            and command.recipient_fault is None
            and (task.idempotency is None or task.idempotency.duplicate_safety is DuplicateSafety.UNSAFE)
            and task.origin != DELEGATION
        )
    if isinstance(command, Take):
        return command.recipient is not None and command.request_id is None
    if isinstance(command, Drain):
        return command.sender is not None and command.request_id is None and command.task_id is None
    return isinstance(command, _BY_HOLDER)


def adds_to_queue(command: Command[Any]) -> bool:
    """Whether a command queues a task or a result: its place must be a current one."""
    return (isinstance(command, Accept) and command.starter is None) or isinstance(command, Settle)


class OpenBatch:
    """A batch that is being decided from memory: commands are added until it is written."""

    def __init__(self, work: BatchState, version: int, place: int, *, fresh: bool, alone: bool) -> None:
        self.work = work
        self.place = place
        self.version = version
        """The version of the registers that it is decided on."""
        self.fresh = fresh
        """Whether its place is current: it was just drawn, or no other node has drawn one since."""
        self.alone = alone
        """Whether no other node was alive when the batch was opened."""
        self.items: list[Item] = []
        self._bytes = 0
        self._queues: dict[PublicKey, int] = {}
        self._results: dict[PublicKey, int] = {}

    @property
    def is_full(self) -> bool:
        return len(self.items) >= BATCH_MAX or self._bytes >= BATCH_BYTES_MAX

    def load_heads(self, recent: RecentTasks, counters: Counters, commands: Iterable[Command[Any]]) -> None:
        """Loads the heads of the queues and results that these commands take from, behind what others have taken."""
        queues: dict[PublicKey, int] = {}
        results: dict[PublicKey, int] = {}
        for command in commands:
            if isinstance(command, Take) and command.recipient is not None:
                queues[command.recipient] = queues.get(command.recipient, 0) + command.count
            elif isinstance(command, Drain) and command.sender is not None:
                results[command.sender] = results.get(command.sender, 0) + command.count
        if queues or results:
            for taken, more in ((self._queues, queues), (self._results, results)):
                for owner in more:
                    taken[owner] = more[owner] = taken.get(owner, 0) + more[owner]
            recent.load_heads(self.work, counters, queues, results)

    def decide(self, item: Item, recent: RecentTasks, clock: Clock, new_id: Callable[[], str]) -> bool:
        """Decides a command from memory. False: it needs more, or a fresh place in the queue, or the batch is full."""
        if item.is_over:
            return True
        if self.is_full:
            return False
        if not self.fresh and adds_to_queue(item.command):
            return False
        if not decide_fast(self.work, item, recent, clock, new_id):
            return False
        self._bytes += item.weigh() if len(self.items) >= UNWEIGHED else 0
        self.items.append(item)
        item.begun = True
        return True


def decide_fast(work: BatchState, item: Item, recent: RecentTasks, clock: Clock, new_id: Callable[[], str]) -> bool:
    """Decides a command from memory. False if it needs more, or makes no events: no gate would check the answer."""
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
        if not decision.events:
            return False
        apply_decision(work, item, decision.answer, None, decision.events)
    except (Missing, CommandRefused, Refusal):
        return False
    if isinstance(command, Accept) and command.starter is not None:
        work.started[command.task.recipient.pubkey] = None
    return True
