"""What tasks use: counted in every form, against every limit, and kept however a turn ends."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from pydantic_ai.messages import ModelMessage
from pydantic_ai.models import Model
from pydantic_ai.models.function import AgentInfo, DeltaToolCall, DeltaToolCalls, FunctionModel

from covenant.agents.api import Agent, SyncTurn, Turn
from covenant.agents.runtime.function_threads import AgentThreads, ThreadChannel
from covenant.agents.runtime.turn_limits import HeldTokens, TokenBudget
from covenant.exchange.a2a_service import A2ARequest
from covenant.exchange.tasks.reader import read_tree
from covenant.ledger.clock import uuid_source
from covenant.ledger.contract.tasks import TreeNode
from covenant.ledger.machine.commands import Sweep
from covenant.model.a2a_requests import CancelTask, Message, SendMessage
from covenant.model.agent_definition import read_agent_definition
from covenant.model.content import Text
from covenant.model.errors import Conflict, OverLimit, WrongType
from covenant.model.ids import TaskId
from covenant.model.peers.delegation import PEER, TERMS
from covenant.model.task import Result
from covenant.model.task_view import TaskState, TaskView
from covenant.model.tenants import DEFAULT
from covenant.model.usage import usage_in
from tests.agents.agents_under_test import AgentsUnderTest, open_agents, said
from tests.agents.model.test_model_agent import Script
from tests.agents.pool_under_test import HOUR_MS, PoolUnderTest, a_ledger, open_pool, time_out
from tests.waits import BOUND_S


def spender(name: str, **amounts: float) -> Agent:
    agent = Agent(name)

    @agent
    async def spend(turn: Turn) -> str:
        turn.spend(**amounts)
        return "done"

    return agent


def used(result: Result | None) -> dict[str, float]:
    assert result is not None
    return usage_in(result.metadata)


async def tree_of(under_test: AgentsUnderTest, view: TaskView) -> TreeNode:
    return await read_tree(under_test.ledger, view.task.id, None)


async def begin(under_test: AgentsUnderTest, agent_id: str) -> tuple[A2ARequest, TaskView]:
    agent = under_test.catalogue.agent(DEFAULT, agent_id)
    assert agent is not None
    ask = A2ARequest(caller=under_test.caller, agent=agent)
    message = Message(message_id=uuid_source()(), parts=(Text("go"),))
    return ask, await under_test.conversations.send(ask, SendMessage(message=message, blocking=False))


@pytest.mark.parametrize(
    "amounts",
    [
        {"input_tokens": 400_001, "output_tokens": 400_001},
        {"prompt_tokens": 400_001, "completion_tokens": 400_001},
        {"total_tokens": 800_002},
        {"tokens": 1, "input_tokens": 800_001},
        {"tokens": -1, "input_tokens": 800_002},
    ],
    ids=["ours", "OpenAI's", "a total", "a total that is too small", "a negative total"],
)
async def test_what_a_sub_agent_reports_counts_in_whatever_form(tmp_path: Path, amounts: dict[str, float]) -> None:
    script = Script(("agent", {"agent": "costly", "message": "go"}), "all done")
    models: dict[str, Model] = {"bot": script.model}
    async with open_agents(tmp_path, spender("costly", **amounts), models=models, tokens_max=200_000) as under_test:
        under_test.add({"id": "bot"})
        view = await under_test.ask("bot", "go")
        assert view.state is TaskState.FAILED
        assert said(view) == "the token budget of this task, 200000, is used up"
        assert used(view.result)["tokens"] > 800_000
        tree = await tree_of(under_test, view)
        assert isinstance(tree.usage_total, dict)
        child = tree.children[0]
        assert isinstance(child.usage_total, dict)
        assert child.usage_total["tokens"] >= 800_001
        own = tree.usage["tokens"] if isinstance(tree.usage, dict) else 0
        assert tree.usage_total["tokens"] == own + child.usage_total["tokens"]


async def test_sums_of_a_tree_are_right_where_its_tasks_report_in_different_forms(tmp_path: Path) -> None:
    asks = Agent("asks")

    @asks
    async def ask(turn: Turn) -> str:
        turn.spend(tokens=10)
        await turn.call_all([("one", "x"), ("two", "x"), ("three", "x"), ("silent", "x")])
        return "done"

    others = (
        spender("one", input_tokens=100, output_tokens=1),
        spender("two", total_tokens=1_000),
        spender("three", tokens=10_000),
        spender("silent"),
    )
    async with open_agents(tmp_path, asks, *others) as under_test:
        view = await under_test.ask("asks", "go")
        assert used(view.result)["tokens"] == 11_111
        tree = await tree_of(under_test, view)
        assert isinstance(tree.usage_total, dict)
        assert tree.usage == {"tokens": 10}
        assert tree.usage_total["tokens"] == 11_111
        assert sorted((child.usage or {}).get("tokens", 0) for child in tree.children) == [0, 101, 1_000, 10_000]


def halting(begun: asyncio.Event) -> FunctionModel:
    """A model that calls a tool in its first answer, and in its second comes to no end."""
    asked: list[int] = []

    async def speak(_: list[ModelMessage], __: AgentInfo) -> AsyncIterator[str | DeltaToolCalls]:
        asked.append(1)
        if len(asked) == 1:
            yield {0: DeltaToolCall(name="mem_show", json_args="{}", tool_call_id="c0")}
            return
        begun.set()
        await asyncio.Event().wait()
        yield ""

    return FunctionModel(stream_function=speak)


@pytest.mark.parametrize("how", ["canceled", "timed out"])
async def test_what_a_turn_had_used_is_kept_when_somebody_else_ends_it(tmp_path: Path, how: str) -> None:
    begun = asyncio.Event()
    async with open_agents(tmp_path, models={"bot": halting(begun)}) as under_test:
        under_test.add({"id": "bot"})
        if how == "canceled":
            ask, view = await begin(under_test, "bot")
            await asyncio.wait_for(begun.wait(), BOUND_S)
            ended = await under_test.conversations.cancel(ask, CancelTask(task_id=view.task.id))
        else:
            body = under_test.model(read_agent_definition({"id": "bot"}))
            assert body is not None
            under_test.workers.register(under_test.catalogue.identity(DEFAULT, "bot"), body, timeout_ms=HOUR_MS)
            asking = asyncio.create_task(under_test.ask("bot", "go"))
            await asyncio.wait_for(begun.wait(), BOUND_S)
            time_out(under_test.workers)
            ended = await asking
            assert said(ended) == "Task timed out"
        assert ended.state is (TaskState.CANCELED if how == "canceled" else TaskState.FAILED)
        tokens = used(ended.result)["tokens"]
        assert tokens > 0
        tree = await tree_of(under_test, ended)
        assert isinstance(tree.usage_total, dict)
        assert tree.usage_total["tokens"] == tokens


@pytest.mark.parametrize("how", ["canceled", "timed out"])
async def test_what_a_model_had_told_while_it_streams_is_kept(tmp_path: Path, how: str) -> None:
    """The provider reports in its first chunk, comes to no end, and is slow to let go of its connection."""
    begun, released = asyncio.Event(), asyncio.Event()

    async def speak(_: list[ModelMessage], __: AgentInfo) -> AsyncIterator[str]:
        yield "some words of an answer "
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            await released.wait()

    async with open_agents(tmp_path, models={"bot": FunctionModel(stream_function=speak)}) as under_test:
        under_test.add({"id": "bot"})
        if how == "canceled":
            ask, view = await begin(under_test, "bot")
            await asyncio.wait_for(begun.wait(), BOUND_S)
            ended = await under_test.conversations.cancel(ask, CancelTask(task_id=view.task.id))
        else:
            body = under_test.model(read_agent_definition({"id": "bot"}))
            assert body is not None
            under_test.workers.register(under_test.catalogue.identity(DEFAULT, "bot"), body, timeout_ms=HOUR_MS)
            asking = asyncio.create_task(under_test.ask("bot", "go"))
            await asyncio.wait_for(begun.wait(), BOUND_S)
            time_out(under_test.workers)
            ended = await asking
            assert said(ended) == "Task timed out"
        released.set()
        assert used(ended.result)["output_tokens"] > 0


async def test_what_a_turn_had_used_is_kept_when_its_tasks_own_time_is_over() -> None:
    async with a_ledger(None) as ledger, open_pool(ledger, stop_s=0.1) as pool:
        begun = asyncio.Event()

        async def endless(turn: Turn) -> None:
            turn.spend(input_tokens=3, output_tokens=5)
            begun.set()
            await asyncio.Event().wait()

        pool.serve(endless)
        task_id = await pool.send(timeout_ms=1)
        await asyncio.wait_for(begun.wait(), BOUND_S)
        async with asyncio.timeout(BOUND_S):
            while not (await ledger.commit(Sweep())).timed_out:  # noqa: ASYNC110  (time must pass)
                await asyncio.sleep(0.005)
        view = await pool.ended(task_id)
        assert view.state is TaskState.FAILED
        assert used(view.result) == {"input_tokens": 3, "output_tokens": 5, "tokens": 8}


async def test_a_call_that_its_author_gives_up_is_charged_for_what_it_used(tmp_path: Path) -> None:
    asks, endless, begun = Agent("asks"), Agent("endless"), asyncio.Event()

    @endless
    async def wait(turn: Turn) -> None:
        turn.spend(tokens=70)
        begun.set()
        await asyncio.Event().wait()

    @asks
    async def ask(turn: Turn) -> str:
        calling = asyncio.ensure_future(turn.call("endless", "x"))
        await begun.wait()
        calling.cancel()
        await asyncio.wait((calling,))
        turn.spend(tokens=1)
        return "done"

    async with open_agents(tmp_path, asks, endless) as under_test:
        view = await under_test.ask("asks", "go")
        assert used(view.result) == {"tokens": 71}
        tree = await tree_of(under_test, view)
        assert isinstance(tree.usage_total, dict)
        assert (tree.usage, tree.usage_total) == ({"tokens": 1}, {"tokens": 71})


async def test_what_earlier_turns_used_counts_on(pool: PoolUnderTest) -> None:
    async def asks(turn: Turn) -> AsyncIterator[Any]:
        turn.spend(input_tokens=10)
        if turn.turn < 3:
            yield turn.need_input("more?")
        yield "done"

    pool.serve(asks)
    task_id = await pool.send()
    for _ in range(2):
        await pool.parked(task_id)
        await pool.say(task_id, "more")
    view = await pool.ended(task_id)
    assert used(view.result) == {"input_tokens": 30, "tokens": 30}


async def test_a_key_that_is_called_again_in_a_later_turn_is_charged_once(tmp_path: Path) -> None:
    asks = Agent("asks")

    @asks
    async def ask(turn: Turn) -> AsyncIterator[Any]:
        await turn.call("costly", "x", key="once")
        if turn.turn == 1:
            yield turn.need_input("more?")
        yield "done"

    async with open_agents(tmp_path, asks, spender("costly", tokens=70)) as under_test:
        parked = await under_test.ask("asks", "go")
        view = await under_test.ask("asks", "more", task_id=parked.task.id)
        assert used(view.result) == {"tokens": 70}
        tree = await tree_of(under_test, view)
        assert tree.usage_total == {"tokens": 70}


BOUNDED: dict[str, Any] = {"origin": PEER, "request_metadata": {TERMS: {"budget": 100}}}


@pytest.mark.parametrize("plain", [False, True], ids=["async", "thread"])
async def test_tokens_are_set_aside_before_they_are_used_and_come_back_when_they_are_not(
    pool: PoolUnderTest, *, plain: bool
) -> None:
    left: list[int | None] = []

    def careful(turn: Turn | SyncTurn) -> str:
        left.append(turn.tokens_left)
        with turn.reserve(60):
            left.append(turn.tokens_left)
            with pytest.raises(OverLimit, match="budget_exceeded: 40 of 100 tokens are left, but 41 are needed"):
                turn.reserve(41).__enter__()
            turn.spend(tokens=50)
            left.append(turn.tokens_left)
        left.append(turn.tokens_left)
        with pytest.raises(OverLimit), turn.reserve(51):
            pytest.fail("it was refused")
        return "stopped in time"

    async def careful_on_the_loop(turn: Turn) -> str:
        return careful(turn)

    pool.serve(careful if plain else careful_on_the_loop)
    view = await pool.ask(**BOUNDED)
    assert (view.state, said(view), used(view.result)) == (TaskState.COMPLETED, "stopped in time", {"tokens": 50})
    assert left == [100, 40, 40, 50]


@pytest.mark.parametrize("plain", [False, True], ids=["async", "thread"])
async def test_a_spend_beyond_the_budget_is_refused_at_once_and_what_was_used_is_told(
    pool: PoolUnderTest, *, plain: bool
) -> None:
    went_on: list[str] = []

    def careless(turn: Turn | SyncTurn) -> str:
        turn.spend(tokens=90)
        with suppress(Conflict):  # it is no other refusal
            turn.spend(tokens=20)
        went_on.append("after it")
        return "done"

    async def careless_on_the_loop(turn: Turn) -> str:
        return careless(turn)

    pool.serve(careless if plain else careless_on_the_loop)
    view = await pool.ask(**BOUNDED)
    assert view.state is TaskState.FAILED
    assert "110 tokens were used of a budget of 100" in said(view)
    assert (used(view.result), went_on) == ({"tokens": 110}, [])


async def test_the_budget_is_the_tasks_and_not_a_turns(pool: PoolUnderTest) -> None:
    left: list[int | None] = []

    async def asks(turn: Turn) -> AsyncIterator[Any]:
        left.append(turn.tokens_left)
        with turn.reserve(10):
            turn.spend(tokens=40)
        yield turn.need_input("more?")

    pool.serve(asks)
    task_id = await pool.send(**BOUNDED)
    for _ in range(2):
        await pool.parked(task_id)
        await pool.say(task_id, "more")
    view = await pool.ended(task_id)
    assert "120 tokens were used of a budget of 100" in said(view)
    assert (left, used(view.result)) == ([100, 60, 20], {"tokens": 120})


async def test_a_spend_is_refused_each_time_once_the_budget_is_used_up(pool: PoolUnderTest) -> None:
    refused: list[str] = []

    async def careless(turn: Turn) -> str:
        for tokens in (110, 20, 0):
            try:
                turn.spend(tokens=tokens, calls=1)
            except OverLimit as over:
                refused.append(over.message)
        return "done"

    pool.serve(careless)
    view = await pool.ask(**BOUNDED)
    assert view.state is TaskState.FAILED
    assert [each.split()[1] for each in refused] == ["110", "130", "130"]
    assert used(view.result) == {"tokens": 130, "calls": 3}


@pytest.mark.parametrize("wanted", [-5, True, 1.5, float("nan"), 2**70, "5"], ids=str)
@pytest.mark.parametrize("plain", [False, True], ids=["async", "thread"])
async def test_only_a_whole_number_of_tokens_is_set_aside(pool: PoolUnderTest, wanted: Any, *, plain: bool) -> None:
    left: list[int | None] = []

    def greedy(turn: Turn | SyncTurn) -> str:
        with pytest.raises(WrongType), turn.reserve(wanted):
            pytest.fail("it was refused")
        left.append(turn.tokens_left)
        return "done"

    async def greedy_on_the_loop(turn: Turn) -> str:
        return greedy(turn)

    pool.serve(greedy if plain else greedy_on_the_loop)
    assert (await pool.ask(**BOUNDED)).state is TaskState.COMPLETED
    assert left == [100]


async def test_a_turn_does_not_wait_for_tokens_that_it_holds_itself() -> None:
    budget = TokenBudget(100)

    async def call() -> None:
        with pytest.raises(OverLimit, match="0 of 100 tokens are left for 1 more calls"):
            await asyncio.wait_for(budget.reserve((TaskId("a"),)), BOUND_S)

    def hold(line: ThreadChannel) -> None:
        with HeldTokens(budget, 100, line.ask):
            line.ask(call)

    with HeldTokens(budget, 100, None):
        await call()
        await asyncio.gather(call(), call())
    await AgentThreads(1).run(hold, lambda _: None, "plain")
    assert await budget.reserve((TaskId("a"),)) == 100, "all of it came back"


async def test_a_call_waits_for_what_another_part_of_its_turn_has_set_aside() -> None:
    budget, entered, leave = TokenBudget(100), asyncio.Event(), asyncio.Event()

    async def hold() -> None:
        with HeldTokens(budget, 100, None):
            entered.set()
            await leave.wait()

    holding = asyncio.create_task(hold())
    await entered.wait()
    calling = asyncio.create_task(budget.reserve((TaskId("a"),)))
    await asyncio.sleep(0)
    assert not calling.done()
    leave.set()
    assert await asyncio.wait_for(calling, BOUND_S) == 100
    await holding


async def test_a_call_gets_nothing_of_what_its_caller_has_set_aside() -> None:
    notes: dict[str, Any] = {}
    budget = TokenBudget(100)
    with HeldTokens(budget, 70, None):
        assert await budget.reserve((TaskId("a"), TaskId("b"))) == 15
        budget.spend({"tokens": 20}, notes)
        assert (budget.left, budget.spent) == (0, 20)
        waiting = asyncio.ensure_future(budget.reserve((TaskId("c"),)))
        await asyncio.sleep(0)
        assert not waiting.done(), "what is set aside may come back"
    assert await asyncio.wait_for(waiting, BOUND_S) == 50
    assert budget.left == 0
