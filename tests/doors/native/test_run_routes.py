"""`/v1/orchestrate`: runs of native clients as events, by any agent, the master or one that comes with the request."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from covenant.agents.agent_directory import AgentDirectory
from covenant.agents.api import Agent
from covenant.agents.router import NO_MODEL, IndexAgent
from covenant.exchange.native import INLINE, inline_of
from covenant.model.task import NATIVE, SIMPLE
from tests.doors.simple.simple_under_test import TOKEN, Frame, Patient, SimpleUnderTest, echo, frames_of, open_simple
from tests.ledger_contract.samples import make_task
from tests.waits import BOUND_S

ORDER = ["request_received", "stream_start", "agent_start", "text", "stream_end", "done"]


class NoModel:
    def model(self, definition: Any, *, remembers: bool = True) -> None:
        return None


def with_index(s: SimpleUnderTest) -> None:
    directory = AgentDirectory(s.catalogue, lambda definition: definition.kind != "model")
    s.workers.register(s.catalogue.identity("default", "index"), IndexAgent(NoModel(), directory))


@asynccontextmanager
async def streaming(s: SimpleUnderTest, path: str, body: Any, **headers: str) -> AsyncIterator[httpx2.Response]:
    url = f"http://127.0.0.1:{s.port}{path}"
    sent = {"authorization": f"Bearer {TOKEN}", **headers}
    async with asyncio.timeout(BOUND_S), s.http.stream("POST", url, json=body, headers=sent) as response:
        assert response.status_code == 200, await response.aread()
        assert response.headers["content-type"].startswith("text/event-stream")
        yield response


async def told(s: SimpleUnderTest, path: str, body: Any, **headers: str) -> list[Frame]:
    async with streaming(s, path, body, **headers) as response:
        return [frame async for frame in frames_of(response)]


async def test_a_run_is_told_from_its_first_step_to_its_last(tmp_path: Path) -> None:
    async with open_simple(tmp_path, echo()) as s:
        events = await told(s, "/v1/orchestrate", {"message": "Hello", "agent": "echo"})
        assert [name for _, name, _ in events] == ORDER
        request_id = events[0][2]["request_id"]
        assert all(
            (data["request_id"], data["stream_id"], data["depth"]) == (request_id, 0, 0) for _, _, data in events
        )
        assert (events[-1][2]["ok"], events[-1][2]["content"]) == (True, "echo: Hello")
        # It is the same task under /v1/requests, and its events are the same.
        assert await s.events(request_id) == events
        shown = (await s.ask("GET", f"/v1/requests/{request_id}")).json()["request"]
        assert (shown["origin"], shown["agent_id"], shown["state"]) == ("native", "echo", "completed")


async def test_a_run_for_later_is_told_when_it_has_begun(tmp_path: Path) -> None:
    async with open_simple(tmp_path, echo()) as s:
        for wrong in (-1, 1.5, "soon", True):
            body = {"message": "Hello", "agent": "echo", "not_before_ms": wrong}
            assert (await s.ask("POST", "/v1/orchestrate", json=body)).status_code == 400
        body = {"message": "Hello", "agent": "echo", "not_before_ms": s.ledger.now_ms() + 60_000}
        async with streaming(s, "/v1/orchestrate", body) as response:
            events = aiter(frames_of(response))
            assert (await anext(events))[1] == "request_received"
            assert (await s.later(59_000)).woken == 0
            assert (await s.later(1_000)).woken == 1
            assert [name async for _, name, _ in events][-1] == "done"


async def test_the_master_does_what_is_addressed_to_nobody(tmp_path: Path) -> None:
    weather = Agent("weather", description="Tells the weather forecast", skills=["forecast"])

    @weather
    async def tell(turn: Any) -> str:
        turn.spend(tokens=7)
        return "sunny"

    async with open_simple(tmp_path, weather) as s:
        with_index(s)
        events = await told(s, "/v1/orchestrate", {"message": "What is the forecast?"})
        names = [name for _, name, _ in events]
        assert names == [
            "request_received",
            "stream_start",
            "agent_start",
            "status",
            "tool_call",
            "sub_agent_response",
            "text",
            "stream_end",
            "token_usage",
            "done",
        ]
        by_name = {name: data for _, name, data in events}
        assert "Handing this to weather" in by_name["status"]["text"]
        assert (by_name["tool_call"]["tool"], by_name["tool_call"]["ok"]) == ("agent:weather", True)
        sub = by_name["sub_agent_response"]
        assert (sub["agent"], sub["content"], sub["stream_id"], sub["depth"]) == ("weather", "sunny", 1, 1)
        assert by_name["token_usage"]["tokens"] == 7


async def test_a_failure_is_an_error_and_then_done(tmp_path: Path) -> None:
    broken = Agent("broken")

    @broken
    async def fail(turn: Any) -> None:
        raise RuntimeError("swordfish")

    async with open_simple(tmp_path, broken) as s:
        events = await told(s, "/v1/orchestrate", {"message": "x", "agent": "broken"})
        assert [name for _, name, _ in events][-2:] == ["error", "done"]
        assert (events[-1][2]["ok"], events[-1][2]["error"]) == (False, "the agent failed")
        assert "swordfish" not in str(events)


async def test_parts_reach_the_agent(tmp_path: Path) -> None:
    agent, seen = Agent("looker"), list[Any]()

    @agent
    async def look(turn: Any) -> str:
        seen.extend(turn.parts)
        return "seen"

    parts = [
        {"type": "text", "text": "look"},
        {"type": "image", "data": "aGk=", "mime_type": "image/gif"},
        {"type": "file", "name": "a.txt", "url": "https://example.com/a"},
        {"type": "data", "value": {"a": 1}},
    ]
    async with open_simple(tmp_path, agent) as s:
        events = await told(s, "/v1/orchestrate", {"message": parts, "agent": "looker"})
        assert events[-1][2]["ok"]
        assert [type(part).__name__ for part in seen] == ["Text", "Resource", "ResourceLink", "Json"]
        assert seen[1].resource.blob == "aGk="


async def test_the_same_key_is_the_same_run_and_another_message_under_it_is_refused(tmp_path: Path) -> None:
    async with open_simple(tmp_path, echo()) as s:
        body = {"message": "Hello", "agent": "echo"}
        first = await told(s, "/v1/orchestrate", body, **{"idempotency-key": "k"})
        again = await told(s, "/v1/orchestrate", body, **{"idempotency-key": "k"})
        assert first == again
        other = await s.ask(
            "POST", "/v1/orchestrate", json={**body, "message": "Bye"}, headers={"idempotency-key": "k"}
        )
        assert (other.status_code, other.json()["code"]) == (409, "idempotency_key_reused")
        assert (await s.ask("GET", "/v1/requests")).json()["count"] == 1


async def test_a_client_that_leaves_ends_nothing_and_can_come_back(tmp_path: Path) -> None:
    patient = Patient()
    async with open_simple(tmp_path, patient.agent) as s:
        request_id = ""
        async with streaming(s, "/v1/orchestrate", {"message": "x", "agent": "patient"}) as response:
            async for _, name, data in frames_of(response):
                if name == "text":
                    request_id = data["request_id"]
                    break
        patient.go_on.set()
        events = await s.events(request_id)
        assert events[-1][1] == "done"
        assert events[-1][2]["ok"]


async def test_the_stream_ends_where_the_task_waits(tmp_path: Path) -> None:
    agent = Agent("asker")

    @agent
    async def ask(turn: Any) -> AsyncIterator[Any]:
        yield turn.need_input("Which one?")

    async with open_simple(tmp_path, agent) as s:
        events = await told(s, "/v1/orchestrate", {"message": "x", "agent": "asker"})
        assert events[-1][1] == "input_required"
        assert events[-1][2]["text"] == "Which one?"


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({}, 400, "invalid_request"),
        ({"message": " "}, 400, "invalid_request"),
        ({"message": []}, 400, "invalid_request"),
        ({"message": 5}, 400, "invalid_request"),
        ({"message": [{"type": "video"}]}, 400, "invalid_request"),
        ({"message": [{"type": "image"}]}, 400, "invalid_request"),
        ({"message": [{"type": "image", "data": "%"}]}, 400, "invalid_request"),
        ({"message": [{"type": "data", "value": json.loads("[" * 40 + "]" * 40)}]}, 400, "invalid_request"),
        ({"message": "x", "agnet": "echo"}, 400, "invalid_request"),
        ({"message": "x", "agent": "nobody"}, 404, "unknown_agent"),
        ({"message": "x", "agent_def": {"kind": "process", "command": ["rm"]}}, 400, "invalid_agent"),
        ({"message": "x", "agent_def": {"colour": "red"}}, 400, "invalid_agent"),
    ],
)
async def test_what_is_wrong_is_refused_before_the_stream_opens(
    tmp_path: Path, body: Any, status: int, code: str
) -> None:
    async with open_simple(tmp_path, echo()) as s:
        response = await s.ask("POST", "/v1/orchestrate", json=body)
        assert (response.status_code, response.json()["code"]) == (status, code)
        assert (await s.ask("POST", "/v1/orchestrate", json=body, token=None)).status_code == 401
        assert (await s.ask("GET", "/v1/requests")).json()["count"] == 0


async def test_an_agent_that_comes_with_the_request_is_kept_with_it_and_needs_a_model(tmp_path: Path) -> None:
    async with open_simple(tmp_path) as s:
        with_index(s)
        body = {"message": "x", "agent_def": {"id": "pirate", "role": "pirate"}}
        events = await told(s, "/v1/orchestrate", body)
        assert (events[-1][2]["ok"], events[-1][2]["error"]) == (False, NO_MODEL)


def test_only_a_native_request_can_bring_an_agent() -> None:
    brought = {INLINE: {"id": "pirate"}}
    assert inline_of(make_task(1, origin=NATIVE, request_metadata=brought)) is not None
    for origin in ("a2a", SIMPLE, "mailbox", "delegation"):
        assert inline_of(make_task(1, origin=origin, request_metadata=brought)) is None
    assert inline_of(make_task(1, origin=NATIVE, metadata=brought)) is None
