"""Runs of native clients: what they become in the ledger, and what the same key means."""

from covenant.exchange.native import NativeRun, inline_of
from covenant.model.content import Json, Text
from covenant.model.task import NATIVE, Hop
from tests.exchange.services import AGENT, open_services
from tests.ledger_contract.driver import refused

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


async def test_a_single_plain_text_is_the_tasks_text() -> None:
    async with open_services() as services:
        plain = await services.runs.task(services.mine, NativeRun(parts=(Text("hello"),), agent=AGENT), None)
        assert (plain.intent_text, plain.parts, plain.origin, plain.context_id) == ("hello", (), NATIVE, plain.id)
        parts = (Text("hello"), Json({"a": 1}))
        mixed = await services.runs.task(services.mine, NativeRun(parts=parts, agent=AGENT), None)
        assert (mixed.intent_text, mixed.parts) == ("hello", parts)


async def test_the_same_key_is_the_same_task_whichever_trace_it_comes_in() -> None:
    async with open_services() as services:
        run, ids = NativeRun(parts=(Text("hello"),), agent=AGENT), set()
        for hop in (None, Hop(traceparent=TRACE)):
            with await services.runs.start(services.mine, run, "k", hop) as stream:
                ids.add(stream.first.task.id)
        assert len(ids) == 1
        with refused("idempotency_key_reused", 409):
            await services.run("something else", "k")


async def test_a_call_within_a_chain_ends_when_its_caller_says() -> None:
    async with open_services() as services:
        deadline_ms = services.ledger.now_ms() + 60_000
        hop = Hop(depth=2, chain=("somebody",), deadline_ms=deadline_ms)
        with await services.runs.start(services.mine, NativeRun(parts=(Text("hi"),), agent=AGENT), None, hop) as stream:
            task = stream.first.task
        assert (task.depth, task.chain, task.deadline_ms) == (2, ("somebody",), deadline_ms)
        assert task.timeout_ms is not None
        assert 0 < task.timeout_ms <= 60_000


async def test_an_agent_comes_with_a_request_only_if_a_model_plays_it() -> None:
    async with open_services() as services:
        given = {"name": "poet", "goal": "Rhyme."}
        task = await services.runs.task(services.mine, NativeRun(parts=(Text("hi"),), definition=given), None)
        found = inline_of(task)
        assert found is not None
        assert (found.name, found.goal) == ("poet", "Rhyme.")
        with refused("invalid_agent", 400):
            await services.runs.task(services.mine, NativeRun(parts=(Text("hi"),), definition={"kind": "worker"}), None)
