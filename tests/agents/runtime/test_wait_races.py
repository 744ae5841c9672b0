"""Waits that are canceled, and races between waits: what the ledger has decides, and nobody waits for what was left."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from covenant import Turn
from covenant.ledger.machine.commands import SignalTask
from covenant.model.ids import TaskId
from covenant.model.task_event import Interruption, Signal
from tests.agents.pool_under_test import PoolUnderTest, a_ledger, open_pool, told
from tests.agents.runtime.steps_under_test import Done, swept, waiting

TURNS = 80
"""Turns of the loop, at least: from the beginning of a wait until its task is parked."""


@pytest.fixture
async def pool(tmp_path: Path) -> AsyncIterator[PoolUnderTest]:
    async with a_ledger(tmp_path) as ledger, open_pool(ledger) as opened:
        yield opened


async def signal(pool: PoolUnderTest, task_id: TaskId, name: str, value: Any = None) -> None:
    await pool.ledger.commit(SignalTask(task_id=task_id, signal=Signal(name, f"{name}-1", value)))


async def _pass(turns: int) -> None:
    for _ in range(turns):
        await asyncio.sleep(0)


async def test_a_wait_that_is_canceled_at_any_moment_has_parked_the_task_or_has_not(pool: PoolUnderTest) -> None:
    """Either the function goes on, and the task is not parked; or the task is parked, and nothing is done."""
    done = Done()

    async def work(turn: Turn) -> str:
        asked = asyncio.ensure_future(turn.approve("stop the order?"))
        await _pass(int(turn.text))
        asked.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asked
        await turn.step("charge", lambda: done.do(turn.text))
        return "charged"

    pool.serve(work, concurrency=TURNS)
    parked = list[tuple[str, TaskId]]()
    for turns in range(TURNS):
        task_id = await pool.send(str(turns))
        view = await pool.until(task_id, lambda view: view.state.terminal or view.state.waits)
        await pool.idle()
        if view.state.waits:
            assert str(turns) not in done, "the task waits, and its function has gone on"
            parked.append((str(turns), task_id))
        else:
            assert done.count(str(turns)) == 1
    assert 0 < len(parked) < TURNS, "some were canceled before the task was parked, and some after that"
    for text, task_id in parked:
        await pool.say(task_id, "approve")
        assert told(await pool.ended(task_id)) == "charged"
        assert done.count(text) == 1


async def test_a_step_that_is_canceled_while_its_result_is_written_is_done(pool: PoolUnderTest) -> None:
    done, heard = Done(), Done()

    async def work(turn: Turn) -> str:
        first = asyncio.ensure_future(turn.step("first", lambda: done.do(turn.text)))
        await _pass(int(turn.text))
        first.cancel()
        ended = (await asyncio.gather(first, return_exceptions=True))[0]
        heard.append(f"{turn.text} {isinstance(ended, BaseException)}")
        await turn.sleep(0)
        return "ok"

    pool.serve(work, concurrency=TURNS)
    for turns in range(1, TURNS // 2):
        assert told(await swept(pool, await pool.send(str(turns)))) == "ok"
        if str(turns) in done:
            assert f"{turns} True" not in heard, "it is in the ledger, and the function hears that it is"
            assert done.count(str(turns)) == 1
    assert done


async def test_a_cancel_that_comes_while_a_step_is_written_holds_for_what_comes_after_it(pool: PoolUnderTest) -> None:
    ended, begun = Done(), asyncio.Event()

    async def work(turn: Turn) -> str:
        def first() -> None:
            ended.do("first")
            begun.set()

        async def both() -> None:
            await turn.step("first", first)
            await asyncio.sleep(0)
            ended.do("went on")

        doing = asyncio.ensure_future(both())
        await begun.wait()
        doing.cancel()
        (came,) = await asyncio.gather(doing, return_exceptions=True)
        return type(came).__name__

    pool.serve(work)
    assert told(await pool.ask()) == "CancelledError"
    assert ended == ["first"]


async def test_a_task_is_not_parked_for_a_wait_that_was_canceled(pool: PoolUnderTest) -> None:
    async def fail() -> None:
        await _pass(TURNS)
        raise ValueError

    async def work(turn: Turn) -> str:
        with contextlib.suppress(ExceptionGroup):
            async with asyncio.TaskGroup() as group:
                group.create_task(turn.wait_for("a"))
                group.create_task(turn.step("bad", fail))
        return f"b is {await turn.wait_for('b')}"

    pool.serve(work)
    task_id = await pool.send()
    await waiting(pool, task_id)
    await signal(pool, task_id, "b", 7)
    assert told(await pool.ended(task_id)) == "b is 7"


async def test_a_person_is_asked_what_the_function_asks_now(pool: PoolUnderTest) -> None:
    async def hang() -> None:
        await asyncio.Event().wait()

    async def work(turn: Turn) -> str:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.02):
                await asyncio.gather(turn.approve("pay 100?"), turn.step("hang", hang))
        return f"5: {(await turn.approve('pay 5?')).approved}"

    pool.serve(work)
    task_id = await pool.send()
    view = await pool.parked(task_id)
    assert view.message is not None
    assert (view.state.value, told(view)) == (Interruption.INPUT_REQUIRED.value, "pay 5?")
    await pool.say(task_id, "approve")
    assert told(await pool.ended(task_id)) == "5: True"


@pytest.mark.parametrize("cancels", [True, False])
async def test_a_function_goes_on_with_the_first_of_two_waits(pool: PoolUnderTest, *, cancels: bool) -> None:
    done = Done()

    async def work(turn: Turn) -> str:
        signaled, late = asyncio.ensure_future(turn.wait_for("a")), asyncio.ensure_future(turn.sleep(0.02))
        first, others = await asyncio.wait((signaled, late), return_when=asyncio.FIRST_COMPLETED)
        for other in others if cancels else ():
            other.cancel()
        await turn.step("charge", lambda: done.do("charge"))
        await turn.step("send", lambda: done.do("send"))
        return "late" if late in first else "in time"

    pool.serve(work)
    assert told(await swept(pool, await pool.send())) == "late"
    assert done == ["charge", "send"]


async def test_a_function_that_has_left_a_wait_waits_for_something_else(pool: PoolUnderTest) -> None:
    async def work(turn: Turn) -> str:
        signaled, late = asyncio.ensure_future(turn.wait_for("a")), asyncio.ensure_future(turn.sleep(0.02))
        await asyncio.wait((signaled, late), return_when=asyncio.FIRST_COMPLETED)
        signaled.cancel()
        return f"b is {await turn.wait_for('b')}"

    pool.serve(work)
    task_id = await pool.send()
    await signal(pool, task_id, "b", 7)
    assert told(await swept(pool, task_id)) == "b is 7"


@pytest.mark.parametrize("first", ["answer", "signal", "sleep"])
async def test_the_first_of_a_question_a_signal_and_a_time_wins(pool: PoolUnderTest, first: str) -> None:
    """The person is asked at once, and a signal does not wait for the end of the time."""
    done = Done()

    async def work(turn: Turn) -> str:
        asked = asyncio.ensure_future(turn.approve("stop the order?"))
        late = asyncio.ensure_future(turn.sleep(0.5 if first == "sleep" else 3600))
        paid = asyncio.ensure_future(turn.wait_for("paid"))
        ended, others = await asyncio.wait((asked, late, paid), return_when=asyncio.FIRST_COMPLETED)
        for other in others:
            other.cancel()
        await turn.step("go on", lambda: done.do("go on"))
        return " ".join(name for name, each in (("answer", asked), ("sleep", late), ("signal", paid)) if each in ended)

    pool.serve(work)
    task_id = await pool.send()
    assert told(await pool.parked(task_id)) == "stop the order?"
    if first == "answer":
        await pool.say(task_id, "approve")
    elif first == "signal":
        await signal(pool, task_id, "paid")
    assert told(await swept(pool, task_id)) == first
    assert done == ["go on"]


async def test_a_question_keeps_its_time_when_another_wait_wakes_the_task(pool: PoolUnderTest) -> None:
    async def work(turn: Turn) -> str:
        asked = asyncio.ensure_future(turn.approve("ok?", timeout_s=3600))
        await asyncio.gather(turn.wait_for("a"), turn.wait_for("b"))
        return f"{(await asked).approved}"

    pool.serve(work)
    task_id = await pool.send()
    waits = []
    for name in ("a", "b"):
        await pool.parked(task_id)
        entry = await pool.ledger.entry(task_id)
        assert entry is not None
        waits.append(entry.wait)
        await signal(pool, task_id, name)
        await pool.until(task_id, lambda view: not view.state.waits)
    await pool.parked(task_id)
    assert [wait.since_ms for wait in waits if wait is not None] == [waits[0].since_ms] * 2 if waits[0] else False
    await pool.say(task_id, "approve")
    assert told(await pool.ended(task_id)) == "True"
