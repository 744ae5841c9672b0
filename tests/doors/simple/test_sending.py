"""The simple door: what may be sent, what is refused and how, and who gets it."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from covenant.model.agent_definition import AgentDefinition, Skill
from covenant.model.settings import A2aSettings
from covenant.model.task_event import Began
from tests.doors.simple.simple_under_test import TOKEN, echo, open_simple, text_of


async def test_a_text_is_accepted_and_answered_in_the_documented_shape(tmp_path: Path) -> None:
    async with open_simple(tmp_path, echo()) as s:
        task = await s.sent("Hello")
        assert list(task) == ["id", "state", "messages", "sessionId", "createdAt", "updatedAt"]
        assert task["state"] == "working"
        assert task["messages"] == [{"role": "user", "parts": [{"type": "text", "text": "Hello"}]}]
        assert task["sessionId"] == task["id"]
        assert task["createdAt"] == task["updatedAt"] == "2023-11-14T22:13:20.000Z"
        done = await s.ended(task["id"])
        assert done == {
            **task,
            "state": "completed",
            "messages": [*task["messages"], {"role": "agent", "parts": [{"type": "text", "text": "echo: Hello"}]}],
        }


@pytest.mark.parametrize(
    ("body", "text", "depth", "timeout_ms"),
    [
        ({"message": "top"}, "top", 1, 300_000),
        ({"params": {"message": "inside"}}, "inside", 1, 300_000),
        ({"params": {"message": "inside"}, "message": "top", "timeoutMs": 1000}, "inside", 1, 300_000),
        ({"params": {"message": "a", "timeoutMs": 600_000, "depth": 3}, "depth": 2}, "a", 3, 600_000),
        ({"params": {"message": "a"}, "depth": 2}, "a", 2, 300_000),
        ({"message": "a", "timeoutMs": 1000, "depth": 3, "method": "tasks/send", "more": {}}, "a", 3, 1000),
    ],
)
async def test_params_count_as_a_whole_and_depth_may_stand_beside_them(
    tmp_path: Path, body: dict[str, Any], text: str, depth: int, timeout_ms: int
) -> None:
    async with open_simple(tmp_path, echo()) as s:
        response = await s.send(body)
        assert response.status_code == 200
        (row,) = await s.ledger.of_tenant("default", 10)
        (first, *_) = await s.ledger.steps(row.task_id, 0, 1)
        assert isinstance(first.what, Began)
        task = first.what.task
        assert (task.intent_text, task.depth, task.timeout_ms, task.origin) == (text, depth, timeout_ms, "simple")
        assert (task.request_metadata or {})["source"] == "agent"


BAD = [
    b"",
    b"{",
    b"[]",
    b'"text"',
    b"{}",
    b'{"message": ""}',
    b'{"message": "  \\n"}',
    b'{"message": 5}',
    b'{"params": {}}',
    b'{"params": {"message": " "}, "message": "top"}',
    b'{"params": {"skill": "chat"}, "message": "top"}',
    b'{"params": "text", "message": "top"}',
    b'{"message": "a", "timeoutMs": 999}',
    b'{"message": "a", "timeoutMs": 600001}',
    b'{"message": "a", "timeoutMs": 1000.5}',
    b'{"message": "a", "timeoutMs": "1000"}',
    b'{"message": "a", "notBeforeMs": -1}',
    b'{"message": "a", "notBeforeMs": 1.5}',
    b'{"message": "a", "notBeforeMs": "soon"}',
    b'{"message": "a", "notBeforeMs": 9000000000000000}',
    b'{"message": "a", "depth": 0}',
    b'{"message": "a", "depth": 11}',
    b'{"message": "a", "skill": ""}',
    b'{"message": "a", "sourceAgent": 5}',
    b'{"message": "\xff"}',
    # Deeper than any interpreter reads, also in what nobody asked for: 3.12 reads some 990 levels, 3.13 some 9,000.
    b'{"message": "a", "more": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
]


@pytest.mark.parametrize("body", BAD, ids=range(len(BAD)))
async def test_what_cannot_be_read_is_refused_and_leaves_nothing(tmp_path: Path, body: bytes) -> None:
    async with open_simple(tmp_path, echo()) as s:
        response = await s.ask("POST", "/a2a/tasks/send", content=body)
        assert response.status_code == 400, response.text
        assert response.json().keys() == {"error", "code"}
        assert response.json()["code"] == "VALIDATION_ERROR"
        assert await s.ledger.of_tenant("default", 10) == ()


@pytest.mark.parametrize("inside", [False, True])
async def test_a_task_for_later_is_begun_later_and_its_time_is_counted_from_then(
    tmp_path: Path, *, inside: bool
) -> None:
    async with open_simple(tmp_path, echo()) as s:
        later_ms = s.ledger.now_ms() + 3_600_000
        asked = {"message": "Hello", "timeoutMs": 1_000, "notBeforeMs": later_ms}
        task = (await s.send({"params": asked} if inside else asked)).json()
        assert task["state"] == "submitted"
        assert (await s.later(3_599_000)).woken == 0
        assert (await s.get(task["id"])).json()["state"] == "submitted"
        assert (await s.later(1_000)).woken == 1
        assert (await s.ended(task["id"]))["state"] == "completed"


async def test_who_has_no_token_is_refused_before_anything_else(tmp_path: Path) -> None:
    async with open_simple(tmp_path, echo()) as s:
        task = await s.sent()
        for token in (None, "wrong", "atr_" + "0" * 64):
            for method, path in (("POST", "/a2a/tasks/send"), ("GET", f"/a2a/tasks/{task['id']}")):
                response = await s.ask(method, path, token=token)
                assert (response.status_code, response.json()["code"]) == (401, "AUTHENTICATION_ERROR")
                assert response.headers["www-authenticate"] == "Bearer"


async def test_other_methods_are_told_which_there_are(tmp_path: Path) -> None:
    async with open_simple(tmp_path) as s:
        response = await s.ask("GET", "/a2a/tasks/send")
        assert (response.status_code, response.headers["allow"]) == (405, "POST")
        assert response.json() == {"error": "this path takes only POST", "code": "METHOD_NOT_ALLOWED"}
        assert (await s.ask("DELETE", "/a2a/tasks/x")).headers["allow"] == "GET"


async def test_without_an_agent_that_has_a_project_there_is_nobody_to_ask(tmp_path: Path) -> None:
    async with open_simple(tmp_path, echo(project="")) as s:
        response = await s.send({"message": "Hello"})
        assert response.status_code == 404
        assert response.json() == {"error": "Agent with default project not found", "code": "NOT_FOUND"}


async def test_a_body_over_the_cap_is_refused_with_and_without_its_length(tmp_path: Path) -> None:
    large = b'{"message": "' + b"x" * (1 << 20) + b'"}'

    async def chunks() -> AsyncIterator[bytes]:
        for start in range(0, len(large), 1 << 16):
            yield large[start : start + (1 << 16)]

    async with open_simple(tmp_path, echo()) as s:
        for content in (large, chunks()):
            response = await s.ask("POST", "/a2a/tasks/send", content=content)
            assert (response.status_code, response.json()["code"]) == (413, "PAYLOAD_TOO_LARGE")
        assert await s.ledger.of_tenant("default", 10) == ()


RATE = A2aSettings(inbound_rate_per_min=5)


async def test_a_credential_sends_five_in_any_minute_whatever_it_calls_itself(tmp_path: Path) -> None:
    async with open_simple(tmp_path, echo(), settings=RATE) as s:
        other = await s.tenant("other")
        s.resident(echo(), "other")
        for number in range(5):
            s.clock.advance(1_000)
            assert (await s.send({"message": "Hello", "sourceAgent": f"agent-{number}"})).status_code == 200
        for named in ({"sourceAgent": "somebody-new"}, {}):
            response = await s.send({"message": "Hello", **named}, headers={"x-source-agent": "somebody-else"})
            assert (response.status_code, response.json()["code"]) == (429, "RATE_LIMITED")
            assert response.headers["retry-after"] == "56"
        assert (await s.send({"message": "Hello"}, token=other)).status_code == 200
        s.clock.advance(55_999)
        assert (await s.send({"message": "Hello"})).headers["retry-after"] == "1"
        s.clock.advance(1)
        assert (await s.send({"message": "Hello"})).status_code == 200
        assert (await s.send({"message": "Hello"})).status_code == 429


async def test_reading_costs_nothing_of_the_rate(tmp_path: Path) -> None:
    async with open_simple(tmp_path, echo(), settings=RATE) as s:
        task = await s.sent()
        for _ in range(20):
            assert (await s.get(task["id"])).status_code == 200


@pytest.mark.parametrize("depth", [4, 10])
async def test_what_has_come_through_too_many_hands_is_refused_and_costs_nothing_of_the_rate(
    tmp_path: Path, depth: int
) -> None:
    async with open_simple(tmp_path, echo(), settings=RATE) as s:
        for _ in range(10):
            response = await s.send({"message": "Hello", "depth": depth})
            assert response.status_code == 400
            assert response.json() == {"error": "Invocation depth limit exceeded.", "code": "VALIDATION_ERROR"}
        for _ in range(5):
            assert (await s.send({"message": "Hello", "depth": 3})).status_code == 200


async def test_the_chain_of_calls_goes_along_in_headers_and_ends_where_it_would_close(tmp_path: Path) -> None:
    async with open_simple(tmp_path, echo(), settings=RATE) as s:
        me = s.catalogue.identity("default", "echo").pubkey
        for _ in range(10):
            response = await s.send({"message": "Hello"}, headers={"covenant-chain": f"a,{me},b"})
            assert (response.status_code, response.json()["code"]) == (400, "VALIDATION_ERROR")
            assert "echo@default is in this chain of calls already, 2 calls up" in response.json()["error"]
        trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
        soon = s.clock() + 5_000
        headers = {"covenant-chain": "a,b", "covenant-depth": "3", "covenant-deadline-ms": str(soon)}
        response = await s.send({"message": "Hello", "depth": 2}, headers={**headers, "traceparent": trace})
        (step, *_) = await s.ledger.steps(response.json()["id"], 0, 1)
        assert isinstance(step.what, Began)
        task = step.what.task
        assert (task.chain, task.depth, task.deadline_ms, task.timeout_ms) == (("a", "b"), 3, soon, 5_000)
        assert task.traceparent == trace
        deep = await s.send({"message": "Hello"}, headers={"covenant-depth": "4"})
        assert (deep.status_code, deep.json()["error"]) == (400, "Invocation depth limit exceeded.")


async def test_a_skill_chooses_the_agent_that_has_it_and_one_that_nobody_has_is_said_to_be_ignored(
    tmp_path: Path,
) -> None:
    stranger = echo("stranger", project="", skills=["paint"])
    async with open_simple(tmp_path, echo("first"), echo("second", skills=["translate"]), stranger) as s:
        for skill, agent, ignored in (
            ("translate", "second", None),
            ("chat", "first", None),
            ("paint", "first", ["skill"]),
            ("unheard-of", "first", ["skill"]),
        ):
            task = await s.sent("Hello", skill=skill)
            assert task.get("ignored") == ignored
            done = await s.ended(task["id"])
            assert text_of(done) == f"{agent}: Hello"
            assert done.get("ignored") == ignored


async def test_the_oldest_agent_that_has_a_project_gets_the_task_whichever_was_changed_last(tmp_path: Path) -> None:
    async with open_simple(tmp_path) as s:
        caller = s.tenancy.recognise(TOKEN)
        assert caller is not None
        for name, project in (("none", ""), ("older", "p"), ("newer", "p")):
            await s.catalogue.store(caller, AgentDefinition(id=name, kind="worker", default_project=project))
            s.clock.advance(1_000)
        changed = AgentDefinition(id="newer", kind="worker", default_project="p", description="changed")
        await s.catalogue.replace(caller, changed)
        await s.sent()
        assert [row.agent_id for row in await s.ledger.of_tenant("default", 10)] == ["older"]
        skilled = AgentDefinition(id="skilled", kind="worker", default_project="p", skills=(Skill(id="translate"),))
        await s.catalogue.store(caller, skilled)
        await s.sent(skill="translate")
        assert [row.agent_id for row in await s.ledger.of_tenant("default", 10)] == ["skilled", "older"]
