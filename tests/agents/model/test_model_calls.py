"""Calls of models and tools: a span of each by the GenAI conventions, and numbers by agent and model."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from pydantic_ai import Agent as PydanticAgent
from pydantic_ai.models.test import TestModel

from covenant.agents.model.model_agent import ModelAgent
from covenant.agents.model.pydantic_agent import PydanticAiAgent
from covenant.agents.runtime.model_calls import ModelCalls
from covenant.daemon.settings import ModelSettings
from covenant.daemon.telemetry import OtelTracer
from covenant.daemon.wiring.language_models import Models
from covenant.doors.metrics import MODEL_PAIRS_MAX, TOOL_PAIRS_MAX, Meter
from covenant.exchange.a2a_service import A2ARequest
from covenant.ledger.contract.ledger import Counts
from covenant.model.a2a_requests import CancelTask, Message, SendMessage
from covenant.model.agent_definition import read_agent_definition
from covenant.model.content import Text
from covenant.model.errors import Invalid
from covenant.model.model_prices import ModelCall, ModelPrices, ModelTokens, ToolCall, read_model_prices
from covenant.model.task_view import TaskState
from covenant.model.tracing import OFF, Tracer
from tests.agents.agents_under_test import AgentsUnderTest, function, open_agents, said
from tests.agents.openai_server import Drip, Line, OpenAi, openai_server
from tests.waits import until

PRICES = {"currency": "EUR", "models": {"openai:small": {"input": 100, "output": 1000}}}
TestModel.__test__ = False  # its name makes pytest take it for tests


@dataclass
class Watched:
    agents: AgentsUnderTest
    server: OpenAi
    models: Models
    meter: Meter
    exporter: InMemorySpanExporter

    def spans(self, start: str) -> list[ReadableSpan]:
        return [span for span in self.exporter.get_finished_spans() if span.name.startswith(start)]

    def samples(self, name: str) -> list[str]:
        text = self.meter.read(NO_COUNTS, models=True).text().decode()
        return [line for line in text.splitlines() if line.startswith(f"{name}{{")]

    async def spans_end(self, start: str, count: int) -> list[ReadableSpan]:
        await asyncio.to_thread(until, lambda: len(self.spans(start)) >= count)
        return self.spans(start)


NO_COUNTS = Counts(
    queued=0,
    leased=0,
    parked=0,
    following=0,
    settled=0,
    cached=0,
    oldest_lease_age_ms=0,
    holders_lost=0,
    commits=0,
    failure=None,
)


@asynccontextmanager
async def watched(
    home: Path, lines: list[Line], *agents: Any, prices: object = PRICES, traced: bool = True, **settings: Any
) -> AsyncIterator[Watched]:
    exporter, meter = InMemorySpanExporter(), Meter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer: Tracer = OtelTracer(provider) if traced else OFF
    calls = ModelCalls(tracer, meter, read_model_prices(prices))
    async with (
        openai_server(lines) as server,
        open_agents(home, *agents, tracer=tracer, model_calls=calls) as under_test,
    ):
        models = Models(ModelSettings(name="openai:small", base_url=server.url, **settings))
        assert models.default is not None
        under_test.models[""] = models.default
        yield Watched(under_test, server, models, meter, exporter)
        await models.close()


def below(child: ReadableSpan, parent: ReadableSpan) -> bool:
    assert child.parent is not None
    assert parent.context is not None
    return bool(child.parent.span_id == parent.context.span_id)


def has(span: ReadableSpan, expected: dict[str, Any]) -> None:
    assert span.attributes is not None
    assert {name: span.attributes.get(name) for name in expected} == expected


async def test_each_call_of_a_model_and_of_a_tool_is_a_span_below_its_attempt(tmp_path: Path) -> None:
    call = ("agent", {"agent": "poet", "message": "spring"})
    async with watched(tmp_path, [call, "done"], function("poet", "roses")) as s:
        s.agents.add({"id": "bot", "max_tokens": 77})
        assert (await s.agents.ask("bot", "go")).state is TaskState.COMPLETED
        await s.agents.workers.idle()
        (attempt,) = s.spans("invoke_agent bot")
        first, second = s.spans("chat small")
        (tool,) = s.spans("execute_tool agent")
    assert all(below(span, attempt) for span in (first, second, tool))
    assert (first.kind, tool.kind) == (SpanKind.CLIENT, SpanKind.INTERNAL)
    asked = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "openai",
        "gen_ai.request.model": "small",
        "gen_ai.request.max_tokens": 77,
        "gen_ai.response.model": "small",
        "gen_ai.agent.name": "bot",
        "gen_ai.agent.id": "bot@default",
        "gen_ai.usage.input_tokens": 11,
        "gen_ai.usage.output_tokens": 5,
        "covenant.cost": pytest.approx((11 * 100 + 5 * 1000) / 1_000_000),
        "covenant.cost.currency": "EUR",
        "covenant.ending": "completed",
    }
    has(first, {**asked, "gen_ai.response.finish_reasons": ("tool_call",)})
    has(second, {**asked, "gen_ai.response.finish_reasons": ("stop",)})
    has(
        tool,
        {
            "gen_ai.operation.name": "execute_tool",
            "gen_ai.tool.name": "agent",
            "gen_ai.tool.type": "function",
            "gen_ai.agent.name": "bot",
            "covenant.ending": "completed",
            "error.type": None,
        },
    )
    assert {span.status.status_code for span in (first, second, tool, attempt)} == {StatusCode.UNSET}


async def test_a_tool_that_fails_is_an_error_in_its_span_alone(tmp_path: Path) -> None:
    async with watched(tmp_path, [("agent", {"agent": "nobody", "message": "x"}), "sorry"]) as s:
        s.agents.add({"id": "bot"})
        await s.agents.ask("bot", "go")
        await s.agents.workers.idle()
        (tool,), (attempt,) = s.spans("execute_tool agent"), s.spans("invoke_agent bot")
    assert (tool.status.status_code, attempt.status.status_code) == (StatusCode.ERROR, StatusCode.UNSET)
    has(tool, {"error.type": "tool_failed", "covenant.ending": "failed"})
    assert not tool.events
    assert tool.status.description is None


async def test_a_failed_call_and_the_fallback_have_a_span_and_numbers_each(tmp_path: Path) -> None:
    async with watched(tmp_path, [429, 429, 429, "roses"], others=("openai:big",)) as s:
        big = s.models.allowed_model("openai:big")
        assert big is not None
        s.agents.fallbacks.append(big)
        s.agents.add({"id": "bot"})
        view = await s.agents.ask("bot", "go")
        assert said(view) == "roses"
        await s.agents.workers.idle()
        (failed,), (answered,) = s.spans("chat small"), s.spans("chat big")
        has(
            failed, {"error.type": "rate_limited", "covenant.ending": "rate_limited", "gen_ai.usage.input_tokens": None}
        )
        assert failed.status.status_code is StatusCode.ERROR
        assert answered.status.status_code is StatusCode.UNSET
        assert s.samples("covenant_model_requests_total") == [
            'covenant_model_requests_total{agent="bot@default",model="openai:small",outcome="rate_limited"} 1.0',
            'covenant_model_requests_total{agent="bot@default",model="openai:big",outcome="completed"} 1.0',
        ]


async def test_a_canceled_attempt_is_no_error_in_spans_or_numbers(tmp_path: Path) -> None:
    async with watched(tmp_path, [Drip("word", 0.01)]) as s:
        s.agents.add({"id": "bot"})
        agent = s.agents.catalogue.agent("default", "bot")
        assert agent is not None
        request = A2ARequest(caller=s.agents.caller, agent=agent)
        message = Message(message_id="m", parts=(Text("go"),))
        sent = SendMessage(message=message, blocking=False)
        view = await s.agents.conversations.send(request, sent)
        await asyncio.to_thread(until, lambda: s.server.asked)
        await s.agents.conversations.cancel(request, CancelTask(task_id=view.task.id))
        (chat,) = await s.spans_end("chat small", 1)
        (attempt,) = await s.spans_end("invoke_agent bot", 1)
        for span in (chat, attempt):
            has(span, {"covenant.ending": "canceled", "error.type": None})
            assert span.status.status_code is StatusCode.UNSET
        (counted,) = s.samples("covenant_model_requests_total")
        assert (
            counted == 'covenant_model_requests_total{agent="bot@default",model="openai:small",outcome="canceled"} 1.0'
        )


@pytest.mark.parametrize("pause_s", [0.0, 0.01])
async def test_an_answer_that_takes_too_long_is_an_error_at_whatever_moment_its_time_is_over(
    tmp_path: Path, pause_s: float
) -> None:
    async with watched(tmp_path, [Drip("word", pause_s)] * 8) as s:
        s.agents.add({"id": "bot"})
        model = s.models.default
        assert model is not None
        for number in range(8):
            definition = read_agent_definition({"id": "bot"})
            body = ModelAgent(model, definition, s.agents.services, request_s=0.05 + number / 200)
            s.agents.workers.register(s.agents.catalogue.identity("default", "bot"), body)
            view = await s.agents.ask("bot", "go")
            assert (view.state, said(view)) == (TaskState.FAILED, "the model failed: timed_out")
        for chat in await s.spans_end("chat small", 8):
            has(chat, {"error.type": "timed_out", "covenant.ending": "timed_out"})


async def test_numbers_have_tokens_cost_and_time_by_agent_and_model(tmp_path: Path) -> None:
    async with watched(tmp_path, ["one", "two"]) as s:
        for name in ("bot", "other"):
            s.agents.add({"id": name})
            await s.agents.ask(name, "go")
        assert s.samples("covenant_model_tokens_total") == [
            f'covenant_model_tokens_total{{agent="{name}@default",model="openai:small",type="{kind}"}} {count}'
            for name in ("bot", "other")
            for kind, count in (("input", 11.0), ("output", 5.0))
        ]
        costs = s.samples("covenant_model_cost_total")
        assert [line.rpartition(" ")[0] for line in costs] == [
            f'covenant_model_cost_total{{agent="{name}@default",model="openai:small",currency="EUR"}}'
            for name in ("bot", "other")
        ]
        assert [float(line.rpartition(" ")[2]) for line in costs] == [pytest.approx(0.0061)] * 2
        assert len(s.samples("covenant_model_request_seconds_count")) == 2
        hidden = s.meter.read(NO_COUNTS).text()
        assert b"covenant_model" not in hidden


def test_pairs_of_agents_and_models_are_bounded_and_names_escaped() -> None:
    meter = Meter()
    for number in range(MODEL_PAIRS_MAX + 20):
        meter.model_called(ModelCall(f"a{number}", 'm"\n', "completed", 0.2, ModelTokens(1, 1), None, "USD"))
    text = meter.read(NO_COUNTS, models=True).text().decode()
    counted = [line for line in text.splitlines() if line.startswith("covenant_model_requests_total{")]
    assert len(counted) == MODEL_PAIRS_MAX + 1
    assert counted[-1] == 'covenant_model_requests_total{agent="other",model="other",outcome="completed"} 20.0'
    assert r'model="m\"\n"' in counted[0]
    assert "covenant_model_cost_total{" not in text


async def test_the_tools_of_a_pydantic_agent_have_spans_and_its_calls_numbers(tmp_path: Path) -> None:
    agent = PydanticAgent(TestModel(call_tools=["look"]))

    @agent.tool_plain
    def look(where: str) -> str:
        return "nothing"

    async with watched(tmp_path, []) as s:
        s.agents.add({"id": "bot"})
        s.agents.workers.register(s.agents.catalogue.identity("default", "bot"), PydanticAiAgent(agent))
        assert (await s.agents.ask("bot", "go")).state is TaskState.COMPLETED
        assert len(s.spans("chat test")) == 2
        (tool,) = s.spans("execute_tool look")
        assert tool.attributes is not None
        assert tool.attributes["gen_ai.tool.call.id"]
        (counted,) = s.samples("covenant_model_requests_total")
        assert counted == 'covenant_model_requests_total{agent="bot@default",model="test:test",outcome="completed"} 2.0'
        (used,) = s.samples("covenant_tool_calls_total")
        assert used == 'covenant_tool_calls_total{agent="bot@default",tool="look",outcome="completed"} 1.0'


@pytest.mark.parametrize("traced", [True, False])
async def test_uses_of_tools_are_counted_with_and_without_traces(tmp_path: Path, *, traced: bool) -> None:
    lines: list[Line] = [
        ("agent", {"agent": "poet", "message": "spring"}),
        ("agent", {"agent": "nobody", "message": "x"}),
    ]
    agent = PydanticAgent(TestModel(call_tools=["look"]))

    @agent.tool_plain
    def look(where: str) -> str:
        raise OSError(where)

    async with watched(tmp_path, [*lines, "done"], function("poet", "roses"), traced=traced) as s:
        s.agents.add({"id": "bot"})
        assert (await s.agents.ask("bot", "go")).state is TaskState.COMPLETED
        s.agents.add({"id": "other"})
        s.agents.workers.register(s.agents.catalogue.identity("default", "other"), PydanticAiAgent(agent))
        assert (await s.agents.ask("other", "go")).state is TaskState.FAILED
        await s.agents.workers.idle()
        assert s.samples("covenant_tool_calls_total") == [
            'covenant_tool_calls_total{agent="bot@default",tool="agent",outcome="completed"} 1.0',
            'covenant_tool_calls_total{agent="bot@default",tool="agent",outcome="failed"} 1.0',
            'covenant_tool_calls_total{agent="other@default",tool="look",outcome="failed"} 1.0',
        ]
        assert s.samples("covenant_tool_call_seconds_count") == [
            'covenant_tool_call_seconds_count{agent="bot@default",tool="agent"} 2.0',
            'covenant_tool_call_seconds_count{agent="other@default",tool="look"} 1.0',
        ]
        assert b"covenant_tool" not in s.meter.read(NO_COUNTS).text()


async def test_a_deferred_tool_is_asked_for_once_and_counts_when_it_is_used(tmp_path: Path) -> None:
    agent = PydanticAgent(TestModel(call_tools=["pay"]))

    @agent.tool_plain(requires_approval=True)
    def pay(what: str) -> str:
        return f"paid {what}"

    async with watched(tmp_path, []) as s:
        s.agents.add({"id": "bot"})
        s.agents.workers.register(s.agents.catalogue.identity("default", "bot"), PydanticAiAgent(agent))
        view = await s.agents.ask("bot", "buy")
        assert view.state is TaskState.INPUT_REQUIRED
        assert s.samples("covenant_tool_calls_total") == []
        assert s.spans("execute_tool pay") == []
        view = await s.agents.ask("bot", "approve", task_id=view.task.id)
        assert view.state is TaskState.COMPLETED
        (used,) = s.samples("covenant_tool_calls_total")
        assert used == 'covenant_tool_calls_total{agent="bot@default",tool="pay",outcome="completed"} 1.0'
        (counted,) = s.samples("covenant_model_requests_total")
        assert counted.endswith(" 2.0"), "once before the question, and once after it"
        assert view.result is not None
        assert isinstance(view.result.metadata, dict)
        assert view.result.metadata["usage"]["requests"] == 2


def test_pairs_of_agents_and_tools_are_bounded() -> None:
    meter = Meter()
    for number in range(TOOL_PAIRS_MAX + 7):
        meter.tool_called(ToolCall("a", f't{number}"', "completed", 0.2))
    text = meter.read(NO_COUNTS, models=True).text().decode()
    counted = [line for line in text.splitlines() if line.startswith("covenant_tool_calls_total{")]
    assert len(counted) == TOOL_PAIRS_MAX + 1
    assert counted[-1] == 'covenant_tool_calls_total{agent="other",tool="other",outcome="completed"} 7.0'
    assert r'tool="t0\""' in counted[0]


def test_cached_tokens_cost_what_the_list_says() -> None:
    tokens = ModelTokens(input=1_000, output=100, cache_read=600, cache_write=200)
    plain = read_model_prices({"models": {"m": {"input": 10, "output": 20}}})
    assert plain.cost("any:m", tokens) == pytest.approx((1_000 * 10 + 100 * 20) / 1e6)
    cached = read_model_prices({"models": {"any:m": {"input": 10, "output": 20, "cache_read": 1, "cache_write": 12}}})
    assert cached.cost("any:m", tokens) == pytest.approx((200 * 10 + 600 * 1 + 200 * 12 + 100 * 20) / 1e6)
    assert cached.cost("other:m", tokens) is None
    assert ModelPrices().cost("any:m", tokens) is None


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ([], "object"),
        ({"prices": {}}, "unknown key /prices"),
        ({"currency": "euro"}, "/currency"),
        ({"models": {"m": {"input": 1}}}, "output: must be given"),
        ({"models": {"m": {"input": -1, "output": 1}}}, "input"),
        ({"models": {"m": {"input": "1", "output": 1}}}, "input"),
        ({"models": {"m": {"input": 1, "output": 1, "inptu": 1}}}, "inptu"),
    ],
)
def test_a_list_of_prices_that_is_wrong_is_refused_with_its_place(given: object, why: str) -> None:
    with pytest.raises(Invalid, match=why):
        read_model_prices(given)
