"""What a batch is made of: commands with whoever waits for them, and what they come to together."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from covenant.ledger.machine.commands import (
    Accept,
    Advance,
    Cancel,
    Command,
    Continue,
    Drain,
    DropPush,
    Interrupt,
    MovePushes,
    PutPush,
    Release,
    Renew,
    Report,
    RetryPush,
    Settle,
    Take,
    TaskCommand,
)
from covenant.ledger.machine.events import AnyEvent
from covenant.ledger.machine.identity_commands import WriteAuditRow
from covenant.ledger.postgres.news import Topics
from covenant.ledger.postgres.registers import RegisterRow
from covenant.ledger.postgres.wanted import Want, WantQueue, WantRequest, WantResults, WantShared, WantTask
from covenant.ledger.postgres.working_set import WorkingSet
from covenant.model.ids import PublicKey
from covenant.model.task import DELEGATION, cache_key, weigh

# Whatever is not here is rare, and is a batch of its own.
TOGETHER: Final = (
    Accept,
    Take,
    Renew,
    Release,
    Interrupt,
    Report,
    Advance,
    Continue,
    Settle,
    Cancel,
    Drain,
    PutPush,
    DropPush,
    MovePushes,
    RetryPush,
    WriteAuditRow,
)


_encode: Final = msgspec.json.Encoder().encode


def weigh_command(command: Command[Any]) -> int:
    """About how many bytes of it will be written."""
    if isinstance(command, Accept):
        return weigh(command.task)
    return len(_encode(command)) if isinstance(command, (Advance, Continue, Report, Settle)) else 0


class Fenced(Exception):
    """This boot was declared lost: whatever it decides is not written."""


class RolledBack(Exception):
    """The database is behind what it has acknowledged to this boot."""


class Conflict(Exception):
    """Somebody else was faster: nothing was written, and the batch is decided anew."""


class Item:
    """One command, and whoever waits for its answer."""

    __slots__ = ("answer", "begun", "command", "done", "error", "events", "registers_version", "ts_ms")

    def __init__(self, command: Command[Any], done: asyncio.Future[Any]) -> None:
        self.command = command
        self.done = done
        self.begun = False
        self.answer: Any = None
        self.error: BaseException | None = None
        self.events: list[AnyEvent] = []
        self.ts_ms = 0
        self.registers_version = 0
        """Which version of the registers it made, if it changed one."""

    def finish(self) -> None:
        if self.done.done():
            return
        if self.error is not None:
            self.done.set_exception(self.error)
        else:
            self.done.set_result(self.answer)

    def fail(self, error: BaseException) -> None:
        if not self.done.done():
            self.done.set_exception(error)


class Committed(msgspec.Struct, frozen=True):
    """A batch that was written: what it came to, once it is known to be durable."""

    items: Sequence[Item]
    seq: int
    work: WorkingSet
    records: Sequence[tuple[Sequence[AnyEvent], int]]
    topics: Topics
    registers: Sequence[RegisterRow]


def hints(batch: Sequence[Item]) -> list[Want]:
    """What these commands will ask for first: loaded at once instead of one after the other."""
    wants: list[Want] = []
    queues: dict[PublicKey, int] = {}
    results: dict[PublicKey | None, int] = {}
    for item in batch:
        command = item.command
        if isinstance(command, TaskCommand):
            wants.append(WantTask(command.task_id))
        elif isinstance(command, Accept):
            task, key = command.task, cache_key(command.task)
            if not command.minted:
                wants.append(WantTask(task.id))
            if command.starter is not None:
                # Nobody starts before those who wait, also at another node.
                queues[task.recipient.pubkey] = queues.get(task.recipient.pubkey, 0) + 1
            if task.origin == DELEGATION and task.parent is not None:
                wants.append(WantTask(task.parent))
            if key is not None:
                wants.append(WantShared(key))
        elif isinstance(command, Take):
            if command.request_id is not None and command.asker is not None:
                wants.append(WantRequest("take", command.asker.pubkey, command.request_id))
            elif command.recipient is not None:
                queues[command.recipient] = queues.get(command.recipient, 0) + command.count
        elif isinstance(command, Drain):
            if command.request_id is not None:
                wants.append(WantRequest("drain", command.by.pubkey, command.request_id))
            elif command.task_id is None:
                results[command.sender] = results.get(command.sender, 0) + command.count
    wants += [WantQueue(recipient, count) for recipient, count in queues.items()]
    wants += [WantResults(sender, count) for sender, count in results.items()]
    return wants
