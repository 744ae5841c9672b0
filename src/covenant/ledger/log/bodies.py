"""The large bodies of live tasks, which stay on disk: which are in memory for now, and which were read back.

A body leaves memory once the archive has it, or earlier when too many large ones wait for that. From then on the entry
of its task is an index entry. The body is in the archive, or on its way there from the journal: whoever leases the task
has it read first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from covenant.ledger.machine.entry import Entry
from covenant.model.ids import TaskId
from covenant.model.task import Task

WAITING_BYTES_MAX: Final = 32 << 20
"""How many bytes of large bodies may be in memory at once, waiting for the archive."""
UNREADABLE_MAX: Final = 8
"""After so many bodies that could not be read, a command tries no more: it goes on with what is in memory."""


class BodyNeeded(Exception):
    """A decision needs the body of a task: the engine reads it, and decides anew."""

    def __init__(self, task_id: TaskId) -> None:
        super().__init__(f"the body of task {task_id} is on disk")
        self.task_id = task_id


@dataclass(slots=True)
class ReadBodies:
    """What was read for one command."""

    found: dict[TaskId, Task] = field(default_factory=dict)
    unreadable: set[TaskId] = field(default_factory=set)

    def get(self, task_id: TaskId) -> Task | None:
        """None if it cannot be read. Raises BodyNeeded for one that was not tried."""
        task = self.found.get(task_id)
        if task is None and task_id not in self.unreadable and len(self.unreadable) < UNREADABLE_MAX:
            raise BodyNeeded(task_id)
        return task


class _Large(NamedTuple):
    seq: int
    task_id: TaskId
    size: int


class LargeBodies:
    """Those that are in memory, in the order of the records that brought them."""

    def __init__(self) -> None:
        self._waiting: deque[_Large] = deque()
        self._size = 0
        self.unloaded_seq = 0
        """The last record that brought a body which is only on disk: the archive must have come to it first."""

    def add(self, entry: Entry, seq: int) -> None:
        self._waiting.append(_Large(seq, entry.task.id, entry.body_bytes))
        self._size += entry.body_bytes

    def leaving(self, archived_seq: int) -> Iterator[TaskId]:
        """The tasks whose bodies are to leave memory now; each is told once."""
        waiting = self._waiting
        while waiting and (waiting[0].seq <= archived_seq or self._size > WAITING_BYTES_MAX):
            large = waiting.popleft()
            self._size -= large.size
            self.unloaded_seq = max(self.unloaded_seq, large.seq)
            yield large.task_id
