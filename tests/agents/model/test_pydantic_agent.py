"""Agents written with pydantic-ai run unchanged: text streamed, history given, usage told."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.messages import BinaryContent, ModelMessage, ModelRequest, ModelResponse, TextPart, UserPromptPart
from pydantic_ai.models.function import AgentInfo, FunctionModel
from pydantic_ai.models.test import TestModel

from covenant.agents.model.pydantic_agent import PydanticAiAgent
from covenant.exchange.native import HISTORY_CHARACTERS_MAX
from covenant.model.content import Embedded, Json, Resource, Text
from covenant.model.settings import A2aSettings
from covenant.model.task_view import TaskState
from tests.agents.pool_under_test import PoolUnderTest, a_ledger, chunks, open_pool, told
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
