"""Compaction changes nothing that anybody can see: no live task, no answer, no order, no memory of what was done."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Final

from covenant.ledger.contract.ledger import Counts
from covenant.ledger.contract.tasks import QueueQuery, TaskDetail
from covenant.ledger.machine.identity_commands import Enroll
from covenant.ledger.machine.states import State
from covenant.model.grant import send_actions
from tests.ledger_contract.driver import LedgerDriver, check_generations, refused
from tests.ledger_contract.durability import Restart, RestartSuite
from tests.ledger_contract.grants import give, sending
from tests.ledger_contract.samples import (
    ALICE,
    BOB,
    CAROL,
    OPERATOR,
    make_grant,
    make_identity,
    make_task,
    ok,
    same_work,
    task_id,
)

BLINK_S: Final = 0.05
"""A send that waits for less has not waited for the compaction, however short that is."""
COMPACTIONS: Final = 5


async def _send_while_compacting(driver: LedgerDriver, number: int) -> list[float]:
    """One task after the other, until it is done: when it began, and when each of them was acknowledged."""
    now = asyncio.get_running_loop().time
    compacting = asyncio.ensure_future(driver.ledger.compact())
    moments = [now()]
    while not compacting.done():
        await driver.send(make_task(number + len(moments) - 1))
        moments.append(now())
    await compacting
    return moments


class CompactionSuite(RestartSuite):
    async def test_nothing_that_is_still_wanted_is_dropped(self, driver: LedgerDriver, restart: Restart) -> None:
        await driver.send_all([make_task(1), same_work(2), same_work(3)])
        leased = await driver.taken(make_task(4, recipient=CAROL))
        await driver.park(await driver.taken(make_task(5, recipient=CAROL)))
        await driver.finish(await driver.taken(make_task(6, recipient=CAROL)), ok(task_id(6)))
        before = [await driver.entry(task_id(number)) for number in range(1, 7)]
        for again in range(3):
            await driver.ledger.compact()
            if again:
                driver = await restart(driver)
            assert [await driver.entry(task_id(number)) for number in range(1, 7)] == before
        assert [leased.task.id for leased in await driver.take(count=9)] == [task_id(1), task_id(2)]
        await driver.finish(leased, ok(task_id(4)))
        assert [result.task_id for result in await driver.drain(count=9)] == [task_id(6), task_id(4)]

    async def test_a_requeued_task_is_kept_whatever_was_posted_and_drained_before(
        self, driver: LedgerDriver, restart: Restart
    ) -> None:
        leased = await driver.taken(make_task())
        await driver.park(leased)
        await driver.say(task_id(1), "that one")
        await driver.take_one()
        await driver.requeue(task_id(1))
        await driver.ledger.compact()
        driver = await restart(driver)
        assert (await driver.entry(task_id(1))).state is State.QUEUED
        assert (await driver.take_one()).lease.attempt == 2

    async def test_resolved_tasks_are_counted_as_dropped_and_stay_in_history(
        self, driver: LedgerDriver, restart: Restart
    ) -> None:
        await driver.finish(await driver.taken(make_task()), ok(task_id(1)))
        await driver.drain()
        shown = await driver.show(task_id(1))
        assert await driver.ledger.compact() == 4
        assert await driver.ledger.compact() == 0
        assert await driver.show(task_id(1)) == shown
        driver = await restart(driver)
        assert await driver.show(task_id(1)) == shown
        assert (await driver.send(make_task())).duplicate
        with refused("duplicate_task_id", 409):
            await driver.send(make_task(intent_text="other"))

    async def test_the_cache_is_kept(self, driver: LedgerDriver, restart: Restart) -> None:
        await driver.finish(await driver.taken(same_work(1)), ok(task_id(1), "42"))
        await driver.drain()
        await driver.ledger.compact()
        assert (await driver.send(same_work(2))).replayed
        driver = await restart(driver)
        assert (await driver.send(same_work(3))).replayed

    async def test_repeated_requests_are_answered_as_before(self, driver: LedgerDriver, restart: Restart) -> None:
        await driver.finish(await driver.taken(make_task(1)), ok(task_id(1)))
        await driver.send_all([make_task(2), make_task(3)])
        leases = await driver.take(request_id="r1")
        results = await driver.drain(request_id="r1")
        await driver.ledger.compact()
        assert await driver.take(request_id="r1") == leases
        driver = await restart(driver)
        assert await driver.take(request_id="r1") == leases
        assert await driver.drain(request_id="r1") == results

    async def test_everything_anybody_can_ask_is_answered_the_same_before_and_after(
        self, driver: LedgerDriver, restart: Restart
    ) -> None:
        await _populate(driver)
        before = await _answers(driver)
        await driver.ledger.compact()
        assert await _answers(driver) == before
        driver = await restart(driver)
        assert await _answers(driver) == before
        await driver.ledger.compact()
        driver = await restart(driver)
        assert await _answers(driver) == before
        await driver.check_audit()

    async def test_order_is_kept_in_every_lane(self, driver: LedgerDriver, restart: Restart) -> None:
        await driver.send_all([make_task(number) for number in range(1, 9)])
        for leased in await driver.take(count=4):
            await driver.requeue(leased.task.id)
        await driver.ledger.compact()
        driver = await restart(driver)
        order = [task_id(number) for number in (5, 6, 7, 8, 1, 2, 3, 4)]
        assert [leased.task.id for leased in await driver.take(count=9)] == order

    async def test_work_goes_on_while_it_compacts(self, driver: LedgerDriver, restart: Restart) -> None:
        await asyncio.gather(*(driver.send(make_task(number)) for number in range(200)))
        number, shares = 1_000, []
        for _ in range(COMPACTIONS):
            moments = await _send_while_compacting(driver, number)
            number += len(moments) - 1
            longest = max(after - before for before, after in pairwise(moments))
            shares.append(longest / (moments[-1] - moments[0]) if longest > BLINK_S else 0.0)
            if shares[-1] < 0.5:
                break
        # A machine that is busy with something else may keep a send waiting too, but not every time.
        assert min(shares) < 0.5, "compaction keeps a send waiting for most of its time"
        driver = await restart(driver)
        assert (await driver.ledger.counts()).queued == 200 + number - 1_000

    async def test_grants_identities_and_the_audit_are_kept(self, driver: LedgerDriver, restart: Restart) -> None:
        await driver.ledger.commit(Enroll(by=OPERATOR, identity=make_identity(ALICE)))
        await give(driver, make_grant(ALICE, send_actions(BOB)[0], max_uses=2))
        await driver.send(make_task(1), access=sending(make_task(1)))
        rows = await driver.audit_rows()
        await driver.ledger.compact()
        driver = await restart(driver)
        assert driver.ledger.identity(make_identity(ALICE).token_sha256) == make_identity(ALICE)
        assert await driver.audit_rows() == rows
        await driver.send(make_task(2), access=sending(make_task(2)))
        with refused("capability_missing", 403):
            await driver.send(make_task(3), access=sending(make_task(3)))
        await driver.check_audit()

    async def test_generations_go_on_from_where_they_were(self, driver: LedgerDriver, restart: Restart) -> None:
        leased = await driver.taken(make_task())
        await driver.report(leased, "one", 1)
        await driver.ledger.compact()
        driver = await restart(driver)
        assert (await driver.report(leased, "one", 1)).duplicate
        await driver.report(leased, "two", 2)
        await driver.ledger.compact()
        driver = await restart(driver)
        await driver.finish(leased, ok(task_id(1)))
        assert (await check_generations(driver, task_id(1))).generation == 5

    async def test_deadlines_and_timeouts_are_kept(self, driver: LedgerDriver, restart: Restart) -> None:
        await driver.send(make_task(1, deadline_ms=driver.clock() + 10))
        await driver.taken(make_task(2, recipient=CAROL, timeout_ms=10))
        await driver.release(await driver.taken(make_task(3, recipient=ALICE, timeout_ms=10)))
        await driver.ledger.compact()
        driver = await restart(driver)
        driver.clock.advance(10)
        swept = await driver.sweep()
        assert (swept.expired, set(swept.timed_out)) == ((task_id(1),), {task_id(2), task_id(3)})

    async def test_a_hold_is_kept(self, driver: LedgerDriver, restart: Restart) -> None:
        await driver.interrupt(await driver.taken_here(make_task()), hold_ms=10)
        await driver.ledger.compact()
        driver = await restart(driver)
        driver.clock.advance(9)
        assert (await driver.sweep()).interrupted == ()
        driver.clock.advance(1)
        assert (await driver.sweep()).interrupted == (task_id(1),)


async def _populate(driver: LedgerDriver) -> None:
    await give(driver, make_grant(ALICE, send_actions(BOB)[0], max_uses=5))
    await driver.send(make_task(1), access=sending(make_task(1)))
    await driver.send_all([same_work(2), same_work(3), make_task(4, parent=task_id(1))])
    await driver.report(await driver.taken(make_task(5, recipient=CAROL)), "on it")
    await driver.park(await driver.taken(make_task(6, recipient=CAROL)))
    for number in (7, 8, 9):
        await driver.finish(await driver.taken(same_work(number, f"k{number}", recipient=CAROL)), ok(task_id(number)))
    await driver.drain(request_id="d1")
    await driver.drain()
    await driver.take(CAROL, everyone=True, request_id="t1")
    await driver.cancel(task_id(4))


async def _answers(driver: LedgerDriver) -> tuple[object, ...]:
    ledger = driver.ledger
    shown: list[TaskDetail | None] = [await ledger.show(task_id(number), None, 100) for number in range(1, 11)]
    counts: Counts = await ledger.counts()
    return (
        shown,
        [await ledger.entry(task_id(number)) for number in (1, 2, 3, 5, 6)],
        await ledger.queue(QueueQuery(limit=100)),
        await ledger.recent_tasks(None, 100),
        await ledger.recent_results(None, 100),
        await ledger.tree(task_id(1), None),
        sorted(await ledger.grants(), key=str),
        await driver.audit_rows(),
        await driver.take(CAROL, everyone=True, request_id="t1"),
        await driver.drain(request_id="d1"),
        (await driver.send(same_work(3))).following,
        (counts.queued, counts.leased, counts.parked, counts.following, counts.settled, counts.cached),
    )
