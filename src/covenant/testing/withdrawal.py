"""A receive or drain whose caller is cancelled, or withdraws it: what nobody was told of goes back, in order."""

from __future__ import annotations

import asyncio
from typing import Any

from covenant.ledger.machine.commands import Command, Drain, GiveBack, Returned, Take, Withdraw
from covenant.ledger.machine.states import State
from covenant.model.ids import TaskId
from covenant.testing.cast import ALICE, BOB, make_task, ok, task_id
from covenant.testing.desk import Desk, refused
from covenant.testing.engine import DurableEngine
from covenant.testing.suite import Suite

STEPS = 8
"""Turns of the loop after which a receive is cancelled: from before it has begun to while it is synced, or beyond."""

TAKE = Take(holder=BOB, recipient=BOB.pubkey, count=2)
DRAIN = Drain(by=ALICE, sender=ALICE.pubkey, count=2)


async def settled(desk: Desk, *numbers: int) -> None:
    for number in numbers:
        await desk.finish(await desk.taken(make_task(number)), ok(task_id(number)))


async def archived(desk: Desk) -> None:
    """Until the archive has everything, and finished tasks have left memory."""
    await desk.ledger.audit_verify()
    await desk.ledger.durable()


async def cancelled_at(desk: Desk, command: Command[Any], step: int) -> Any:
    """The answer, or None if the caller was cancelled so many turns of the loop after it had asked."""
    asking = asyncio.ensure_future(desk.ledger.commit(command))
    for _ in range(step):
        await asyncio.sleep(0)
    asking.cancel()
    try:
        return await asking
    except asyncio.CancelledError:
        return None


class WithdrawalSuite(Suite):
    async def test_a_receive_cancelled_at_any_moment_leases_to_its_caller_or_to_nobody(self, desk: Desk) -> None:
        await desk.send_all([make_task(number) for number in range(40)])
        told: list[TaskId] = []
        for step in range(STEPS):
            answer = await cancelled_at(desk, TAKE, step)
            told += [leased.task.id for leased in answer.tasks] if answer is not None else []
            assert (await desk.ledger.counts()).leased == len(told), step
        told += [leased.task.id for leased in await desk.take(count=40)]
        assert told == [task_id(number) for number in range(40)]

    async def test_a_drain_cancelled_at_any_moment_drains_to_its_caller_or_not_at_all(self, desk: Desk) -> None:
        await settled(desk, *range(40))
        told: list[TaskId] = []
        for step in range(STEPS):
            answer = await cancelled_at(desk, DRAIN, step)
            told += [result.task_id for result in answer.results] if answer is not None else []
            assert (await desk.ledger.counts()).settled == 40 - len(told), step
        told += [result.task_id for result in await desk.drain(count=40)]
        assert told == [task_id(number) for number in range(40)]

    async def test_a_lease_that_goes_back_keeps_its_place_and_is_no_attempt(self, desk: Desk) -> None:
        await desk.send_all([make_task(number) for number in (1, 2, 3)])
        leases = tuple((each.task.id, each.lease.lease_id) for each in await desk.take(count=2))
        assert await desk.ledger.commit(GiveBack(leases=leases)) == Returned(leases=2)
        assert [entry.task.id for entry in await desk.queue()] == [task_id(1), task_id(2), task_id(3)]
        assert (await desk.entry(task_id(1))).state is State.QUEUED
        first = await desk.take_one()
        assert first.task.id == task_id(1)
        await desk.settle(ok(task_id(1)), holder=BOB)  # without its lease, which must be named if there were several

    async def test_a_lease_that_goes_back_starts_no_timeout(self, desk: Desk) -> None:
        leased = await desk.taken(make_task(timeout_ms=1_000))
        await desk.ledger.commit(GiveBack(leases=((task_id(1), leased.lease.lease_id),)))
        desk.clock.advance(10_000)
        assert (await desk.sweep()).timed_out == ()
        await desk.take_one()
        desk.clock.advance(1_000)
        assert (await desk.sweep()).timed_out == (task_id(1),)

    async def test_what_has_moved_on_stays_where_it_is(self, desk: Desk) -> None:
        begun, requeued = await desk.taken(make_task(1)), await desk.taken(make_task(2))
        await desk.report(begun, "on it", 1)
        await desk.requeue(task_id(2))
        back = GiveBack(
            leases=tuple((each.task.id, each.lease.lease_id) for each in (begun, requeued)),
            results=(task_id(1), task_id(2), task_id(3)),
        )
        assert await desk.ledger.commit(back) == Returned()
        await desk.finish(begun, ok(task_id(1)))
        assert await desk.ledger.commit(back) == Returned()
        assert len(await desk.drain(count=9)) == 1

    async def test_a_result_goes_back_also_when_only_the_archive_knows_its_task(self, desk: Desk) -> None:
        await settled(desk, 1, 2, 3)
        drained = await desk.drain(count=2)
        await archived(desk)
        back = GiveBack(results=tuple(result.task_id for result in drained))
        assert await desk.ledger.commit(back) == Returned(results=2)
        assert [result.task_id for result in await desk.drain(count=9)] == [task_id(1), task_id(2), task_id(3)]
        await archived(desk)
        with refused("already_drained"):
            await desk.drain(which=task_id(1))
        assert (await desk.ledger.counts()).settled == 0

    async def test_a_withdrawn_receive_gives_back_its_leases_and_gets_none_later(self, desk: Desk) -> None:
        await desk.send_all([make_task(number) for number in (1, 2)])
        await desk.take(count=2, request_id="r1")
        withdraw = Withdraw(by=BOB, request_id="r1")
        assert await desk.ledger.commit(withdraw) == Returned(leases=2)
        assert await desk.ledger.commit(withdraw) == Returned()
        assert await desk.take(request_id="r1") == ()
        assert [leased.task.id for leased in await desk.take(count=2)] == [task_id(1), task_id(2)]

    async def test_a_receive_that_comes_after_its_withdrawal_gets_nothing(self, desk: Desk) -> None:
        await desk.send(make_task())
        await desk.ledger.commit(Withdraw(by=BOB, request_id="r1"))
        await desk.ledger.commit(Withdraw(by=ALICE, request_id="r2"))
        assert await desk.take(request_id="r1") == ()
        await desk.finish(await desk.take_one(request_id="r2"), ok(task_id(1)))
        assert await desk.drain(request_id="r2") == ()
        assert len(await desk.drain()) == 1

    async def test_a_withdrawn_drain_gives_back_its_results_also_from_the_archive(self, desk: Desk) -> None:
        await settled(desk, 1, 2)
        await desk.drain(count=2, request_id="r1")
        await archived(desk)
        assert await desk.ledger.commit(Withdraw(by=BOB, request_id="r1")) == Returned()
        assert await desk.ledger.commit(Withdraw(by=ALICE, request_id="r1")) == Returned(results=2)
        assert await desk.drain(request_id="r1") == ()
        assert [result.task_id for result in await desk.drain(count=9)] == [task_id(1), task_id(2)]

    async def test_a_receive_under_a_request_id_stands_when_its_caller_is_cancelled(self, desk: Desk) -> None:
        await desk.send_all([make_task(number) for number in (1, 2)])
        take = Take(holder=BOB, recipient=BOB.pubkey, request_id="r1")
        for step in range(STEPS):
            await cancelled_at(desk, take, step)
        assert [leased.task.id for leased in await desk.take(request_id="r1")] == [task_id(1)]
        assert [leased.task.id for leased in await desk.take(count=9)] == [task_id(2)]


class WithdrawalKeepingSuite(Suite):
    async def test_what_went_back_is_back_after_a_crash_and_after_a_compaction(self, engine: DurableEngine) -> None:
        desk = Desk(await engine.open(), engine.clock)
        await settled(desk, 1, 2)
        await desk.send_all([make_task(number) for number in (3, 4)])
        drained, taken = await desk.drain(count=2), await desk.take(count=2)
        await archived(desk)
        await desk.ledger.compact()  # from here on the snapshot does not know the drained tasks
        leases = tuple((each.task.id, each.lease.lease_id) for each in taken)
        results: tuple[TaskId, ...] = tuple(result.task_id for result in drained)
        await desk.ledger.commit(GiveBack(leases=leases, results=results))
        await desk.ledger.commit(Withdraw(by=BOB, request_id="r1"))
        for _ in range(2):
            desk = Desk(await engine.crash_and_reopen(desk.ledger), engine.clock)
            assert await desk.take(request_id="r1") == ()
            assert (await desk.ledger.counts()).settled == 2
            await desk.ledger.compact()
        assert [result.task_id for result in await desk.drain(count=9)] == [task_id(1), task_id(2)]
        assert [leased.task.id for leased in await desk.take(count=9)] == [task_id(3), task_id(4)]
