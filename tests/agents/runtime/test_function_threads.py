"""Plain functions: they run in threads, say what async ones can say, and hold up nobody when they do not stop."""

import asyncio
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest

from covenant import Agent, SyncTurn
from covenant.agents.api import Rejection
from covenant.agents.function_agent import FunctionAgent
from covenant.agents.runtime.function_threads import ITEMS_MAX, AgentThreads, ThreadChannel
from covenant.ledger.contract.ledger import Ledger
from covenant.model.content import Json, Text
from covenant.model.task_event import StatusUpdate
from covenant.model.task_view import TaskState
from tests.agents.agents_under_test import function, open_agents, said
from tests.agents.pool_under_test import HOUR_MS, PoolUnderTest, chunks, open_pool, statuses, time_out, told
from tests.waits import BOUND_S


async def until(met: Any) -> None:
    async with asyncio.timeout(BOUND_S):
        while not met():  # noqa: ASYNC110  (what is waited for happens in a thread)
            await asyncio.sleep(0.005)


async def test_a_plain_function_runs_beside_the_loop(pool: PoolUnderTest) -> None:
    heard, go_on = threading.Event(), threading.Event()

    def waits(turn: SyncTurn) -> str:
        heard.set()
        assert go_on.wait(BOUND_S)
        return f"{turn.text} {threading.current_thread() is threading.main_thread()}"

    pool.serve(waits)
    task_id = await pool.send("hello")
    await until(heard.is_set)  # the loop is free: this coroutine runs while the function blocks
    go_on.set()
    assert told(await pool.ended(task_id)) == "hello False"


async def test_a_plain_generator_streams_in_order_and_faster_than_it_is_written(pool: PoolUnderTest) -> None:
    count = 4 * ITEMS_MAX

    def counts(turn: SyncTurn) -> Iterator[str]:
        for number in range(count):
            yield f"{number} "

    pool.serve(counts)
    view = await pool.ask()
    words = "".join(f"{number} " for number in range(count))
    written = "".join(part.text for chunk in chunks(await pool.steps(view.task.id)) for part in chunk.parts)  # type: ignore[union-attr]
    assert told(view) == written == words


async def test_a_plain_generator_says_whatever_an_async_one_can(pool: PoolUnderTest) -> None:
    def produce(turn: SyncTurn) -> Iterator[Any]:
        yield turn.status("reading")
        yield "text"
        yield turn.file("a.md", b"# a")
        yield turn.data({"n": 1})
        turn.spend(tokens=7)

    pool.serve(produce)
    view = await pool.ask()
    assert statuses(await pool.steps(view.task.id)) == ["reading"]
    assert [artifact.artifact_id.removeprefix(view.task.id) for artifact in view.artifacts] == [
        "-text-0",
        "-file-0",
        "-data-0",
    ]
    assert view.artifacts[2].parts == (Json({"n": 1}),)
    assert view.result is not None
    assert view.result.metadata == {"usage": {"tokens": 7}}


async def test_a_plain_generator_stops_where_it_asks_its_sender(pool: PoolUnderTest) -> None:
    ran: list[str] = []

    def asks(turn: SyncTurn) -> Iterator[Any]:
        try:
            if turn.turn == 1:
                yield turn.need_input("Which language?")
                ran.append("after the question")
            yield f"in {turn.text}"
        finally:
            ran.append("closed")

    pool.serve(asks)
    task_id = await pool.send()
    assert told(await pool.parked(task_id)) == "Which language?"
    await until(lambda: ran == ["closed"])
    await pool.say(task_id, "Latin")
    assert told(await pool.ended(task_id)) == "in Latin"
    assert ran == ["closed", "closed"]


async def test_a_thread_is_answered_whatever_its_request_raises(pool: PoolUnderTest) -> None:
    class Odd:
        """Raises where the event loop looks at it."""

        def __getattribute__(self, name: str) -> Any:
            raise SystemExit(3)

    def yields(turn: SyncTurn) -> Iterator[Any]:
        yield Odd()

    pool.serve(yields)
    view = await pool.ask()
    assert (view.state, told(view)) == (TaskState.FAILED, "the agent failed")
    await pool.idle()
    assert pool.workers.threads_abandoned == 0


@pytest.mark.parametrize("error", [ValueError("swordfish"), SystemExit(3), asyncio.CancelledError()], ids=repr)
async def test_what_a_plain_function_raises_fails_its_task_and_nothing_else(
    pool: PoolUnderTest, error: BaseException
) -> None:
    def broken(turn: SyncTurn) -> str:
        if turn.text == "break":
            raise error
        return "fine"

    pool.serve(broken)
    view = await pool.ask("break")
    assert (view.state, told(view)) == (TaskState.FAILED, "the agent failed")
    assert told(await pool.ask("work")) == "fine"


async def test_what_cannot_be_said_fails_a_plain_function_too(pool: PoolUnderTest) -> None:
    def odd(turn: SyncTurn) -> Iterator[Any]:
        yield 5

    pool.serve(odd)
    assert told(await pool.ask()).startswith("the agent yielded an int, which cannot be sent")

    async def inner() -> str:
        return "never"

    def forgot_async(turn: SyncTurn) -> Any:
        return inner()

    pool.serve(forgot_async)
    assert told(await pool.ask()).startswith("the agent returned a coroutine, which cannot be sent")


async def test_a_canceled_generator_is_closed_at_its_next_word_and_nothing_more_is_heard(pool: PoolUnderTest) -> None:
    go_on, closed = threading.Event(), threading.Event()

    def talks(turn: SyncTurn) -> Iterator[str]:
        try:
            yield "first"
            assert go_on.wait(BOUND_S)
            yield "second"
        finally:
            closed.set()

    pool.serve(talks)
    task_id = await pool.send()
    await pool.until(task_id, lambda view: bool(view.artifacts))
    await pool.cancel(task_id)
    go_on.set()
    await until(closed.is_set)
    await pool.idle()
    view = await pool.ended(task_id)
    assert (view.state, view.artifacts[0].parts) == (TaskState.CANCELED, (Text("first"),))


async def test_a_thread_that_does_not_stop_is_left_behind_counted_and_keeps_its_place(
    ledger: Ledger, caplog: pytest.LogCaptureFixture
) -> None:
    go_on, begun = threading.Event(), []

    def hangs(turn: SyncTurn) -> str:
        begun.append(turn.text)
        if turn.text == "hang":
            assert go_on.wait(BOUND_S)
        return "done"

    async with open_pool(ledger, stop_s=0.05) as pool:
        pool.serve(hangs, concurrency=1, timeout_ms=HOUR_MS)
        task_id = await pool.send("hang")
        await until(lambda: begun == ["hang"])
        time_out(pool.workers)
        hung = await pool.ended(task_id)
        assert (hung.state, told(hung)) == (TaskState.FAILED, "Task timed out")
        await pool.idle()
        assert pool.workers.threads_abandoned == 1
        assert "agent.abandoned" in [record.message for record in caplog.records]
        # The only thread of this agent is taken: the next turn waits for it, and for no longer than it may.
        task_id = await pool.send("wait")
        await until(lambda: "agent.threads_used_up" in [record.message for record in caplog.records])
        time_out(pool.workers)
        waits = await pool.ended(task_id)
        assert (told(waits), begun) == ("Task timed out", ["hang"])
        go_on.set()
        await until(lambda: pool.workers.threads_abandoned == 0)
        assert told(await pool.ask("work")) == "done"


async def test_a_stop_does_not_begin_again_what_a_thread_still_does(ledger: Ledger) -> None:
    go_on, begun = threading.Event(), threading.Event()

    def hangs(turn: SyncTurn) -> None:
        begun.set()
        assert go_on.wait(BOUND_S)

    try:
        async with open_pool(ledger, stop_s=0.05) as pool:
            pool.serve(hangs, idempotent=True)
            task_id = await pool.send()
            await until(begun.is_set)
            await pool.cut_short()
            entry = await ledger.entry(task_id)
            assert entry is not None
            assert (entry.lease is not None, (await ledger.counts()).queued) == (True, 0)
    finally:
        go_on.set()


async def test_a_plain_function_calls_other_agents_and_waits_for_them(tmp_path: Path) -> None:
    asking = Agent("asking")

    @asking
    def ask(turn: SyncTurn) -> str:
        one = turn.call("shout", "hey")
        several = turn.call_all([("shout", "you"), ("whisper", "you")])
        first = turn.call_first([("shout", "first")])
        return " ".join(answer.text for answer in (one, *several, first))

    async with open_agents(
        tmp_path / "home", asking, function("shout", "{}!"), function("whisper", "({})")
    ) as under_test:
        view = await under_test.ask("asking", "go")
        assert said(view) == "hey! you! (you) first!"


async def test_a_refused_call_is_raised_in_the_thread(tmp_path: Path) -> None:
    asking = Agent("asking")

    @asking
    def ask(turn: SyncTurn) -> str:
        try:
            turn.call("nobody", "hey")
        except Exception as refusal:  # noqa: BLE001
            return type(refusal).__name__
        return "answered"

    async with open_agents(tmp_path / "home", asking) as under_test:
        assert said(await under_test.ask("asking", "go")) == "NotFound"


async def test_a_call_under_way_ends_with_its_turn(tmp_path: Path) -> None:
    stopped: list[type[BaseException]] = []
    asking, endless, entered = Agent("asking"), Agent("endless"), asyncio.Event()

    @asking
    def ask(turn: SyncTurn) -> str:
        try:
            return turn.call("endless", "hey").text
        except BaseException as error:
            stopped.append(type(error).__mro__[1])
            raise

    @endless
    async def wait(turn: Any) -> None:
        entered.set()
        await asyncio.Event().wait()

    async with open_agents(tmp_path / "home", endless) as under_test:
        under_test.add(asking)  # which names it; the time limit is the workers's
        identity = under_test.catalogue.identity("default", "asking")
        under_test.workers.register(identity, FunctionAgent(asking), timeout_ms=HOUR_MS)
        asked = asyncio.create_task(under_test.ask("asking", "go"))
        await asyncio.wait_for(entered.wait(), BOUND_S)
        time_out(under_test.workers)
        view = await asked
        assert (view.state, said(view)) == (TaskState.FAILED, "Task timed out")
        await until(lambda: stopped == [asyncio.CancelledError])


@pytest.mark.parametrize(
    ("said", "field"),
    [
        (StatusUpdate(cast(str, 5)), "StatusUpdate.text"),
        (StatusUpdate(cast(str, 5), "input-required"), "StatusUpdate.text"),
        (Rejection(cast(str, None)), "Rejection.text"),
        (Json(float("nan")), "Json.value"),
        (Text(cast(str, b"x")), "Text.text"),
    ],
    ids=["status", "parked", "rejection", "json", "text"],
)
async def test_a_plain_generator_fails_with_the_field_that_cannot_be_said(
    pool: PoolUnderTest, said: Any, field: str
) -> None:
    def odd(turn: SyncTurn) -> Iterator[Any]:
        yield said

    pool.serve(odd)
    view = await pool.ask()
    assert view.state is TaskState.FAILED
    assert told(view).startswith(f"the agent yielded an invalid value: {field}")


async def test_a_turn_that_waits_for_a_thread_gets_one_when_more_are_allowed() -> None:
    threads, go_on = AgentThreads(1), threading.Event()
    began: list[str] = []

    def work(name: str, channel: ThreadChannel) -> None:
        began.append(name)
        assert go_on.wait(BOUND_S)

    first = asyncio.create_task(threads.run(partial(work, "first"), lambda _: None, "slow"))
    await until(lambda: began)
    second = asyncio.create_task(threads.run(partial(work, "second"), lambda _: None, "slow"))
    await asyncio.sleep(0)
    assert (began, threads.running) == (["first"], 1)
    threads.resize(2)
    await until(lambda: len(began) == 2)
    go_on.set()
    await asyncio.gather(first, second)
