"""Counts for limits and metrics: each writer keeps its own changes, and every node the sums in memory.

They are exact about what this node decided. What other nodes decided comes with their news, so a limit may be passed by
what they decide at the same moment.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from covenant.ledger.machine.entry import Entry
from covenant.ledger.machine.states import DRAINED
from covenant.model.task import Ending

Count = tuple[str, str, int]
"""Kind, lane, and how many more or fewer."""

ALL: Final = ""
KEPT: Final = "kept"
"""The kind of the bytes that the finished tasks of each tenant take; the lane is the tenant, or empty."""
LANE: Final = "lane"
"""The kind of the counts of all tasks, ended ones too, by tenant, recipient and lane (see `lane_of`)."""


def lane_of(entry: Entry) -> str:
    """No part of it has a space."""
    task, lane = entry.task, entry.state.wire_name
    if entry.state is DRAINED:
        lane = "failed" if entry.ending is Ending.FAILED else "done"
    return f"{task.tenant or ALL} {task.recipient.display} {task.recipient.pubkey} {lane}"


class Counters:
    """Sums by kind and lane. What is zero is not kept."""

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
        """Over all lanes: for metrics, since it looks at everything."""
        return sum(n for (a_kind, _), n in self._sums.items() if a_kind == kind)

    def __iter__(self) -> Iterator[Count]:
        return ((kind, lane, n) for (kind, lane), n in self._sums.items())

    def __bool__(self) -> bool:
        return bool(self._sums)
