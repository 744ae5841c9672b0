"""A receive or drain whose caller is cancelled, or withdraws it: what nobody was told of goes back, in order."""

from __future__ import annotations

import asyncio
from typing import Any

from covenant.ledger.machine.commands import Command, Drain, GiveBack, Returned, Take, Withdraw
from covenant.ledger.machine.states import State
from covenant.model.ids import TaskId
from tests.ledger_contract.driver import LedgerDriver, refused
from tests.ledger_contract.engine import DurableEngine
from tests.ledger_contract.samples import ALICE, BOB, CAROL, make_task, ok, task_id
from tests.ledger_contract.suite import Suite

STEPS = 8
"""Turns of the loop after which a receive is cancelled: from before it has begun to while it is synced, or beyond."""

TAKE = Take(holder=BOB, recipient=BOB.pubkey, count=2)
DRAIN = Drain(by=ALICE, sender=ALICE.pubkey, count=2)


async def settled(driver: LedgerDriver, *numbers: int) -> None:
    for number in numbers:
        await driver.finish(await driver.taken(make_task(number)), ok(task_id(number)))


async def archived(driver: LedgerDriver) -> None:
    """Until the archive has everything, and finished tasks have left memory."""
    await driver.ledger.audit_verify()
    await driver.ledger.durable()


async def cancelled_at(driver: LedgerDriver, command: Command[Any], step: int) -> Any:
    """The answer, or None if the caller was cancelled so many turns of the loop after it had asked."""
    asking = asyncio.ensure_future(driver.ledger.commit(command))
    for _ in range(step):
        await asyncio.sleep(0)
    asking.cancel()
    try:
        return await asking
    except asyncio.CancelledError:
        return None


class WithdrawalSuite(Suite):
    async def test_a_receive_cancelled_at_any_moment_leases_to_its_caller_or_to_nobody(
        self, driver: LedgerDriver
    ) -> None:
        await driver.send_all([make_task(number) for number in range(40)])
        told: list[TaskId] = []
        for step in range(STEPS):
            answer = await cancelled_at(driver, TAKE, step)
            told += [leased.task.id for leased in answer.tasks] if answer is not None else []
            assert (await driver.ledger.counts()).leased == len(told), step
        told += [leased.task.id for leased in await driver.take(count=40)]
        assert told == [task_id(number) for number in range(40)]

    async def test_a_drain_cancelled_at_any_moment_drains_to_its_caller_or_not_at_all(
        self, driver: LedgerDriver
    ) -> None:
        await settled(driver, *range(40))
        told: list[TaskId] = []
        for step in range(STEPS):
            answer = await cancelled_at(driver, DRAIN, step)
            told += [result.task_id for result in answer.results] if answer is not None else []
            assert (await driver.ledger.counts()).settled == 40 - len(told), step
        told += [result.task_id for result in await driver.drain(count=40)]
        assert told == [task_id(number) for number in range(40)]

    async def test_whoever_was_not_told_of_a_lease_has_no_part_in_the_task(self, driver: LedgerDriver) -> None:
        await driver.send(make_task(1))
        leased = await driver.take_one(CAROL, everyone=True)
        await driver.ledger.commit(GiveBack(leases=((leased.task.id, leased.lease.lease_id),)))
        await driver.cancel(task_id(1))
        await driver.drain()
        await archived(driver)
        with refused("unknown_task", 404):
            await driver.settle(ok(task_id(1)), holder=CAROL, viewer=CAROL, lease_id=leased.lease.lease_id)

    async def test_a_lease_that_goes_back_keeps_its_place_and_is_no_attempt(self, driver: LedgerDriver) -> None:
        await driver.send_all([make_task(number) for number in (1, 2, 3)])
        leases = tuple((each.task.id, each.lease.lease_id) for each in await driver.take(count=2))
        assert await driver.ledger.commit(GiveBack(leases=leases)) == Returned(leases=2)
        assert [entry.task.id for entry in await driver.queue()] == [task_id(1), task_id(2), task_id(3)]
        assert (await driver.entry(task_id(1))).state is State.QUEUED
        first = await driver.take_one()
        assert first.task.id == task_id(1)
        await driver.settle(ok(task_id(1)), holder=BOB)  # without its lease, which must be named if there were several

    async def test_a_lease_that_goes_back_starts_no_timeout(self, driver: LedgerDriver) -> None:
        leased = await driver.taken(make_task(timeout_ms=1_000))
        await driver.ledger.commit(GiveBack(leases=((task_id(1), leased.lease.lease_id),)))
        driver.clock.advance(10_000)
        assert (await driver.sweep()).timed_out == ()
        await driver.take_one()
        driver.clock.advance(1_000)
        assert (await driver.sweep()).timed_out == (task_id(1),)

    async def test_what_has_moved_on_stays_where_it_is(self, driver: LedgerDriver) -> None:
        begun, requeued = await driver.taken(make_task(1)), await driver.taken(make_task(2))
        await driver.report(begun, "on it", 1)
        await driver.requeue(task_id(2))
        back = GiveBack(
            leases=tuple((each.task.id, each.lease.lease_id) for each in (begun, requeued)),
            results=(task_id(1), task_id(2), task_id(3)),
        )
        assert await driver.ledger.commit(back) == Returned()
        await driver.finish(begun, ok(task_id(1)))
        assert await driver.ledger.commit(back) == Returned()
        assert len(await driver.drain(count=9)) == 1

    async def test_a_result_goes_back_also_when_only_the_archive_knows_its_task(self, driver: LedgerDriver) -> None:
        await settled(driver, 1, 2, 3)
        drained = await driver.drain(count=2)
        await archived(driver)
        back = GiveBack(results=tuple(result.task_id for result in drained))
        assert await driver.ledger.commit(back) == Returned(results=2)
        assert [result.task_id for result in await driver.drain(count=9)] == [task_id(1), task_id(2), task_id(3)]
        await archived(driver)
        with refused("already_drained"):
            await driver.drain(which=task_id(1))
        assert (await driver.ledger.counts()).settled == 0

    async def test_a_withdrawn_receive_gives_back_its_leases_and_gets_none_later(self, driver: LedgerDriver) -> None:
        await driver.send_all([make_task(number) for number in (1, 2)])
        await driver.take(count=2, request_id="r1")
        withdraw = Withdraw(by=BOB, request_id="r1")
        assert await driver.ledger.commit(withdraw) == Returned(leases=2)
        assert await driver.ledger.commit(withdraw) == Returned()
        assert await driver.take(request_id="r1") == ()
        assert [leased.task.id for leased in await driver.take(count=2)] == [task_id(1), task_id(2)]

    async def test_a_receive_that_comes_after_its_withdrawal_gets_nothing(self, driver: LedgerDriver) -> None:
        await driver.send(make_task())
        await driver.ledger.commit(Withdraw(by=BOB, request_id="r1"))
        await driver.ledger.commit(Withdraw(by=ALICE, request_id="r2"))
        assert await driver.take(request_id="r1") == ()
        await driver.finish(await driver.take_one(request_id="r2"), ok(task_id(1)))
        assert await driver.drain(request_id="r2") == ()
        assert len(await driver.drain()) == 1

    async def test_a_withdrawn_drain_gives_back_its_results_also_from_the_archive(self, driver: LedgerDriver) -> None:
        await settled(driver, 1, 2)
        await driver.drain(count=2, request_id="r1")
        await archived(driver)
        assert await driver.ledger.commit(Withdraw(by=BOB, request_id="r1")) == Returned()
        assert await driver.ledger.commit(Withdraw(by=ALICE, request_id="r1")) == Returned(results=2)
        assert await driver.drain(request_id="r1") == ()
        assert [result.task_id for result in await driver.drain(count=9)] == [task_id(1), task_id(2)]

    async def test_a_receive_under_a_request_id_stands_when_its_caller_is_cancelled(self, driver: LedgerDriver) -> None:
        await driver.send_all([make_task(number) for number in (1, 2)])
        take = Take(holder=BOB, recipient=BOB.pubkey, request_id="r1")
        for step in range(STEPS):
            await cancelled_at(driver, take, step)
        assert [leased.task.id for leased in await driver.take(request_id="r1")] == [task_id(1)]
        assert [leased.task.id for leased in await driver.take(count=9)] == [task_id(2)]


class WithdrawalDurabilitySuite(Suite):
    async def test_what_went_back_is_back_after_a_crash_and_after_a_compaction(self, engine: DurableEngine) -> None:
        driver = LedgerDriver(await engine.open(), engine.clock)
        await settled(driver, 1, 2)
        await driver.send_all([make_task(number) for number in (3, 4)])
        drained, taken = await driver.drain(count=2), await driver.take(count=2)
        await archived(driver)
        await driver.ledger.compact()  # from here on the snapshot does not know the drained tasks
        leases = tuple((each.task.id, each.lease.lease_id) for each in taken)
        results: tuple[TaskId, ...] = tuple(result.task_id for result in drained)
        await driver.ledger.commit(GiveBack(leases=leases, results=results))
        await driver.ledger.commit(Withdraw(by=BOB, request_id="r1"))
        for _ in range(2):
            driver = LedgerDriver(await engine.crash_and_reopen(driver.ledger), engine.clock)
            assert await driver.take(request_id="r1") == ()
            assert (await driver.ledger.counts()).settled == 2
            await driver.ledger.compact()
        assert [result.task_id for result in await driver.drain(count=9)] == [task_id(1), task_id(2)]
        assert [leased.task.id for leased in await driver.take(count=9)] == [task_id(3), task_id(4)]
