"""Rules 2, 11 and 12: one live lease for a task, receives that can be repeated, and nobody who starves another."""

from __future__ import annotations

import asyncio

import pytest

from covenant.ledger.machine.states import State
from covenant.ledger.machine.view import Limits
from covenant.model.repair import RetryPolicy
from covenant.model.result import Result
from covenant.testing.cast import ALICE, BOB, CAROL, DAVE, agent, make_task, ok, task_id
from covenant.testing.desk import WAIT_MS, Desk, refused
from covenant.testing.engine import Engine
from covenant.testing.line import Line
from covenant.testing.suite import Suite

TEN_YEARS_MS = 10 * 365 * 24 * 3_600_000


class LeasingSuite(Suite):
    async def test_a_receive_tells_the_lease_and_the_attempt(self, desk: Desk) -> None:
        leased = await desk.taken(make_task())
        lease = leased.lease
        assert (lease.leased_to, lease.leased_at_ms, lease.attempt) == (BOB, desk.clock(), 1)
        entry = await desk.entry(task_id(1))
        assert entry.state is State.LEASED
        assert entry.lease == lease

    async def test_a_leased_task_is_not_received_again(self, desk: Desk) -> None:
        await desk.taken(make_task())
        assert await desk.take(count=10) == ()
        assert await desk.take(CAROL, everyone=True) == ()

    async def test_receives_at_the_same_moment_share_the_queue_without_overlap(self, desk: Desk) -> None:
        await desk.send_all([make_task(number) for number in range(40)])
        batches = await asyncio.gather(*(desk.take(count=3) for _ in range(20)))
        received = [leased.task.id for batch in batches for leased in batch]
        assert sorted(received) == [task_id(number) for number in range(40)]

    async def test_every_lease_has_its_own_id(self, desk: Desk) -> None:
        await desk.send_all([make_task(number) for number in range(50)])
        ids = {leased.lease.lease_id for leased in await desk.take(count=50)}
        assert len(ids) == 50

    async def test_a_lease_never_ends_by_itself(self, desk: Desk) -> None:
        leased = await desk.taken(make_task(deadline_ms=desk.clock() + 1))
        desk.clock.advance(TEN_YEARS_MS)
        await desk.sweep()
        assert await desk.take() == ()
        assert (await desk.entry(task_id(1))).lease == leased.lease
        await desk.finish(leased, ok(task_id(1)))

    async def test_a_clock_that_jumps_makes_no_second_lease(self, desk: Desk) -> None:
        leased = await desk.taken(make_task())
        for jump_ms in (TEN_YEARS_MS, -2 * TEN_YEARS_MS, TEN_YEARS_MS):
            desk.clock.advance(jump_ms)
            await desk.sweep()
            assert await desk.take(count=10) == ()
            await desk.renew(leased)

    async def test_renewing_is_a_sign_of_life_and_makes_the_lease_young(self, desk: Desk) -> None:
        first = await desk.taken(make_task(1))
        await desk.taken(make_task(2))
        desk.clock.advance(1_000)
        await desk.renew(first)
        lease = (await desk.entry(task_id(1))).lease
        assert lease is not None
        assert (lease.leased_at_ms, lease.renewed_at_ms) == (desk.clock() - 1_000, desk.clock())
        assert [entry.task.id for entry in await desk.queue(min_lease_age_ms=1_000)] == [task_id(2)]
        assert [entry.task.id for entry in await desk.queue()] == [task_id(2), task_id(1)]

    async def test_nothing_but_renewing_makes_a_lease_young(self, desk: Desk) -> None:
        first = await desk.taken(make_task(1))
        desk.clock.advance(1_000)
        await desk.taken(make_task(2))
        desk.clock.advance(1_000)
        await desk.report(first, "on it")
        await desk.interrupt(first)
        assert (await desk.ledger.counts()).oldest_lease_age_ms == 2_000
        report = await desk.retry(RetryPolicy(min_lease_age_ms=0, scan_limit=1))
        assert [skip.task_id for skip in report.skipped] == [task_id(1)]

    async def test_only_the_holder_of_the_live_lease_renews_it(self, desk: Desk) -> None:
        first = await desk.taken(make_task())
        with refused("not_lessee", 403):
            await desk.renew(first, holder=CAROL)
        await desk.requeue(task_id(1))
        with refused("not_leased", 409):
            await desk.renew(first)
        second = await desk.take_one()
        with refused("stale_lease", 409):
            await desk.renew(first)
        await desk.finish(second, ok(task_id(1)))
        with refused("already_settled", 409):
            await desk.renew(second)

    async def test_released_work_goes_back_to_the_queue_and_counts_as_an_attempt(self, desk: Desk) -> None:
        first = await desk.taken(make_task())
        await desk.release(first)
        assert (await desk.entry(task_id(1))).state is State.QUEUED
        second = await desk.take_one()
        assert second.lease.attempt == 2
        with refused("stale_lease", 409):
            await desk.release(first)

    async def test_requeued_work_goes_to_the_back_of_the_queue(self, desk: Desk) -> None:
        await desk.send_all([make_task(number) for number in (1, 2, 3)])
        await desk.take_one()
        await desk.requeue(task_id(1))
        assert [leased.task.id for leased in await desk.take(count=3)] == [task_id(2), task_id(3), task_id(1)]

    async def test_interrupted_work_stays_leased_and_is_shown_as_lost_until_its_holder_is_heard(
        self, desk: Desk
    ) -> None:
        await desk.taken(make_task(1))
        leased = await desk.taken(make_task(2))
        await desk.interrupt(leased)
        assert await desk.take() == ()
        first, second = await desk.queue()
        assert (first.task.id, first.holder_lost, second.holder_lost) == (task_id(2), True, False)
        await desk.renew(leased)
        assert not any(entry.holder_lost for entry in await desk.queue())
        await desk.finish(leased, ok(task_id(2)))

    async def test_an_interrupted_holder_may_still_deliver_its_result(self, desk: Desk) -> None:
        leased = await desk.taken(make_task())
        await desk.interrupt(leased)
        await desk.finish(leased, ok(task_id(1)))
        assert len(await desk.drain()) == 1

    async def test_whoever_receives_for_everyone_holds_the_lease(self, desk: Desk) -> None:
        await desk.send_all([make_task(1, recipient=BOB), make_task(2, recipient=CAROL)])
        first, second = await desk.take(DAVE, 2, everyone=True)
        assert (first.task.id, second.task.id) == (task_id(1), task_id(2))
        assert first.lease.leased_to == second.lease.leased_to == DAVE
        with refused("not_lessee", 403):
            await desk.settle(ok(task_id(1)), holder=BOB, lease_id=first.lease.lease_id)
        await desk.finish(first, ok(task_id(1)))

    async def test_a_batch_is_bounded(self, engine: Engine) -> None:
        desk = Desk(await engine.open(Limits(batch_max=5)), engine.clock)
        await desk.send_all([make_task(number) for number in range(10)])
        assert len(await desk.take(count=1_000)) == 5
        for leased in await desk.take(count=1_000):
            await desk.finish(leased, ok(leased.task.id))
        assert len(await desk.drain(count=1_000)) == 5

    async def test_a_batch_is_bounded_by_its_bytes_but_never_empty(self, engine: Engine) -> None:
        desk = Desk(await engine.open(Limits(batch_bytes_max=5_000)), engine.clock)
        await desk.send_all([make_task(number, intent_text="x" * 2_000) for number in range(4)])
        await desk.send(make_task(4, intent_text="x" * 9_000))
        sizes = [await desk.take(count=9) for _ in range(3)]
        assert [len(batch) for batch in sizes] == [2, 2, 1]
        for batch in sizes:
            for leased in batch:
                await desk.finish(leased, Result.ok(leased.task.id, leased.task.intent_text))
        assert [len(await desk.drain(count=9)) for _ in range(4)] == [2, 2, 1, 0]

    async def test_tasks_past_their_deadline_do_not_hide_the_work_behind_them(self, desk: Desk) -> None:
        deadline_ms = desk.clock() + 10
        await desk.send_all([make_task(number, deadline_ms=deadline_ms) for number in range(5)])
        await desk.send(make_task(9))
        desk.clock.advance(10)
        assert (await desk.take_one()).task.id == task_id(9)
        assert [result.error_message for result in await desk.drain(count=10)] == ["deadline_exceeded"] * 5

    async def test_a_receive_repeated_under_its_request_id_gives_the_same_leases(self, desk: Desk) -> None:
        await desk.send_all([make_task(number) for number in range(5)])
        first = await desk.take(count=2, request_id="r1")
        assert await desk.take(count=2, request_id="r1") == first
        assert await desk.take(count=2, request_id="r1") == first
        assert [leased.task.id for leased in await desk.take(count=2, request_id="r2")] == [task_id(2), task_id(3)]
        assert (await desk.ledger.counts()).leased == 4

    async def test_a_repeated_receive_leaves_out_what_has_ended_and_adds_nothing(self, desk: Desk) -> None:
        await desk.send_all([make_task(number) for number in range(3)])
        first, second = await desk.take(count=2, request_id="r1")
        await desk.finish(first, ok(first.task.id))
        assert await desk.take(count=2, request_id="r1") == (second,)
        await desk.requeue(second.task.id)
        assert await desk.take(count=2, request_id="r1") == ()
        await desk.take(count=2)
        assert await desk.take(count=2, request_id="r1") == ()

    async def test_a_receive_that_found_nothing_may_find_something_under_the_same_request_id(self, desk: Desk) -> None:
        assert await desk.take(request_id="r1") == ()
        await desk.send(make_task())
        assert len(await desk.take(request_id="r1")) == 1

    async def test_a_request_id_belongs_to_the_one_who_uses_it(self, desk: Desk) -> None:
        await desk.send_all([make_task(1, recipient=BOB), make_task(2, recipient=CAROL)])
        assert (await desk.take_one(BOB, request_id="r1")).task.id == task_id(1)
        assert (await desk.take_one(CAROL, request_id="r1")).task.id == task_id(2)

    async def test_a_receive_and_a_drain_under_one_request_id_are_two_requests(self, desk: Desk) -> None:
        done = await desk.taken(make_task(1, recipient=ALICE))
        await desk.finish(done, ok(task_id(1)))
        await desk.send(make_task(2, recipient=ALICE))
        leases = await desk.take(ALICE, request_id="r1")
        results = await desk.drain(ALICE, request_id="r1")
        assert [leased.task.id for leased in leases] == [task_id(2)]
        assert [result.task_id for result in results] == [task_id(1)]
        assert await desk.take(ALICE, request_id="r1") == leases
        assert await desk.drain(ALICE, request_id="r1") == results

    async def test_a_drain_repeated_under_its_request_id_gives_the_same_results(self, desk: Desk) -> None:
        for number in range(4):
            await desk.finish(await desk.taken(make_task(number)), ok(task_id(number)))
        first = await desk.drain(count=2, request_id="r1")
        assert await desk.drain(count=2, request_id="r1") == first
        await desk.ledger.audit_verify()  # waits for the archive
        assert await desk.drain(count=2, request_id="r1") == first
        assert [result.task_id for result in await desk.drain(count=9, request_id="r2")] == [task_id(2), task_id(3)]
        assert await desk.drain(count=9) == ()

    async def test_the_result_of_one_task_is_drained_alone_and_once(self, desk: Desk) -> None:
        for number in (1, 2):
            await desk.send(make_task(number))
        for leased in await desk.take(count=2):
            await desk.finish(leased, ok(leased.task.id))
        assert await desk.drain(which=task_id(2), request_id="r1") == (ok(task_id(2)),)
        assert await desk.drain(which=task_id(2), request_id="r1") == (ok(task_id(2)),)
        with refused("already_drained"):
            await desk.drain(which=task_id(2))
        with refused("unknown_task"):
            await desk.drain(BOB, which=task_id(1))
        assert await desk.drain(count=9) == (ok(task_id(1)),)

    async def test_drains_repeated_by_many_at_once_give_each_result_to_one_request(self, desk: Desk) -> None:
        for number in range(20):
            await desk.finish(await desk.taken(make_task(number)), ok(task_id(number)))
        batches = await asyncio.gather(*(desk.drain(count=2, request_id=f"r{number % 10}") for number in range(40)))
        for number, batch in enumerate(batches):
            assert batch == batches[number % 10]
        assert len({result.task_id for batch in batches for result in batch}) == 20

    async def test_only_so_many_requests_are_remembered_and_the_newest_are(self, engine: Engine) -> None:
        desk = Desk(await engine.open(Limits(requests_remembered_max=2)), engine.clock)
        await desk.send_all([make_task(number) for number in range(4)])
        for number in range(3):
            await desk.take(request_id=f"r{number}")
        assert (await desk.take_one(request_id="r2")).task.id == task_id(2)
        assert (await desk.take_one(request_id="r0")).task.id == task_id(3)

    async def test_work_that_arrives_wakes_the_longest_waiting_and_nobody_else(self, desk: Desk) -> None:
        async with Line(desk) as line:
            first, second = await line.wait_for_tasks(BOB), await line.wait_for_tasks(None)
            elsewhere = await line.wait_for_tasks(CAROL)
            await desk.send(make_task(1))
            assert await first.woken()
            assert not second.is_woken
            await desk.send(make_task(2))
            assert await second.woken()
            assert not elsewhere.is_woken
            for each in (first, second):
                each.waiter.served()
        assert len(await desk.take(count=2)) == 2

    async def test_a_wake_is_passed_on_by_whoever_takes_nothing(self, desk: Desk) -> None:
        """Cancelled in that very moment, or leaving without having looked: the next one is woken instead."""
        async with Line(desk) as line:
            cancelled, leaving, last = [await line.wait_for_tasks(who) for who in (BOB, None, BOB)]
            await desk.send(make_task(1))
            cancelled.cancel()
            assert await leaving.woken()
            assert not last.is_woken
            leaving.leave()
            assert await last.woken()

    async def test_one_that_was_served_wakes_nobody_when_it_leaves(self, desk: Desk) -> None:
        async with Line(desk) as line:
            served, other = await line.wait_for_tasks(BOB), await line.wait_for_tasks(BOB)
            await desk.send(make_task(1))
            assert await served.woken()
            served.waiter.served()
            served.leave()
            await line.turns()
            assert not other.is_woken

    async def test_one_that_was_woken_in_vain_keeps_its_place(self, desk: Desk) -> None:
        async with Line(desk) as line:
            first, second = await line.wait_for_tasks(BOB), await line.wait_for_tasks(BOB)
            await desk.send(make_task(1))
            await desk.take_one()
            assert await first.woken()
            await first.wait_again()
            await desk.send(make_task(2))
            assert await first.woken()
            assert not second.is_woken

    async def test_as_many_are_woken_as_there_is_work_also_work_that_comes_back(self, desk: Desk) -> None:
        async with Line(desk) as line:
            waiting = [await line.wait_for_tasks(BOB) for _ in range(5)]
            await desk.send_all([make_task(number) for number in (1, 2)])
            await line.turns()
            assert [each.is_woken for each in waiting] == [True, True, False, False, False]
            leased = await desk.take_one()
            await desk.release(leased)
            await line.turns()
            assert [each.is_woken for each in waiting] == [True, True, True, False, False]

    async def test_a_result_that_arrives_wakes_one_drain_and_whoever_waits_for_its_task(self, desk: Desk) -> None:
        leased = await desk.taken(make_task())
        async with Line(desk) as line:
            anyone, sender = await line.wait_for_results(None), await line.wait_for_results(ALICE)
            finished = asyncio.ensure_future(desk.ledger.finished(task_id(1), WAIT_MS))
            await asyncio.sleep(0)
            await desk.finish(leased, ok(task_id(1)))
            assert await finished
            assert await anyone.woken()
            assert not sender.is_woken

    async def test_a_wait_for_nothing_ends_with_its_time(self, desk: Desk) -> None:
        with desk.ledger.task_waiter(BOB.pubkey) as tasks, desk.ledger.result_waiter(ALICE.pubkey) as results:
            assert not await tasks.wait(1)
            assert not await results.wait(1)
            await desk.send(make_task())
            assert not await desk.ledger.finished(task_id(1), 1)
            assert await tasks.wait(0)

    async def test_ten_thousand_tasks_of_one_recipient_neither_hide_nor_delay_anothers(self, desk: Desk) -> None:
        await asyncio.gather(*(desk.send(make_task(number)) for number in range(10_000)))
        await desk.send(make_task(20_000, recipient=CAROL))
        leased = await desk.take_one(CAROL)
        assert leased.task.id == task_id(20_000)
        stale = await desk.taken(make_task(20_001, recipient=CAROL))
        assert {entry.task.id for entry in await desk.queue(viewer=CAROL.pubkey)} == {leased.task.id, stale.task.id}
        assert [entry.state for entry in await desk.queue()][:2] == ["in_flight", "in_flight"]
        await desk.finish(leased, ok(leased.task.id))
        assert len(await desk.drain()) == 1

    @pytest.mark.parametrize("recipients", [3])
    async def test_each_recipient_receives_its_own_in_turn_whatever_waits_for_others(
        self, desk: Desk, recipients: int
    ) -> None:
        who = [agent(f"worker-{number}@here") for number in range(recipients)]
        for number in range(30):
            await desk.send(make_task(number, recipient=who[number % recipients]))
        for round_ in range(30 // recipients):
            for index, recipient in enumerate(who):
                assert (await desk.take_one(recipient)).task.id == task_id(round_ * recipients + index)
