"""The parts of a batch: commands with their waiters, and the decided batch."""

from __future__ import annotations

import asyncio
from collections import deque
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
from covenant.ledger.machine.event_codec import encode_events
from covenant.ledger.machine.events import AnyEvent
from covenant.ledger.machine.identity_commands import WriteAuditRow
from covenant.ledger.machine.peer_commands import ReceiveFromPeer
from covenant.ledger.postgres.batch_state import BatchState
from covenant.ledger.postgres.missing_rows import Want, WantQueue, WantRequest, WantResults, WantShared, WantTask
from covenant.ledger.postgres.news import Topics
from covenant.ledger.postgres.registers import RegisterRow
from covenant.model.errors import Refusal
from covenant.model.ids import PublicKey
from covenant.model.task import DELEGATION, cache_key, weigh

BATCH_MAX: Final = 128
BATCH_BYTES_MAX: Final = 4 << 20
UNWEIGHED: Final = 4
"""This many commands go together whatever their size: measuring a command takes longer than counting it."""

# All other commands are rare, and each is a batch of its own.
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
_decode_raws: Final = msgspec.json.Decoder(list[msgspec.Raw]).decode


def weigh_command(command: Command[Any]) -> int:
    if isinstance(command, Accept):
        return weigh(command.task)
    return len(_encode(command)) if isinstance(command, (Advance, Continue, Report, Settle)) else 0


class Fenced(Exception):
    """This run was declared lost: none of its decisions is written."""


class RolledBack(Exception):
    """The database lacks batches that it has acknowledged to this run."""


class Conflict(Exception):
    """Another node was faster: nothing was written, and the batch is decided anew."""


class Item:
    """One command, and the waiter for its answer."""

    __slots__ = (
        "_bytes",
        "answer",
        "answered",
        "begun",
        "command",
        "done",
        "error",
        "events",
        "registers_version",
        "ts_ms",
    )

    def __init__(self, command: Command[Any], done: asyncio.Future[Any]) -> None:
        self.command = command
        self.done = done
        self.begun = self.answered = False
        self._bytes = -1
        self.answer: Any = None
        self.error: BaseException | None = None
        self.events: list[AnyEvent] = []
        self.ts_ms = 0
        self.registers_version = 0
        """The version of the registers that the command made, if it changed one."""

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to do: the command is answered, or its waiter left before the command was begun."""
        return self.answered or (self.done.cancelled() and not self.begun)

    def finish(self) -> None:
        if not self.answered:
            self.answered = True
            self._answer()

    def fail(self, error: BaseException) -> None:
        if not self.answered:
            self.error = error
            self.finish()

    def _answer(self) -> None:
        if self.done.done():
            return
        if self.error is not None:
            self.done.set_exception(self.error)
        else:
            self.done.set_result(self.answer)

    def outcome(self) -> asyncio.Future[Any]:
        """The future of the answer. A command whose waiter has left gets a new one."""
        if self.done.cancelled():
            self.done = asyncio.get_running_loop().create_future()
            if self.answered:
                self._answer()
        return self.done

    def set_size(self, size: int) -> None:
        """Sets how many bytes the command writes, once they are encoded."""
        self._bytes = size

    def weigh(self) -> int:
        """The number of bytes that the command writes; until it is decided, approximately."""
        if self._bytes < 0:
            self._bytes = weigh_command(self.command)
        return self._bytes


def apply_decision(
    work: BatchState, item: Item, answer: Any, refusal: Refusal | None, events: Sequence[AnyEvent]
) -> None:
    """Applies the decision about a command. Raises Missing or a Refusal, and then nothing is applied."""
    work.check(events)
    kept: list[AnyEvent] = []
    if events:
        encoded, kept = encode_events(events)
        texts = [encoded[1:-1]] if len(kept) == 1 else [bytes(raw) for raw in _decode_raws(encoded)]
        work.apply(kept, texts, item.ts_ms)
        item.set_size(len(encoded))
    item.answer, item.error, item.events = answer, refusal, kept


class DecidedBatch(msgspec.Struct, frozen=True):
    """A batch from its decision until its items are answered. `records`: the events of each command, and their time."""

    items: Sequence[Item]
    seq: int
    work: BatchState
    records: Sequence[tuple[Sequence[AnyEvent], int]]
    topics: Topics
    registers: Sequence[RegisterRow]


def next_batch(waiting: deque[Item], count: int) -> list[Item]:
    """The commands to decide together: up to `count` of those that wait, or one that is a batch of its own."""
    batch: list[Item] = []
    size = 0
    while waiting and len(batch) < count and size < BATCH_BYTES_MAX:
        together = isinstance(waiting[0].command, TOGETHER)
        if not together and batch:
            break
        item = waiting.popleft()
        if not item.is_over:
            item.begun = True
            batch.append(item)
            size += item.weigh() if len(batch) > UNWEIGHED else 0
        if not together:
            break
    return batch


def hints(batch: Sequence[Item], work: BatchState, *, careful: bool) -> list[Want[Any]]:
    """The rows that these commands read first. They are loaded together, and not one after the other.

    Ids that this node has just made are new, unless `careful`.
    """
    wants: list[Want[Any]] = []
    queues: dict[PublicKey, int] = {}
    results: dict[PublicKey | None, int] = {}
    for item in batch:
        command = item.command
        if isinstance(command, ReceiveFromPeer) and command.accept is not None:
            command = command.accept
        if isinstance(command, TaskCommand):
            wants.append(WantTask(command.task_id))
        elif isinstance(command, Accept):
            task, key = command.task, cache_key(command.task)
            if command.minted and not careful:
                work.new_task(task.id)
            else:
                wants.append(WantTask(task.id))
            if command.starter is not None:
                # No task starts before one that waits, also at another node.
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
