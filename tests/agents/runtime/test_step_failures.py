"""Steps that fail: the failure is in the ledger, and is raised again until a further attempt tries again."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from covenant import Agent, Invalid, StepError, StepFailed, SyncTurn, Turn, Unavailable
from covenant.agents.runtime.step_failures import exception_of, failure_of
from covenant.ledger.machine.commands import SignalTask
from covenant.model.rate_limits import Backoff
from covenant.model.task_event import Signal
from covenant.model.task_view import TaskState
from tests.agents.pool_under_test import PoolUnderTest, a_ledger, function_agent, open_pool, told
from tests.agents.runtime.steps_under_test import Done, requeue, swept, waiting
from tests.waits import BOUND_S

FAST = Backoff(0.01, 0.02)


class ShopClosed(Exception):
    def __init__(self, shop: str, hours: int) -> None:
        super().__init__(f"{shop} opens in {hours} hours")
        self.shop, self.hours, self.door = shop, hours, object()


class Needy(Exception):
    def __str__(self) -> str:
        return f"{self.args[1]}"


@pytest.fixture
async def pool() -> AsyncIterator[PoolUnderTest]:
    async with a_ledger(None) as ledger, open_pool(ledger) as opened:
        yield opened


@pytest.mark.parametrize("plain", [False, True])
async def test_a_step_that_raises_is_done_once_however_often_its_turn_is_woken(
    pool: PoolUnderTest, *, plain: bool
) -> None:
    done, caught = Done(), Done()

    def charge() -> None:
        done.do("charge")
        raise TimeoutError("the answer did not come")

    async def work(turn: Turn) -> str:
        try:
            await turn.step("charge", charge)
        except TimeoutError as error:
            caught.do(str(error))
        await turn.sleep(0)
        await turn.approve("go on?")
        await turn.sleep(0)
        return "done"

    def plain_work(turn: SyncTurn) -> str:
        try:
            turn.step("charge", charge)
        except TimeoutError as error:
            caught.do(str(error))
        turn.sleep(0)
        turn.approve("go on?")
        turn.sleep(0)
        return "done"

    pool.serve(plain_work if plain else work)
    task_id = await pool.send()
    ended = asyncio.ensure_future(swept(pool, task_id))
    await pool.parked(task_id)
    await pool.say(task_id, "approve")
    assert told(await ended) == "done"
    assert done == ["charge"]
    assert caught == ["the answer did not come"] * 4


async def test_what_failed_is_tried_again_under_another_name(pool: PoolUnderTest) -> None:
    done = Done()

    def charge() -> int:
        done.do("charge")
        if len(done) == 1:
            raise TimeoutError
        return len(done)

    async def work(turn: Turn) -> str:
        try:
            charged = await turn.step("charge", charge)
        except TimeoutError:
            charged = await turn.step("charge, second try", charge)
        await turn.sleep(0)
        return f"charged {charged}"

    pool.serve(work)
    assert told(await swept(pool, await pool.send())) == "charged 2"
    assert done == ["charge", "charge"]


async def test_a_step_that_its_function_cancels_is_done_once(pool: PoolUnderTest) -> None:
    done = Done()
    bounds: list[asyncio.Timeout] = []

    async def hang() -> None:
        done.do("begun")
        bounds[0].reschedule(0)
        await asyncio.Event().wait()

    async def work(turn: Turn) -> str:
        try:
            # The first one ends when the step has begun.
            async with asyncio.timeout(0.02 if bounds else BOUND_S) as bound:
                bounds.append(bound)
                await turn.step("charge", hang)
        except TimeoutError:
            done.do("late")
        return str(await turn.wait_for("go"))

    pool.serve(work)
    task_id = await pool.send()
    await waiting(pool, task_id)
    await pool.ledger.commit(SignalTask(task_id=task_id, signal=Signal("go", "s1", "on")))
    assert told(await pool.ended(task_id)) == "on"
    assert done == ["begun", "late", "late"]


async def test_a_step_whose_own_task_was_canceled_has_failed(pool: PoolUnderTest) -> None:
    done = Done()

    async def lose() -> None:
        done.do("begun")
        inner = asyncio.ensure_future(asyncio.Event().wait())
        inner.cancel()
        await inner

    async def work(turn: Turn) -> str:
        with pytest.raises(StepFailed, match="CancelledError"):
            await turn.step("lose", lose)
        await turn.sleep(0)
        return "done"

    pool.serve(work)
    assert told(await swept(pool, await pool.send())) == "done"
    assert done == ["begun"]


async def test_a_further_attempt_does_what_failed_again(pool: PoolUnderTest) -> None:
    done = Done()

    def fetch() -> str:
        done.do("fetch")
        if len(done) < 3:
            raise ConnectionError("the other side is gone")
        return "it"

    async def work(turn: Turn) -> str:
        await turn.step("once", lambda: None)
        found = await turn.step("fetch", fetch)
        await turn.sleep(0)
        return f"{found} in attempt {turn.attempt}"

    pool.serve(function_agent(work, idempotent=True, attempts=3, backoff=FAST, retry_on=(ConnectionError,)))
    assert told(await swept(pool, await pool.send())) == "it in attempt 3"
    assert done == ["fetch"] * 3


async def test_a_class_that_cannot_be_made_again_can_be_retried_on(pool: PoolUnderTest) -> None:
    class LocalError(Exception):
        pass

    async def work(turn: Turn) -> str:
        def fetch() -> int:
            if turn.attempt == 1:
                raise LocalError("gone")
            return turn.attempt

        return str(await turn.step("fetch", fetch))

    pool.serve(function_agent(work, idempotent=True, attempts=2, backoff=FAST, retry_on=(LocalError,)))
    assert told(await swept(pool, await pool.send())) == "2"


async def test_a_further_attempt_does_not_do_again_what_its_function_went_on_after(pool: PoolUnderTest) -> None:
    done, hung = Done(), asyncio.Event()

    def charge() -> None:
        done.do("charge")
        raise TimeoutError

    async def work(turn: Turn) -> str:
        try:
            await turn.step("charge", charge)
        except TimeoutError:
            await turn.step("ask the bank", lambda: done.do("ask"))
        if not hung.is_set():
            hung.set()
            await asyncio.Event().wait()
        return f"attempt {turn.attempt}"

    pool.serve(work)
    task_id = await pool.send()
    await asyncio.wait_for(hung.wait(), BOUND_S)
    await requeue(pool, task_id)
    assert told(await pool.ended(task_id)) == "attempt 2"
    assert done == ["charge", "ask"]


async def test_a_result_that_cannot_be_written_is_a_failure_of_its_step(pool: PoolUnderTest) -> None:
    done = Done()

    async def work(turn: Turn) -> str:
        with pytest.raises(StepError, match="cannot be written as JSON"):
            await turn.step("odd", lambda: done.do("odd", object()))
        await turn.sleep(0)
        return "done"

    pool.serve(work)
    assert told(await swept(pool, await pool.send())) == "done"
    assert done == ["odd"]


async def test_a_failure_is_told_to_nobody_but_the_function(pool: PoolUnderTest) -> None:
    async def work(turn: Turn) -> None:
        def fail() -> None:
            raise ValueError("the password is 1234")

        await turn.step("secret", fail)

    pool.serve(work)
    view = await pool.ask()
    assert (view.state, told(view)) == (TaskState.FAILED, "the agent failed")


def _again(error: Exception) -> Exception:
    return exception_of(failure_of(error))


@pytest.mark.parametrize(
    "error",
    [
        ValueError("no"),
        KeyError("key"),
        TimeoutError(),
        OSError(2, "no such file", "a.txt"),
        ConnectionResetError(104, "reset"),
        json.JSONDecodeError("bad", "{", 0),
        ShopClosed("baker", 3),
        Invalid("bad_order", "an order needs an item"),
        Unavailable("closed", "come back", retry_after_ms=5),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_exception_is_made_again_with_its_class_its_words_and_what_is_json(error: Exception) -> None:
    made = _again(error)
    assert type(made) is type(error)
    assert str(made) == str(error)
    for name in ("args", "errno", "filename", "code", "status", "retry_after_ms", "shop", "hours", "message"):
        assert getattr(made, name, None) == getattr(error, name, None)
    assert not hasattr(made, "door")


def _local() -> Exception:
    class LocalError(Exception):
        pass

    return LocalError("here")


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (_local(), "LocalError: here"),
        (ExceptionGroup("both", [ValueError("a")]), "both"),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"), "invalid start byte"),
        (ValueError(object()), "object object"),
        (ValueError("\ud800"), "?"),
        (ValueError("x" * 100_000), "x" * 4_096),
    ],
    ids=["local", "group", "decode", "object", "surrogate", "long"],
)
def test_an_exception_that_cannot_be_written_keeps_its_words(error: Exception, says: str) -> None:
    made = _again(error)
    assert says in str(made)
    assert len(str(made)) < 5_000
    assert isinstance(made, StepFailed | type(error))


def test_a_class_that_needs_more_than_it_has_is_a_failed_step() -> None:
    made = _again(Needy("only one"))
    assert isinstance(made, StepFailed)
    assert made.type == f"{__name__}:Needy"


@pytest.mark.parametrize("name", ["os:system", "builtins:KeyboardInterrupt", "nowhere:Error", "str", "", ":", "a:b:c"])
def test_only_an_exception_is_made(name: str) -> None:
    failure = failure_of(ValueError("x"))
    made: Any = exception_of(type(failure)(type=name, message="x", args=("true",)))
    assert isinstance(made, StepFailed)
    assert made.type == name


def test_an_agent_declares_what_it_retries_on() -> None:
    assert Agent("a", idempotent=True, retry_on=(StepFailed,)).retry_on == (StepFailed,)
