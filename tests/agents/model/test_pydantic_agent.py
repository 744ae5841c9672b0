"""Agents written with pydantic-ai run unchanged: text streamed, history given, usage told."""

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
from pydantic import BaseModel
from pydantic_ai import Agent, RunContext
from pydantic_ai.exceptions import ModelHTTPError, ModelTimeoutError, UnexpectedModelBehavior
from pydantic_ai.messages import (
    BinaryContent,
    ModelMessage,
    ModelRequest,
    ModelResponse,
    TextPart,
    ToolReturnPart,
    UserPromptPart,
)
from pydantic_ai.models.function import AgentInfo, DeltaToolCall, DeltaToolCalls, FunctionModel
from pydantic_ai.models.test import TestModel

from covenant import Agent as OurAgent
from covenant import Backoff, Turn
from covenant.agents.agent_loader import CannotLoad, ServedFile, load_agent, load_agents
from covenant.agents.model.pydantic_agent import PydanticAiAgent
from covenant.exchange.native import HISTORY_CHARACTERS_MAX
from covenant.model.content import Embedded, Json, Resource, Text
from covenant.model.peers.delegation import PEER, TERMS
from covenant.model.settings import A2aSettings
from covenant.model.task_view import TaskState
from tests.agents.agents_under_test import open_agents, said
from tests.agents.pool_under_test import PoolUnderTest, a_ledger, chunks, open_pool, told
from tests.agents.runtime.steps_under_test import swept
from tests.agents.runtime.test_turn_limits import spender
from tests.ledger_contract.samples import agent
from tests.waits import BOUND_S

TestModel.__test__ = False  # its name makes pytest take it for tests


async def test_text_is_streamed_as_the_model_says_it_and_usage_told(pool: PoolUnderTest) -> None:
    async def model(messages: list[ModelMessage], info: AgentInfo) -> AsyncIterator[str]:
        for word in ("the ", "answer ", "is 42"):
            yield word
            await asyncio.sleep(0)

    pool.serve(PydanticAiAgent(Agent(FunctionModel(stream_function=model))))
    view = await pool.ask("what is it?")
    assert (view.state, told(view)) == (TaskState.COMPLETED, "the answer is 42")
    said = [chunk.parts[0] for chunk in chunks(await pool.steps(view.task.id))]
    assert said == [Text("the "), Text("answer "), Text("is 42"), Text("")]
    assert view.result is not None
    assert isinstance(view.result.metadata, dict)
    usage = view.result.metadata["usage"]
    assert usage["requests"] == 1
    assert usage["output_tokens"] > 0


async def test_files_and_data_reach_the_model(pool: PoolUnderTest) -> None:
    seen: list[object] = []

    async def model(messages: list[ModelMessage], info: AgentInfo) -> AsyncIterator[str]:
        request = messages[0]
        assert isinstance(request, ModelRequest)
        (prompt,) = (part for part in request.parts if isinstance(part, UserPromptPart))
        seen.extend(prompt.content)
        yield "seen"

    pool.serve(PydanticAiAgent(Agent(FunctionModel(stream_function=model))))
    parts = (Text("look"), Json({"a": 1}), Resource(Embedded(uri="", mimeType="image/png", blob="iVBO"), "a.png"))
    assert told(await pool.ask("look", parts=parts)) == "seen"
    assert seen == ["look", '{"a":1}', BinaryContent(b"\x89PN", media_type="image/png")]


async def test_an_output_that_is_not_text_is_data(pool: PoolUnderTest) -> None:
    class City(BaseModel):
        name: str
        people: int

    model = TestModel(custom_output_args={"name": "Paris", "people": 2})
    pool.serve(PydanticAiAgent(Agent(model, output_type=City)))
    view = await pool.ask()
    assert view.message is not None
    assert view.message.parts == (Json({"name": "Paris", "people": 2}),)
    assert [artifact.artifact_id for artifact in view.artifacts] == [f"{view.task.id}-data-0"]


async def test_a_model_that_fails_fails_the_task(pool: PoolUnderTest) -> None:
    async def model(messages: list[ModelMessage], info: AgentInfo) -> AsyncIterator[str]:
        if messages:
            raise RuntimeError("the password is swordfish")
        yield ""

    pool.serve(PydanticAiAgent(Agent(FunctionModel(stream_function=model))))
    view = await pool.ask()
    assert (view.state, told(view)) == (TaskState.FAILED, "the agent failed")


async def test_a_later_turn_knows_the_earlier_ones(pool: PoolUnderTest) -> None:
    go_on, seen = asyncio.Event(), list[ModelMessage]()

    async def model(messages: list[ModelMessage], info: AgentInfo) -> AsyncIterator[str]:
        await asyncio.wait_for(go_on.wait(), BOUND_S)
        seen[:] = messages
        yield f"heard {len(messages)}"

    pool.serve(PydanticAiAgent(Agent(FunctionModel(stream_function=model))))
    task_id = await pool.send("one")
    await pool.say(task_id, "two")
    go_on.set()
    assert told(await pool.ended(task_id)) == "heard 3"
    first, answer, second = seen
    assert isinstance(first, ModelRequest)
    assert isinstance(answer, ModelResponse)
    assert isinstance(second, ModelRequest)
    assert [part.content for part in first.parts if isinstance(part, UserPromptPart)] == ["one"]
    assert [part.content for part in answer.parts if isinstance(part, TextPart)] == ["heard 1"]
    assert [part.content for part in second.parts if isinstance(part, UserPromptPart)] == ["two"]


async def test_a_cancel_stops_the_run(pool: PoolUnderTest) -> None:
    started, stopped = asyncio.Event(), asyncio.Event()

    async def model(messages: list[ModelMessage], info: AgentInfo) -> AsyncIterator[str]:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            stopped.set()
        yield ""

    pool.serve(PydanticAiAgent(Agent(FunctionModel(stream_function=model))))
    task_id = await pool.send()
    await asyncio.wait_for(started.wait(), BOUND_S)
    await pool.cancel(task_id)
    await pool.idle()
    assert stopped.is_set()


TRIP: Final[dict[str, Any]] = {"tenant": "default", "context_id": "trip"}


def recalling(seen: list[list[str]]) -> PydanticAiAgent:
    """An agent that writes down the texts of the messages that its model is given."""

    async def model(messages: list[ModelMessage], info: AgentInfo) -> AsyncIterator[str]:
        parts = [part for message in messages for part in message.parts]
        seen.append([str(part.content) for part in parts if isinstance(part, UserPromptPart | TextPart)])
        yield f"heard {seen[-1][-1]}"

    return PydanticAiAgent(Agent(FunctionModel(stream_function=model)))


async def test_earlier_tasks_of_the_context_are_its_history(pool: PoolUnderTest) -> None:
    seen: list[list[str]] = []
    pool.serve(recalling(seen))
    for text in ("one", "two"):
        await pool.ask(text, **TRIP)
    await pool.ask("elsewhere", tenant="default", context_id="other")
    await pool.ask("three", **TRIP)
    assert seen == [
        ["one"],
        ["one", "heard one", "two"],
        ["elsewhere"],
        ["one", "heard one", "two", "heard two", "three"],
    ]


async def test_a_context_holds_nothing_of_another_sender(pool: PoolUnderTest) -> None:
    seen: list[list[str]] = []
    pool.serve(recalling(seen))
    await pool.ask("secret", **TRIP)
    await pool.ask("curious", **TRIP, sender=agent("mallory"))
    assert seen == [["secret"], ["curious"]]


async def test_the_history_of_a_context_is_bounded(pool: PoolUnderTest) -> None:
    seen: list[list[str]] = []
    pool.serve(recalling(seen))
    await pool.ask("x" * HISTORY_CHARACTERS_MAX, **TRIP)
    for number in range(3):
        await pool.ask(str(number), **TRIP)
    assert seen[-1] == ["0", "heard 0", "1", "heard 1", "2"]


async def test_the_history_of_a_context_can_be_switched_off(tmp_path: Path) -> None:
    seen: list[list[str]] = []
    async with a_ledger(tmp_path) as ledger, open_pool(ledger, limits=A2aSettings(context_history=False)) as pool:
        pool.serve(recalling(seen))
        for text in ("one", "two"):
            await pool.ask(text, **TRIP)
    assert seen == [["one"], ["two"]]


def shop(model: Any) -> Agent[Any, str]:
    made: Agent[Any, str] = Agent(model, deps_type=dict)

    @made.tool
    def stock(context: RunContext[Any], what: str) -> str:
        return f"{context.deps['stock']} of {what}"

    return made


async def calls_stock(messages: list[ModelMessage], info: AgentInfo) -> AsyncIterator[str | DeltaToolCalls]:
    """Uses the tool, then says what it returned."""
    returned = [part for message in messages for part in message.parts if isinstance(part, ToolReturnPart)]
    if returned:
        yield f"there are {returned[-1].content}"
    else:
        yield {0: DeltaToolCall(name="stock", json_args='{"what": "chairs"}')}


class Stock(dict[str, int]):
    """Dependencies that are made from a turn, and can be called themselves."""

    def __init__(self, turn: Turn) -> None:
        super().__init__(stock=len(turn.text))

    def __call__(self) -> None:
        raise AssertionError("it is what the agent needs")


class Maker:
    def __call__(self, turn: Turn) -> dict[str, int]:
        return {"stock": len(turn.text)}


def made_by(start: int, turn: Turn) -> dict[str, int]:
    return {"stock": start + len(turn.text)}


@pytest.mark.parametrize("made", ["value", "function", "coroutine", "class", "object", "partial", "callable value"])
async def test_an_agent_gets_its_dependencies_and_its_tool_calls_are_artifacts(pool: PoolUnderTest, made: str) -> None:
    async def later(turn: Turn) -> dict[str, int]:
        return {"stock": len(turn.text)}

    called = Stock.__new__(Stock)
    called["stock"] = 5
    deps = {
        "value": {"stock": 5},
        "function": lambda turn: {"stock": len(turn.text)},
        "coroutine": later,
        "class": Stock,
        "object": Maker(),
        "partial": partial(made_by, 0),
        "callable value": called,
    }[made]
    wrapper = OurAgent("shop", wraps=shop(FunctionModel(stream_function=calls_stock)), deps=deps)
    _, body = load_agent(wrapper)
    pool.serve(body)
    view = await pool.ask("how many?" if "value" in made else "five!")
    assert (view.state, told(view)) == (TaskState.COMPLETED, "there are 5 of chairs")
    (tool,) = (artifact for artifact in view.artifacts if artifact.name == "tool_call")
    assert isinstance(tool.parts[0], Json)
    assert tool.parts[0].value == {"tool": "stock", "ok": True}


@pytest.mark.parametrize(
    ("error", "word"),
    [
        (ModelHTTPError(429, "m"), "rate_limited"),
        (ModelHTTPError(401, "m", "the key sk-123"), "auth_failed"),
        (ModelHTTPError(500, "m"), "provider_error"),
        (ModelTimeoutError("m", "too late"), "timed_out"),
        (UnexpectedModelBehavior("odd"), "provider_error"),
    ],
)
async def test_a_failure_of_the_provider_is_told_as_that_of_a_model_agent_is(
    pool: PoolUnderTest, error: Exception, word: str
) -> None:
    async def model(messages: list[ModelMessage], info: AgentInfo) -> AsyncIterator[str]:
        if messages:
            raise error
        yield ""

    pool.serve(PydanticAiAgent(Agent(FunctionModel(stream_function=model))))
    view = await pool.ask()
    assert (view.state, told(view)) == (TaskState.FAILED, f"the model failed: {word}")


async def test_the_budget_of_a_task_bounds_its_tokens_and_each_answer(pool: PoolUnderTest) -> None:
    asked: list[int | None] = []

    async def model(messages: list[ModelMessage], info: AgentInfo) -> AsyncIterator[str | DeltaToolCalls]:
        asked.append((info.model_settings or {}).get("max_tokens"))
        yield {0: DeltaToolCall(name="stock", json_args='{"what": "chairs"}')}

    pool.serve(PydanticAiAgent(shop(FunctionModel(stream_function=model)), {"stock": 5}))
    view = await pool.ended(await pool.send("go", origin=PEER, request_metadata={TERMS: {"budget": 400}}))
    assert view.state is TaskState.FAILED
    assert told(view).startswith(("budget_exceeded: ", "the token budget of this task, 400, is used up"))
    assert asked[0] == 400
    assert [one for one in asked if one is not None] == sorted([one for one in asked if one], reverse=True)
    assert len(asked) > 1
    assert view.result is not None
    assert isinstance(view.result.metadata, dict)
    assert view.result.metadata["usage"]["tokens"] >= 400


def spendthrift(asked: list[int | None]) -> Any:
    """A model that uses its tool again and again. `asked`: how long an answer it may give, each time."""

    async def model(messages: list[ModelMessage], info: AgentInfo) -> AsyncIterator[str | DeltaToolCalls]:
        asked.append((info.model_settings or {}).get("max_tokens"))
        yield {0: DeltaToolCall(name="stock", json_args='{"what": "chairs"}')}

    return FunctionModel(stream_function=model)


async def test_the_operators_limit_bounds_the_tokens_of_a_task_as_it_does_those_of_model_agents(tmp_path: Path) -> None:
    asked: list[int | None] = []
    wrapper = OurAgent("shop", wraps=shop(spendthrift(asked)), deps={"stock": 5})
    async with open_agents(tmp_path, wrapper, tokens_max=300) as under_test:
        view = await under_test.ask("shop", "go")
        assert (view.state, said(view)) == (TaskState.FAILED, "the token budget of this task, 300, is used up")
        assert asked[0] == 300
        lengths = [length for length in asked if length is not None]
        assert len(lengths) == len(asked) > 1
        assert lengths == sorted(lengths, reverse=True)
        assert view.result is not None
        assert isinstance(view.result.metadata, dict)
        assert view.result.metadata["usage"]["tokens"] >= 300


async def test_what_a_tool_delegates_counts_and_nothing_is_asked_once_the_limit_is_reached(tmp_path: Path) -> None:
    requests: list[int] = []

    async def model(messages: list[ModelMessage], info: AgentInfo) -> AsyncIterator[str | DeltaToolCalls]:
        requests.append(len(messages))
        yield {0: DeltaToolCall(name="delegate", json_args="{}")}

    boss: Agent[Turn, str] = Agent(FunctionModel(stream_function=model), deps_type=Turn)

    @boss.tool
    async def delegate(context: RunContext[Turn]) -> str:
        return (await context.deps.call("costly", "go")).text

    wrapper = OurAgent("boss", wraps=boss, deps=lambda turn: turn)
    async with open_agents(tmp_path, wrapper, spender("costly", tokens=5_000), tokens_max=2_000) as under_test:
        view = await under_test.ask("boss", "go")
        assert (view.state, said(view)) == (TaskState.FAILED, "the token budget of this task, 2000, is used up")
        assert requests == [1], "the model was asked although nothing was left"


@pytest.mark.parametrize("error", [ModelHTTPError(503, "m"), OSError("the stock is away")])
@pytest.mark.parametrize("failures", [2, 3])
async def test_an_agent_is_begun_again_after_the_failures_that_its_author_names(
    pool: PoolUnderTest, error: Exception, failures: int
) -> None:
    attempts = list[int]()

    async def model(messages: list[ModelMessage], info: AgentInfo) -> AsyncIterator[str | DeltaToolCalls]:
        if isinstance(error, ModelHTTPError) and len(attempts) <= failures:
            raise error
        async for each in calls_stock(messages, info):
            yield each

    author: Agent[Turn, str] = Agent(FunctionModel(stream_function=model), deps_type=Turn)

    @author.tool
    def stock(context: RunContext[Turn], what: str) -> str:
        if len(attempts) <= failures:
            raise error
        return f"5 {what}"

    def begin(turn: Turn) -> Turn:
        attempts.append(turn.attempt)
        return turn

    pauses = Backoff(0.01, 0.01)
    wrapper = OurAgent("shop", wraps=author, deps=begin, idempotent=True, retry_on=(type(error),), backoff=pauses)
    _, body = load_agent(wrapper)
    pool.serve(body)
    view = await swept(pool, await pool.send("how many?"))
    assert attempts == [1, 2, 3]
    if failures == 2:
        assert (view.state, told(view)) == (TaskState.COMPLETED, "there are 5 chairs")
    else:
        word = "the model failed: provider_error" if isinstance(error, ModelHTTPError) else "the agent failed"
        assert (view.state, told(view)) == (TaskState.FAILED, word)
    if isinstance(error, OSError):
        assert view.result is not None
        assert isinstance(view.result.metadata, dict)
        assert view.result.metadata["usage"]["requests"] == (4 if failures == 2 else 3), "failed attempts count"


async def test_a_used_up_budget_is_no_reason_for_a_further_attempt(tmp_path: Path) -> None:
    asked: list[int | None] = []
    wrapper = OurAgent(
        "shop", wraps=shop(spendthrift(asked)), deps={"stock": 5}, idempotent=True, retry_on=(Exception,)
    )
    async with open_agents(tmp_path, wrapper, tokens_max=100) as under_test:
        view = await under_test.ask("shop", "go")
        assert (view.state, said(view)) == (TaskState.FAILED, "the token budget of this task, 100, is used up")
        shown = await under_test.ledger.show(view.task.id, None, 10)
        assert shown is not None
        assert [lease.attempt for lease in shown.leases] == [1]


def test_an_agent_with_dependencies_is_not_served_without_them(tmp_path: Path) -> None:
    (tmp_path / "shops.py").write_text(
        "from pydantic_ai import Agent\nfrom pydantic_ai.models.test import TestModel\n"
        "shop = Agent(TestModel(), deps_type=dict)\n"
    )
    with pytest.raises(CannotLoad, match=r"wraps=shop, deps=…"):
        load_agents([ServedFile(tmp_path / "shops.py")])
    with (tmp_path / "shops.py").open("a") as file:
        file.write("import covenant\nserved = covenant.Agent('store', wraps=shop, deps={})\n")
    assert [each.definition.id for each in load_agents([ServedFile(tmp_path / "shops.py")])] == ["store"]


def test_what_an_agent_cannot_wrap_is_told_to_its_author() -> None:
    with pytest.raises(ValueError, match="deps need wraps"):
        OurAgent("a", deps=1)
    with pytest.raises(ValueError, match="cannot have isolate"):
        OurAgent("a", wraps=Agent(TestModel()), isolate=True)
    with pytest.raises(TypeError, match="no agent of pydantic-ai"):
        load_agent(OurAgent("a", wraps="a string"))
    with pytest.raises(TypeError, match="wraps an agent of pydantic-ai"):
        OurAgent("a", wraps=Agent(TestModel()))(lambda turn: "x")
