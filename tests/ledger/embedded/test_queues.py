"""The queues and the cache of results in memory."""

from typing import Any

import msgspec
import pytest

from covenant.ledger.embedded.queues import STALE_TIMES_MAX, FifoQueues, ResultCache
from covenant.ledger.embedded.state import LedgerState
from covenant.ledger.machine.events import CacheDropped, TaskClosed, TaskLeased, TaskSent
from covenant.ledger.machine.states import State
from covenant.ledger.machine.view import Cached
from covenant.model.clock_steps import STEADY
from covenant.model.ids import LeaseId, TaskId
from covenant.model.settings import Limits
from covenant.model.task import DELEGATION, CacheKey, Cause, Ending, Lease
from tests.ledger_contract.samples import BOB, idempotent, make_task, ok, task_id


def queues_of(*owners: str) -> FifoQueues:
    """The first task is of the first owner, and so on."""
    queues = FifoQueues()
    for number, owner in enumerate(owners, 1):
        queues.enter(owner, task_id(number))
    return queues


def ids(*numbers: int) -> list[TaskId]:
    return [task_id(number) for number in numbers]


def test_owners_are_served_in_turn_however_many_tasks_one_has() -> None:
    queues = queues_of("a", "a", "a", "b", "c", "c")
    assert queues.in_turn(10) == ids(1, 4, 5, 2, 6, 3)
    assert queues.in_turn(2) == ids(1, 4)
    queues.leave("a", task_id(1))
    assert queues.in_turn(3) == ids(4, 5, 2)
    assert queues.first(None, 3) == ids(2, 3, 4)


def test_the_beginning_of_a_long_turn_is_the_short_one() -> None:
    queues = queues_of("a", "b", "a", "c", "b", "a", "d")
    whole = queues.in_turn(100)
    assert [queues.in_turn(count) for count in range(8)] == [whole[:count] for count in range(8)]


def cache_of(count: int) -> tuple[ResultCache, list[CacheKey]]:
    cache = ResultCache()
    keys = [CacheKey("s", "r", "k", str(number)) for number in range(count)]
    for number, key in enumerate(keys):
        cache.put(key, Cached(source_task_id=task_id(number), result=ok(task_id(number)), cached_at_ms=number))
    return cache, keys


def test_what_is_over_the_limits_is_named_and_dropped_by_its_keys() -> None:
    cache, keys = cache_of(5)
    limits = Limits(cache_entries_max=2)
    assert cache.overflow(limits, 0, 2, STEADY) == keys[:2]
    assert cache.overflow(limits, 0, 100, STEADY) == keys[:3]
    cache.drop(CacheDropped(keys=(keys[1], CacheKey("gone", "r", "k", "1"))))
    assert [key for key, _ in cache.items()] == [keys[0], *keys[2:]]
    assert cache.overflow(Limits(cache_age_ms_max=0), 3, 100, STEADY) == [keys[0], keys[2]]


def test_a_record_of_earlier_versions_counts_the_oldest() -> None:
    cache, keys = cache_of(3)
    cache.drop(msgspec.json.decode(b'{"type":"cache_dropped","count":2}', type=CacheDropped))
    assert [key for key, _ in cache.items()] == keys[2:]


def test_a_snapshot_of_earlier_versions_has_the_wire_names_of_states() -> None:
    for state in State:
        assert msgspec.json.decode(msgspec.json.encode(state.wire_name), type=State) is state
        assert msgspec.json.decode(msgspec.json.encode(state), type=State) is state


@pytest.mark.parametrize(
    ("fields", "request_id"),
    [
        ({}, None),
        ({}, "request"),
        ({"deadline_ms": 9}, None),
        ({"timeout_ms": 7}, None),
        ({"idempotency": idempotent()}, None),
        ({"origin": DELEGATION, "parent": task_id(2)}, None),
        ({"intent_text": "x" * 100_000}, None),
    ],
)
def test_a_task_that_is_leased_as_it_is_accepted_is_kept_as_one_that_was_queued_first(
    fields: dict[str, Any], request_id: str | None
) -> None:
    task = make_task(1, **fields)
    lease = Lease(lease_id=LeaseId("a lease"), leased_to=BOB, leased_at_ms=5, attempt=1)
    sent, leased = TaskSent(task.id, task, "digest"), TaskLeased(task.id, lease, 2, request_id)
    at_once, queued_first = LedgerState(Limits()), LedgerState(Limits())
    at_once.apply([sent, leased], 5, 1)
    queued_first.apply([sent], 5, 1)
    queued_first.apply([leased], 5, 1)
    assert at_once.entries[task.id].state is State.LEASED
    for state in (at_once, queued_first):
        assert not len(state.queue)
        assert state.account(f"@{task.sender.pubkey}").tasks == 1
    for name in ("entries", "leased", "requests", "leaders", "children", "orphaned"):
        assert getattr(at_once, name) == getattr(queued_first, name), name
    assert at_once.due_tasks._heap == queued_first.due_tasks._heap


def test_times_of_ended_tasks_leave_memory_long_before_they_come() -> None:
    state, day_ms, count = LedgerState(Limits()), 86_400_000, 3 * STALE_TIMES_MAX
    alive = [make_task(number, deadline_ms=day_ms + number) for number in range(100)]
    for seq, task in enumerate(alive, 1):
        state.apply([TaskSent(task.id, task, "digest")], 5, seq)
    for number in range(100, 100 + count):
        task = make_task(number, deadline_ms=day_ms)
        closed = TaskClosed(task.id, ok(task.id), Ending.COMPLETED, Cause.RESULT, 2)
        state.apply([TaskSent(task.id, task, "digest"), closed], 5, number)
        state.evict(number)
    assert len(state.entries) == len(alive)
    assert len(state.due_tasks._heap) <= 2 * len(alive) + STALE_TIMES_MAX
    due = state.due(day_ms + len(alive), count, STEADY)
    assert [entry.task.id for entry in due] == [task.id for task in alive]
