"""Compaction changes nothing that anybody can see: no live task, no answer, no order, no memory of what was done."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Final

from covenant.ledger.contract import Counts, QueueQuery, Shown
from covenant.ledger.machine.commands import Enroll
from covenant.ledger.machine.states import State
from covenant.model.grant import send_actions
from covenant.testing.cast import (
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
from covenant.testing.desk import Desk, check_generations, refused
from covenant.testing.grants import give, sending
from covenant.testing.surviving import Restart, RestartSuite

COMPACTIONS: Final = 5


async def _send_while_compacting(desk: Desk, number: int) -> list[float]:
    """One task after the other, until it is done: when it began, and when each of them was acknowledged."""
    now = asyncio.get_running_loop().time
    compacting = asyncio.ensure_future(desk.ledger.compact())
    moments = [now()]
    while not compacting.done():
        await desk.send(make_task(number + len(moments) - 1))
        moments.append(now())
    await compacting
    return moments


class CompactingSuite(RestartSuite):
    async def test_nothing_that_is_still_wanted_is_dropped(self, desk: Desk, restart: Restart) -> None:
        await desk.send_all([make_task(1), same_work(2), same_work(3)])
        leased = await desk.taken(make_task(4, recipient=CAROL))
        await desk.park(await desk.taken(make_task(5, recipient=CAROL)))
        await desk.finish(await desk.taken(make_task(6, recipient=CAROL)), ok(task_id(6)))
        before = [await desk.entry(task_id(number)) for number in range(1, 7)]
        for again in range(3):
            await desk.ledger.compact()
            if again:
                desk = await restart(desk)
            assert [await desk.entry(task_id(number)) for number in range(1, 7)] == before
        assert [leased.task.id for leased in await desk.take(count=9)] == [task_id(1), task_id(2)]
        await desk.finish(leased, ok(task_id(4)))
        assert [result.task_id for result in await desk.drain(count=9)] == [task_id(6), task_id(4)]

    async def test_a_requeued_task_is_kept_whatever_was_posted_and_drained_before(
        self, desk: Desk, restart: Restart
    ) -> None:
        leased = await desk.taken(make_task())
        await desk.park(leased)
        await desk.say(task_id(1), "that one")
        await desk.take_one()
        await desk.requeue(task_id(1))
        await desk.ledger.compact()
        desk = await restart(desk)
        assert (await desk.entry(task_id(1))).state is State.QUEUED
        assert (await desk.take_one()).lease.attempt == 2

    async def test_resolved_tasks_are_counted_as_dropped_and_stay_in_history(
        self, desk: Desk, restart: Restart
    ) -> None:
        await desk.finish(await desk.taken(make_task()), ok(task_id(1)))
        await desk.drain()
        shown = await desk.show(task_id(1))
        assert await desk.ledger.compact() == 4
        assert await desk.ledger.compact() == 0
        assert await desk.show(task_id(1)) == shown
        desk = await restart(desk)
        assert await desk.show(task_id(1)) == shown
        assert (await desk.send(make_task())).duplicate
        with refused("duplicate_task_id", 409):
            await desk.send(make_task(intent_text="other"))

    async def test_the_cache_is_kept(self, desk: Desk, restart: Restart) -> None:
        await desk.finish(await desk.taken(same_work(1)), ok(task_id(1), "42"))
        await desk.drain()
        await desk.ledger.compact()
        assert (await desk.send(same_work(2))).replayed
        desk = await restart(desk)
        assert (await desk.send(same_work(3))).replayed

    async def test_repeated_requests_are_answered_as_before(self, desk: Desk, restart: Restart) -> None:
        await desk.finish(await desk.taken(make_task(1)), ok(task_id(1)))
        await desk.send_all([make_task(2), make_task(3)])
        leases = await desk.take(request_id="r1")
        results = await desk.drain(request_id="r1")
        await desk.ledger.compact()
        assert await desk.take(request_id="r1") == leases
        desk = await restart(desk)
        assert await desk.take(request_id="r1") == leases
        assert await desk.drain(request_id="r1") == results

    async def test_everything_anybody_can_ask_is_answered_the_same_before_and_after(
        self, desk: Desk, restart: Restart
    ) -> None:
        await _populate(desk)
        before = await _answers(desk)
        await desk.ledger.compact()
        assert await _answers(desk) == before
        desk = await restart(desk)
        assert await _answers(desk) == before
        await desk.ledger.compact()
        desk = await restart(desk)
        assert await _answers(desk) == before
        await desk.check_audit()

    async def test_order_is_kept_in_every_lane(self, desk: Desk, restart: Restart) -> None:
        await desk.send_all([make_task(number) for number in range(1, 9)])
        for leased in await desk.take(count=4):
            await desk.requeue(leased.task.id)
        await desk.ledger.compact()
        desk = await restart(desk)
        order = [task_id(number) for number in (5, 6, 7, 8, 1, 2, 3, 4)]
        assert [leased.task.id for leased in await desk.take(count=9)] == order

    async def test_work_goes_on_while_it_compacts(self, desk: Desk, restart: Restart) -> None:
        await asyncio.gather(*(desk.send(make_task(number)) for number in range(200)))
        number, shares = 1_000, []
        for _ in range(COMPACTIONS):
            moments = await _send_while_compacting(desk, number)
            number += len(moments) - 1
            shares.append(max(after - before for before, after in pairwise(moments)) / (moments[-1] - moments[0]))
            if shares[-1] < 0.5:
                break
        # A machine that is busy with something else may keep a send waiting too, but not every time.
        assert min(shares) < 0.5, "compaction keeps a send waiting for most of its time"
        desk = await restart(desk)
        assert (await desk.ledger.counts()).queued == 200 + number - 1_000

    async def test_grants_identities_and_the_audit_are_kept(self, desk: Desk, restart: Restart) -> None:
        await desk.ledger.commit(Enroll(by=OPERATOR, identity=make_identity(ALICE)))
        await give(desk, make_grant(ALICE, send_actions(BOB)[0], max_uses=2))
        await desk.send(make_task(1), access=sending(make_task(1)))
        rows = await desk.audit_rows()
        await desk.ledger.compact()
        desk = await restart(desk)
        assert desk.ledger.identity(make_identity(ALICE).token_sha256) == make_identity(ALICE)
        assert await desk.audit_rows() == rows
        await desk.send(make_task(2), access=sending(make_task(2)))
        with refused("capability_missing", 403):
            await desk.send(make_task(3), access=sending(make_task(3)))
        await desk.check_audit()

    async def test_generations_go_on_from_where_they_were(self, desk: Desk, restart: Restart) -> None:
        leased = await desk.taken(make_task())
        await desk.report(leased, "one", 1)
        await desk.ledger.compact()
        desk = await restart(desk)
        assert (await desk.report(leased, "one", 1)).duplicate
        await desk.report(leased, "two", 2)
        await desk.ledger.compact()
        desk = await restart(desk)
        await desk.finish(leased, ok(task_id(1)))
        assert (await check_generations(desk, task_id(1))).generation == 5

    async def test_deadlines_and_timeouts_are_kept(self, desk: Desk, restart: Restart) -> None:
        await desk.send(make_task(1, deadline_ms=desk.clock() + 10))
        await desk.taken(make_task(2, recipient=CAROL, timeout_ms=10))
        await desk.release(await desk.taken(make_task(3, recipient=ALICE, timeout_ms=10)))
        await desk.ledger.compact()
        desk = await restart(desk)
        desk.clock.advance(10)
        swept = await desk.sweep()
        assert (swept.expired, set(swept.timed_out)) == ((task_id(1),), {task_id(2), task_id(3)})


async def _populate(desk: Desk) -> None:
    await give(desk, make_grant(ALICE, send_actions(BOB)[0], max_uses=5))
    await desk.send(make_task(1), access=sending(make_task(1)))
    await desk.send_all([same_work(2), same_work(3), make_task(4, parent=task_id(1))])
    await desk.report(await desk.taken(make_task(5, recipient=CAROL)), "on it")
    await desk.park(await desk.taken(make_task(6, recipient=CAROL)))
    for number in (7, 8, 9):
        await desk.finish(await desk.taken(same_work(number, f"k{number}", recipient=CAROL)), ok(task_id(number)))
    await desk.drain(request_id="d1")
    await desk.drain()
    await desk.take(CAROL, everyone=True, request_id="t1")
    await desk.cancel(task_id(4))


async def _answers(desk: Desk) -> tuple[object, ...]:
    ledger = desk.ledger
    shown: list[Shown | None] = [await ledger.show(task_id(number), None, 100) for number in range(1, 11)]
    counts: Counts = await ledger.counts()
    return (
        shown,
        [await ledger.entry(task_id(number)) for number in (1, 2, 3, 5, 6)],
        await ledger.queue(QueueQuery(limit=100)),
        await ledger.recent_tasks(None, 100),
        await ledger.recent_results(None, 100),
        await ledger.tree(task_id(1), None),
        sorted(await ledger.grants(), key=str),
        await desk.audit_rows(),
        await desk.take(CAROL, everyone=True, request_id="t1"),
        await desk.drain(request_id="d1"),
        (await desk.send(same_work(3))).following,
        (counts.queued, counts.leased, counts.parked, counts.following, counts.settled, counts.cached),
    )
