"""Rule 8: the same work is done once. A finished `ok` is replayed; while it is under way, others follow it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from covenant.ledger.machine.states import State
from covenant.model.ids import TaskId
from covenant.model.settings import Limits
from covenant.model.task import Result, Task
from tests.ledger_contract.driver import LedgerDriver, check_generations, refused
from tests.ledger_contract.engine import Engine
from tests.ledger_contract.samples import ALICE, BOB, CAROL, failed, make_task, ok, partial, same_work, task_id, unsafe
from tests.ledger_contract.suite import Suite

EndsLeader = Callable[[LedgerDriver, TaskId], Awaitable[object]]

HOUR_MS = 3_600_000


async def _cancel(driver: LedgerDriver, leader: TaskId) -> None:
    await driver.cancel(leader)


async def _force(driver: LedgerDriver, leader: TaskId) -> None:
    await driver.take()
    await driver.force_error(leader)


async def _expire(driver: LedgerDriver, _leader: TaskId) -> None:
    driver.clock.advance(HOUR_MS)
    await driver.sweep()


async def _expire_at_receive(driver: LedgerDriver, _leader: TaskId) -> None:
    driver.clock.advance(HOUR_MS)
    await driver.take()


async def _time_out(driver: LedgerDriver, _leader: TaskId) -> None:
    await driver.take()
    driver.clock.advance(HOUR_MS)
    await driver.sweep()


class IdempotencySuite(Suite):
    async def test_a_finished_result_is_replayed_at_once_and_says_so(self, driver: LedgerDriver) -> None:
        await driver.finish(await driver.taken(same_work(1)), ok(task_id(1), "42"))
        accepted = await driver.send(same_work(2))
        assert accepted.replayed
        assert not accepted.duplicate
        assert await driver.take() == ()
        assert await driver.drain(count=10) == (ok(task_id(1), "42"), ok(task_id(2), "42"))
        assert (await driver.send(same_work(2))).replayed
        assert (await check_generations(driver, task_id(2))).attempt == 0

    @pytest.mark.parametrize("result", [failed(task_id(1)), partial(task_id(1))], ids=["error", "partial"])
    async def test_what_did_not_succeed_is_not_replayed(self, driver: LedgerDriver, result: Result) -> None:
        await driver.finish(await driver.taken(same_work(1)), result)
        assert not (await driver.send(same_work(2))).replayed
        assert (await driver.take_one()).task.id == task_id(2)

    async def test_what_was_forced_or_canceled_is_not_replayed(self, driver: LedgerDriver) -> None:
        await driver.taken(same_work(1))
        await driver.force_error(task_id(1))
        await driver.send(same_work(2))
        await driver.cancel(task_id(2))
        assert not (await driver.send(same_work(3))).replayed
        assert (await driver.take_one()).task.id == task_id(3)

    async def test_the_same_work_while_the_first_is_queued_follows_it(self, driver: LedgerDriver) -> None:
        await driver.send(same_work(1))
        assert (await driver.send(same_work(2))).following == task_id(1)
        assert [leased.task.id for leased in await driver.take(count=10)] == [task_id(1)]

    async def test_the_same_work_while_the_first_is_in_flight_follows_it(self, driver: LedgerDriver) -> None:
        await driver.taken(same_work(1))
        assert (await driver.send(same_work(2))).following == task_id(1)
        assert await driver.take(count=10) == ()

    async def test_the_same_work_while_the_first_is_parked_follows_it(self, driver: LedgerDriver) -> None:
        await driver.park(await driver.taken(same_work(1)))
        assert (await driver.send(same_work(2))).following == task_id(1)

    async def test_the_same_work_sent_by_many_at_once_runs_once(self, driver: LedgerDriver) -> None:
        answers = await asyncio.gather(*(driver.send(same_work(number)) for number in range(10)))
        assert len([answer for answer in answers if answer.following is None]) == 1
        assert len(await driver.take(count=10)) == 1

    @pytest.mark.parametrize("make", [ok, failed, partial])
    async def test_the_leaders_result_settles_its_followers(
        self, driver: LedgerDriver, make: Callable[[TaskId], Result]
    ) -> None:
        leased = await driver.taken(same_work(1))
        await driver.send_all([same_work(2), same_work(3)])
        await driver.finish(leased, make(task_id(1)))
        assert await driver.drain(count=10) == (make(task_id(1)), make(task_id(2)), make(task_id(3)))
        assert await driver.drain(count=10) == ()
        assert await driver.take(count=10) == ()
        for number in (1, 2, 3):
            await check_generations(driver, task_id(number))

    async def test_a_follower_asked_again_says_whom_it_follows(self, driver: LedgerDriver) -> None:
        await driver.send_all([same_work(1), same_work(2)])
        again = await driver.send(same_work(2))
        assert again.duplicate
        assert again.following == task_id(1)

    @pytest.mark.parametrize("end", [_cancel, _force, _expire, _expire_at_receive, _time_out])
    async def test_a_leader_that_ends_without_a_result_promotes_the_oldest_follower(
        self, driver: LedgerDriver, end: EndsLeader
    ) -> None:
        limits: dict[str, Any] = {"deadline_ms": driver.clock() + 1_000} if end in (_expire, _expire_at_receive) else {}
        limits |= {"timeout_ms": 1_000} if end is _time_out else {}
        await driver.send_all([same_work(1, **limits), same_work(2), same_work(3)])
        await end(driver, task_id(1))
        assert (await driver.entry(task_id(2))).state is State.QUEUED
        assert (await driver.entry(task_id(3))).state is State.FOLLOWING
        assert (await driver.send(same_work(4))).following == task_id(2)
        leased = await driver.take_one()
        assert leased.task.id == task_id(2)
        assert leased.lease.attempt == 1
        await driver.finish(leased, ok(task_id(2)))
        assert [result.task_id for result in await driver.drain(count=10)] == [
            task_id(number) for number in (1, 2, 3, 4)
        ]

    async def test_canceling_a_follower_leaves_the_leader_and_the_other_followers(self, driver: LedgerDriver) -> None:
        leased = await driver.taken(same_work(1))
        await driver.send_all([same_work(2), same_work(3)])
        assert (await driver.cancel(task_id(2))).canceled
        await driver.renew(leased)
        await driver.finish(leased, ok(task_id(1)))
        results = await driver.drain(count=10)
        assert [result.task_id for result in results] == [task_id(2), task_id(1), task_id(3)]

    async def test_a_followers_own_deadline_ends_it_alone(self, driver: LedgerDriver) -> None:
        leased = await driver.taken(same_work(1))
        await driver.send_all([same_work(2, deadline_ms=driver.clock() + 10), same_work(3)])
        driver.clock.advance(10)
        assert (await driver.sweep()).expired == (task_id(2),)
        await driver.finish(leased, ok(task_id(1)))
        assert [result.status for result in await driver.drain(count=10)] == ["error", "ok", "ok"]

    async def test_a_leader_and_all_its_followers_past_their_deadlines_end_once_each(
        self, driver: LedgerDriver
    ) -> None:
        deadline_ms = driver.clock() + 10
        await driver.send_all([same_work(number, deadline_ms=deadline_ms) for number in range(1, 6)])
        driver.clock.advance(10)
        assert len((await driver.sweep()).expired) == 5
        assert len(await driver.drain(count=100)) == 5
        assert (await driver.send(same_work(9))).following is None

    async def test_a_requeued_leader_keeps_its_followers(self, driver: LedgerDriver) -> None:
        await driver.taken(same_work(1))
        await driver.send(same_work(2))
        await driver.requeue(task_id(1))
        await driver.finish(await driver.take_one(), ok(task_id(1)))
        assert len(await driver.drain(count=10)) == 2

    @pytest.mark.parametrize(
        "other",
        [
            same_work(2, sender=CAROL),
            same_work(2, recipient=CAROL),
            same_work(2, key="invoice-8"),
            make_task(2, task_kind="receipt", idempotency=same_work(1).idempotency),
            make_task(2, idempotency=same_work(1).idempotency),
            make_task(2, task_kind="invoice"),
            make_task(2, task_kind="invoice", idempotency=unsafe()),
        ],
        ids=["sender", "recipient", "key", "kind", "no kind", "no key", "unsafe"],
    )
    async def test_work_that_differs_in_any_part_of_its_key_runs_by_itself(
        self, driver: LedgerDriver, other: Task
    ) -> None:
        await driver.send(same_work(1))
        assert (await driver.send(other)).following is None
        await driver.finish(await driver.take_one(BOB), ok(task_id(1)))
        assert not (await driver.send(make_task(3, sender=ALICE))).replayed
        assert (await driver.take_one(other.recipient)).task.id == task_id(2)

    async def test_blanks_around_key_and_kind_make_no_other_work(self, driver: LedgerDriver) -> None:
        await driver.send(same_work(1))
        blank = make_task(2, task_kind=" invoice ", idempotency=same_work(1, " invoice-7 ").idempotency)
        assert (await driver.send(blank)).following == task_id(1)

    async def test_a_cached_result_is_replayed_until_it_is_too_old(self, engine: Engine) -> None:
        driver = LedgerDriver(await engine.open(Limits(cache_age_ms_max=1_000)), engine.clock)
        await driver.finish(await driver.taken(same_work(1)), ok(task_id(1)))
        driver.clock.advance(1_000)
        assert (await driver.send(same_work(2))).replayed
        driver.clock.advance(1)
        assert not (await driver.send(same_work(3))).replayed
        assert (await driver.sweep()).uncached == 1
        assert (await driver.ledger.counts()).cached == 0

    async def test_a_clock_that_steps_back_over_the_age_of_a_cached_result_orphans_nobody(self, engine: Engine) -> None:
        driver = LedgerDriver(await engine.open(Limits(cache_age_ms_max=1_000)), engine.clock)
        await driver.finish(await driver.taken(same_work(1)), ok(task_id(1)))
        driver.clock.advance(5_000)
        leased = await driver.taken(same_work(2))
        await driver.send(same_work(3))
        driver.clock.advance(-5_000)
        assert (await driver.send(same_work(4))).replayed
        await driver.finish(leased, ok(task_id(2)))
        assert {result.task_id for result in await driver.drain(count=10)} == {task_id(n) for n in (1, 2, 3, 4)}

    async def test_the_cache_keeps_the_newest_results_up_to_its_size(self, engine: Engine) -> None:
        driver = LedgerDriver(await engine.open(Limits(cache_entries_max=2)), engine.clock)
        for number in range(4):
            await driver.finish(await driver.taken(same_work(number, f"key-{number}")), ok(task_id(number)))
            await driver.sweep()
        assert (await driver.ledger.counts()).cached == 2
        replayed = [(await driver.send(same_work(10 + number, f"key-{number}"))).replayed for number in range(4)]
        assert replayed == [False, False, True, True]

    async def test_the_number_of_followers_is_bounded(self, engine: Engine) -> None:
        driver = LedgerDriver(await engine.open(Limits(followers_max=2)), engine.clock)
        await driver.send_all([same_work(number) for number in range(3)])
        with refused("followers_full", 429):
            await driver.send(same_work(3))
        assert (await driver.send(same_work(2))).duplicate
