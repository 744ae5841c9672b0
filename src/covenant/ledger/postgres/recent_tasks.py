"""This node's recent writes: live tasks as it wrote them, and the queues and results that it filled itself.

Another node may have changed any of them since. The gate of a batch detects that; then the outdated part is forgotten.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from copy import copy
from itertools import islice
from typing import Final

from covenant.ledger.machine.entry import Entry
from covenant.ledger.machine.states import DRAINED, QUEUED, SETTLED, State
from covenant.ledger.postgres.batch_state import BatchState
from covenant.ledger.postgres.counters import Counters
from covenant.ledger.postgres.stored_task import Slot
from covenant.model.ids import PublicKey, TaskId

RECENT_MAX: Final = 20_000
BYTES_MAX: Final = 4_096
"""The largest entry that is kept: a larger one is read on demand."""

PlacedTasks = OrderedDict[int, TaskId]
"""A queue, or the results of a sender: tasks by place."""


class RecentTasks:
    def __init__(self) -> None:
        self._tasks: OrderedDict[TaskId, tuple[Entry, Slot]] = OrderedDict()
        self._queues: dict[State, dict[str, PlacedTasks]] = {QUEUED: {}, SETTLED: {}}
        """The queues by recipient, and the results by sender."""

    def get(self, task_id: TaskId) -> tuple[Entry, Slot] | None:
        """The entry, and a copy of its slot, which the batch may change."""
        known = self._tasks.get(task_id)
        return (known[0], copy(known[1])) if known is not None else None

    def clear(self) -> None:
        self._tasks.clear()
        for queues in self._queues.values():
            queues.clear()

    def forget(self, task_ids: Iterable[TaskId]) -> None:
        for task_id in task_ids:
            known = self._tasks.pop(task_id, None)
            if known is not None:
                self._leave(*known)

    def remember(self, work: BatchState) -> None:
        """Remembers the tasks that a batch has written."""
        tasks = self._tasks
        self.forget(work.moved)
        for task_id in work.moved:
            entry, slot = work.entries[task_id], work.slots[task_id]
            assert entry is not None
            if entry.state is DRAINED:
                continue
            slot.table, slot.held_n = "live", slot.n
            kept = entry if entry.state is QUEUED else entry.without_body()
            if _bytes(kept) > BYTES_MAX:
                continue
            tasks[task_id] = (kept, slot)
            self._enter(kept, slot)
        while len(tasks) > RECENT_MAX:
            self._leave(*tasks.popitem(last=False)[1])

    def _enter(self, entry: Entry, slot: Slot) -> None:
        found = _queue_of(entry, slot)
        if found is None or (entry.state is QUEUED and entry.body_on_disk):
            return
        state, owner, place = found
        queues = self._queues[state]
        queue = queues.setdefault(owner, OrderedDict())
        behind = not queue or place > next(reversed(queue))
        queue[place] = entry.task.id
        if not behind:
            queues[owner] = OrderedDict(sorted(queue.items()))

    def _leave(self, entry: Entry, slot: Slot) -> None:
        found = _queue_of(entry, slot)
        if found is None:
            return
        state, owner, place = found
        queue = self._queues[state].get(owner)
        if queue is not None:
            queue.pop(place, None)
            if not queue:
                del self._queues[state][owner]

    def load_heads(
        self,
        work: BatchState,
        counters: Counters,
        queues: Mapping[PublicKey, int],
        results: Mapping[PublicKey, int],
    ) -> None:
        """Loads the first so many tasks of queues and results, if this node knows all of their tasks."""
        for recipient, count in queues.items():
            rows, limit = self._head(work, QUEUED, recipient, counters.get("queued", recipient), count)
            if rows:
                work.queue.heads[recipient].load(rows, limit)
        for sender, count in results.items():
            rows, limit = self._head(work, SETTLED, sender, counters.get("settled", sender), count)
            if rows:
                work.results.heads[sender].load(rows, limit)

    def _head(
        self, work: BatchState, state: State, owner: str, counted: int, count: int
    ) -> tuple[list[tuple[int, TaskId]], int]:
        queues = self._queues[state]
        queue = queues.get(owner)
        if queue is None:
            return [], 0
        if len(queue) != counted:
            del queues[owner]  # another node has changed the queue: it is known again once it was empty
            return [], 0
        rows = list(islice(queue.items(), count))
        for _, task_id in rows:
            entry, slot = self._tasks[task_id]
            work.load_entry(task_id, entry, copy(slot))
        return rows, len(rows) + (len(rows) == len(queue))


def _queue_of(entry: Entry, slot: Slot) -> tuple[State, str, int] | None:
    if entry.state is QUEUED:
        return QUEUED, entry.task.recipient.pubkey, slot.place
    if entry.state is SETTLED and slot.settled_place is not None:
        return SETTLED, entry.task.sender.pubkey, slot.settled_place
    return None


def _bytes(entry: Entry) -> int:
    body_bytes = 0 if entry.body_on_disk else entry.body_bytes
    return body_bytes + entry.messages_bytes + entry.kept_bytes + entry.signals_bytes + entry.result_bytes
