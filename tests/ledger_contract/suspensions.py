"""Rule 17: waits. A task that is parked until a moment or for a signal goes on once, whatever happens meanwhile."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from covenant.ledger.machine.commands import (
    Advance,
    Advanced,
    Cancel,
    Continue,
    LeasedTask,
    Reported,
    SignalTask,
    Sweep,
)
from covenant.ledger.machine.states import State
from covenant.model.content import Content, Json, Text
from covenant.model.ids import TaskId
from covenant.model.question import APPROVAL, QUESTION, PersonDecision, QuestionKind
from covenant.model.settings import Limits
from covenant.model.task_event import MessageUpdate, Signal, StatusUpdate, StepUpdate, TurnUpdate, Wait
from tests.ledger_contract.driver import WAIT_MS, LedgerDriver, check_generations, refused
from tests.ledger_contract.engine import DurableEngine, Engine
from tests.ledger_contract.samples import ALICE, make_task, ok, same_work, task_id
from tests.ledger_contract.suite import Suite


async def until_leading(driver: LedgerDriver) -> None:
    """One of the nodes of a ledger looks at what is due: soon it is this one, which is the only one."""
    while not driver.ledger.leads("wakes"):  # noqa: ASYNC110  (nobody tells of it)
        await asyncio.sleep(0.02)


async def suspend(
    driver: LedgerDriver,
    leased: LeasedTask,
    *,
    updates: tuple[TurnUpdate, ...] = (),
    status: StatusUpdate | None = None,
    **wait: Any,
) -> Advanced:
    return await driver.ledger.commit(
        Advance(
            task_id=leased.task.id,
            holder=leased.lease.leased_to,
            lease_id=leased.lease.lease_id,
            updates=updates,
            status=status,
            wait=Wait(since_ms=driver.clock(), **wait),
        )
    )


async def sleep(driver: LedgerDriver, leased: LeasedTask, for_ms: int, step: int = 1) -> Advanced:
    return await suspend(driver, leased, for_ms=for_ms, step=step, name="sleep")


async def wait_for(driver: LedgerDriver, leased: LeasedTask, name: str, **more: Any) -> Advanced:
    return await suspend(driver, leased, signal=name, step=1, name=name, **more)


async def signal(driver: LedgerDriver, which: TaskId, name: str, value: Any = None, said: str = "s1") -> Reported:
    return await driver.ledger.commit(SignalTask(task_id=which, signal=Signal(name, said, value)))


async def ask(driver: LedgerDriver, leased: LeasedTask, kind: QuestionKind = "approval", **more: Any) -> Advanced:
    status = StatusUpdate("may I?", "input-required", metadata={QUESTION: {"id": "1-1", "kind": kind}})
    return await suspend(driver, leased, status=status, step=1, name=kind, asks=kind, question="d", **more)


async def answer(driver: LedgerDriver, *parts: Content, said: str = "m1") -> Reported:
    message = MessageUpdate(role="user", parts=parts, message_id=said)
    return await driver.ledger.commit(Continue(task_id=task_id(1), message=message, message_id=said, by=ALICE))


async def decide(driver: LedgerDriver, said: str = "m1", **decision: Any) -> Reported:
    return await answer(driver, *PersonDecision(**decision).as_parts(), said=said)


async def durable_steps(driver: LedgerDriver, which: TaskId) -> list[StepUpdate]:
    steps = await driver.ledger.steps(which, 0, 1_000)
    return [step.what for step in steps if isinstance(step.what, StepUpdate)]


class SuspensionSuite(Suite):
    async def test_a_sleeping_task_wakes_once_when_its_time_is_over(self, driver: LedgerDriver) -> None:
        leased = await driver.taken(make_task())
        await sleep(driver, leased, 5_000)
        entry = await driver.entry(task_id(1))
        assert (entry.state, entry.a2a_state) == (State.PARKED, "working")
        driver.clock.advance(4_999)
        assert (await driver.sweep()).woken == 0
        assert await driver.take() == ()
        driver.clock.advance(1)
        assert (await driver.sweep()).woken == 1
        assert (await driver.sweep()).woken == 0
        again = await driver.take_one()
        assert (again.lease.attempt, again.continues, again.cut) == (1, True, False)
        assert [(step.no, step.waits) for step in await durable_steps(driver, task_id(1))] == [(1, True), (1, False)]
        await driver.finish(again, ok(task_id(1)))
        shown = await check_generations(driver, task_id(1))
        assert [update.kind for update in shown.updates] == ["submitted", "working", "step", "step", "settled"]
        assert [lease.outcome for lease in shown.leases] == ["suspended", "settled"]

    @pytest.mark.parametrize("first", ["signal", "sleep", "answer", "other signal"])
    async def test_the_first_of_several_waits_wakes_the_task(self, driver: LedgerDriver, first: str) -> None:
        leased = await driver.taken(make_task())
        since_ms = driver.clock()
        others = (
            Wait(since_ms=since_ms, signal="a", step=2, name="a", for_ms=9_000),
            Wait(since_ms=since_ms, for_ms=5_000, step=3, name="sleep"),
            Wait(since_ms=since_ms, signal="b", step=4, name="b"),
        )
        await ask(driver, leased, others=others)
        assert (await driver.entry(task_id(1))).a2a_state == "input-required"
        driver.clock.advance(4_999)
        assert (await driver.sweep()).woken == 0
        if first == "sleep":
            driver.clock.advance(1)
            assert (await driver.sweep()).woken == 1
        elif first == "answer":
            await decide(driver, approved=True)
        else:
            await signal(driver, task_id(1), "a" if first == "signal" else "b", 7)
        await signal(driver, task_id(1), "a", 8, said="s2")
        again = await driver.take_one()
        assert (again.lease.attempt, again.continues) == (1, True)
        (come,) = await durable_steps(driver, task_id(1))
        assert not come.timed_out
        found = (come.no, come.result if first != "answer" else come.result["approved"])
        assert found == {"signal": (2, 7), "sleep": (3, None), "answer": (1, True), "other signal": (4, 7)}[first]
        assert (await driver.entry(task_id(1))).a2a_state == "working"
        kept = await suspend(driver, again, for_ms=1, step=5, name="sleep", others=others[:1])
        assert kept.signal is not None
        assert kept.signal.value == 8, "what came after the first is kept"
        shown = await check_generations(driver, task_id(1))
        assert [update.kind for update in shown.updates].count("step") == 2

    async def test_waits_that_make_no_sense_together_are_refused(self, driver: LedgerDriver) -> None:
        leased = await driver.taken(make_task())
        one = Wait(since_ms=0, for_ms=1, step=2, name="sleep")
        asks = Wait(since_ms=0, step=2, name="approval", asks="approval", question="d")
        within = Wait(since_ms=0, for_ms=1, step=2, name="sleep", others=(one,))
        too_long = Wait(since_ms=0, for_ms=1 << 50, step=2, name="sleep")
        loose = Wait(since_ms=0, for_ms=1)
        for others in ((asks,), (within,), (one,) * 100, (too_long,), (loose,)):
            with refused("invalid_wait", 400):
                await suspend(driver, leased, for_ms=1, step=1, name="sleep", others=others)

    async def test_a_question_is_answered_once_and_only_by_a_decision(self, driver: LedgerDriver) -> None:
        leased = await driver.taken(make_task())
        with refused("not_asked", 409):
            await decide(driver, approved=True)
        await ask(driver, leased)
        entry = await driver.entry(task_id(1))
        assert (entry.state, entry.a2a_state) == (State.PARKED, "input-required")
        assert await driver.take() == ()
        for said in (Text("yes, but only half of it"), Text("hm"), Text(""), Json({APPROVAL: {"approved": "yes"}})):
            with refused("approval_expected", 400):
                await answer(driver, said)
        with refused("not_asked", 409):
            await decide(driver, approved=True, id="1-7")
        told = await decide(driver, approved=False, reason="too dear", id="1-1")
        assert not told.duplicate
        assert (await decide(driver, approved=False, reason="too dear", id="1-1")).duplicate
        with refused("not_asked", 409):
            await decide(driver, said="m2", approved=True)
        entry = await driver.entry(task_id(1))
        assert (entry.state, entry.a2a_state, entry.kept) == (State.QUEUED, "working", ())
        again = await driver.take_one()
        assert (again.lease.attempt, again.turn, again.continues) == (1, 1, True)
        (come,) = await durable_steps(driver, task_id(1))
        assert (come.kind, come.no) == ("ask", 1)
        assert come.result == {"question": "d", "approved": False, "reason": "too dear", "by": ALICE.display}
        await driver.finish(again, ok(task_id(1)))
        shown = await check_generations(driver, task_id(1))
        kinds = [update.kind for update in shown.updates]
        assert kinds == ["submitted", "working", "parked", "continued", "step", "settled"]
        rows = [row for row in await driver.audit_rows() if row["kind"]["type"] == "a2a_approval"]
        assert [(row["kind"]["approved"], row["kind"]["question_id"]) for row in rows] == [(False, "1-1")]

    async def test_a_question_that_nobody_answers_ends_by_its_time_and_a_decision_comes_too_late(
        self, driver: LedgerDriver
    ) -> None:
        leased = await driver.taken(make_task())
        await ask(driver, leased, for_ms=1_000)
        driver.clock.advance(1_000)
        assert (await driver.sweep()).woken == 1
        assert (await driver.entry(task_id(1))).a2a_state == "working"
        with refused("not_asked", 409):
            await decide(driver, approved=True)
        (come,) = await durable_steps(driver, task_id(1))
        assert (come.timed_out, come.result) == (True, None)

    @pytest.mark.parametrize("early", [False, True])
    async def test_a_question_that_also_waits_for_a_signal_ends_with_either(
        self, driver: LedgerDriver, early: bool
    ) -> None:
        leased, told = await driver.taken(make_task()), SignalTask(task_id=task_id(1), signal=Signal("elsewhere", "s1"))
        if early:
            await driver.ledger.commit(told)
        advanced = await ask(driver, leased, signal="elsewhere")
        assert (advanced.signal is not None) == early
        if not early:
            assert (await driver.entry(task_id(1))).a2a_state == "input-required"
            await driver.ledger.commit(told)
        assert (await driver.entry(task_id(1))).a2a_state == "working"
        (come,) = await durable_steps(driver, task_id(1))
        assert (come.kind, come.result, come.timed_out) == ("ask", None, False)
        with refused("not_asked", 409):
            await decide(driver, approved=True)
        again = leased if early else await driver.take_one()
        await driver.finish(again, ok(task_id(1)))
        await check_generations(driver, task_id(1))

    async def test_a_question_that_wants_words_takes_any(self, driver: LedgerDriver) -> None:
        leased = await driver.taken(make_task())
        await ask(driver, leased, "input")
        with refused("not_asked", 409):
            await decide(driver, approved=True)
        await answer(driver, Text("the blue one"))
        (come,) = await durable_steps(driver, task_id(1))
        assert come.result == {"question": "d", "text": "the blue one"}

    async def test_whoever_waits_for_what_is_due_is_told_in_time_and_of_an_earlier_one(
        self, driver: LedgerDriver
    ) -> None:
        await until_leading(driver)
        assert not await driver.ledger.overdue(0)
        await driver.send(make_task(1, not_before_ms=driver.clock() + 86_400_000))
        waiting = asyncio.create_task(driver.ledger.overdue(WAIT_MS))
        await asyncio.sleep(0.05)  # it looks, and waits
        assert not waiting.done()
        await driver.send(make_task(2, not_before_ms=driver.clock() + 20))
        assert await waiting in (True, False)  # an earlier one has come: it looks again
        driver.clock.advance(20)
        assert await driver.ledger.overdue(WAIT_MS)
        swept = await driver.ledger.commit(Sweep())
        assert swept.woken == 1
        assert not await driver.ledger.overdue(20)

    async def test_a_task_that_has_ended_is_due_no_more(self, driver: LedgerDriver) -> None:
        await until_leading(driver)
        task = make_task(not_before_ms=driver.clock() + 1_000)
        await driver.send(task)
        await driver.ledger.commit(Cancel(task_id=task.id, by=task.sender, reason=""))
        driver.clock.advance(2_000)
        assert not await driver.ledger.overdue(20)

    async def test_a_task_is_not_begun_before_its_time(self, driver: LedgerDriver) -> None:
        task = make_task(not_before_ms=driver.clock() + 1_000)
        await driver.send(task)
        assert (await driver.send(task)).duplicate
        assert await driver.take() == ()
        driver.clock.advance(1_000)
        assert (await driver.sweep()).woken == 1
        leased = await driver.take_one()
        assert (leased.lease.attempt, leased.continues) == (1, False)
        await driver.send(make_task(2, not_before_ms=driver.clock()))
        assert (await driver.take_one()).task.id == task_id(2)

    async def test_a_start_that_makes_no_sense_is_refused(self, driver: LedgerDriver) -> None:
        now_ms = driver.clock()
        with refused("invalid_task", 400):
            await driver.send(make_task(not_before_ms=now_ms + 2_000, deadline_ms=now_ms + 1_000))
        with refused("invalid_task", 400):
            await driver.send(make_task(not_before_ms=1 << 60))
        with refused("invalid_task", 400):
            await driver.send(make_task(not_before_ms=-1))

    async def test_a_deadline_ends_a_task_that_waits(self, driver: LedgerDriver) -> None:
        leased = await driver.taken(make_task(deadline_ms=driver.clock() + 1_000))
        await sleep(driver, leased, 5_000)
        driver.clock.advance(1_000)
        swept = await driver.sweep()
        assert (swept.expired, swept.woken) == ((task_id(1),), 0)
        driver.clock.advance(10_000)
        assert (await driver.sweep()).woken == 0

    async def test_no_time_of_a_turn_passes_while_it_waits(self, driver: LedgerDriver) -> None:
        leased = await driver.taken(make_task(timeout_ms=1_000))
        await sleep(driver, leased, 60_000)
        driver.clock.advance(60_000)
        swept = await driver.sweep()
        assert (swept.timed_out, swept.woken) == ((), 1)
        await driver.take_one()
        driver.clock.advance(1_000)
        assert (await driver.sweep()).timed_out == (task_id(1),)

    async def test_a_signal_ends_the_wait_for_it_and_is_its_result(self, driver: LedgerDriver) -> None:
        leased = await driver.taken(make_task())
        await wait_for(driver, leased, "paid")
        assert not (await signal(driver, task_id(1), "other", 1, "s0")).duplicate
        assert await driver.take() == ()
        told = await signal(driver, task_id(1), "paid", {"amount": 3})
        assert (await signal(driver, task_id(1), "paid", {"amount": 3})).duplicate
        assert told.generation == (await driver.entry(task_id(1))).generation
        assert (await driver.take_one()).continues
        waited, come = await durable_steps(driver, task_id(1))
        assert (waited.waits, come.waits, come.kind, come.result) == (True, False, "wait", {"amount": 3})
        await check_generations(driver, task_id(1))

    async def test_a_signal_that_comes_early_is_kept(self, driver: LedgerDriver) -> None:
        leased = await driver.taken(make_task())
        before = (await driver.entry(task_id(1))).queued_bytes
        await signal(driver, task_id(1), "paid", 1, "s1")
        await signal(driver, task_id(1), "paid", 2, "s2")
        assert (await signal(driver, task_id(1), "paid", 1, "s1")).duplicate
        first = await wait_for(driver, leased, "paid")
        assert first.signal is not None
        assert first.signal.value == 1
        second = await suspend(driver, leased, signal="paid", step=2, name="paid")
        assert second.signal is not None
        assert second.signal.value == 2
        entry = await driver.entry(task_id(1))
        assert (entry.state, entry.signals, entry.queued_bytes) == (State.LEASED, (), before)
        assert [step.result for step in await durable_steps(driver, task_id(1))] == [1, 2]
        await driver.finish(leased, ok(task_id(1)))
        with refused("already_settled", 409):
            await signal(driver, task_id(1), "paid", 3, "s3")

    async def test_a_signal_that_does_not_come_in_time_is_told_as_that(self, driver: LedgerDriver) -> None:
        leased = await driver.taken(make_task())
        await wait_for(driver, leased, "paid", for_ms=1_000)
        driver.clock.advance(1_000)
        assert (await driver.sweep()).woken == 1
        assert [step.timed_out for step in await durable_steps(driver, task_id(1))] == [False, True]

    async def test_who_has_no_part_in_a_task_cannot_signal_it(self, driver: LedgerDriver) -> None:
        await driver.send(make_task())
        with refused("unknown_task", 404):
            await driver.ledger.commit(SignalTask(task_id=task_id(1), viewer=task_id(9), signal=Signal("a", "b")))  # type: ignore[arg-type]
        with refused("unknown_task", 404):
            await signal(driver, task_id(8), "a")

    async def test_signals_are_bounded(self, engine: Engine) -> None:
        driver = LedgerDriver(await engine.open(Limits(messages_kept_max=2)), engine.clock)
        await driver.send(make_task())
        await signal(driver, task_id(1), "a", 1, "s1")
        await signal(driver, task_id(1), "a", 1, "s2")
        with refused("too_many_signals"):
            await signal(driver, task_id(1), "a", 1, "s3")

    async def test_a_retry_is_a_further_attempt_and_its_wait_is_told(self, driver: LedgerDriver) -> None:
        leased = await driver.taken(make_task())
        await suspend(driver, leased, for_ms=1_000, status=StatusUpdate("again in a second"))
        assert (await driver.entry(task_id(1))).a2a_state == "working"
        driver.clock.advance(1_000)
        await driver.sweep()
        again = await driver.take_one()
        assert (again.lease.attempt, again.continues, again.cut) == (2, False, False)
        await driver.finish(again, ok(task_id(1)))
        shown = await check_generations(driver, task_id(1))
        assert [update.kind for update in shown.updates] == ["submitted", "working", "status", "settled"]

    async def test_a_message_to_a_task_that_sleeps_is_for_its_next_turn(self, driver: LedgerDriver) -> None:
        leased = await driver.taken(make_task())
        await sleep(driver, leased, 1_000)
        await driver.say(task_id(1), "and this")
        assert await driver.take() == ()
        driver.clock.advance(1_000)
        await driver.sweep()
        again = await driver.take_one()
        assert (again.turn, again.messages) == (1, ())
        assert (await driver.finish(again, ok(task_id(1)))).goes_on
        assert (await driver.take_one()).turn == 2

    async def test_nothing_more_is_taken_from_a_holder_whose_task_waits(self, driver: LedgerDriver) -> None:
        leased = await driver.taken(make_task())
        await sleep(driver, leased, 1_000)
        with refused("not_leased", 409):
            await driver.finish(leased, ok(task_id(1)))
        with refused("not_leased", 409):
            await driver.report(leased, "still here")
        assert (await driver.cancel(task_id(1))).canceled
        driver.clock.advance(1_000)
        assert (await driver.sweep()).woken == 0

    async def test_what_was_cut_short_is_told_until_a_step_is_written(self, driver: LedgerDriver) -> None:
        leased = await driver.taken(make_task())
        assert not leased.cut
        await driver.requeue(task_id(1))
        leased = await driver.take_one()
        assert leased.cut
        await suspend(driver, leased, for_ms=0)
        await driver.sweep()
        leased = await driver.take_one()
        assert leased.cut, "a retry does not tell what the attempt before it did"
        await driver.ledger.commit(
            Advance(
                task_id=task_id(1),
                holder=leased.lease.leased_to,
                lease_id=leased.lease.lease_id,
                updates=(StepUpdate("charge", 1),),
            )
        )
        await suspend(driver, leased, for_ms=0)
        await driver.sweep()
        assert not (await driver.take_one()).cut

    async def test_who_waits_in_a_line_follows_a_leader_that_sleeps(self, driver: LedgerDriver) -> None:
        leased = await driver.taken(same_work(1))
        assert (await driver.send(same_work(2))).following == task_id(1)
        await sleep(driver, leased, 1_000)
        with refused("following", 409):
            await signal(driver, task_id(2), "a")
        driver.clock.advance(1_000)
        await driver.sweep()
        await driver.finish(await driver.take_one(), ok(task_id(1)))
        assert len(await driver.drain(ALICE, 2)) == 2


class SuspensionDurabilitySuite(Suite):
    async def test_priorities_hold_after_a_restart(self, engine: DurableEngine) -> None:
        ledger = await engine.open()
        driver = LedgerDriver(ledger, engine.clock)
        for number, priority in ((1, 0), (2, 5), (3, 0)):
            await driver.send(make_task(number, priority=priority))
        ledger = await engine.crash_and_reopen(ledger)
        await ledger.compact()
        ledger = await engine.close_and_reopen(ledger)
        driver = LedgerDriver(ledger, engine.clock)
        await driver.send(make_task(4, priority=5))
        assert [each.task.id for each in await driver.take(count=4)] == [task_id(n) for n in (2, 4, 1, 3)]

    async def test_a_sleep_outlives_restarts_and_wakes_once(self, engine: DurableEngine) -> None:
        ledger = await engine.open()
        driver = LedgerDriver(ledger, engine.clock)
        leased = await driver.taken(make_task())
        await signal(driver, task_id(1), "later", [1])
        await sleep(driver, leased, 3_000)
        await driver.send(make_task(2, not_before_ms=driver.clock() + 3_000))
        for _ in range(3):
            ledger = await engine.crash_and_reopen(ledger)
            driver = LedgerDriver(ledger, engine.clock)
            assert (await driver.sweep()).woken == 0
            engine.clock.advance(1_000)
        await ledger.compact()
        ledger = await engine.close_and_reopen(ledger)
        driver = LedgerDriver(ledger, engine.clock)
        assert (await driver.sweep()).woken == 2
        ledger = await engine.crash_and_reopen(ledger)
        driver = LedgerDriver(ledger, engine.clock)
        assert (await driver.sweep()).woken == 0
        again = await driver.take(count=2)
        assert [each.task.id for each in again] == [task_id(1), task_id(2)]
        assert again[0].continues
        kept = await suspend(driver, again[0], signal="later", step=2, name="later")
        assert kept.signal is not None
        assert kept.signal.value == [1]
