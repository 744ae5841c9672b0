"""A request's events, from steps: which name each gets, and what it carries."""

import json
from typing import Any

import pytest

from covenant.model.content import Embedded, Image, Json, Resource, ResourceLink, Text
from covenant.model.result import Ending, Result, ResultStatus, error_result
from covenant.model.step import Began, Continued, Ended, Happening, Started, Step
from covenant.model.update import ArtifactUpdate, MessageUpdate, StatusUpdate
from covenant.testing.cast import make_task, task_id
from covenant.wire.native import Telling

TASK = make_task(1, tenant="acme", context_id="c")
ID = task_id(1)


def told(what: Happening, generation: int = 7) -> tuple[str, dict[str, Any]]:
    frame = Telling(TASK, 1_000).frame(Step(generation, 1_500, what)).decode()
    numbered, named, data, empty, end = frame.split("\n")
    assert (numbered, empty, end) == (f"id: {generation}", "", "")
    carried = json.loads(data.removeprefix("data: "))
    for field, value in {"request_id": ID, "stream_id": 0, "depth": 0, "ts_ms": 1_500}.items():
        assert carried.pop(field) == value
    return named.removeprefix("event: "), carried


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
            {"agent": "bob", "text": TASK.intent_text, "tenant_id": "acme", "conversation_id": "c"},
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
def test_each_step_is_one_event_under_its_name(what: Happening, event: str, carried: dict[str, Any]) -> None:
    assert told(what) == (event, carried)


def test_the_end_says_how_it_went_and_what_it_took() -> None:
    whose = {"agent": "bob", "tenant_id": "acme", "conversation_id": "c", "duration_ms": 500}
    result = Result(task_id=ID, status=ResultStatus.OK, content=(Text("done"),), metadata={"usage": {"tokens": 3}})
    assert told(Ended(Ending.COMPLETED, result)) == (
        "done",
        {"ok": True, "state": "completed", "content": "done", "metadata": {"usage": {"tokens": 3}}, **whose},
    )
    assert told(Ended(Ending.FAILED, error_result(ID, "no"))) == (
        "done",
        {"ok": False, "state": "failed", "content": "", "error": "no", **whose},
    )


def test_what_was_received_is_the_first_step() -> None:
    telling = Telling(TASK, 1_500)
    assert telling.received() == telling.frames([Step(1, 1_500, Began(TASK))])
