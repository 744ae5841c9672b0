"""A wall clock that is set while the ledger works: nothing is expired, retried or forgotten for an age that it made up.

And nothing waits for the clock to come back to where it was.
"""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from covenant.ledger.clock import PAUSE_MS
from covenant.ledger.embedded.engine import EmbeddedLedger
from covenant.ledger.embedded.open import memory_ledger, open_ledger
from covenant.ledger.machine.commands import Access
from covenant.model.grant import REQUEUE_ACTION
from covenant.model.retry_policy import RetryPolicy, SkipReason
from covenant.model.settings import Limits
from tests.ledger_contract.driver import LedgerDriver, refused
from tests.ledger_contract.fake_clock import FakeClock
from tests.ledger_contract.grants import give
from tests.ledger_contract.samples import ALICE, BOB, OPERATOR, make_grant, make_task, ok, same_work, task_id
from tests.ledger_contract.suspensions import sleep
from tests.waits import BOUND_S

MINUTE_MS = 60_000
DAY_MS = 86_400_000
BOTH_WAYS = pytest.mark.parametrize("step_ms", [DAY_MS, -DAY_MS], ids=["forward", "back"])
STALE = RetryPolicy(enabled=True, min_lease_age_ms=5 * MINUTE_MS, max_requeues=100)
SEND = Access(
    caller=ALICE, actions=("a2a.send.bob@here",), scope_id="a2a-send:bob@here", what="a2a send", peer=BOB.pubkey
)


@pytest.fixture
async def driver() -> AsyncIterator[LedgerDriver]:
    clock = FakeClock()
    ledger = await memory_ledger(clock=clock, monotonic_ms=clock.monotonic_ms)
    yield LedgerDriver(ledger, clock)
    await ledger.close()


async def reopened(home: Path, clock: FakeClock) -> EmbeddedLedger:
    return await open_ledger(home, clock=clock, monotonic_ms=clock.monotonic_ms)


async def test_a_receive_after_a_step_forward_leases_what_waits_and_expires_nothing(driver: LedgerDriver) -> None:
    await driver.send_all([make_task(number, deadline_ms=driver.clock() + 60 * MINUTE_MS) for number in (1, 2)])
    driver.clock.step(DAY_MS)
    assert [each.task.id for each in await driver.take(count=10)] == [task_id(1), task_id(2)]


@BOTH_WAYS
async def test_a_sweep_in_the_pause_settles_and_forgets_nothing(driver: LedgerDriver, step_ms: int) -> None:
    await driver.send(make_task(1, deadline_ms=driver.clock() + MINUTE_MS))
    driver.clock.step(step_ms)
    swept = await driver.sweep()
    assert (swept.expired, swept.timed_out, swept.forgotten) == ((), (), 0)
    assert (await driver.show(task_id(1))).state == "queued"


async def test_a_deadline_that_has_passed_by_a_clock_that_stays_set_expires_after_the_pause(
    driver: LedgerDriver,
) -> None:
    await driver.send(make_task(1, deadline_ms=driver.clock() + 60 * MINUTE_MS))
    driver.clock.step(DAY_MS)
    assert (await driver.sweep()).expired == ()
    driver.clock.advance(PAUSE_MS)
    assert (await driver.sweep()).expired == (task_id(1),)


@BOTH_WAYS
async def test_a_hold_lasts_as_long_as_it_should_whatever_the_clock_is_set_to(
    driver: LedgerDriver, step_ms: int
) -> None:
    await driver.interrupt(await driver.taken(make_task(1)), hold_ms=60 * MINUTE_MS)
    driver.clock.advance(10 * MINUTE_MS)
    driver.clock.step(step_ms)
    assert (await driver.sweep()).interrupted == ()
    driver.clock.advance(49 * MINUTE_MS)
    assert (await driver.sweep()).interrupted == ()
    driver.clock.advance(MINUTE_MS)
    assert (await driver.sweep()).interrupted == (task_id(1),)


async def test_a_clock_that_is_set_right_within_the_pause_has_cost_nothing(driver: LedgerDriver) -> None:
    await driver.send(make_task(1, deadline_ms=driver.clock() + 60 * MINUTE_MS))
    for step_ms in (DAY_MS, -DAY_MS):
        driver.clock.step(step_ms)
        assert (await driver.sweep()).expired == ()
    driver.clock.advance(PAUSE_MS)
    assert (await driver.sweep()).expired == ()
    driver.clock.advance(60 * MINUTE_MS)
    assert (await driver.sweep()).expired == (task_id(1),)


async def test_a_task_whose_deadline_only_the_step_has_passed_is_taken_in(driver: LedgerDriver) -> None:
    deadline_ms = driver.clock() + 60 * MINUTE_MS
    driver.clock.step(DAY_MS)
    await driver.send(make_task(1, deadline_ms=deadline_ms))
    driver.clock.advance(PAUSE_MS)
    with refused("deadline_past"):
        await driver.send(make_task(2, deadline_ms=deadline_ms))


@BOTH_WAYS
async def test_the_retry_gate_names_the_step_and_then_counts_without_it(driver: LedgerDriver, step_ms: int) -> None:
    await driver.taken(same_work(1))
    driver.clock.step(step_ms)
    assert await skipped(driver) == [SkipReason.CLOCK_STEPPED]
    driver.clock.advance(PAUSE_MS)
    assert await skipped(driver) == [SkipReason.LEASE_TOO_YOUNG]
    driver.clock.advance(4 * MINUTE_MS)
    report = await driver.retry(STALE)
    assert [each.task_id for each in report.requeued] == [task_id(1)]


async def skipped(driver: LedgerDriver) -> list[SkipReason]:
    report = await driver.retry(STALE)
    assert not report.requeued
    return [each.reason for each in report.skipped]


async def test_the_retry_gate_asked_by_hand_says_why_it_leaves_a_lease_alone(driver: LedgerDriver) -> None:
    access = Access(caller=OPERATOR, actions=(REQUEUE_ACTION,), scope_id="a2a-auto-retry", what="retry")
    await give(driver, make_grant(OPERATOR, REQUEUE_ACTION))
    await driver.taken(same_work(1))
    driver.clock.step(DAY_MS)
    (skip,) = (await driver.retry(RetryPolicy(min_lease_age_ms=0, max_requeues=1), access=access)).skipped
    assert (skip.reason, skip.lease_age_ms) == (SkipReason.CLOCK_STEPPED, 0)


@BOTH_WAYS
async def test_a_lease_that_was_renewed_after_the_step_is_young(driver: LedgerDriver, step_ms: int) -> None:
    leased = await driver.taken(same_work(1))
    driver.clock.advance(10 * MINUTE_MS)
    driver.clock.step(step_ms)
    await driver.renew(leased)
    driver.clock.advance(PAUSE_MS)
    assert await skipped(driver) == [SkipReason.LEASE_TOO_YOUNG]


@BOTH_WAYS
async def test_a_timeout_counts_the_time_that_passed_and_not_the_step(driver: LedgerDriver, step_ms: int) -> None:
    await driver.taken(make_task(1, timeout_ms=10 * MINUTE_MS))
    driver.clock.step(step_ms)
    assert (await driver.sweep()).timed_out == ()
    driver.clock.advance(10 * MINUTE_MS - 1)
    assert (await driver.sweep()).timed_out == ()
    driver.clock.advance(1)
    assert (await driver.sweep()).timed_out == (task_id(1),)


@BOTH_WAYS
async def test_a_turn_that_is_leased_again_after_the_step_keeps_its_time(driver: LedgerDriver, step_ms: int) -> None:
    leased = await driver.taken(make_task(1, timeout_ms=10 * MINUTE_MS))
    driver.clock.step(step_ms)
    driver.clock.advance(PAUSE_MS)
    await driver.sweep()
    await driver.release(leased)
    await driver.take_one()
    driver.clock.advance(9 * MINUTE_MS - 1)
    assert (await driver.sweep()).timed_out == ()
    driver.clock.advance(1)
    assert (await driver.sweep()).timed_out == (task_id(1),)


@BOTH_WAYS
async def test_work_that_begins_after_the_step_has_its_whole_time(driver: LedgerDriver, step_ms: int) -> None:
    driver.clock.step(step_ms)
    await driver.taken(make_task(1, timeout_ms=10 * MINUTE_MS))
    driver.clock.advance(10 * MINUTE_MS - 1)
    assert (await driver.sweep()).timed_out == ()
    driver.clock.advance(1)
    assert (await driver.sweep()).timed_out == (task_id(1),)


@pytest.mark.parametrize("step_ms", [60 * DAY_MS, -60 * DAY_MS], ids=["forward", "back"])
async def test_no_result_is_forgotten_before_its_time_whatever_the_clock_says(step_ms: int) -> None:
    clock = FakeClock()
    limits = Limits(retention_ms=30 * DAY_MS)
    ledger = await memory_ledger(clock=clock, monotonic_ms=clock.monotonic_ms, limits=limits)
    driver = LedgerDriver(ledger, clock)
    leased = await driver.taken(make_task(1))
    await driver.finish(leased, ok(task_id(1)))
    clock.step(step_ms)
    await driver.sweep()
    clock.advance(30 * DAY_MS)
    assert (await driver.sweep()).forgotten == 0
    clock.advance(1)
    assert (await driver.sweep()).forgotten == 1
    await ledger.close()


async def test_a_cached_result_answers_the_same_work_after_a_step(driver: LedgerDriver) -> None:
    leased = await driver.taken(same_work(1))
    await driver.finish(leased, ok(task_id(1)))
    driver.clock.step(60 * DAY_MS)
    driver.clock.advance(PAUSE_MS)
    await driver.sweep()
    assert (await driver.send(same_work(2))).replayed


async def test_a_grant_that_has_expired_by_either_clock_is_refused_until_the_pause_is_over(
    driver: LedgerDriver,
) -> None:
    """Fail closed: a step forward ends it, and a step back does not bring it back for as long as nobody looked."""
    await give(driver, make_grant(ALICE, "a2a.send.bob@here", expires_at=driver.clock() + 60 * MINUTE_MS))
    await driver.send(make_task(1), access=SEND)
    driver.clock.step(DAY_MS)
    with refused("capability_missing"):
        await driver.send(make_task(2), access=SEND)
    driver.clock.step(-DAY_MS)
    with refused("capability_missing"):
        await driver.send(make_task(2), access=SEND)
    driver.clock.advance(PAUSE_MS)
    await driver.send(make_task(2), access=SEND)


async def test_a_wait_ends_in_its_own_time_after_a_step_back(driver: LedgerDriver) -> None:
    with driver.ledger.task_waiter(BOB.pubkey) as waiter:
        waiting = asyncio.ensure_future(waiter.wait(50))
        await asyncio.sleep(0)
        driver.clock.step(-DAY_MS)
        assert await asyncio.wait_for(waiting, BOUND_S) is False


async def test_a_home_from_the_future_neither_expires_nor_waits_for_the_future(tmp_path: Path) -> None:
    ahead, today = FakeClock(), FakeClock()
    ahead.advance(DAY_MS)
    ledger = await reopened(tmp_path, ahead)
    driver = LedgerDriver(ledger, ahead)
    await driver.taken(make_task(1, timeout_ms=10 * MINUTE_MS))
    await driver.taken(same_work(2))
    await driver.send(make_task(3, deadline_ms=ahead() + MINUTE_MS))
    await ledger.close()

    ledger = await reopened(tmp_path, today)
    driver = LedgerDriver(ledger, today)
    assert ledger.clock.is_paused()
    assert (await ledger.counts()).clock_steps == 1
    assert await skipped(driver) == [SkipReason.CLOCK_STEPPED] * 2
    today.advance(PAUSE_MS)
    swept = await driver.sweep()
    assert (swept.expired, swept.timed_out) == ((), ())
    today.advance(9 * MINUTE_MS)
    assert (await driver.sweep()).timed_out == (task_id(1),)
    assert [each.task_id for each in (await driver.retry(STALE)).requeued] == [task_id(2)]
    await ledger.close()


async def test_a_start_after_a_compaction_knows_a_home_from_the_future_too(tmp_path: Path) -> None:
    ahead, today = FakeClock(), FakeClock()
    ahead.advance(DAY_MS)
    ledger = await open_ledger(tmp_path, clock=ahead, monotonic_ms=ahead.monotonic_ms, segment_bytes=4_096)
    driver = LedgerDriver(ledger, ahead)
    await driver.taken(make_task(1, timeout_ms=10 * MINUTE_MS))
    await ledger.compact()
    await ledger.close()
    ledger = await reopened(tmp_path, today)
    assert ledger.clock.is_paused()
    await ledger.close()


async def test_what_passed_while_the_machine_was_off_has_passed(tmp_path: Path) -> None:
    clock = FakeClock()
    ledger = await reopened(tmp_path, clock)
    await LedgerDriver(ledger, clock).send(make_task(1, deadline_ms=clock() + 60 * MINUTE_MS))
    await ledger.close()
    later = FakeClock(clock() + DAY_MS)
    ledger = await reopened(tmp_path, later)
    driver = LedgerDriver(ledger, later)
    assert not ledger.clock.is_paused()
    assert await driver.take() == ()
    assert (await driver.show(task_id(1))).state == "result_pending"
    await ledger.close()


@BOTH_WAYS
async def test_a_sleep_takes_as_long_as_it_says(driver: LedgerDriver, step_ms: int) -> None:
    await sleep(driver, await driver.taken(make_task()), 10 * MINUTE_MS)
    driver.clock.advance(5 * MINUTE_MS)
    assert (await driver.sweep()).woken == 0
    driver.clock.step(step_ms)
    assert (await driver.sweep()).woken == 0
    driver.clock.advance(PAUSE_MS)
    assert (await driver.sweep()).woken == 0
    driver.clock.advance(4 * MINUTE_MS - 1)
    assert (await driver.sweep()).woken == 0
    driver.clock.advance(1)
    assert (await driver.sweep()).woken == 1


async def test_a_task_that_is_not_to_begin_before_a_moment_begins_by_the_clock(driver: LedgerDriver) -> None:
    await driver.send(make_task(not_before_ms=driver.clock() + DAY_MS))
    driver.clock.step(DAY_MS)
    assert (await driver.sweep()).woken == 0
    driver.clock.advance(PAUSE_MS)
    assert (await driver.sweep()).woken == 1
    assert (await driver.take_one()).lease.attempt == 1
