"""`/v1/requests`: a tenant's tasks by id, their events from any number on, and an end to them."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from covenant.agents.api import Agent
from tests.doors.simple.simple_under_test import Patient, echo, open_simple
from tests.waits import BOUND_S

UNKNOWN = "00000000-0000-4000-8000-000000000000"


async def test_requests_are_listed_the_newest_first_and_shown_one_by_one(tmp_path: Path) -> None:
    async with open_simple(tmp_path, echo()) as s:
        first = (await s.sent("one"))["id"]
        await s.ended(first)
        s.clock.advance(1_000)
        second = (await s.sent("two"))["id"]
        await s.ended(second)
        listed = (await s.ask("GET", "/v1/requests")).json()
        assert listed["count"] == 2
        assert [each["request_id"] for each in listed["requests"]] == [second, first]
        shown = (await s.ask("GET", f"/v1/requests/{first}")).json()
        assert shown == {"request": listed["requests"][1]}
        assert shown["request"] == {
            "request_id": first,
            "tenant_id": "default",
            "agent_id": "echo",
            "conversation_id": None,
            "origin": "simple",
            "state": "completed",
            "a2a_state": "completed",
            "started_at_ms": 1_700_000_000_000,
            "updated_at_ms": 1_700_000_000_000,
            "completed_at_ms": 1_700_000_000_000,
            "error_message": None,
            "last_seq": shown["request"]["last_seq"],
        }
        assert (await s.ask("GET", "/v1/requests?limit=1")).json()["count"] == 1


@pytest.mark.parametrize("limit", ["0", "201", "-1", "many"])
async def test_a_limit_out_of_bounds_is_refused(tmp_path: Path, limit: str) -> None:
    async with open_simple(tmp_path) as s:
        response = await s.ask("GET", f"/v1/requests?limit={limit}")
        assert (response.status_code, response.json()["code"]) == (400, "invalid_request")


async def test_what_is_another_tenants_is_not_there(tmp_path: Path) -> None:
    async with open_simple(tmp_path, echo()) as s:
        stranger, task = await s.tenant("stranger"), (await s.sent())["id"]
        await s.ended(task)
        assert (await s.ask("GET", "/v1/requests", token=stranger)).json() == {"count": 0, "requests": []}
        for path in (f"/v1/requests/{task}", f"/v1/requests/{task}/events"):
            foreign = await s.ask("GET", path, token=stranger)
            unknown = await s.ask("GET", path.replace(task, UNKNOWN))
            malformed = await s.ask("GET", path.replace(task, "x"))
            assert {(each.status_code, each.text) for each in (foreign, unknown, malformed)} == {
                (404, '{"error":"request not found","code":"unknown_request"}')
            }
            assert (await s.ask("GET", path, token=None)).status_code == 401


async def test_events_are_told_from_the_beginning_by_name_each_once_and_numbered(tmp_path: Path) -> None:
    async with open_simple(tmp_path, echo()) as s:
        task = (await s.sent("Hello"))["id"]
        await s.ended(task)
        events = await s.events(task)
        assert [(number, name) for number, name, _ in events] == [
            (1, "request_received"),
            (2, "stream_start"),
            (2, "agent_start"),
            (3, "text"),
            (3, "stream_end"),
            (4, "done"),
        ]
        received, started, _, text, _, done = (data for _, _, data in events)
        assert (received["text"], received["agent"], received["tenant_id"]) == ("Hello", "echo", "default")
        assert started["agent"] == "echo"
        assert (text["text"], text["append"], text["last"]) == ("echo: Hello", False, True)
        assert (done["ok"], done["state"], done["content"]) == (True, "completed", "echo: Hello")
        assert all((data["request_id"], data["stream_id"], data["depth"]) == (task, 0, 0) for _, _, data in events)


async def test_whoever_comes_back_gets_the_rest_also_after_a_restart(tmp_path: Path) -> None:
    async with open_simple(tmp_path, echo()) as s:
        task = (await s.sent("Hello"))["id"]
        await s.ended(task)
        events = await s.events(task)
    async with open_simple(tmp_path) as s:
        for seen in range(events[-1][0] + 1):
            rest = [event for event in events if event[0] > seen]
            assert await s.events(task, **{"last-event-id": str(seen)}) == rest
            assert await s.events(task, f"?since={seen}") == rest
            assert await s.events(task, f"?since_seq={seen}") == rest
        assert await s.events(task, "?since=1", **{"last-event-id": "2"}) == events[3:]


@pytest.mark.parametrize("query", ["?since=99", "?since=-1", "?since=x", "?since_seq=1.5"])
async def test_a_place_that_was_never_reached_is_refused(tmp_path: Path, query: str) -> None:
    async with open_simple(tmp_path, echo()) as s:
        task = (await s.sent())["id"]
        await s.ended(task)
        response = await s.ask("GET", f"/v1/requests/{task}/events{query}")
        assert (response.status_code, response.json()["code"]) == (400, "invalid_request")
        response = await s.ask("GET", f"/v1/requests/{task}/events", headers={"last-event-id": "x"})
        assert response.status_code == 400


async def test_what_happened_and_what_happens_make_one_stream_without_gap_or_repeat(tmp_path: Path) -> None:
    patient = Patient()
    async with open_simple(tmp_path, patient.agent) as s:
        task = (await s.sent("Hello"))["id"]
        await asyncio.wait_for(patient.spoke.wait(), BOUND_S)
        live = []
        async with s.frames(task) as frames:
            async for frame in frames:
                live.append(frame)
                if frame[1] == "text":
                    patient.go_on.set()
        assert [name for _, name, _ in live] == [
            "request_received",
            "stream_start",
            "agent_start",
            "text",
            "text",
            "stream_end",
            "done",
        ]
        assert [number for number, _, _ in live] == [1, 2, 2, 3, 4, 5, 6]
        assert await s.events(task) == live


async def test_what_an_agent_makes_has_its_own_events(tmp_path: Path) -> None:
    agent = Agent("maker", default_project="work")

    @agent
    async def make(turn: Any) -> AsyncIterator[Any]:
        yield turn.status("looking")
        yield turn.file("note.txt", b"hi", media_type="text/plain")
        yield turn.file("page", url="https://example.com/page")
        yield turn.data({"answer": 42})
        yield turn.need_input("Which one?")

    async with open_simple(tmp_path, agent) as s:
        task = (await s.sent())["id"]
        async with s.frames(task, "?since=2") as frames:
            told = [(name, data) async for _, name, data in _until(frames, "input_required")]
        names = [name for name, _ in told]
        assert names == ["status", "file", "file", "artifact", "input_required"]
        status, note, page, data, asked = (each for _, each in told)
        assert (status["state"], status["text"]) == ("working", "looking")
        assert (note["name"], note["data"], note["mime_type"]) == ("note.txt", "aGk=", "text/plain")
        assert (page["name"], page["url"]) == ("page", "https://example.com/page")
        assert data["value"] == {"answer": 42}
        assert asked["text"] == "Which one?"
        await s.ask("POST", f"/v1/requests/{task}/cancel")
        (*_, (_, name, done)) = await s.events(task)
        assert (name, done["ok"], done["state"]) == ("done", False, "canceled")


async def _until(frames: AsyncIterator[Any], last: str) -> AsyncIterator[Any]:
    async for frame in frames:
        yield frame
        if frame[1] == last:
            return


async def test_canceling_ends_a_request_once_and_is_told_the_same_of_all_that_cannot_be_ended(tmp_path: Path) -> None:
    patient = Patient()
    async with open_simple(tmp_path, patient.agent) as s:
        stranger, task = await s.tenant("stranger"), (await s.sent())["id"]
        await asyncio.wait_for(patient.spoke.wait(), BOUND_S)
        refusal = {"cancelled": False, "reason": "no such request is running"}
        foreign = await s.ask("POST", f"/v1/requests/{task}/cancel", token=stranger)
        assert (foreign.status_code, foreign.json()) == (404, {"request_id": task, **refusal})
        canceled = await s.ask("POST", f"/v1/requests/{task}/cancel")
        assert (canceled.status_code, canceled.json()) == (200, {"request_id": task, "cancelled": True})
        await asyncio.wait_for(patient.stopped.wait(), BOUND_S)
        for request_id in (task, UNKNOWN, "x"):
            over = await s.ask("POST", f"/v1/requests/{request_id}/cancel")
            assert (over.status_code, over.json()) == (404, {"request_id": request_id, **refusal})
        shown = (await s.ask("GET", f"/v1/requests/{task}")).json()["request"]
        assert (shown["state"], shown["a2a_state"]) == ("canceled", "canceled")


async def test_a_stream_ends_when_its_tenant_may_not_go_on_and_the_task_does_not(tmp_path: Path) -> None:
    patient = Patient()
    async with open_simple(tmp_path) as s:
        token = await s.tenant("other")
        s.resident(patient.agent, "other")
        task = (await s.send({"message": "Hello"}, token=token)).json()["id"]
        async with s.frames(task, authorization=f"Bearer {token}") as frames:
            async for _, name, _ in frames:
                if name == "text":
                    await s.tenancy.change(s.operator, "other", disabled=True)
        await s.tenancy.change(s.operator, "other", disabled=False)
        patient.go_on.set()
        assert (await s.events(task, authorization=f"Bearer {token}"))[-1][1] == "done"
