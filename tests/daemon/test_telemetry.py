"""Spans: a trace is the tree of what was delegated, nothing is paid for what is off, and nothing said is in it."""

import asyncio
import logging
import subprocess
import sys
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from covenant import Agent, Turn
from covenant.daemon.settings import TelemetrySettings
from covenant.daemon.telemetry import Log, OtelTracer, open_tracer, start_logging
from covenant.model.ids import TaskId
from covenant.model.task_event import Began
from covenant.model.tracing import OFF
from tests.doors.a2a.a2a_under_test import A2AOptions, A2AUnderTest, open_a2a
from tests.waits import BOUND_S

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
TRACE_ID = int("0af7651916cd43dd8448eb211c80319c", 16)
CANARY = "canary-7f3a"


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def tracer(exporter: InMemorySpanExporter) -> OtelTracer:
    return OtelTracer(_provider(exporter))


def _provider(exporter: InMemorySpanExporter) -> TracerProvider:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return provider


def echo() -> Agent:
    agent = Agent("echo")

    @agent
    async def say(turn: Turn) -> str:
        turn.spend(input_tokens=3, output_tokens=5)
        return f"{CANARY} {turn.text}"

    return agent


def failing() -> Agent:
    agent = Agent("failing")

    @agent
    async def fail(turn: Turn) -> str:
        raise RuntimeError(CANARY)

    return agent


def boss() -> Agent:
    agent = Agent("boss")

    @agent
    async def delegate(turn: Turn) -> str:
        answer = await turn.call("echo", turn.text)
        return answer.text

    return agent


def message(text: str, **more: Any) -> dict[str, Any]:
    return {"message": {"messageId": "m", "role": "ROLE_USER", "parts": [{"text": text}], **more}}


async def said(s: A2AUnderTest, agent: str, **headers: str) -> dict[str, Any]:
    answer = await s.result(agent, "SendMessage", message(f"{CANARY} hello"), **headers)
    task: dict[str, Any] = answer["task"]
    return task


async def kept_on(s: A2AUnderTest, task_id: str) -> str | None:
    (first,) = await s.ledger.steps(TaskId(task_id), 0, 1)
    assert isinstance(first.what, Began)
    return first.what.task.traceparent


def named(exporter: InMemorySpanExporter, name: str) -> ReadableSpan:
    (found,) = [span for span in exporter.get_finished_spans() if span.name == name]
    return found


def below(child: ReadableSpan, parent: ReadableSpan) -> bool:
    assert child.parent is not None
    assert child.context is not None
    assert parent.context is not None
    return (child.context.trace_id, child.parent.span_id) == (parent.context.trace_id, parent.context.span_id)


async def test_a_task_is_a_span_of_its_accepting_and_one_of_each_attempt_below_it(
    tmp_path: Path, tracer: OtelTracer, exporter: InMemorySpanExporter
) -> None:
    async with open_a2a(tmp_path, echo(), options=A2AOptions(tracer=tracer)) as s:
        task = await said(s, "echo")
        await s.workers.idle()
    accept, attempt = named(exporter, "accept echo"), named(exporter, "invoke_agent echo")
    assert accept.parent is None
    assert accept.kind is SpanKind.SERVER
    assert below(attempt, accept)
    expected = {
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.agent.name": "echo",
        "gen_ai.agent.id": "echo@default",
        "gen_ai.conversation.id": task["contextId"],
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 5,
        "covenant.task.id": task["id"],
        "covenant.tenant": "default",
        "covenant.origin": "a2a",
        "covenant.turn": 1,
        "covenant.attempt": 1,
        "covenant.ending": "completed",
    }
    assert attempt.attributes is not None
    assert {name: attempt.attributes[name] for name in expected} == expected
    assert attempt.status.status_code is StatusCode.UNSET


async def test_a_failure_is_one_in_the_span_and_says_no_more_than_that(
    tmp_path: Path, tracer: OtelTracer, exporter: InMemorySpanExporter
) -> None:
    async with open_a2a(tmp_path, failing(), options=A2AOptions(tracer=tracer)) as s:
        await said(s, "failing")
        await s.workers.idle()
    attempt = named(exporter, "invoke_agent failing")
    assert attempt.status.status_code is StatusCode.ERROR
    assert attempt.attributes is not None
    assert attempt.attributes["error.type"] == "failed"


async def test_nothing_that_was_said_is_in_a_span_unless_the_operator_wants_it(
    tmp_path: Path, tracer: OtelTracer, exporter: InMemorySpanExporter
) -> None:
    async with open_a2a(tmp_path / "1", echo(), failing(), options=A2AOptions(tracer=tracer)) as s:
        await said(s, "echo")
        await said(s, "failing")
        await s.workers.idle()
    assert CANARY not in "".join(span.to_json() for span in exporter.get_finished_spans())
    telling = OtelTracer(_provider(exporter), content=True)
    exporter.clear()
    async with open_a2a(tmp_path / "2", echo(), options=A2AOptions(tracer=telling)) as s:
        await said(s, "echo")
        await s.workers.idle()
    attributes = named(exporter, "invoke_agent echo").attributes
    assert attributes is not None
    assert attributes["gen_ai.input.messages"] == (
        f'[{{"role":"user","parts":[{{"type":"text","content":"{CANARY} hello"}}]}}]'
    )


@pytest.mark.parametrize("way", ["header", "metadata"])
async def test_a_callers_trace_goes_on_here(
    tmp_path: Path, tracer: OtelTracer, exporter: InMemorySpanExporter, way: str
) -> None:
    async with open_a2a(tmp_path, echo(), options=A2AOptions(tracer=tracer)) as s:
        if way == "header":
            await s.result("echo", "SendMessage", message("x"), traceparent=PARENT, tracestate="a=b")
        else:
            await s.result("echo", "SendMessage", message("x", metadata={"traceparent": PARENT, "tracestate": "a=b"}))
        await s.workers.idle()
    accept = named(exporter, "accept echo")
    assert accept.context is not None
    assert accept.parent is not None
    assert (accept.context.trace_id, accept.parent.span_id) == (TRACE_ID, int("b7ad6b7169203331", 16))
    assert accept.context.trace_state.get("a") == "b"


@pytest.mark.parametrize("off", [True, False])
async def test_the_trace_is_kept_on_the_task_and_is_no_part_of_the_request(
    tmp_path: Path, tracer: OtelTracer, off: bool
) -> None:
    other = PARENT.replace("b7ad", "c7ad")
    async with open_a2a(tmp_path, echo(), options=A2AOptions(tracer=OFF if off else tracer)) as s:
        first = await said(s, "echo", idempotency_key="k", traceparent=PARENT)
        again = await said(s, "echo", idempotency_key="k", traceparent=other)
        assert again["id"] == first["id"]
        kept = await kept_on(s, first["id"])
    assert kept is not None
    assert kept.split("-")[1] == PARENT.split("-")[1]
    assert (kept == PARENT) is off


async def test_what_is_no_trace_context_is_not_kept(tmp_path: Path) -> None:
    async with open_a2a(tmp_path, echo()) as s:
        for wrong in ("nonsense", PARENT.upper(), PARENT.replace("0af7651916cd43dd8448eb211c80319c", "0" * 32)):
            task = await said(s, "echo", traceparent=wrong)
            assert await kept_on(s, task["id"]) is None


async def test_what_is_delegated_is_below_the_attempt_that_delegates_it(
    tmp_path: Path, tracer: OtelTracer, exporter: InMemorySpanExporter
) -> None:
    async with open_a2a(tmp_path, boss(), echo(), options=A2AOptions(tracer=tracer)) as s:
        await said(s, "boss")
        await s.workers.idle()
    assert below(named(exporter, "accept echo"), named(exporter, "invoke_agent boss"))
    assert below(named(exporter, "invoke_agent echo"), named(exporter, "accept echo"))
    assert below(named(exporter, "invoke_agent boss"), named(exporter, "accept boss"))


async def test_waiting_for_a_place_is_a_span_of_its_own(
    tmp_path: Path, tracer: OtelTracer, exporter: InMemorySpanExporter
) -> None:
    held, let_go = asyncio.Event(), asyncio.Event()
    agent = Agent("busy", concurrency=1)

    @agent
    async def wait(turn: Turn) -> str:
        held.set()
        await let_go.wait()
        return "done"

    async with open_a2a(tmp_path, agent, options=A2AOptions(tracer=tracer)) as s:
        sending = asyncio.create_task(said(s, "busy"))
        await held.wait()
        asked = {**message("x"), "configuration": {"returnImmediately": True}}
        second = (await s.result("busy", "SendMessage", asked))["task"]
        let_go.set()
        await sending
        assert await s.ledger.finished(second["id"], 20_000)
        await s.workers.idle()
    queue = named(exporter, "queue busy")
    (attempt,) = [
        span
        for span in exporter.get_finished_spans()
        if span.name == "invoke_agent busy" and span.parent == queue.parent
    ]
    assert queue.start_time is not None
    assert queue.end_time is not None
    assert queue.start_time <= queue.end_time
    assert attempt.start_time == queue.end_time


async def test_spans_that_an_agent_begins_itself_are_below_its_attempt(
    tmp_path: Path, exporter: InMemorySpanExporter
) -> None:
    provider = _provider(exporter)
    agent = Agent("curious")

    @agent
    async def look(turn: Turn) -> str:
        with provider.get_tracer("its own").start_as_current_span("looking"):
            return "seen"

    async with open_a2a(tmp_path, agent, options=A2AOptions(tracer=OtelTracer(provider))) as s:
        await said(s, "curious")
        await s.workers.idle()
    assert below(named(exporter, "looking"), named(exporter, "invoke_agent curious"))


def opened(settings: TelemetrySettings, variables: dict[str, str]) -> tuple[bool, str]:
    """Whether spans are on, and what the log says."""
    lines = StringIO()
    start_logging("text", "info", lines)

    async def look() -> bool:
        async with open_tracer(settings, variables, Log()) as tracer:
            return tracer.on

    return asyncio.run(look()), lines.getvalue()


@pytest.fixture(autouse=True)
def _quiet_again() -> Iterator[None]:
    root = logging.getLogger()
    kept = list(root.handlers), root.level, logging.getLogger("covenant").level
    yield
    root.handlers[:] = kept[0]
    root.setLevel(kept[1])
    logging.getLogger("covenant").setLevel(kept[2])


def test_spans_are_off_until_somebody_asks_for_them() -> None:
    asked = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318"}
    off = TelemetrySettings(traces="off")
    assert opened(TelemetrySettings(), {}) == (False, "")
    assert opened(off, asked) == (False, "")
    assert opened(TelemetrySettings(), {**asked, "OTEL_SDK_DISABLED": "true"}) == (False, "")
    assert opened(TelemetrySettings(), {**asked, "OTEL_TRACES_EXPORTER": "none"}) == (False, "")


def test_an_exporter_that_is_not_installed_is_said_and_stops_nothing() -> None:
    on, log = opened(TelemetrySettings(), {"OTEL_TRACES_EXPORTER": "nobody"})
    assert not on
    assert "telemetry.not_installed" in log
    assert "pip install 'covenant-a2a[otel]'" in log


def test_asking_whether_spans_are_on_calls_nothing() -> None:
    """Each message asks four times, so it must stay a plain attribute."""
    calls: list[str] = []
    sys.setprofile(lambda frame, event, _: calls.append(f"{event} {frame.f_code.co_qualname}"))
    on = OFF.on
    sys.setprofile(None)
    assert not on
    assert calls == ["c_call test_asking_whether_spans_are_on_calls_nothing"]


def test_a_daemon_without_spans_imports_nothing_of_them() -> None:
    names = "[name for name in sys.modules if name.split('.')[0] in ('opentelemetry', 'mcp')]"
    look = f"import sys, covenant.daemon.wiring.daemon; print({names})"
    found = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True, timeout=BOUND_S)
    assert found.stdout.strip() == "[]"
