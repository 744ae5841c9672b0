"""Counts for limits and metrics: each writer stores its own changes, and every node has the sums in memory.

The sums are exact about this node's decisions. Other nodes' changes arrive with their news, so decisions at the same
time may together exceed a limit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any, Final, NamedTuple

from covenant.ledger.machine.entry import Entry
from covenant.ledger.machine.states import DRAINED, FINISHED, QUEUED, SETTLED, State
from covenant.model.peers.delegation import Delegation, DelegationRole, DelegationState
from covenant.model.push import Push
from covenant.model.task import DELEGATION, Ending, account_of
from covenant.model.tenants import host_of

Key = tuple[str, str]
"""Kind and lane."""
Count = tuple[str, str, int]
"""Kind, lane, and the change of the count."""

ALL: Final = ""
KEPT_BYTES: Final = "kept"
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


class Contribution(NamedTuple):
    """The counts of a task in its present state: one for each key, and its bytes for another."""

    keys: tuple[Key, ...]
    sized: Key | None
    size: int


def contribution(entry: Entry, *, listed: bool) -> Contribution:
    task = entry.task
    keys, sized = _keys_of(
        entry.state,
        account_of(task),
        task.sender.pubkey,
        task.recipient.pubkey,
        entry.a2a_state if listed and task.tenant is not None else None,
        lane_of(entry) if listed else None,
        delegated=task.origin == DELEGATION,
    )
    if sized is None:
        return Contribution(keys, None, 0)
    return Contribution(keys, sized, entry.result_bytes if entry.finished else entry.queued_bytes)


@lru_cache(maxsize=4_096)
def _keys_of(  # noqa: PLR0917  the positional arguments are the key of the cache
    state: State, account: str, sender: str, recipient: str, a2a_state: str | None, lane: str | None, *, delegated: bool
) -> tuple[tuple[Key, ...], Key | None]:
    """The counted keys, and the key that counts bytes, if any."""
    keys: list[Key] = []
    sized: Key | None = None
    if state is not DRAINED:
        keys.append(("state", state.value))
    if state not in FINISHED:
        keys.append(("tasks", account))
        sized = ("size", account)
        if delegated:
            keys.append(("delegated", ALL))
        if state is QUEUED:
            keys.append(("queued", recipient))
    elif state is SETTLED:
        keys.append(("settled", sender))
        sized = ("undrained", sender)
    if a2a_state is not None:
        keys.append(("listed", f"{recipient} {a2a_state}"))
    if lane is not None:
        keys.append((LANE, lane))
    return tuple(keys), sized


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
    """Sums by kind and lane. Zeros are not told."""

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

    def change(self, before: Contribution | None, after: Contribution) -> None:
        """Replaces a task's contribution."""
        sums = self._sums
        if before is None or before.keys is not after.keys:
            for key in before.keys if before is not None else ():
                sums[key] = sums.get(key, 0) - 1
            for key in after.keys:
                sums[key] = sums.get(key, 0) + 1
        if before is not None and before.sized is not None:
            sums[before.sized] = sums.get(before.sized, 0) - before.size
        if after.sized is not None:
            sums[after.sized] = sums.get(after.sized, 0) + after.size

    def total(self, kind: str) -> int:
        """The sum over all lanes: for metrics, since it looks at every entry."""
        return sum(n for (a_kind, _), n in self._sums.items() if a_kind == kind)

    def __iter__(self) -> Iterator[Count]:
        return ((kind, lane, n) for (kind, lane), n in self._sums.items() if n)

    def __bool__(self) -> bool:
        return any(self._sums.values())


def count_push(counts: Counters, push: Push, change: int) -> None:
    counts.count("pushes", ALL, change)
    counts.count("pushes_of", host_of(push.recipient.display), change)
    if push.dead_at_ms is not None:
        counts.count("pushes_dead", ALL, change)


def count_delegation(counts: Counters, delegation: Delegation, change: int) -> None:
    counts.count("delegations_ended" if delegation.ended else "delegations", ALL, change)
    if delegation.state is DelegationState.LOST and delegation.role is DelegationRole.REQUESTER:
        counts.count("delegations_lost", ALL, change)


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
