"""The live tasks as readers see them, from memory alone: for when the archive cannot be read or written.

The same answers as `history` gives, in the same order, of what has not been resolved. The cost of a question grows with
the live work, which is why the archive is asked first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from heapq import nsmallest
from itertools import chain, islice

import msgspec

from covenant.ledger.contract import LeaseRecord, Queue, QueueEntry, QueueQuery, Shown
from covenant.ledger.log.state import LedgerState
from covenant.ledger.machine.entry import Entry
from covenant.ledger.machine.states import FOLLOWING, LEASED, PARKED
from covenant.model.ids import PublicKey, TaskId
from covenant.model.result import Result
from covenant.model.task import Task


def queue(state: LedgerState, query: QueueQuery, now_ms: int, node: str, boot: str) -> Queue:
    """Lost holders first, then the longest held leases, then what is queued, then what waits for something else."""

    def rank(entry: Entry) -> tuple[bool, int]:
        return not entry.holder_lost(node, boot), -entry.lease.age_ms(now_ms) if entry.lease is not None else 0

    leased = (entry for entry in state.leases() if _passes(entry, query, now_ms))
    queued = (entry for entry in _entries(state, state.queue) if _passes(entry, query, now_ms))
    waiting = (entry for entry in _waiting(state) if _passes(entry, query, now_ms))
    chosen = islice(chain(nsmallest(query.limit, leased, rank), queued, waiting), query.limit)
    results = recent_results(state, query.viewer, query.limit, newest_first=False)
    return Queue(tuple(_line(entry, node, boot) for entry in chosen), tuple(results))


def recent_tasks(state: LedgerState, viewer: PublicKey | None, limit: int) -> Sequence[Task]:
    """Queued tasks, the newest first."""
    found = (entry.task for entry in _entries(state, reversed(state.queue)) if _has_part(entry, viewer))
    return tuple(islice(found, limit))


def recent_results(
    state: LedgerState, viewer: PublicKey | None, limit: int, *, newest_first: bool = True
) -> Sequence[Result]:
    """Undrained results. Results are the sender's alone."""
    order = reversed(state.results) if newest_first else iter(state.results)
    found = (
        entry.result
        for entry in _entries(state, order)
        if entry.result is not None and viewer in (None, entry.task.sender.pubkey)
    )
    return tuple(islice(found, limit))


def show(entry: Entry, viewer: PublicKey | None, archived: Shown | None, node: str, boot: str) -> Shown | None:
    """One task that is in memory. Its leases and updates are told as far as the archive has them."""
    if not _has_part(entry, viewer):
        return None
    leases = archived.leases if archived is not None else ()
    live = _lease_record(entry)
    if live is not None and all(lease.lease_id != live.lease_id for lease in leases):
        leases = (*leases, live)
    return Shown(
        task=entry.task,
        state=entry.state.value,
        a2a_state=in_words_of_a2a(entry),
        attempt=entry.attempt,
        turn=entry.turn,
        generation=entry.generation,
        created_at_ms=entry.accepted_at_ms,
        updated_at_ms=entry.updated_at_ms,
        leases=leases,
        updates=archived.updates if archived is not None else (),
        result=entry.result,
        cause=entry.cause,
        holder_lost=entry.holder_lost(node, boot),
    )


def in_words_of_a2a(entry: Entry) -> str:
    """The state as an A2A client is told it."""
    if entry.ending is not None:
        return entry.ending
    if entry.state is PARKED:
        return entry.interruption or ""
    return "working" if entry.attempt > 0 or entry.turn > 1 else "submitted"


def _entries(state: LedgerState, task_ids: Iterable[TaskId]) -> Iterator[Entry]:
    return (state.entries[task_id] for task_id in task_ids)


def _waiting(state: LedgerState) -> Iterator[Entry]:
    if not state.parked and not state.following:
        return iter(())
    return (entry for entry in state.entries.values() if entry.state in (PARKED, FOLLOWING))


def _has_part(entry: Entry, viewer: PublicKey | None) -> bool:
    task, lease = entry.task, entry.lease
    if viewer is None or viewer in (task.sender.pubkey, task.recipient.pubkey):
        return True
    return lease is not None and lease.leased_to.pubkey == viewer


def _passes(entry: Entry, query: QueueQuery, now_ms: int) -> bool:
    if query.state_filter is not None and entry.state.value != query.state_filter:
        return False
    age_ms, within_ms = query.min_lease_age_ms, query.deadline_within_ms
    held = entry.lease if entry.state is LEASED else None
    if age_ms is not None and held is not None and held.age_ms(now_ms) < age_ms:
        return False
    if within_ms is not None and (entry.deadline_ms is None or entry.deadline_ms > now_ms + within_ms):
        return False
    return _has_part(entry, query.viewer)


def _line(entry: Entry, node: str, boot: str) -> QueueEntry:
    line = QueueEntry(state=entry.state.value, task=entry.task, attempt=entry.attempt)
    lease = entry.lease
    if entry.state is not LEASED or lease is None:
        return line
    return msgspec.structs.replace(
        line,
        lease_id=lease.lease_id,
        leased_to=lease.leased_to,
        leased_at_ms=lease.leased_at_ms,
        renewed_at_ms=lease.renewed_at_ms or None,
        holder_lost=entry.holder_lost(node, boot),
    )


def _lease_record(entry: Entry) -> LeaseRecord | None:
    lease = entry.lease
    if entry.state is not LEASED or lease is None:
        return None
    return LeaseRecord(
        lease_id=lease.lease_id,
        leased_to=lease.leased_to,
        leased_at_ms=lease.leased_at_ms,
        turn=entry.turn,
        attempt=lease.attempt,
    )
