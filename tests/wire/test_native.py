"""A request's events, from steps: which name each gets, and what it carries."""

import json
from typing import Any

import pytest

from covenant.model.content import Embedded, Image, Json, Resource, ResourceLink, Text
from covenant.model.task import Ending, Result, ResultStatus, error_result
from covenant.model.task_event import (
    ArtifactUpdate,
    Began,
    Continued,
    Ended,
    MessageUpdate,
    Started,
    StatusUpdate,
    Step,
    StepContent,
)
from covenant.wire.native import RequestEvents
from tests.ledger_contract.samples import make_task, task_id

TASK = make_task(1, tenant="acme", context_id="c")
ID = task_id(1)


def all_told(what: StepContent, generation: int = 7) -> list[tuple[str, dict[str, Any]]]:
    """The events of one step. Only the last one has its number."""
    frames = RequestEvents(TASK, 1_000).frame(Step(generation, 1_500, what)).decode().split("\n\n")
    assert frames.pop() == ""
    assert [frame.startswith("id: ") for frame in frames] == [False] * (len(frames) - 1) + [True]
    events = []
    for frame in frames:
        *numbered, named, data = frame.split("\n")
        assert numbered in ([], [f"id: {generation}"])
        carried = json.loads(data.removeprefix("data: "))
        assert (carried.pop("request_id"), carried.pop("ts_ms")) == (ID, 1_500)
        events.append((named.removeprefix("event: "), carried))
    return events


def told(what: StepContent) -> tuple[str, dict[str, Any]]:
    (name, carried), *_ = all_told(what)
    assert (carried.pop("stream_id"), carried.pop("depth")) == ((1, 1) if name == "sub_agent_response" else (0, 0))
    return name, carried


def made(kind: str, *parts: Any, **more: Any) -> ArtifactUpdate:
    return ArtifactUpdate(f"{ID}-{kind}-0", parts, **more)


def named(kind: str, *, append: bool = False, last: bool = False) -> dict[str, Any]:
    return {"artifact_id": f"{ID}-{kind}-0", "append": append, "last": last}


BYTES = Resource(Embedded(uri="", mimeType="text/plain", blob="aGk="), filename="note.txt")
SUB = {"agent": "writer", "depth": 1, "content": "a poem"}


@pytest.mark.parametrize(
    ("what", "event", "carried"),
    [
        (
            Began(TASK),
            "request_received",
            {"agent": "bob", "text": TASK.intent_text, "tenant_id": "acme"},
        ),
        (Started(), "stream_start", {"agent": "bob"}),
        (made("text", Text("a"), Text("b")), "text", {**named("text"), "text": "ab"}),
        (made("text", Text("c"), append=True), "text", {**named("text", append=True), "text": "c"}),
        (made("text", Text(""), append=True, last_chunk=True), "stream_end", named("text", append=True, last=True)),
        (made("text", Text("d"), last_chunk=True), "text", {**named("text", last=True), "text": "d"}),
        (
            made("tool", Json({"tool": "mcp:a.b", "ok": True})),
            "tool_call",
            {**named("tool"), "tool": "mcp:a.b", "ok": True},
        ),
        (made("tool", Json({"tool": 5})), "tool_call", {**named("tool"), "ok": False}),
        (
            made("sub", Json(SUB)),
            "sub_agent_response",
            {**named("sub"), "agent": "writer", "content": "a poem", "value": SUB},
        ),
        (
            made("file", BYTES, name="note.txt"),
            "file",
            {**named("file"), "name": "note.txt", "data": "aGk=", "mime_type": "text/plain"},
        ),
        (
            made("file", ResourceLink("https://example.com/x")),
            "file",
            {**named("file"), "url": "https://example.com/x"},
        ),
        (made("data", Json([1]), name="n"), "artifact", {**named("data"), "name": "n", "value": [1]}),
        (made("tool", Text("odd")), "artifact", {**named("tool"), "text": "odd"}),
        (
            made("plot", Image("AA==", "image/png")),
            "artifact",
            {**named("plot"), "data": "AA==", "mime_type": "image/png"},
        ),
        (made("plot"), "artifact", named("plot")),
        (StatusUpdate("looking"), "status", {"state": "working", "text": "looking"}),
        (StatusUpdate("who?", "input-required"), "input_required", {"state": "input-required", "text": "who?"}),
        (
            StatusUpdate(state="auth-required", parts=(Text("log in"),)),
            "auth_required",
            {"state": "auth-required", "text": "log in"},
        ),
        (MessageUpdate(parts=(Text("by the way"),)), "message", {"role": "agent", "text": "by the way"}),
        (Continued(MessageUpdate(role="user", parts=(Text("more"),))), "message", {"role": "user", "text": "more"}),
    ],
)
def test_each_step_is_an_event_under_its_name(what: StepContent, event: str, carried: dict[str, Any]) -> None:
    assert told(what) == (event, carried)


def test_the_end_says_how_it_went_and_what_it_took() -> None:
    mine = {"stream_id": 0, "depth": 0}
    whose = {"agent": "bob", "tenant_id": "acme", "duration_ms": 500, **mine}
    usage = {"tokens": 3, "input_tokens": 2, "output_tokens": 1}
    result = Result(task_id=ID, status=ResultStatus.OK, content=(Text("done"),), metadata={"usage": usage})
    assert all_told(Ended(Ending.COMPLETED, result)) == [
        ("token_usage", {"agent": "bob", **usage, **mine}),
        ("done", {"ok": True, "state": "completed", "content": "done", "metadata": {"usage": usage}, **usage, **whose}),
    ]
    assert all_told(Ended(Ending.FAILED, error_result(ID, "no"))) == [
        ("error", {"error": "no", "state": "failed", **mine}),
        ("done", {"ok": False, "state": "failed", "content": "", "error": "no", **whose}),
    ]


def test_an_agent_that_begins_and_a_text_that_is_complete_are_told_with_a_second_event() -> None:
    assert [name for name, _ in all_told(Started())] == ["stream_start", "agent_start"]
    assert [name for name, _ in all_told(made("text", Text("d"), last_chunk=True))] == ["text", "stream_end"]
    assert [name for name, _ in all_told(made("text", Text(""), append=True, last_chunk=True))] == ["stream_end"]


def test_what_other_agents_answered_has_a_stream_of_its_own() -> None:
    second = ArtifactUpdate(f"{ID}-sub-1", (Json({"agent": "poet", "depth": 2, "content": "x"}),))
    ((_, carried),) = all_told(second)
    assert (carried["stream_id"], carried["depth"]) == (2, 2)


def test_what_was_received_is_the_first_step() -> None:
    telling = RequestEvents(TASK, 1_500)
    assert telling.received() == telling.frames([Step(1, 1_500, Began(TASK))])
