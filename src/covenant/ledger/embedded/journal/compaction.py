"""Compaction: sealed segments become a snapshot, in a process of its own, so that nobody waits for it.

    python -m covenant.ledger.embedded.journal.compaction <journal folder> <through seq> <limits as JSON>

Reads the newest snapshot and the sealed segments after it, folds them with the same `apply` as everybody, and writes
the snapshot of the last sealed record. Large bodies are not held meanwhile: they are copied one by one. It deletes
nothing: dropping what is covered is for the engine, once the archive covers it too. A run that is killed leaves a file
without a name, which the next run overwrites.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from covenant.ledger.embedded.journal import snapshot
from covenant.ledger.embedded.journal.snapshot import EVICT_EVERY, Replayed, read_events, records
from covenant.ledger.embedded.state import LedgerState
from covenant.ledger.machine.entry import Entry
from covenant.ledger.machine.events import TaskFollowed, TaskSent
from covenant.ledger.machine.view import Limits
from covenant.model.ids import TaskId
from covenant.model.task import Task

NICE: Final = 10
"""Nobody waits for it, and whoever sends a task does."""


class Compacted(msgspec.Struct, frozen=True, gc=False):
    """`dropped` counts the events of tasks that are resolved: what the snapshot no longer holds."""

    seq: int
    dropped: int


class _Place(NamedTuple):
    """Where a large body is: in a line of a segment, or of the snapshot before."""

    path: Path
    offset: int
    length: int


class _LargeBodies:
    """Where the bodies are that are too large to be kept, so that the new snapshot has them too."""

    def __init__(self, state: LedgerState, old: Path | None) -> None:
        self._state = state
        self._old = old
        self._places: dict[TaskId, _Place] = {}

    def of_snapshot(self, entry: Entry, offset: int, length: int) -> None:
        assert self._old is not None
        # Its entry in the state is not there yet, and may have no size of its own.
        if length >= self._state.limits.body_bytes_on_disk:
            self._places[entry.task.id] = _Place(self._old, offset, length)

    def of_record(self, record: Replayed) -> None:
        if record.length < self._state.limits.body_bytes_on_disk:
            return
        for event in record.events:
            if isinstance(event, TaskSent | TaskFollowed):
                self._places[event.task_id] = _Place(record.path, record.offset, record.length)

    def forget(self, task_ids: Iterable[TaskId]) -> None:
        for task_id in task_ids:
            self._places.pop(task_id, None)

    def read(self, task_id: TaskId) -> Task:
        place = self._places[task_id]
        if place.path == self._old:
            return snapshot.read_entry(*place).task
        for event in read_events(*place):
            if isinstance(event, TaskSent | TaskFollowed) and event.task_id == task_id:
                return event.task
        raise AssertionError(f"task {task_id} is not where it was read")


def compact(folder: Path, through_seq: int, limits: Limits) -> Compacted:
    state = LedgerState(limits)
    found = snapshot.newest(folder)
    bodies = _LargeBodies(state, None if found is None else found[1])
    seq = 0 if found is None else snapshot.load(found[1], state, bodies.of_snapshot)
    if seq >= through_seq:
        return Compacted(seq, 0)
    for record in records(folder, seq, through_seq):
        state.apply(record.events, record.ts_ms, record.seq)
        bodies.of_record(record)
        if not record.seq % EVICT_EVERY:
            bodies.forget(state.evict(record.seq))
    state.evict(through_seq)
    snapshot.write(folder, through_seq, state, bodies.read)
    return Compacted(through_seq, state.resolved_events)


def main(arguments: list[str]) -> int:
    os.nice(NICE)
    folder, through_seq, limits = arguments
    compacted = compact(Path(folder), int(through_seq), msgspec.json.decode(limits, type=Limits))
    sys.stdout.write(msgspec.json.encode(compacted).decode() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
