"""Models that ask a person: for approval before a tool is used, for what they need to know, for the results of deferred
tools of pydantic-ai. Each answer comes in another lease, and the model is asked nothing twice."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from pydantic_ai import Agent, DeferredToolRequests, RunContext
from pydantic_ai.messages import ModelMessage, ModelRequest, ToolReturnPart
from pydantic_ai.models.function import AgentInfo, DeltaToolCall, DeltaToolCalls, FunctionModel

from covenant.agents.model.pydantic_agent import PydanticAiAgent
from covenant.model.content import Json, Text
from covenant.model.question import APPROVAL, QUESTION
from covenant.model.task_view import TaskState
from tests.agents.agents_under_test import function, open_agents, said
from tests.agents.model.test_model_agent import BOT, Script
from tests.agents.pool_under_test import PoolUnderTest, chunks, told, words


async def test_a_tool_that_needs_approval_is_used_when_a_person_has_approved_it(tmp_path: Path) -> None:
    script = Script([("write", {"path": "a.txt", "content": "x"}), ("mem_show", {})], "written")
    bot = {**BOT, "needs_approval": ["/write"]}
    async with open_agents(tmp_path, bot, models={"": script.model}, tokens_max=100_000) as under_test:
        view = await under_test.ask("bot", "write it")
        assert view.state is TaskState.INPUT_REQUIRED
        assert view.message is not None
        assert view.message.metadata is not None
        asked = view.message.metadata[QUESTION]
        assert (asked["tool"], asked["arguments"]) == ("write", {"path": "a.txt", "content": "x"})
        assert not [each for each in view.artifacts if each.name == "a.txt"]
        view = await under_test.ask("bot", (Json({APPROVAL: {"approved": True}}),), task_id=view.task.id)
        assert (view.state, said(view)) == (TaskState.COMPLETED, "written")
        assert [each.name for each in view.artifacts if each.name == "a.txt"] == ["a.txt"]
        assert len(script.told) == 2, "the model was asked once before the question and once after it"
        assert any("OK: wrote a.txt" in each for each in script.returned)
        assert view.result is not None
        assert isinstance(view.result.metadata, dict)
        assert view.result.metadata["usage"]["requests"] == 2


async def test_a_denial_is_told_to_the_model_with_its_reason(tmp_path: Path) -> None:
    script = Script(("write", {"path": "a.txt", "content": "x"}), "as you like")
    async with open_agents(tmp_path, {**BOT, "needs_approval": ["write"]}, models={"": script.model}) as under_test:
        view = await under_test.ask("bot", "write it")
        view = await under_test.ask("bot", "deny: not on a sunday", task_id=view.task.id)
        assert (view.state, said(view)) == (TaskState.COMPLETED, "as you like")
        assert not [each for each in view.artifacts if each.name == "a.txt"]
        assert script.returned == ["A person denied this. not on a sunday"]
        uses = [part.value for each in view.artifacts for part in each.parts if isinstance(part, Json)]
        assert uses == [{"tool": "write", "ok": False}]


async def test_a_tool_of_pydantic_ai_that_raises_is_told_as_used(pool: PoolUnderTest) -> None:
    async def model(_: list[ModelMessage], __: AgentInfo) -> AsyncIterator[str | DeltaToolCalls]:
        yield {0: DeltaToolCall(name="pay", json_args="{}", tool_call_id="c0")}

    author: Agent[None, str] = Agent(FunctionModel(stream_function=model))

    @author.tool_plain
    def pay() -> str:
        raise RuntimeError("no money")

    pool.serve(PydanticAiAgent(author))
    view = await pool.until(await pool.send("pay"), lambda view: view.state.terminal)
    assert view.state is TaskState.FAILED
    uses = [part.value for each in view.artifacts for part in each.parts if isinstance(part, Json)]
    assert uses == [{"tool": "pay", "ok": False}]


async def test_a_model_asks_its_user_and_goes_on_with_the_answer(tmp_path: Path) -> None:
    script = Script(("ask_user", {"question": "Which city?"}), ("ask_user", {"question": "Which day?"}), "sunny")
    async with open_agents(tmp_path, BOT, models={"": script.model}) as under_test:
        view = await under_test.ask("bot", "weather?")
        assert (view.state, said(view)) == (TaskState.INPUT_REQUIRED, "Which city?")
        view = await under_test.ask("bot", "Paris", task_id=view.task.id)
        assert (view.state, said(view)) == (TaskState.INPUT_REQUIRED, "Which day?")
        view = await under_test.ask("bot", "Monday", task_id=view.task.id)
        assert (view.state, said(view)) == (TaskState.COMPLETED, "sunny")
        assert script.returned == ["Paris", "Monday"]
        assert len(script.told) == 3


async def test_what_a_model_made_before_a_question_is_kept(tmp_path: Path) -> None:
    asks = [("ask_user", {"question": f"{each}?"}) for each in ("Go on", "And on")]
    writes = [("write", {"path": f"{each}.txt", "content": each}) for each in ("one", "two", "three")]
    script = Script(writes[0], asks[0], writes[1], asks[1], writes[2], "written")
    async with open_agents(tmp_path, BOT, models={"": script.model}) as under_test:
        view = await under_test.ask("bot", "write")
        for _ in asks:
            assert view.state is TaskState.INPUT_REQUIRED
            view = await under_test.ask("bot", "yes", task_id=view.task.id)
        assert (view.state, said(view)) == (TaskState.COMPLETED, "written")
        files = [each.name for each in view.artifacts if (each.name or "").endswith(".txt")]
        assert files == ["one.txt", "two.txt", "three.txt"]
        tools = [part.value["tool"] for each in view.artifacts for part in each.parts if isinstance(part, Json)]
        assert tools.count("write") == 3


async def test_what_a_model_said_before_a_question_is_kept(tmp_path: Path) -> None:
    script = Script(
        ["I look. ", ("ask_user", {"question": "Where?"})], ["I see. ", ("ask_user", {"question": "When?"})], "sunny"
    )
    async with open_agents(tmp_path, BOT, models={"": script.model}) as under_test:
        view = await under_test.ask("bot", "weather?")
        for answer in ("Paris", "Monday"):
            assert view.state is TaskState.INPUT_REQUIRED
            view = await under_test.ask("bot", answer, task_id=view.task.id)
        assert (view.state, said(view)) == (TaskState.COMPLETED, "sunny")
        texts = {each.artifact_id: words(each.parts) for each in view.artifacts if each.name == "response"}
        begun = f"{view.task.id}-text-0"
        assert texts == {begun: "I look. ", f"{begun}.1": "I see. ", f"{begun}.2": "sunny"}
        last = [each.artifact_id for each in chunks(await under_test.steps(view)) if each.last_chunk]
        assert last == [begun, f"{begun}.1", f"{begun}.2"], "each is closed"


async def test_a_question_without_words_is_answered_by_an_error(tmp_path: Path) -> None:
    script = Script(("ask_user", {"question": "  "}), "never mind")
    async with open_agents(tmp_path, BOT, models={"": script.model}) as under_test:
        view = await under_test.ask("bot", "go")
        assert (view.state, said(view)) == (TaskState.COMPLETED, "never mind")
        assert "ERR:" in script.returned[0]


async def test_a_function_agent_that_asks_a_model_agent_hears_that_it_asks_for_approval(tmp_path: Path) -> None:
    clerk = Script(("write", {"path": "a.txt", "content": "x"}), "done")
    caller = function("caller", "")
    caller.function = None

    @caller
    async def ask(turn: Any) -> str:
        answer = await turn.call("bot", "write it")
        assert answer.asks_approval
        return str((await turn.answer(answer, "approve")).text)

    bot = {**BOT, "needs_approval": ["write"]}
    async with open_agents(tmp_path, bot, caller, models={"": clerk.model}) as under_test:
        assert said(await under_test.ask("caller", "go")) == "done"


async def test_deferred_tools_of_pydantic_ai_park_the_task(pool: PoolUnderTest) -> None:
    done: list[str] = []

    async def model(messages: list[ModelMessage], info: AgentInfo) -> AsyncIterator[str | DeltaToolCalls]:
        request = messages[-1]
        assert isinstance(request, ModelRequest)
        returned = [part for part in request.parts if isinstance(part, ToolReturnPart)]
        if returned:
            yield " ".join(sorted(str(part.content) for part in returned))
            return
        for place, name in enumerate(("pay", "look", "weigh")):
            yield {place: DeltaToolCall(name=name, json_args=json.dumps({"what": "a chair"}), tool_call_id=f"c{place}")}

    author: Agent[None, str | DeferredToolRequests] = Agent(
        FunctionModel(stream_function=model), output_type=[str, DeferredToolRequests]
    )

    @author.tool_plain(requires_approval=True)
    def pay(what: str) -> str:
        done.append(f"paid {what}")
        return f"paid {what}"

    @author.tool_plain
    def look(what: str) -> str:
        done.append(f"saw {what}")
        return f"saw {what}"

    @author.tool
    def weigh(context: RunContext[None], what: str) -> str:
        from pydantic_ai import CallDeferred  # noqa: PLC0415

        raise CallDeferred

    pool.serve(PydanticAiAgent(author))
    task_id = await pool.send("buy")
    view = await pool.parked(task_id)
    assert view.message is not None
    assert view.message.parts == (Text('May I use pay with {"what":"a chair"}? (approve, or deny: why)'),)
    await pool.say(task_id, "approve")
    view = await pool.until(task_id, lambda view: view.message is not None and "weigh" in told(view))
    await pool.say(task_id, "9 kg")
    assert told(await pool.ended(task_id)) == "9 kg paid a chair saw a chair"
    assert done == ["saw a chair", "paid a chair"], "each was done once"
