"""Withdrawal: what a receive or drain was given, and its caller never heard of, goes back to where it came from.

A lease that goes back so is no attempt, and the task stands where it stood in the queue. A result can be drained again.
Both are records like every other: a crash afterwards changes nothing about it.
"""

from __future__ import annotations

from collections.abc import Iterable

from covenant.ledger.machine.commands import GiveBack, Returned, Withdraw
from covenant.ledger.machine.decision import Decide
from covenant.ledger.machine.events import LeaseReleased, RequestWithdrawn, ResultReturned
from covenant.ledger.machine.states import State
from covenant.model.ids import LeaseId, TaskId


def give_back(decide: Decide, command: GiveBack) -> Returned:
    leases = _release(decide, command.leases, command.reason)
    return Returned(leases, _return(decide, command.results, command.reason))


def withdraw(decide: Decide, command: Withdraw) -> Returned:
    by, request_id = command.by.pubkey, command.request_id
    taken = decide.view.remembered("take", by, request_id)
    drained = decide.view.remembered("drain", by, request_id)
    leases = _release(decide, zip(taken.task_ids, taken.lease_ids, strict=True) if taken else (), command.reason)
    results = _return(decide, drained.task_ids if drained else (), command.reason)
    decide.add(RequestWithdrawn(by, request_id))
    return Returned(leases, results)


def _release(decide: Decide, leases: Iterable[tuple[TaskId, LeaseId]], reason: str) -> int:
    count = 0
    # The last first: each goes to the head of the queue, so in the end they stand as they stood.
    for task_id, lease_id in reversed(tuple(leases)):
        entry = decide.view.entry(task_id)
        if entry is None or entry.state is not State.LEASED or entry.lease is None or entry.lease.lease_id != lease_id:
            continue
        # Somebody has worked under it, so somebody was told of it.
        if entry.update_no or entry.artifacts or entry.lease.renewed_at_ms:
            continue
        decide.add(LeaseReleased(task_id, lease_id, reason, undelivered=True))
        count += 1
    return count


def _return(decide: Decide, task_ids: Iterable[TaskId], reason: str) -> int:
    found = [event for task_id in task_ids if (event := _returned(decide, task_id, reason)) is not None]
    for event in reversed(found):
        decide.add(event)
    return len(found)


def _returned(decide: Decide, task_id: TaskId, reason: str) -> ResultReturned | None:
    entry = decide.view.entry(task_id)
    if entry is None:
        gone = decide.view.archived(task_id)
        if gone is None or gone.task is None:
            return None
        return ResultReturned(
            task_id,
            reason,
            gone.task,
            gone.digest,
            gone.result,
            gone.ending,
            gone.cause,
            gone.generation,
            gone.accepted_at_ms,
            gone.lease,
        )
    if entry.state is not State.DRAINED or entry.result is None or entry.ending is None or entry.cause is None:
        return None
    return ResultReturned(
        task_id,
        reason,
        entry.task,
        entry.digest,
        entry.result,
        entry.ending,
        entry.cause,
        entry.generation,
        entry.accepted_at_ms,
        entry.lease,
    )
