"""Function agents: what an author's function says, and what becomes of its task."""

import asyncio
import functools
import logging
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from covenant import Agent, Turn
from covenant.agents.function_agent import FunctionAgent
from covenant.agents.runtime.durable_step import StepError
from covenant.agents.runtime.job import Job
from covenant.ledger.contract.ledger import Ledger
from covenant.model.content import Json, Resource, ResourceLink, Text
from covenant.model.settings import A2aSettings
from covenant.model.task import ResultStatus
from covenant.model.task_event import Began, Started
from covenant.model.task_view import TaskState
from tests.agents.pool_under_test import PoolUnderTest, chunks, endings, open_pool, statuses, told


async def test_an_echo_costs_two_records(pool: PoolUnderTest) -> None:
    async def echo(turn: Turn) -> str:
        return turn.text

    pool.serve(echo)
    before = (await pool.ledger.counts()).commits
    view = await pool.ask("hello")
    assert (await pool.ledger.counts()).commits - before == 2
    assert (view.state, told(view)) == (TaskState.COMPLETED, "hello")


async def test_streamed_text_is_one_artifact_with_a_last_empty_chunk(pool: PoolUnderTest) -> None:
    async def count(turn: Turn) -> AsyncIterator[str]:
        for word in ("one ", "two ", "three"):
            yield word

    pool.serve(count)
    view = await pool.ask()
    steps = await pool.steps(view.task.id)
    text_id = f"{view.task.id}-text-0"
    assert [(c.artifact_id, c.parts, c.name, c.append, c.last_chunk) for c in chunks(steps)] == [
        (text_id, (Text("one "),), "response", False, False),
        (text_id, (Text("two "),), None, True, False),
        (text_id, (Text("three"),), None, True, False),
        (text_id, (Text(""),), None, True, True),
    ]
    assert told(view) == "one two three"
    assert [type(step.what) for step in steps[:2]] == [Began, Started]
    assert [step.generation for step in steps] == [*range(1, len(steps) + 1)]


async def test_words_that_come_one_by_one_are_written_in_order(pool: PoolUnderTest) -> None:
    async def slowly(turn: Turn) -> AsyncIterator[str]:
        for number in range(500):
            yield f"{number} "
            if number % 7 == 0:
                await asyncio.sleep(0)

    pool.serve(slowly)
    view = await pool.ask()
    said = "".join(part.text for chunk in chunks(await pool.steps(view.task.id)) for part in chunk.parts)  # type: ignore[union-attr]
    assert said == told(view) == "".join(f"{number} " for number in range(500))


async def test_what_was_said_is_seen_before_the_agent_ends(pool: PoolUnderTest) -> None:
    go_on = asyncio.Event()

    async def waits(turn: Turn) -> AsyncIterator[str]:
        yield "half"
        await go_on.wait()
        yield " done"

    pool.serve(waits)
    task_id = await pool.send()
    view = await pool.until(task_id, lambda view: bool(view.artifacts))
    assert (view.state, view.artifacts[0].parts) == (TaskState.WORKING, (Text("half"),))
    go_on.set()
    assert told(await pool.ended(task_id)) == "half done"


async def test_files_data_and_status_are_steps_of_their_own(pool: PoolUnderTest) -> None:
    async def produce(turn: Turn) -> AsyncIterator[Any]:
        yield turn.status("reading")
        yield turn.file("a.md", b"# a")
        yield turn.file("b", url="https://host/b.png", media_type="image/png")
        yield turn.data({"n": 1, "list": [True, None]})
        turn.spend(tokens=7)
        turn.spend(tokens=3, calls=1)

    pool.serve(produce)
    view = await pool.ask()
    task_id = view.task.id
    assert statuses(await pool.steps(task_id)) == ["reading"]
    named = {artifact.artifact_id: artifact for artifact in view.artifacts}
    assert [*named] == [f"{task_id}-file-0", f"{task_id}-file-1", f"{task_id}-data-0"]
    first, link, found = (artifact.parts[0] for artifact in view.artifacts)
    assert isinstance(first, Resource)
    assert (first.resource.mimeType, first.resource.blob, first.filename) == ("text/markdown", "IyBh", "a.md")
    assert link == ResourceLink(uri="https://host/b.png", name="b", mimeType="image/png")
    assert found == Json({"n": 1, "list": [True, None]})
    assert view.result is not None
    assert view.result.metadata == {"usage": {"tokens": 10, "calls": 1}}


async def test_a_function_that_says_nothing_completes_its_task(pool: PoolUnderTest) -> None:
    async def silent(turn: Turn) -> None:
        return None

    pool.serve(silent)
    view = await pool.ask()
    assert (view.state, view.message, view.artifacts) == (TaskState.COMPLETED, None, ())


async def test_a_function_may_return_several_things(pool: PoolUnderTest) -> None:
    async def several(turn: Turn) -> list[Any]:
        return ["a word", turn.data([1])]

    pool.serve(several)
    view = await pool.ask()
    assert told(view) == "a word"
    assert len(view.artifacts) == 2


async def test_an_exception_fails_the_task_and_only_the_log_says_why(
    pool: PoolUnderTest, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(turn: Turn) -> AsyncIterator[str]:
        yield "so far"
        raise ValueError("the password is swordfish")

    pool.serve(broken)
    view = await pool.ask()
    assert (view.state, told(view)) == (TaskState.FAILED, "the agent failed")
    assert [artifact.parts for artifact in view.artifacts] == [(Text("so far"),)]
    record = next(record for record in caplog.records if record.message == "agent.failed")
    assert record.task_id == view.task.id  # type: ignore[attr-defined]
    assert "swordfish" in logging.Formatter().formatException(record.exc_info)  # type: ignore[arg-type]


@pytest.mark.parametrize("error", [SystemExit(3), asyncio.CancelledError(), RecursionError()], ids=repr)
async def test_whatever_an_agent_raises_fails_its_task_and_nothing_else(
    pool: PoolUnderTest, error: BaseException
) -> None:
    async def broken(turn: Turn) -> str:
        if turn.text == "break":
            raise error
        return "fine"

    pool.serve(broken)
    assert (await pool.ask("break")).state is TaskState.FAILED
    assert told(await pool.ask("work")) == "fine"


async def test_a_rejection_ends_the_task_as_rejected(pool: PoolUnderTest) -> None:
    async def picky(turn: Turn) -> AsyncIterator[Any]:
        yield turn.reject("not my kind of work")
        yield "never said"

    pool.serve(picky)
    view = await pool.ask()
    assert (view.state, told(view), view.artifacts) == (TaskState.REJECTED, "not my kind of work", ())


async def test_a_reply_is_a_bare_message(pool: PoolUnderTest) -> None:
    async def replies(turn: Turn) -> Any:
        return turn.reply("hi")

    pool.serve(replies)
    view = await pool.ask()
    assert view.result is not None
    assert (view.result.reply, view.result.status, told(view)) == (True, ResultStatus.OK, "hi")


async def test_a_reply_after_streamed_text_is_a_mistake(pool: PoolUnderTest) -> None:
    async def confused(turn: Turn) -> AsyncIterator[Any]:
        yield "text"
        yield turn.reply("hi")

    pool.serve(confused)
    view = await pool.ask()
    assert view.state is TaskState.FAILED
    assert "bare message" in told(view)


@pytest.mark.parametrize("state", [TaskState.INPUT_REQUIRED, TaskState.AUTH_REQUIRED], ids=str)
async def test_an_agent_that_needs_something_is_called_again_with_the_answer(
    pool: PoolUnderTest, state: TaskState
) -> None:
    closed: list[int] = []

    async def asks(turn: Turn) -> AsyncIterator[Any]:
        try:
            if turn.turn == 1:
                yield "well: "
                yield (turn.need_input if state is TaskState.INPUT_REQUIRED else turn.need_auth)("Which language?")
                raise AssertionError("the turn is over")
            said = [(message.role, message.parts) for message in turn.history]
            assert said == [("user", (Text("translate"),)), ("agent", (Text("Which language?"),))]
            yield f"in {turn.text}"
        finally:
            closed.append(turn.turn)

    pool.serve(asks)
    task_id = await pool.send("translate")
    view = await pool.parked(task_id)
    assert (view.state, told(view)) == (state, "Which language?")
    await pool.idle()
    await pool.say(task_id, "French")
    view = await pool.ended(task_id)
    assert (view.state, told(view)) == (TaskState.COMPLETED, "in French")
    assert [artifact.artifact_id for artifact in view.artifacts] == [f"{task_id}-text-0", f"{task_id}-text-1"]
    assert closed == [1, 2]


async def test_a_message_to_a_running_task_is_its_next_turn(pool: PoolUnderTest) -> None:
    go_on = asyncio.Event()

    async def chat(turn: Turn) -> str:
        await go_on.wait()
        return f"{turn.turn}: {turn.text}"

    pool.serve(chat)
    task_id = await pool.send("first")
    await pool.say(task_id, "second")
    go_on.set()
    view = await pool.ended(task_id)
    assert told(view) == "2: second"
    assert [(m.role, m.parts[0].text) for m in view.history] == [  # type: ignore[union-attr]
        ("user", "first"),
        ("user", "second"),
        ("agent", "1: first"),
        ("agent", "2: second"),
    ]


async def test_a_turn_knows_what_it_is_about(pool: PoolUnderTest) -> None:
    seen: list[Turn] = []

    async def looks(turn: Turn) -> None:
        seen.append(turn)

    pool.serve(looks)
    parts = (Text("look at"), Json({"a": 1}), Text("this"))
    fields: dict[str, Any] = {"message_id": "m-1", "context_id": "c-1", "metadata": {"lang": "en"}}
    task_id = await pool.send("look at this", parts=parts, **fields)
    await pool.ended(task_id)
    (turn,) = seen
    assert (turn.task_id, turn.context_id, turn.message_id) == (task_id, "c-1", "m-1")
    assert (turn.text, turn.parts, turn.metadata) == ("look at\nthis", parts, {"lang": "en"})
    assert (turn.turn, turn.attempt, turn.history) == (1, 1, ())


@pytest.mark.parametrize("nonsense", [7, b"bytes", {"a": 1}, object(), Turn, ["x"]], ids=lambda v: type(v).__name__)
async def test_nonsense_fails_the_task_with_a_clear_message(pool: PoolUnderTest, nonsense: object) -> None:
    async def mad(turn: Turn) -> AsyncIterator[Any]:
        yield "sane so far"
        yield nonsense

    pool.serve(mad)
    view = await pool.ask()
    assert view.state is TaskState.FAILED
    assert f"yielded a{'n' if type(nonsense).__name__ in ('int', 'object') else ''} {type(nonsense).__name__}," in told(
        view
    )


@pytest.mark.parametrize(
    "say",
    [
        lambda turn: turn.data(object()),
        lambda turn: turn.data(nested(100)),
        lambda turn: turn.file("x", "not bytes"),
        lambda turn: turn.file("x"),
        lambda turn: "\ud800",
    ],
    ids=["no json", "deep", "text for bytes", "no bytes", "half a character"],
)
async def test_what_cannot_be_written_fails_its_task_alone(pool: PoolUnderTest, say: Any) -> None:
    async def mad(turn: Turn) -> AsyncIterator[Any]:
        yield say(turn) if turn.text == "mad" else "sane"

    pool.serve(mad)
    assert (await pool.ask("mad")).state is TaskState.FAILED
    assert told(await pool.ask("sane")) == "sane"


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


async def test_a_flood_is_stopped_at_the_limit_of_updates(ledger: Ledger) -> None:
    said = 0

    async def flood(turn: Turn) -> AsyncIterator[str]:
        nonlocal said
        while True:
            said += 1
            yield "more "

    async with open_pool(ledger, limits=A2aSettings(turn_updates_max=1_000)) as pool:
        pool.serve(flood)
        view = await pool.ask()
        assert (view.state, told(view)) == (TaskState.FAILED, "the agent's output in one turn exceeds 1000 updates")
        assert said == 1_001
        assert len(chunks(await pool.steps(view.task.id))) == 1_000


async def test_a_flood_is_stopped_at_the_limit_of_bytes(ledger: Ledger) -> None:
    async def flood(turn: Turn) -> AsyncIterator[Any]:
        while True:
            yield turn.file("big.bin", bytes(10_000))

    async with open_pool(ledger, limits=A2aSettings(turn_bytes_max=1_000_000)) as pool:
        pool.serve(flood)
        view = await pool.ask()
        assert (view.state, told(view)) == (TaskState.FAILED, "the agent's output in one turn exceeds 1000000 bytes")


@pytest.mark.parametrize("error", [ValueError, StepError, asyncio.CancelledError])
async def test_an_agent_that_raises_exactly_at_the_limit_of_updates_still_ends_its_task(
    ledger: Ledger, error: type[BaseException]
) -> None:
    async def full(turn: Turn) -> AsyncIterator[str]:
        for _ in range(3):
            yield "more "
        # The chunk that closes the text is one update too many.
        raise error("step_result", "of the agent")

    async with open_pool(ledger, limits=A2aSettings(turn_updates_max=3)) as pool:
        pool.serve(full)
        view = await pool.ask()
        assert (view.state, told(view)) == (TaskState.FAILED, "the agent's output in one turn exceeds 3 updates")


async def test_a_flood_of_artifacts_is_stopped_by_the_ledger(pool: PoolUnderTest) -> None:
    async def flood(turn: Turn) -> AsyncIterator[Any]:
        while True:
            yield turn.data(1)
            await asyncio.sleep(0)

    pool.serve(flood)
    view = await pool.ask()
    assert (view.state, told(view)) == (
        TaskState.FAILED,
        "the agent failed: this attempt has written too many artifacts; append to one of them",
    )
    assert len(endings(await pool.steps(view.task.id))) == 1


def test_an_agent_has_one_function() -> None:
    agent = Agent("plain")
    with pytest.raises(TypeError, match="needs a function"):
        agent("not a function")  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="has no function"):
        FunctionAgent(agent)

    @agent
    async def once(turn: Turn) -> None: ...

    with pytest.raises(TypeError, match="has a function already"):
        agent(once)


async def test_a_task_ends_even_if_what_its_agent_noted_cannot_be_kept(pool: PoolUnderTest) -> None:
    class Notes:
        async def run(self, job: Job) -> None:
            job.notes["usage"] = {"\ud800": 1}
            job.complete(Text("done"))

    pool.serve(Notes())
    view = await pool.ask()
    assert (view.state, told(view)) == (TaskState.FAILED, "the agent failed")
    await pool.idle()


def decorated(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def inner(*args: Any) -> Any:
        return function(*args)

    return inner


async def returns(turn: Turn) -> str:
    return f"{turn.text} on {threading.current_thread().name}"


async def yields(turn: Turn) -> AsyncIterator[str]:
    yield f"{turn.text} on {threading.current_thread().name}"


class Returns:
    async def __call__(self, turn: Turn) -> str:
        return await returns(turn)


class Yields:
    @decorated
    async def __call__(self, turn: Turn) -> AsyncIterator[str]:
        async for said in yields(turn):
            yield said


@pytest.mark.parametrize(
    "function",
    [
        decorated(returns),
        decorated(yields),
        decorated(decorated(returns)),
        functools.partial(decorated(yields)),
        Returns(),
        Yields(),
        functools.partial(Returns()),
        Returns().__call__,
    ],
    ids=["function", "generator", "twice", "partial", "object", "object_generator", "partial_object", "method"],
)
async def test_an_async_function_behind_a_decorator_or_an_object_runs_on_the_loop(
    pool: PoolUnderTest, function: Callable[..., Any]
) -> None:
    pool.serve(function)
    view = await pool.ask("hello")
    assert (view.state, told(view)) == (TaskState.COMPLETED, f"hello on {threading.current_thread().name}")


async def test_a_decorator_that_answers_by_itself_need_not_call_the_async_function(pool: PoolUnderTest) -> None:
    @functools.wraps(returns)
    def cached(turn: Turn) -> str:
        return "from the cache"

    pool.serve(cached)
    assert told(await pool.ask()) == "from the cache"
