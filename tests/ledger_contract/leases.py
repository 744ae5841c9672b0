"""Leases: one live lease for a task, receives that can be repeated, and whose task is next.

A recipient receives its own tasks in the order in which they were accepted, whatever waits for others. Whoever receives
for everyone takes the oldest task of each recipient in turn.
"""

from __future__ import annotations

import asyncio

import pytest

from covenant.ledger.machine.priorities import HEAD_START
from covenant.ledger.machine.states import State
from covenant.model.ids import TaskId
from covenant.model.retry_policy import RetryPolicy
from covenant.model.settings import Limits
from covenant.model.task import Result
from tests.ledger_contract.driver import WAIT_MS, LedgerDriver, refused
from tests.ledger_contract.engine import Engine
from tests.ledger_contract.samples import ALICE, BOB, CAROL, DAVE, OPERATOR, agent, make_task, ok, task_id
from tests.ledger_contract.suite import Suite
from tests.ledger_contract.waiters import WaiterQueue

TEN_YEARS_MS = 10 * 365 * 24 * 3_600_000


class LeaseSuite(Suite):
    async def test_a_higher_priority_is_begun_first_and_equals_in_their_order(self, driver: LedgerDriver) -> None:
        for number, priority in ((1, 0), (2, 3), (3, 9), (4, 3), (5, 0)):
            await driver.send(make_task(number, priority=priority))
        await driver.send(make_task(6, recipient=CAROL, priority=1))
        taken = await driver.take(count=3)
        assert [each.task.id for each in taken] == [task_id(3), task_id(2), task_id(4)]
        await driver.release(taken[1])
        assert [each.task.id for each in await driver.take(count=2)] == [task_id(2), task_id(1)]
        await driver.send(make_task(7, priority=1))
        everyone = await driver.take(OPERATOR, count=3, everyone=True)
        assert {each.task.id for each in everyone} == {task_id(6), task_id(7), task_id(5)}
        with refused("invalid_task", 400):
            await driver.send(make_task(8, priority=10))
        with refused("invalid_task", 400):
            await driver.send(make_task(8, priority=-1))

    async def test_a_task_that_is_overtaken_is_begun_after_a_bounded_number_of_others(
        self, driver: LedgerDriver
    ) -> None:
        await driver.send(make_task(1))
        for number in range(2, 2 * HEAD_START):
            await driver.send(make_task(number, priority=1))
            leased = await driver.take_one()
            if leased.task.id == task_id(1):
                break
            await driver.finish(leased, ok(leased.task.id))
        else:
            pytest.fail("the task without a priority starves")
        assert number > 10, "a priority is worth something"

    async def test_a_receive_tells_the_lease_and_the_attempt(self, driver: LedgerDriver) -> None:
        leased = await driver.taken(make_task())
        lease = leased.lease
        assert (lease.leased_to, lease.leased_at_ms, lease.attempt) == (BOB, driver.clock(), 1)
        entry = await driver.entry(task_id(1))
        assert entry.state is State.LEASED
        assert entry.lease == lease

    async def test_a_node_is_told_with_its_run_and_what_its_agents_hold(self, driver: LedgerDriver) -> None:
        ledger = driver.ledger
        await driver.taken(make_task(1))
        await driver.taken_here(make_task(2, recipient=CAROL))
        (node,) = await ledger.nodes()
        assert (node.node, node.boot, node.alive, node.leases) == (ledger.node, ledger.boot, True, 1)
        assert 0 < node.started_at_ms <= node.seen_at_ms

    async def test_the_only_node_leads_whatever_one_node_alone_does(self, driver: LedgerDriver) -> None:
        async with asyncio.timeout(WAIT_MS / 1000):
            while True:
                if driver.ledger.leads("something"):
                    break
                await asyncio.sleep(0.01)

    async def test_the_only_node_does_every_part_of_what_nodes_share(self, driver: LedgerDriver) -> None:
        async with asyncio.timeout(WAIT_MS / 1000):
            while True:
                if all(driver.ledger.shares("something", str(part)) for part in range(16)):
                    break
                await asyncio.sleep(0.01)

    async def test_a_leased_task_is_not_received_again(self, driver: LedgerDriver) -> None:
        await driver.taken(make_task())
        assert await driver.take(count=10) == ()
        assert await driver.take(CAROL, everyone=True) == ()

    async def test_receives_at_the_same_moment_share_the_queue_without_overlap(self, driver: LedgerDriver) -> None:
        await driver.send_all([make_task(number) for number in range(40)])
        batches = await asyncio.gather(*(driver.take(count=3) for _ in range(20)))
        received = [leased.task.id for batch in batches for leased in batch]
        assert sorted(received) == [task_id(number) for number in range(40)]

    async def test_every_lease_has_its_own_id(self, driver: LedgerDriver) -> None:
        await driver.send_all([make_task(number) for number in range(50)])
        ids = {leased.lease.lease_id for leased in await driver.take(count=50)}
        assert len(ids) == 50

    async def test_a_lease_never_ends_by_itself(self, driver: LedgerDriver) -> None:
        leased = await driver.taken(make_task(deadline_ms=driver.clock() + 1))
        driver.clock.advance(TEN_YEARS_MS)
        await driver.sweep()
        assert await driver.take() == ()
        assert (await driver.entry(task_id(1))).lease == leased.lease
        await driver.finish(leased, ok(task_id(1)))

    async def test_a_clock_that_jumps_makes_no_second_lease(self, driver: LedgerDriver) -> None:
        leased = await driver.taken(make_task())
        for jump_ms in (TEN_YEARS_MS, -2 * TEN_YEARS_MS, TEN_YEARS_MS):
            driver.clock.advance(jump_ms)
            await driver.sweep()
            assert await driver.take(count=10) == ()
            await driver.renew(leased)

    async def test_renewing_is_a_sign_of_life_and_makes_the_lease_young(self, driver: LedgerDriver) -> None:
        first = await driver.taken(make_task(1))
        await driver.taken(make_task(2))
        driver.clock.advance(1_000)
        await driver.renew(first)
        lease = (await driver.entry(task_id(1))).lease
        assert lease is not None
        assert (lease.leased_at_ms, lease.renewed_at_ms) == (driver.clock() - 1_000, driver.clock())
        assert [entry.task.id for entry in await driver.queue(min_lease_age_ms=1_000)] == [task_id(2)]
        assert [entry.task.id for entry in await driver.queue()] == [task_id(2), task_id(1)]

    async def test_nothing_but_renewing_makes_a_lease_young(self, driver: LedgerDriver) -> None:
        first = await driver.taken(make_task(1))
        driver.clock.advance(1_000)
        await driver.taken(make_task(2))
        driver.clock.advance(1_000)
        await driver.report(first, "on it")
        await driver.interrupt(first)
        assert (await driver.ledger.counts()).oldest_lease_age_ms == 2_000
        report = await driver.retry(RetryPolicy(min_lease_age_ms=0, scan_limit=1))
        assert [skip.task_id for skip in report.skipped] == [task_id(1)]

    async def test_only_the_holder_of_the_live_lease_renews_it(self, driver: LedgerDriver) -> None:
        first = await driver.taken(make_task())
        with refused("not_lessee", 403):
            await driver.renew(first, holder=CAROL)
        await driver.requeue(task_id(1))
        with refused("not_leased", 409):
            await driver.renew(first)
        second = await driver.take_one()
        with refused("stale_lease", 409):
            await driver.renew(first)
        await driver.finish(second, ok(task_id(1)))
        with refused("already_settled", 409):
            await driver.renew(second)

    async def test_released_work_goes_back_to_the_queue_and_counts_as_an_attempt(self, driver: LedgerDriver) -> None:
        first = await driver.taken(make_task())
        await driver.release(first)
        assert (await driver.entry(task_id(1))).state is State.QUEUED
        second = await driver.take_one()
        assert second.lease.attempt == 2
        with refused("stale_lease", 409):
            await driver.release(first)

    async def test_requeued_work_goes_to_the_back_of_the_queue(self, driver: LedgerDriver) -> None:
        await driver.send_all([make_task(number) for number in (1, 2, 3)])
        await driver.take_one()
        await driver.requeue(task_id(1))
        assert [leased.task.id for leased in await driver.take(count=3)] == [task_id(2), task_id(3), task_id(1)]

    async def test_interrupted_work_stays_leased_and_is_shown_as_lost_until_its_holder_is_heard(
        self, driver: LedgerDriver
    ) -> None:
        await driver.taken(make_task(1))
        leased = await driver.taken(make_task(2))
        await driver.interrupt(leased)
        assert await driver.take() == ()
        first, second = await driver.queue()
        assert (first.task.id, first.holder_lost, second.holder_lost) == (task_id(2), True, False)
        await driver.renew(leased)
        assert not any(entry.holder_lost for entry in await driver.queue())
        await driver.finish(leased, ok(task_id(2)))

    async def test_an_interrupted_holder_may_still_deliver_its_result(self, driver: LedgerDriver) -> None:
        leased = await driver.taken(make_task())
        await driver.interrupt(leased)
        await driver.finish(leased, ok(task_id(1)))
        assert len(await driver.drain()) == 1

    async def test_whoever_receives_for_everyone_holds_the_lease(self, driver: LedgerDriver) -> None:
        await driver.send_all([make_task(1, recipient=BOB), make_task(2, recipient=CAROL)])
        first, second = await driver.take(DAVE, 2, everyone=True)
        assert (first.task.id, second.task.id) == (task_id(1), task_id(2))
        assert first.lease.leased_to == second.lease.leased_to == DAVE
        with refused("not_lessee", 403):
            await driver.settle(ok(task_id(1)), holder=BOB, lease_id=first.lease.lease_id)
        await driver.finish(first, ok(task_id(1)))

    async def test_a_batch_is_bounded(self, engine: Engine) -> None:
        driver = LedgerDriver(await engine.open(Limits(batch_max=5)), engine.clock)
        await driver.send_all([make_task(number) for number in range(10)])
        assert len(await driver.take(count=1_000)) == 5
        for leased in await driver.take(count=1_000):
            await driver.finish(leased, ok(leased.task.id))
        assert len(await driver.drain(count=1_000)) == 5

    async def test_a_batch_is_bounded_by_its_bytes_but_never_empty(self, engine: Engine) -> None:
        driver = LedgerDriver(await engine.open(Limits(batch_bytes_max=5_000)), engine.clock)
        await driver.send_all([make_task(number, intent_text="x" * 2_000) for number in range(4)])
        await driver.send(make_task(4, intent_text="x" * 9_000))
        sizes = [await driver.take(count=9) for _ in range(3)]
        assert [len(batch) for batch in sizes] == [2, 2, 1]
        for batch in sizes:
            for leased in batch:
                await driver.finish(leased, Result.ok(leased.task.id, leased.task.intent_text))
        assert [len(await driver.drain(count=9)) for _ in range(4)] == [2, 2, 1, 0]

    async def test_tasks_past_their_deadline_do_not_hide_the_work_behind_them(self, driver: LedgerDriver) -> None:
        deadline_ms = driver.clock() + 10
        await driver.send_all([make_task(number, deadline_ms=deadline_ms) for number in range(5)])
        await driver.send(make_task(9))
        driver.clock.advance(10)
        assert (await driver.take_one()).task.id == task_id(9)
        assert [result.error_message for result in await driver.drain(count=10)] == ["deadline_exceeded"] * 5

    async def test_a_receive_repeated_under_its_request_id_gives_the_same_leases(self, driver: LedgerDriver) -> None:
        await driver.send_all([make_task(number) for number in range(5)])
        first = await driver.take(count=2, request_id="r1")
        assert await driver.take(count=2, request_id="r1") == first
        assert await driver.take(count=2, request_id="r1") == first
        assert [leased.task.id for leased in await driver.take(count=2, request_id="r2")] == [task_id(2), task_id(3)]
        assert (await driver.ledger.counts()).leased == 4

    async def test_a_repeated_receive_leaves_out_what_has_ended_and_adds_nothing(self, driver: LedgerDriver) -> None:
        await driver.send_all([make_task(number) for number in range(3)])
        first, second = await driver.take(count=2, request_id="r1")
        await driver.finish(first, ok(first.task.id))
        assert await driver.take(count=2, request_id="r1") == (second,)
        await driver.requeue(second.task.id)
        assert await driver.take(count=2, request_id="r1") == ()
        await driver.take(count=2)
        assert await driver.take(count=2, request_id="r1") == ()

    async def test_a_receive_that_found_nothing_may_find_something_under_the_same_request_id(
        self, driver: LedgerDriver
    ) -> None:
        assert await driver.take(request_id="r1") == ()
        await driver.send(make_task())
        assert len(await driver.take(request_id="r1")) == 1

    async def test_a_request_id_belongs_to_the_one_who_uses_it(self, driver: LedgerDriver) -> None:
        await driver.send_all([make_task(1, recipient=BOB), make_task(2, recipient=CAROL)])
        assert (await driver.take_one(BOB, request_id="r1")).task.id == task_id(1)
        assert (await driver.take_one(CAROL, request_id="r1")).task.id == task_id(2)

    async def test_a_receive_and_a_drain_under_one_request_id_are_two_requests(self, driver: LedgerDriver) -> None:
        done = await driver.taken(make_task(1, recipient=ALICE))
        await driver.finish(done, ok(task_id(1)))
        await driver.send(make_task(2, recipient=ALICE))
        leases = await driver.take(ALICE, request_id="r1")
        results = await driver.drain(ALICE, request_id="r1")
        assert [leased.task.id for leased in leases] == [task_id(2)]
        assert [result.task_id for result in results] == [task_id(1)]
        assert await driver.take(ALICE, request_id="r1") == leases
        assert await driver.drain(ALICE, request_id="r1") == results

    async def test_a_drain_repeated_under_its_request_id_gives_the_same_results(self, driver: LedgerDriver) -> None:
        for number in range(4):
            await driver.finish(await driver.taken(make_task(number)), ok(task_id(number)))
        first = await driver.drain(count=2, request_id="r1")
        assert await driver.drain(count=2, request_id="r1") == first
        await driver.ledger.audit_verify()  # waits for the archive
        assert await driver.drain(count=2, request_id="r1") == first
        assert [result.task_id for result in await driver.drain(count=9, request_id="r2")] == [task_id(2), task_id(3)]
        assert await driver.drain(count=9) == ()

    async def test_the_result_of_one_task_is_drained_alone_and_once(self, driver: LedgerDriver) -> None:
        for number in (1, 2):
            await driver.send(make_task(number))
        for leased in await driver.take(count=2):
            await driver.finish(leased, ok(leased.task.id))
        assert await driver.drain(which=task_id(2), request_id="r1") == (ok(task_id(2)),)
        assert await driver.drain(which=task_id(2), request_id="r1") == (ok(task_id(2)),)
        with refused("already_drained"):
            await driver.drain(which=task_id(2))
        with refused("unknown_task"):
            await driver.drain(BOB, which=task_id(1))
        assert await driver.drain(count=9) == (ok(task_id(1)),)

    async def test_drains_repeated_by_many_at_once_give_each_result_to_one_request(self, driver: LedgerDriver) -> None:
        for number in range(20):
            await driver.finish(await driver.taken(make_task(number)), ok(task_id(number)))
        batches = await asyncio.gather(*(driver.drain(count=2, request_id=f"r{number % 10}") for number in range(40)))
        for number, batch in enumerate(batches):
            assert batch == batches[number % 10]
        assert len({result.task_id for batch in batches for result in batch}) == 20

    async def test_only_so_many_requests_are_remembered_and_the_newest_are(self, engine: Engine) -> None:
        driver = LedgerDriver(await engine.open(Limits(requests_remembered_max=2)), engine.clock)
        await driver.send_all([make_task(number) for number in range(4)])
        for number in range(3):
            await driver.take(request_id=f"r{number}")
        assert (await driver.take_one(request_id="r2")).task.id == task_id(2)
        assert (await driver.take_one(request_id="r0")).task.id == task_id(3)

    async def test_work_that_arrives_wakes_the_longest_waiting_and_nobody_else(self, driver: LedgerDriver) -> None:
        async with WaiterQueue(driver) as line:
            first, second = await line.wait_for_tasks(BOB), await line.wait_for_tasks(None)
            elsewhere = await line.wait_for_tasks(CAROL)
            await driver.send(make_task(1))
            assert await first.woken()
            assert not second.is_woken
            await driver.send(make_task(2))
            assert await second.woken()
            assert not elsewhere.is_woken
            for each in (first, second):
                each.waiter.served()
        assert len(await driver.take(count=2)) == 2

    async def test_a_wake_is_passed_on_by_whoever_takes_nothing(self, driver: LedgerDriver) -> None:
        """Cancelled in that very moment, or leaving without having looked: the next one is woken instead."""
        async with WaiterQueue(driver) as line:
            cancelled, leaving, last = [await line.wait_for_tasks(who) for who in (BOB, None, BOB)]
            await driver.send(make_task(1))
            cancelled.cancel()
            assert await leaving.woken()
            assert not last.is_woken
            leaving.leave()
            assert await last.woken()

    async def test_one_that_was_served_wakes_nobody_when_it_leaves(self, driver: LedgerDriver) -> None:
        async with WaiterQueue(driver) as line:
            served, other = await line.wait_for_tasks(BOB), await line.wait_for_tasks(BOB)
            await driver.send(make_task(1))
            assert await served.woken()
            served.waiter.served()
            served.leave()
            await line.turns()
            assert not other.is_woken

    async def test_one_that_was_woken_in_vain_keeps_its_place(self, driver: LedgerDriver) -> None:
        async with WaiterQueue(driver) as line:
            first, second = await line.wait_for_tasks(BOB), await line.wait_for_tasks(BOB)
            await driver.send(make_task(1))
            await driver.take_one()
            assert await first.woken()
            await first.wait_again()
            await driver.send(make_task(2))
            assert await first.woken()
            assert not second.is_woken

    async def test_as_many_are_woken_as_there_is_work_also_work_that_comes_back(self, driver: LedgerDriver) -> None:
        async with WaiterQueue(driver) as line:
            waiting = [await line.wait_for_tasks(BOB) for _ in range(5)]
            await driver.send_all([make_task(number) for number in (1, 2)])
            await line.turns()
            assert [each.is_woken for each in waiting] == [True, True, False, False, False]
            leased = await driver.take_one()
            await driver.release(leased)
            await line.turns()
            assert [each.is_woken for each in waiting] == [True, True, True, False, False]

    async def test_a_result_that_arrives_wakes_one_drain_and_whoever_waits_for_its_task(
        self, driver: LedgerDriver
    ) -> None:
        leased = await driver.taken(make_task())
        async with WaiterQueue(driver) as line:
            anyone, sender = await line.wait_for_results(None), await line.wait_for_results(ALICE)
            finished = asyncio.ensure_future(driver.ledger.finished(task_id(1), WAIT_MS))
            await asyncio.sleep(0)
            await driver.finish(leased, ok(task_id(1)))
            assert await finished
            assert await anyone.woken()
            assert not sender.is_woken

    async def test_a_wait_for_nothing_ends_with_its_time(self, driver: LedgerDriver) -> None:
        with driver.ledger.task_waiter(BOB.pubkey) as tasks, driver.ledger.result_waiter(ALICE.pubkey) as results:
            assert not await tasks.wait(1)
            assert not await results.wait(1)
            await driver.send(make_task())
            assert not await driver.ledger.finished(task_id(1), 1)
            assert await tasks.wait(0)

    async def test_ten_thousand_tasks_of_one_recipient_neither_hide_nor_delay_anothers(
        self, driver: LedgerDriver
    ) -> None:
        for first in range(0, 10_000, 1_000):
            await asyncio.gather(*(driver.send(make_task(number)) for number in range(first, first + 1_000)))
        await driver.send(make_task(20_000, recipient=CAROL))
        leased = await driver.take_one(CAROL)
        assert leased.task.id == task_id(20_000)
        stale = await driver.taken(make_task(20_001, recipient=CAROL))
        assert {entry.task.id for entry in await driver.queue(viewer=CAROL.pubkey)} == {leased.task.id, stale.task.id}
        assert [entry.state for entry in await driver.queue()][:2] == ["in_flight", "in_flight"]
        await driver.finish(leased, ok(leased.task.id))
        assert len(await driver.drain()) == 1

    async def test_each_recipient_receives_its_own_in_order_whatever_waits_for_others(
        self, driver: LedgerDriver
    ) -> None:
        """One of them has most of the queue, before and after everybody else's, and never receives."""
        busy, *others = [agent(f"worker-{number}@here") for number in range(4)]
        recipients = [busy] * 50 + [others[number % 3] for number in range(30)] + [busy] * 50
        tasks = [make_task(number, recipient=recipient) for number, recipient in enumerate(recipients)]
        await driver.send_all(tasks)
        for recipient in others:
            own = [task.id for task in tasks if task.recipient == recipient]
            received = [leased.task.id for leased in await driver.take(recipient, 3)]
            while leased := await driver.take(recipient):
                received.append(leased[0].task.id)
            assert received == own
        assert len(await driver.queued_ids(busy)) == 100

    @pytest.mark.parametrize("at_once", [1, 4])
    async def test_a_receive_for_everyone_serves_recipients_in_turn_and_each_in_order(
        self, driver: LedgerDriver, at_once: int
    ) -> None:
        """Bob has ten tasks before Carol's two and Dave's one, and more of his come while everybody's are received."""
        recipients = [BOB] * 10 + [CAROL] * 2 + [DAVE]
        await driver.send_all([make_task(number, recipient=who) for number, who in enumerate(recipients)])
        received: list[TaskId] = []
        for later in range(20, 30):
            await driver.send(make_task(later))
            received += [leased.task.id for leased in await driver.take(OPERATOR, at_once, everyone=True)]
        while leased := await driver.take(OPERATOR, at_once, everyone=True):
            received += [each.task.id for each in leased]
        assert set(received[:3]) == {task_id(0), task_id(10), task_id(12)}
        assert set(received[3:5]) == {task_id(1), task_id(11)}
        assert received[5:] == [task_id(number) for number in (*range(2, 10), *range(20, 30))]

    async def test_a_drain_for_everyone_takes_the_oldest_result_whoever_sent_the_task(
        self, driver: LedgerDriver
    ) -> None:
        for number in range(8):
            leased = await driver.taken(make_task(number, sender=CAROL if number == 5 else ALICE))
            await driver.finish(leased, ok(task_id(number)))
        drained = [result.task_id for _ in range(8) for result in await driver.drain(DAVE, everyone=True)]
        assert drained == [task_id(number) for number in range(8)]
