"""Rule 9: deadlines and timeouts, and what is kept no longer than it should be."""

from __future__ import annotations

import pytest

from covenant.ledger.machine.states import State
from covenant.ledger.machine.view import Limits
from covenant.testing.cast import ALICE, make_task, ok, same_work, task_id
from covenant.testing.desk import Desk, check_generations, refused
from covenant.testing.engine import Engine
from covenant.testing.suite import Suite


class ExpiringSuite(Suite):
    @pytest.mark.parametrize("state", ["queued", "parked", "following", "requeued"])
    async def test_a_waiting_task_whose_deadline_passes_is_settled_as_an_error(self, desk: Desk, state: str) -> None:
        deadline_ms = desk.clock() + 1_000
        if state == "following":
            await desk.send(same_work(2))
        await desk.send(same_work(1, deadline_ms=deadline_ms))
        if state in ("parked", "requeued"):
            leased = await desk.take_one()
            await (desk.park(leased) if state == "parked" else desk.requeue(task_id(1)))
        desk.clock.advance(999)
        assert (await desk.sweep()).expired == ()
        desk.clock.advance(1)
        assert (await desk.sweep()).expired == (task_id(1),)
        (result,) = await desk.drain()
        assert (result.task_id, result.status, result.error_message) == (task_id(1), "error", "deadline_exceeded")
        assert (await check_generations(desk, task_id(1))).a2a_state == "failed"
        assert (await desk.sweep()).expired == ()

    async def test_a_leased_task_past_its_deadline_is_only_shown(self, desk: Desk) -> None:
        leased = await desk.taken(make_task(deadline_ms=desk.clock() + 10))
        desk.clock.advance(10)
        assert (await desk.sweep()).expired == ()
        assert [entry.task.id for entry in await desk.queue(deadline_within_ms=0)] == [task_id(1)]
        await desk.finish(leased, ok(task_id(1)))
        assert await desk.drain() == (ok(task_id(1)),)

    async def test_a_leased_task_past_its_deadline_ends_when_it_is_requeued(self, desk: Desk) -> None:
        await desk.taken(make_task(deadline_ms=desk.clock() + 10))
        desk.clock.advance(10)
        await desk.sweep()
        await desk.requeue(task_id(1))
        assert (await desk.sweep()).expired == (task_id(1),)

    async def test_a_timeout_counts_from_the_first_lease_of_the_turn(self, desk: Desk) -> None:
        await desk.send(make_task(timeout_ms=1_000))
        desk.clock.advance(5_000)
        assert (await desk.sweep()).timed_out == ()
        await desk.take_one()
        desk.clock.advance(600)
        await desk.requeue(task_id(1))
        leased = await desk.take_one()
        await desk.renew(leased)
        desk.clock.advance(399)
        assert (await desk.sweep()).timed_out == ()
        desk.clock.advance(1)
        assert (await desk.sweep()).timed_out == (task_id(1),)
        (result,) = await desk.drain()
        assert (result.status, result.error_message) == ("error", "Task timed out")
        for said in (desk.renew(leased), desk.finish(leased, ok(task_id(1)))):
            with refused("already_settled", 409):
                await said
        await check_generations(desk, task_id(1))

    async def test_a_task_that_is_back_in_the_queue_times_out_too(self, desk: Desk) -> None:
        await desk.taken(make_task(timeout_ms=1_000))
        await desk.requeue(task_id(1))
        desk.clock.advance(1_000)
        assert (await desk.sweep()).timed_out == (task_id(1),)

    async def test_no_timeout_runs_while_a_task_waits_for_its_next_message(self, desk: Desk) -> None:
        await desk.park(await desk.taken(make_task(timeout_ms=1_000)))
        desk.clock.advance(10_000)
        assert (await desk.sweep()).timed_out == ()
        await desk.say(task_id(1), "that one")
        await desk.take_one()
        desk.clock.advance(999)
        assert (await desk.sweep()).timed_out == ()
        desk.clock.advance(1)
        assert (await desk.sweep()).timed_out == (task_id(1),)

    async def test_more_than_one_sweep_can_settle_is_settled_by_the_next(self, desk: Desk) -> None:
        deadline_ms = desk.clock() + 10
        for number in range(250):
            await desk.send(make_task(number, deadline_ms=deadline_ms))
        desk.clock.advance(10)
        assert len((await desk.sweep()).expired) == 250
        counts = await desk.ledger.counts()
        assert (counts.queued, counts.settled) == (0, 250)

    async def test_a_result_nobody_comes_for_is_forgotten_after_its_retention_and_stays_in_history(
        self, engine: Engine
    ) -> None:
        desk = Desk(await engine.open(Limits(retention_ms=1_000)), engine.clock)
        await desk.finish(await desk.taken(make_task()), ok(task_id(1)))
        desk.clock.advance(1_000)
        assert (await desk.sweep()).forgotten == 0
        desk.clock.advance(1)
        assert (await desk.sweep()).forgotten == 1
        assert await desk.drain() == ()
        assert (await desk.show(task_id(1))).result == ok(task_id(1))
        assert (await desk.send(make_task())).duplicate

    async def test_a_sweep_leaves_everything_else_alone(self, desk: Desk) -> None:
        await desk.send(make_task(1))
        await desk.taken(make_task(2, recipient=ALICE))
        await desk.park(await desk.taken(make_task(3, recipient=ALICE)))
        await desk.finish(await desk.taken(make_task(4, recipient=ALICE)), ok(task_id(4)))
        desk.clock.advance(24 * 3_600_000)
        await desk.sweep()
        states = [(await desk.entry(task_id(number))).state for number in (1, 2, 3, 4)]
        assert states == [State.QUEUED, State.LEASED, State.PARKED, State.SETTLED]

    async def test_a_clock_that_steps_back_expires_nothing_early_and_everything_in_time(self, desk: Desk) -> None:
        await desk.send(make_task(deadline_ms=desk.clock() + 1_000))
        desk.clock.advance(-3_600_000)
        assert (await desk.sweep()).expired == ()
        desk.clock.advance(3_601_000)
        assert (await desk.sweep()).expired == (task_id(1),)
