"""Rule 8: the same work is done once. A finished `ok` is replayed; while it is under way, others follow it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from covenant.ledger.machine.states import State
from covenant.ledger.machine.view import Limits
from covenant.model.ids import TaskId
from covenant.model.result import Result
from covenant.model.task import Task
from covenant.testing.cast import ALICE, BOB, CAROL, failed, make_task, ok, partial, same_work, task_id, unsafe
from covenant.testing.desk import Desk, check_generations, refused
from covenant.testing.engine import Engine
from covenant.testing.suite import Suite

EndsLeader = Callable[[Desk, TaskId], Awaitable[object]]

HOUR_MS = 3_600_000


async def _cancel(desk: Desk, leader: TaskId) -> None:
    await desk.cancel(leader)


async def _force(desk: Desk, leader: TaskId) -> None:
    await desk.take()
    await desk.force_error(leader)


async def _expire(desk: Desk, _leader: TaskId) -> None:
    desk.clock.advance(HOUR_MS)
    await desk.sweep()


async def _expire_at_receive(desk: Desk, _leader: TaskId) -> None:
    desk.clock.advance(HOUR_MS)
    await desk.take()


async def _time_out(desk: Desk, _leader: TaskId) -> None:
    await desk.take()
    desk.clock.advance(HOUR_MS)
    await desk.sweep()


class SharingSuite(Suite):
    async def test_a_finished_result_is_replayed_at_once_and_says_so(self, desk: Desk) -> None:
        await desk.finish(await desk.taken(same_work(1)), ok(task_id(1), "42"))
        accepted = await desk.send(same_work(2))
        assert accepted.replayed
        assert not accepted.duplicate
        assert await desk.take() == ()
        assert await desk.drain(count=10) == (ok(task_id(1), "42"), ok(task_id(2), "42"))
        assert (await desk.send(same_work(2))).replayed
        assert (await check_generations(desk, task_id(2))).attempt == 0

    @pytest.mark.parametrize("result", [failed(task_id(1)), partial(task_id(1))], ids=["error", "partial"])
    async def test_what_did_not_succeed_is_not_replayed(self, desk: Desk, result: Result) -> None:
        await desk.finish(await desk.taken(same_work(1)), result)
        assert not (await desk.send(same_work(2))).replayed
        assert (await desk.take_one()).task.id == task_id(2)

    async def test_what_was_forced_or_canceled_is_not_replayed(self, desk: Desk) -> None:
        await desk.taken(same_work(1))
        await desk.force_error(task_id(1))
        await desk.send(same_work(2))
        await desk.cancel(task_id(2))
        assert not (await desk.send(same_work(3))).replayed
        assert (await desk.take_one()).task.id == task_id(3)

    async def test_the_same_work_while_the_first_is_queued_follows_it(self, desk: Desk) -> None:
        await desk.send(same_work(1))
        assert (await desk.send(same_work(2))).following == task_id(1)
        assert [leased.task.id for leased in await desk.take(count=10)] == [task_id(1)]

    async def test_the_same_work_while_the_first_is_in_flight_follows_it(self, desk: Desk) -> None:
        await desk.taken(same_work(1))
        assert (await desk.send(same_work(2))).following == task_id(1)
        assert await desk.take(count=10) == ()

    async def test_the_same_work_while_the_first_is_parked_follows_it(self, desk: Desk) -> None:
        await desk.park(await desk.taken(same_work(1)))
        assert (await desk.send(same_work(2))).following == task_id(1)

    async def test_the_same_work_sent_by_many_at_once_runs_once(self, desk: Desk) -> None:
        answers = await asyncio.gather(*(desk.send(same_work(number)) for number in range(10)))
        assert len([answer for answer in answers if answer.following is None]) == 1
        assert len(await desk.take(count=10)) == 1

    @pytest.mark.parametrize("make", [ok, failed, partial])
    async def test_the_leaders_result_settles_its_followers(self, desk: Desk, make: Callable[[TaskId], Result]) -> None:
        leased = await desk.taken(same_work(1))
        await desk.send_all([same_work(2), same_work(3)])
        await desk.finish(leased, make(task_id(1)))
        assert await desk.drain(count=10) == (make(task_id(1)), make(task_id(2)), make(task_id(3)))
        assert await desk.drain(count=10) == ()
        assert await desk.take(count=10) == ()
        for number in (1, 2, 3):
            await check_generations(desk, task_id(number))

    async def test_a_follower_asked_again_says_whom_it_follows(self, desk: Desk) -> None:
        await desk.send_all([same_work(1), same_work(2)])
        again = await desk.send(same_work(2))
        assert again.duplicate
        assert again.following == task_id(1)

    @pytest.mark.parametrize("end", [_cancel, _force, _expire, _expire_at_receive, _time_out])
    async def test_a_leader_that_ends_without_a_result_promotes_the_oldest_follower(
        self, desk: Desk, end: EndsLeader
    ) -> None:
        limits: dict[str, Any] = {"deadline_ms": desk.clock() + 1_000} if end in (_expire, _expire_at_receive) else {}
        limits |= {"timeout_ms": 1_000} if end is _time_out else {}
        await desk.send_all([same_work(1, **limits), same_work(2), same_work(3)])
        await end(desk, task_id(1))
        assert (await desk.entry(task_id(2))).state is State.QUEUED
        assert (await desk.entry(task_id(3))).state is State.FOLLOWING
        assert (await desk.send(same_work(4))).following == task_id(2)
        leased = await desk.take_one()
        assert leased.task.id == task_id(2)
        assert leased.lease.attempt == 1
        await desk.finish(leased, ok(task_id(2)))
        assert [result.task_id for result in await desk.drain(count=10)] == [task_id(number) for number in (1, 2, 3, 4)]

    async def test_canceling_a_follower_leaves_the_leader_and_the_other_followers(self, desk: Desk) -> None:
        leased = await desk.taken(same_work(1))
        await desk.send_all([same_work(2), same_work(3)])
        assert (await desk.cancel(task_id(2))).canceled
        await desk.renew(leased)
        await desk.finish(leased, ok(task_id(1)))
        results = await desk.drain(count=10)
        assert [result.task_id for result in results] == [task_id(2), task_id(1), task_id(3)]

    async def test_a_followers_own_deadline_ends_it_alone(self, desk: Desk) -> None:
        leased = await desk.taken(same_work(1))
        await desk.send_all([same_work(2, deadline_ms=desk.clock() + 10), same_work(3)])
        desk.clock.advance(10)
        assert (await desk.sweep()).expired == (task_id(2),)
        await desk.finish(leased, ok(task_id(1)))
        assert [result.status for result in await desk.drain(count=10)] == ["error", "ok", "ok"]

    async def test_a_leader_and_all_its_followers_past_their_deadlines_end_once_each(self, desk: Desk) -> None:
        deadline_ms = desk.clock() + 10
        await desk.send_all([same_work(number, deadline_ms=deadline_ms) for number in range(1, 6)])
        desk.clock.advance(10)
        assert len((await desk.sweep()).expired) == 5
        assert len(await desk.drain(count=100)) == 5
        assert (await desk.send(same_work(9))).following is None

    async def test_a_requeued_leader_keeps_its_followers(self, desk: Desk) -> None:
        await desk.taken(same_work(1))
        await desk.send(same_work(2))
        await desk.requeue(task_id(1))
        await desk.finish(await desk.take_one(), ok(task_id(1)))
        assert len(await desk.drain(count=10)) == 2

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
    async def test_work_that_differs_in_any_part_of_its_key_runs_by_itself(self, desk: Desk, other: Task) -> None:
        await desk.send(same_work(1))
        assert (await desk.send(other)).following is None
        await desk.finish(await desk.take_one(BOB), ok(task_id(1)))
        assert not (await desk.send(make_task(3, sender=ALICE))).replayed
        assert (await desk.take_one(other.recipient)).task.id == task_id(2)

    async def test_blanks_around_key_and_kind_make_no_other_work(self, desk: Desk) -> None:
        await desk.send(same_work(1))
        blank = make_task(2, task_kind=" invoice ", idempotency=same_work(1, " invoice-7 ").idempotency)
        assert (await desk.send(blank)).following == task_id(1)

    async def test_a_cached_result_is_replayed_until_it_is_too_old(self, engine: Engine) -> None:
        desk = Desk(await engine.open(Limits(cache_age_ms_max=1_000)), engine.clock)
        await desk.finish(await desk.taken(same_work(1)), ok(task_id(1)))
        desk.clock.advance(1_000)
        assert (await desk.send(same_work(2))).replayed
        desk.clock.advance(1)
        assert not (await desk.send(same_work(3))).replayed
        assert (await desk.sweep()).uncached == 1
        assert (await desk.ledger.counts()).cached == 0

    async def test_a_clock_that_steps_back_over_the_age_of_a_cached_result_orphans_nobody(self, engine: Engine) -> None:
        desk = Desk(await engine.open(Limits(cache_age_ms_max=1_000)), engine.clock)
        await desk.finish(await desk.taken(same_work(1)), ok(task_id(1)))
        desk.clock.advance(5_000)
        leased = await desk.taken(same_work(2))
        await desk.send(same_work(3))
        desk.clock.advance(-5_000)
        assert (await desk.send(same_work(4))).replayed
        await desk.finish(leased, ok(task_id(2)))
        assert {result.task_id for result in await desk.drain(count=10)} == {task_id(n) for n in (1, 2, 3, 4)}

    async def test_the_cache_keeps_the_newest_results_up_to_its_size(self, engine: Engine) -> None:
        desk = Desk(await engine.open(Limits(cache_entries_max=2)), engine.clock)
        for number in range(4):
            await desk.finish(await desk.taken(same_work(number, f"key-{number}")), ok(task_id(number)))
            await desk.sweep()
        assert (await desk.ledger.counts()).cached == 2
        replayed = [(await desk.send(same_work(10 + number, f"key-{number}"))).replayed for number in range(4)]
        assert replayed == [False, False, True, True]

    async def test_the_number_of_followers_is_bounded(self, engine: Engine) -> None:
        desk = Desk(await engine.open(Limits(followers_max=2)), engine.clock)
        await desk.send_all([same_work(number) for number in range(3)])
        with refused("followers_full", 429):
            await desk.send(same_work(3))
        assert (await desk.send(same_work(2))).duplicate
