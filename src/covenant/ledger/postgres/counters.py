"""Counts for limits and metrics: each writer stores its own changes, and every node has the sums in memory.

The sums are exact about this node's decisions. Other nodes' changes arrive with their news, so decisions at the same
time may together exceed a limit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

from covenant.ledger.machine.entry import Entry
from covenant.ledger.machine.states import DRAINED, QUEUED, SETTLED
from covenant.model.task import DELEGATION, Ending, account_of

Count = tuple[str, str, int]
"""Kind, lane, and the change of the count."""

ALL: Final = ""
KEPT: Final = "kept"
"""The kind of the bytes of each tenant's finished tasks; the lane is the tenant, or empty."""
COUNTED_TOGETHER: Final = 64
"""The number of a writer's batches whose counts are added together."""
_SEQ_BITS: Final = 40
LANE: Final = "lane"
"""The kind of the counts of all tasks, ended ones too, by tenant, recipient and lane (see `lane_of`)."""


def lane_of(entry: Entry) -> str:
    """The lane of a task. None of its words contains a space."""
    task, lane = entry.task, entry.state.wire_name
    if entry.state is DRAINED:
        lane = "failed" if entry.ending is Ending.FAILED else "done"
    return f"{task.tenant or ALL} {task.recipient.display} {task.recipient.pubkey} {lane}"


def contributions(entry: Entry, *, listed: bool) -> list[Count]:
    """The counts that a task contributes in its present state."""
    task, state = entry.task, entry.state
    counts: list[Count] = []
    if state is not DRAINED:
        counts.append(("state", state.value, 1))
    if not entry.finished:
        account = account_of(task)
        counts += (("tasks", account, 1), ("size", account, entry.queued_bytes))
        if task.origin == DELEGATION:
            counts.append(("delegated", ALL, 1))
        if state is QUEUED:
            counts.append(("queued", task.recipient.pubkey, 1))
    elif state is SETTLED:
        sender = task.sender.pubkey
        counts += (("settled", sender, 1), ("undrained", sender, entry.result_bytes))
    if listed and task.tenant is not None:
        counts.append(("listed", f"{task.recipient.pubkey} {entry.a2a_state}", 1))
    if listed:
        counts.append((LANE, lane_of(entry), 1))
    return counts


def counter_number(writer: int, seq: int) -> int:
    """The number of the counter row for a writer's batch, which several batches share. Sums are over all rows."""
    return (writer << _SEQ_BITS) + seq // COUNTED_TOGETHER


def counted_batch(writer: int, seq: int) -> int:
    """The number of a batch's own counter row."""
    return (writer << _SEQ_BITS) + seq


def counts_of_batch(counts: Counters, writer: int, seq: int, *, as_rows: bool) -> dict[str, Any]:
    """The count rows of a batch. From time to time a batch also adds together the rows of those before it.

    `as_rows`: a daemon lives that knows the rows of `lane_counts` alone.
    """
    if not counts:
        return {}
    kinds, lanes, ns = map(list, zip(*sorted(counts), strict=True))
    values: dict[str, Any] = {"c_kind": kinds, "c_lane": lanes, "c_n": ns, "counter": counter_number(writer, seq)}
    if as_rows:
        return values | {"as_rows": True}
    values["counted"] = counted_batch(writer, seq)
    if not seq % COUNTED_TOGETHER:
        # Twice as far back: the batch that last had to do so may have been refused by the gate.
        values["added_from"] = counted_batch(writer, max(0, seq - 2 * COUNTED_TOGETHER))
    return values


class Counters:
    """Sums by kind and lane. Zeros are not kept."""

    def __init__(self, counts: Iterable[Count] = ()) -> None:
        self._sums: dict[tuple[str, str], int] = {}
        self.add(counts)

    def get(self, kind: str, lane: str = ALL) -> int:
        return self._sums.get((kind, lane), 0)

    def add(self, counts: Iterable[Count]) -> None:
        for kind, lane, change in counts:
            self.count(kind, lane, change)

    def replace(self, counts: Iterable[Count]) -> None:
        self._sums.clear()
        self.add(counts)

    def count(self, kind: str, lane: str, change: int) -> None:
        key, sums = (kind, lane), self._sums
        left = sums.get(key, 0) + change
        if left:
            sums[key] = left
        else:
            sums.pop(key, None)

    def total(self, kind: str) -> int:
        """The sum over all lanes: for metrics, since it looks at every entry."""
        return sum(n for (a_kind, _), n in self._sums.items() if a_kind == kind)

    def __iter__(self) -> Iterator[Count]:
        return ((kind, lane, n) for (kind, lane), n in self._sums.items())

    def __bool__(self) -> bool:
        return bool(self._sums)


class CountersAhead(Counters):
    """Sums as they will be when the batch being written is committed."""

    def __init__(self, committed: Counters) -> None:
        super().__init__()
        self._committed = committed
        self.changes: Counters | None = None
        """The sums of that batch."""

    def get(self, kind: str, lane: str = ALL) -> int:
        sums = self._committed.get(kind, lane)
        return sums if self.changes is None else sums + self.changes.get(kind, lane)
