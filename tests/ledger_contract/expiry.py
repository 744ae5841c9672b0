"""Rule 9: deadlines and timeouts, and what is kept no longer than it should be."""

from __future__ import annotations

import pytest

from covenant.ledger.machine.states import State
from covenant.model.settings import Limits
from tests.ledger_contract.driver import LedgerDriver, check_generations, refused
from tests.ledger_contract.engine import Engine
from tests.ledger_contract.samples import ALICE, make_task, ok, same_work, task_id
from tests.ledger_contract.suite import Suite


class ExpirySuite(Suite):
    @pytest.mark.parametrize("state", ["queued", "parked", "following", "requeued"])
    async def test_a_waiting_task_whose_deadline_passes_is_settled_as_an_error(
        self, driver: LedgerDriver, state: str
    ) -> None:
        deadline_ms = driver.clock() + 1_000
        if state == "following":
            await driver.send(same_work(2))
        await driver.send(same_work(1, deadline_ms=deadline_ms))
        if state in ("parked", "requeued"):
            leased = await driver.take_one()
            await (driver.park(leased) if state == "parked" else driver.requeue(task_id(1)))
        driver.clock.advance(999)
        assert (await driver.sweep()).expired == ()
        driver.clock.advance(1)
        assert (await driver.sweep()).expired == (task_id(1),)
        (result,) = await driver.drain()
        assert (result.task_id, result.status, result.error_message) == (task_id(1), "error", "deadline_exceeded")
        assert (await check_generations(driver, task_id(1))).a2a_state == "failed"
        assert (await driver.sweep()).expired == ()

    async def test_a_follower_nobody_drains_leaves_its_leader_when_it_expires(self, driver: LedgerDriver) -> None:
        deadline_ms = driver.clock() + 1_000
        await driver.send(same_work(2, deadline_ms=deadline_ms))
        await driver.send(same_work(1, deadline_ms=deadline_ms, origin="simple", tenant="acme", context_id="c"))
        driver.clock.advance(1_000)
        assert (await driver.sweep()).expired == (task_id(1), task_id(2))
        assert await driver.queue() == ()

    async def test_a_leased_task_past_its_deadline_is_only_shown(self, driver: LedgerDriver) -> None:
        leased = await driver.taken(make_task(deadline_ms=driver.clock() + 10))
        driver.clock.advance(10)
        assert (await driver.sweep()).expired == ()
        assert [entry.task.id for entry in await driver.queue(deadline_within_ms=0)] == [task_id(1)]
        await driver.finish(leased, ok(task_id(1)))
        assert await driver.drain() == (ok(task_id(1)),)

    async def test_a_leased_task_past_its_deadline_ends_when_it_is_requeued(self, driver: LedgerDriver) -> None:
        await driver.taken(make_task(deadline_ms=driver.clock() + 10))
        driver.clock.advance(10)
        await driver.sweep()
        await driver.requeue(task_id(1))
        assert (await driver.sweep()).expired == (task_id(1),)

    async def test_a_timeout_counts_from_the_first_lease_of_the_turn(self, driver: LedgerDriver) -> None:
        await driver.send(make_task(timeout_ms=1_000))
        driver.clock.advance(5_000)
        assert (await driver.sweep()).timed_out == ()
        await driver.take_one()
        driver.clock.advance(600)
        await driver.requeue(task_id(1))
        leased = await driver.take_one()
        await driver.renew(leased)
        driver.clock.advance(399)
        assert (await driver.sweep()).timed_out == ()
        driver.clock.advance(1)
        assert (await driver.sweep()).timed_out == (task_id(1),)
        (result,) = await driver.drain()
        assert (result.status, result.error_message) == ("error", "Task timed out")
        for said in (driver.renew(leased), driver.finish(leased, ok(task_id(1)))):
            with refused("already_settled", 409):
                await said
        await check_generations(driver, task_id(1))

    async def test_a_task_that_is_back_in_the_queue_times_out_too(self, driver: LedgerDriver) -> None:
        await driver.taken(make_task(timeout_ms=1_000))
        await driver.requeue(task_id(1))
        driver.clock.advance(1_000)
        assert (await driver.sweep()).timed_out == (task_id(1),)

    async def test_no_timeout_runs_while_a_task_waits_for_its_next_message(self, driver: LedgerDriver) -> None:
        await driver.park(await driver.taken(make_task(timeout_ms=1_000)))
        driver.clock.advance(10_000)
        assert (await driver.sweep()).timed_out == ()
        await driver.say(task_id(1), "that one")
        await driver.take_one()
        driver.clock.advance(999)
        assert (await driver.sweep()).timed_out == ()
        driver.clock.advance(1)
        assert (await driver.sweep()).timed_out == (task_id(1),)

    async def test_interrupted_work_fails_when_no_operator_decides_in_time(self, driver: LedgerDriver) -> None:
        leased = await driver.taken(make_task())
        await driver.interrupt(leased, "the daemon stopped", hold_ms=60_000)
        (said,) = [update.body for update in (await driver.show(task_id(1))).updates if update.kind == "status"]
        assert said["text"] == (
            "interrupted: the daemon stopped; an operator decides by 2023-11-14T22:14:20.000Z, or else the task fails"
        )
        driver.clock.advance(59_999)
        assert (await driver.sweep()).interrupted == ()
        driver.clock.advance(1)
        assert (await driver.sweep()).interrupted == (task_id(1),)
        shown = await check_generations(driver, task_id(1))
        assert (shown.a2a_state, shown.cause) == ("failed", "interrupted")
        (result,) = await driver.drain()
        assert result.error_message == "interrupted: the daemon stopped; no operator decided within 60 s"
        assert (await driver.sweep()).interrupted == ()

    async def test_an_interruption_is_told_once_and_a_hold_is_not_prolonged(self, driver: LedgerDriver) -> None:
        leased = await driver.taken(make_task())
        await driver.interrupt(leased, hold_ms=1_000)
        generation = (await driver.show(task_id(1))).generation
        driver.clock.advance(600)
        await driver.interrupt(leased, hold_ms=1_000)
        assert (await driver.show(task_id(1))).generation == generation
        driver.clock.advance(400)
        assert (await driver.sweep()).interrupted == (task_id(1),)

    @pytest.mark.parametrize("decided", ["requeued", "heard again", "without a bound", "by the next start"])
    async def test_a_hold_that_is_over_or_has_no_bound_ends_nothing(self, driver: LedgerDriver, decided: str) -> None:
        leased = await driver.taken(make_task())
        if decided == "by the next start":
            await driver.interrupt(leased, hold_ms=1_000, outlook="the work begins again")
        else:
            await driver.interrupt(leased, hold_ms=0 if decided == "without a bound" else 1_000)
        if decided == "requeued":
            await driver.requeue(task_id(1))
            await driver.take_one()
        elif decided == "heard again":
            await driver.renew(leased)
        driver.clock.advance(24 * 3_600_000)
        assert (await driver.sweep()).interrupted == ()
        assert (await driver.entry(task_id(1))).state is State.LEASED

    async def test_work_that_is_interrupted_again_is_held_anew(self, driver: LedgerDriver) -> None:
        await driver.interrupt(await driver.taken(make_task()), hold_ms=1_000)
        await driver.requeue(task_id(1))
        driver.clock.advance(900)
        await driver.interrupt(await driver.take_one(), hold_ms=1_000)
        driver.clock.advance(999)
        assert (await driver.sweep()).interrupted == ()
        driver.clock.advance(1)
        assert (await driver.sweep()).interrupted == (task_id(1),)

    async def test_a_timeout_goes_before_a_longer_hold(self, driver: LedgerDriver) -> None:
        await driver.interrupt(await driver.taken(make_task(timeout_ms=500)), hold_ms=1_000)
        driver.clock.advance(500)
        swept = await driver.sweep()
        assert (swept.timed_out, swept.interrupted) == ((task_id(1),), ())

    async def test_more_than_one_sweep_can_settle_is_settled_by_the_next(self, driver: LedgerDriver) -> None:
        deadline_ms = driver.clock() + 10
        for number in range(250):
            await driver.send(make_task(number, deadline_ms=deadline_ms))
        driver.clock.advance(10)
        assert len((await driver.sweep()).expired) == 250
        counts = await driver.ledger.counts()
        assert (counts.queued, counts.settled) == (0, 250)

    async def test_a_result_nobody_comes_for_is_forgotten_after_its_retention_and_stays_in_history(
        self, engine: Engine
    ) -> None:
        driver = LedgerDriver(await engine.open(Limits(retention_ms=1_000)), engine.clock)
        await driver.finish(await driver.taken(make_task()), ok(task_id(1)))
        driver.clock.advance(1_000)
        assert (await driver.sweep()).forgotten == 0
        driver.clock.advance(1)
        assert (await driver.sweep()).forgotten == 1
        assert await driver.drain() == ()
        assert (await driver.show(task_id(1))).result == ok(task_id(1))
        assert (await driver.send(make_task())).duplicate

    async def test_a_sweep_leaves_everything_else_alone(self, driver: LedgerDriver) -> None:
        await driver.send(make_task(1))
        await driver.taken(make_task(2, recipient=ALICE))
        await driver.park(await driver.taken(make_task(3, recipient=ALICE)))
        await driver.finish(await driver.taken(make_task(4, recipient=ALICE)), ok(task_id(4)))
        driver.clock.advance(24 * 3_600_000)
        await driver.sweep()
        states = [(await driver.entry(task_id(number))).state for number in (1, 2, 3, 4)]
        assert states == [State.QUEUED, State.LEASED, State.PARKED, State.SETTLED]

    async def test_a_clock_that_steps_back_expires_nothing_early_and_everything_in_time(
        self, driver: LedgerDriver
    ) -> None:
        await driver.send(make_task(deadline_ms=driver.clock() + 1_000))
        driver.clock.advance(-3_600_000)
        assert (await driver.sweep()).expired == ()
        driver.clock.advance(3_601_000)
        assert (await driver.sweep()).expired == (task_id(1),)
