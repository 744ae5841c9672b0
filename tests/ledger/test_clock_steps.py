"""A wall clock that is set while the ledger works: nothing is expired, retried or forgotten for an age that it made up.

And nothing waits for the clock to come back to where it was.
"""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from covenant.ledger.clock import PAUSE_MS
from covenant.ledger.log.engine import LogLedger
from covenant.ledger.log.homes import memory_ledger, open_ledger
from covenant.ledger.machine.commands import Access
from covenant.ledger.machine.view import Limits
from covenant.model.grant import REQUEUE_ACTION
from covenant.model.repair import RetryPolicy, SkipReason
from covenant.testing.cast import ALICE, BOB, OPERATOR, make_grant, make_task, ok, same_work, task_id
from covenant.testing.clock import FakeClock
from covenant.testing.desk import Desk, refused
from covenant.testing.grants import give

MINUTE_MS = 60_000
DAY_MS = 86_400_000
BOTH_WAYS = pytest.mark.parametrize("step_ms", [DAY_MS, -DAY_MS], ids=["forward", "back"])
STALE = RetryPolicy(enabled=True, min_lease_age_ms=5 * MINUTE_MS, max_requeues=100)
SEND = Access(
    caller=ALICE, actions=("a2a.send.bob@here",), scope_id="a2a-send:bob@here", what="a2a send", peer=BOB.pubkey
)


@pytest.fixture
async def desk() -> AsyncIterator[Desk]:
    clock = FakeClock()
    ledger = await memory_ledger(clock=clock, monotonic_ms=clock.monotonic_ms)
    yield Desk(ledger, clock)
    await ledger.close()


async def reopened(home: Path, clock: FakeClock) -> LogLedger:
    return await open_ledger(home, clock=clock, monotonic_ms=clock.monotonic_ms)


async def test_a_receive_after_a_step_forward_leases_what_waits_and_expires_nothing(desk: Desk) -> None:
    await desk.send_all([make_task(number, deadline_ms=desk.clock() + 60 * MINUTE_MS) for number in (1, 2)])
    desk.clock.step(DAY_MS)
    assert [each.task.id for each in await desk.take(count=10)] == [task_id(1), task_id(2)]


@BOTH_WAYS
async def test_a_sweep_in_the_pause_settles_and_forgets_nothing(desk: Desk, step_ms: int) -> None:
    await desk.send(make_task(1, deadline_ms=desk.clock() + MINUTE_MS))
    desk.clock.step(step_ms)
    swept = await desk.sweep()
    assert (swept.expired, swept.timed_out, swept.forgotten) == ((), (), 0)
    assert (await desk.show(task_id(1))).state == "queued"


async def test_a_deadline_that_has_passed_by_a_clock_that_stays_set_expires_after_the_pause(desk: Desk) -> None:
    await desk.send(make_task(1, deadline_ms=desk.clock() + 60 * MINUTE_MS))
    desk.clock.step(DAY_MS)
    assert (await desk.sweep()).expired == ()
    desk.clock.advance(PAUSE_MS)
    assert (await desk.sweep()).expired == (task_id(1),)


async def test_a_clock_that_is_set_right_within_the_pause_has_cost_nothing(desk: Desk) -> None:
    await desk.send(make_task(1, deadline_ms=desk.clock() + 60 * MINUTE_MS))
    for step_ms in (DAY_MS, -DAY_MS):
        desk.clock.step(step_ms)
        assert (await desk.sweep()).expired == ()
    desk.clock.advance(PAUSE_MS)
    assert (await desk.sweep()).expired == ()
    desk.clock.advance(60 * MINUTE_MS)
    assert (await desk.sweep()).expired == (task_id(1),)


async def test_a_task_whose_deadline_only_the_step_has_passed_is_taken_in(desk: Desk) -> None:
    deadline_ms = desk.clock() + 60 * MINUTE_MS
    desk.clock.step(DAY_MS)
    await desk.send(make_task(1, deadline_ms=deadline_ms))
    desk.clock.advance(PAUSE_MS)
    with refused("deadline_past"):
        await desk.send(make_task(2, deadline_ms=deadline_ms))


@BOTH_WAYS
async def test_the_retry_gate_names_the_step_and_then_counts_without_it(desk: Desk, step_ms: int) -> None:
    await desk.taken(same_work(1))
    desk.clock.step(step_ms)
    assert await skipped(desk) == [SkipReason.CLOCK_STEPPED]
    desk.clock.advance(PAUSE_MS)
    assert await skipped(desk) == [SkipReason.LEASE_TOO_YOUNG]
    desk.clock.advance(4 * MINUTE_MS)
    report = await desk.retry(STALE)
    assert [each.task_id for each in report.requeued] == [task_id(1)]


async def skipped(desk: Desk) -> list[SkipReason]:
    report = await desk.retry(STALE)
    assert not report.requeued
    return [each.reason for each in report.skipped]


async def test_the_retry_gate_asked_by_hand_says_why_it_leaves_a_lease_alone(desk: Desk) -> None:
    access = Access(caller=OPERATOR, actions=(REQUEUE_ACTION,), scope_id="a2a-auto-retry", what="retry")
    await give(desk, make_grant(OPERATOR, REQUEUE_ACTION))
    await desk.taken(same_work(1))
    desk.clock.step(DAY_MS)
    (skip,) = (await desk.retry(RetryPolicy(min_lease_age_ms=0, max_requeues=1), access=access)).skipped
    assert (skip.reason, skip.lease_age_ms) == (SkipReason.CLOCK_STEPPED, 0)


@BOTH_WAYS
async def test_a_lease_that_was_renewed_after_the_step_is_young(desk: Desk, step_ms: int) -> None:
    leased = await desk.taken(same_work(1))
    desk.clock.advance(10 * MINUTE_MS)
    desk.clock.step(step_ms)
    await desk.renew(leased)
    desk.clock.advance(PAUSE_MS)
    assert await skipped(desk) == [SkipReason.LEASE_TOO_YOUNG]


@BOTH_WAYS
async def test_a_timeout_counts_the_time_that_passed_and_not_the_step(desk: Desk, step_ms: int) -> None:
    await desk.taken(make_task(1, timeout_ms=10 * MINUTE_MS))
    desk.clock.step(step_ms)
    assert (await desk.sweep()).timed_out == ()
    desk.clock.advance(10 * MINUTE_MS - 1)
    assert (await desk.sweep()).timed_out == ()
    desk.clock.advance(1)
    assert (await desk.sweep()).timed_out == (task_id(1),)


@BOTH_WAYS
async def test_a_turn_that_is_leased_again_after_the_step_keeps_its_time(desk: Desk, step_ms: int) -> None:
    leased = await desk.taken(make_task(1, timeout_ms=10 * MINUTE_MS))
    desk.clock.step(step_ms)
    desk.clock.advance(PAUSE_MS)
    await desk.sweep()
    await desk.release(leased)
    await desk.take_one()
    desk.clock.advance(9 * MINUTE_MS - 1)
    assert (await desk.sweep()).timed_out == ()
    desk.clock.advance(1)
    assert (await desk.sweep()).timed_out == (task_id(1),)


@BOTH_WAYS
async def test_work_that_begins_after_the_step_has_its_whole_time(desk: Desk, step_ms: int) -> None:
    desk.clock.step(step_ms)
    await desk.taken(make_task(1, timeout_ms=10 * MINUTE_MS))
    desk.clock.advance(10 * MINUTE_MS - 1)
    assert (await desk.sweep()).timed_out == ()
    desk.clock.advance(1)
    assert (await desk.sweep()).timed_out == (task_id(1),)


@pytest.mark.parametrize("step_ms", [60 * DAY_MS, -60 * DAY_MS], ids=["forward", "back"])
async def test_no_result_is_forgotten_before_its_time_whatever_the_clock_says(step_ms: int) -> None:
    clock = FakeClock()
    limits = Limits(retention_ms=30 * DAY_MS)
    ledger = await memory_ledger(clock=clock, monotonic_ms=clock.monotonic_ms, limits=limits)
    desk = Desk(ledger, clock)
    leased = await desk.taken(make_task(1))
    await desk.finish(leased, ok(task_id(1)))
    clock.step(step_ms)
    await desk.sweep()
    clock.advance(30 * DAY_MS)
    assert (await desk.sweep()).forgotten == 0
    clock.advance(1)
    assert (await desk.sweep()).forgotten == 1
    await ledger.close()


async def test_a_cached_result_answers_the_same_work_after_a_step(desk: Desk) -> None:
    leased = await desk.taken(same_work(1))
    await desk.finish(leased, ok(task_id(1)))
    desk.clock.step(60 * DAY_MS)
    desk.clock.advance(PAUSE_MS)
    await desk.sweep()
    assert (await desk.send(same_work(2))).replayed


async def test_a_grant_that_has_expired_by_either_clock_is_refused_until_the_pause_is_over(desk: Desk) -> None:
    """Fail closed: a step forward ends it, and a step back does not bring it back for as long as nobody looked."""
    await give(desk, make_grant(ALICE, "a2a.send.bob@here", expires_at=desk.clock() + 60 * MINUTE_MS))
    await desk.send(make_task(1), access=SEND)
    desk.clock.step(DAY_MS)
    with refused("capability_missing"):
        await desk.send(make_task(2), access=SEND)
    desk.clock.step(-DAY_MS)
    with refused("capability_missing"):
        await desk.send(make_task(2), access=SEND)
    desk.clock.advance(PAUSE_MS)
    await desk.send(make_task(2), access=SEND)


async def test_a_wait_ends_in_its_own_time_after_a_step_back(desk: Desk) -> None:
    with desk.ledger.task_waiter(BOB.pubkey) as waiter:
        waiting = asyncio.ensure_future(waiter.wait(50))
        await asyncio.sleep(0)
        desk.clock.step(-DAY_MS)
        assert await asyncio.wait_for(waiting, 10) is False


async def test_a_home_from_the_future_neither_expires_nor_waits_for_the_future(tmp_path: Path) -> None:
    ahead, today = FakeClock(), FakeClock()
    ahead.advance(DAY_MS)
    ledger = await reopened(tmp_path, ahead)
    desk = Desk(ledger, ahead)
    await desk.taken(make_task(1, timeout_ms=10 * MINUTE_MS))
    await desk.taken(same_work(2))
    await desk.send(make_task(3, deadline_ms=ahead() + MINUTE_MS))
    await ledger.close()

    ledger = await reopened(tmp_path, today)
    desk = Desk(ledger, today)
    assert ledger.clock.is_paused()
    assert (await ledger.counts()).clock_steps == 1
    assert await skipped(desk) == [SkipReason.CLOCK_STEPPED] * 2
    today.advance(PAUSE_MS)
    swept = await desk.sweep()
    assert (swept.expired, swept.timed_out) == ((), ())
    today.advance(9 * MINUTE_MS)
    assert (await desk.sweep()).timed_out == (task_id(1),)
    assert [each.task_id for each in (await desk.retry(STALE)).requeued] == [task_id(2)]
    await ledger.close()


async def test_a_start_after_a_compaction_knows_a_home_from_the_future_too(tmp_path: Path) -> None:
    ahead, today = FakeClock(), FakeClock()
    ahead.advance(DAY_MS)
    ledger = await open_ledger(tmp_path, clock=ahead, monotonic_ms=ahead.monotonic_ms, segment_bytes=4_096)
    desk = Desk(ledger, ahead)
    await desk.taken(make_task(1, timeout_ms=10 * MINUTE_MS))
    await ledger.compact()
    await ledger.close()
    ledger = await reopened(tmp_path, today)
    assert ledger.clock.is_paused()
    await ledger.close()


async def test_what_passed_while_the_machine_was_off_has_passed(tmp_path: Path) -> None:
    clock = FakeClock()
    ledger = await reopened(tmp_path, clock)
    await Desk(ledger, clock).send(make_task(1, deadline_ms=clock() + 60 * MINUTE_MS))
    await ledger.close()
    later = FakeClock(clock() + DAY_MS)
    ledger = await reopened(tmp_path, later)
    desk = Desk(ledger, later)
    assert not ledger.clock.is_paused()
    assert await desk.take() == ()
    assert (await desk.show(task_id(1))).state == "result_pending"
    await ledger.close()
