"""MCP clients as strangers: they list and call tools over HTTP and stdio, leave, come back, and find their tasks."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import pytest
from mcp import Client
from mcp.client.streamable_http import streamable_http_client

from tests.cli.daemons import Daemon, covenant
from tests.doors.mcp.daemon import Gate, Told, called, gate_at, operator_token, over_http, over_stdio, start
from tests.places import short_folder
from tests.waits import BOUND_S

Way = Callable[[Daemon], AbstractAsyncContextManager[Client]]
HTTP, LEGACY, STDIO = over_http, partial(over_http, mode="legacy"), over_stdio
WAYS = pytest.mark.parametrize("way", [HTTP, LEGACY, STDIO], ids=["http", "http-handshake", "stdio"])
NAMES = {
    "discover_agent",
    "invoke_remote_agent",
    "list_agents",
    "send_task",
    "get_task",
    "cancel_task",
    "queue_status",
}


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with short_folder() as found:
        yield found


@pytest.fixture(scope="module")
def daemon(folder: Path) -> Iterator[Daemon]:
    started = start(folder)
    yield started
    assert started.stop() == 0


@pytest.fixture
async def gate(folder: Path) -> AsyncIterator[Gate]:
    async with gate_at(folder) as gate:
        yield gate


def tenant(daemon: Daemon, name: str) -> str:
    """Its token."""
    token: str = daemon.json("tenants", "add", name)["token"]
    return token


@WAYS
async def test_a_stranger_lists_the_tools_and_gives_an_agent_work(daemon: Daemon, way: Way) -> None:
    async with way(daemon) as client:
        tools = {tool.name: tool for tool in (await client.list_tools()).tools}
        assert set(tools) == NAMES
        assert tools["discover_agent"].input_schema["required"] == ["url"]
        invoke = tools["invoke_remote_agent"].input_schema
        assert set(invoke["properties"]) >= {"agent_url", "message", "skill", "timeout_minutes", "min_trust"}
        assert invoke["required"] == ["agent_url", "message"]
        failed, text, data = await called(client, "list_agents")
        assert not failed, text
        assert "- echo: Says it back" in text
        told = Told()
        failed, text, data = await called(client, "send_task", told, agent="echo", message="hello")
        assert not failed, text
        assert text.endswith("\n\nyou said: hello")
        assert data["state"] == "completed"
        assert data["text"] == "you said: hello"
        # Before anything else: so whoever leaves now knows what to come back for.
        assert told.task_id == data["task_id"]
        failed, text, again = await called(client, "get_task", task_id=data["task_id"])
        assert again == data


@WAYS
async def test_a_client_that_leaves_in_the_middle_of_a_call_loses_nothing(daemon: Daemon, gate: Gate, way: Way) -> None:
    told = Told()
    async with way(daemon) as client:
        calling = asyncio.create_task(client.call_tool("send_task", {"agent": "held", "message": "x"}, None, told))
        await asyncio.wait_for(gate.held.wait(), BOUND_S)
        await asyncio.wait_for(told.first.wait(), BOUND_S)
        calling.cancel()
        await asyncio.gather(calling, return_exceptions=True)
    async with over_http(daemon) as client:
        failed, _, data = await called(client, "get_task", task_id=told.task_id)
        assert (failed, data["state"]) == (False, "working")
        waiting = asyncio.create_task(called(client, "get_task", task_id=told.task_id, wait_seconds=20))
        await gate.open("it goes on")
        failed, _, data = await waiting
        assert (failed, data["state"], data["text"]) == (False, "completed", "it goes on")


async def test_without_progress_a_client_of_the_older_protocol_is_told_the_id_in_a_log_line(daemon: Daemon) -> None:
    said: list[str] = []

    async def heard(params: Any) -> None:
        said.append(str(params.data))

    headers = {"authorization": f"Bearer {operator_token(daemon)}"}
    async with (
        httpx2.AsyncClient(headers=headers, timeout=BOUND_S, trust_env=False) as http,
        Client(
            streamable_http_client(f"{daemon.url}/mcp", http_client=http), mode="legacy", logging_callback=heard
        ) as client,
    ):
        _, _, data = await called(client, "send_task", agent="echo", message="x")
    assert said[0] == f"task {data['task_id']}: submitted"


async def test_much_is_told_in_the_answer_and_not_all_of_it_as_progress(daemon: Daemon) -> None:
    told = Told()
    async with over_http(daemon) as client:
        failed, text, data = await called(client, "send_task", told, agent="chatty", message="x")
    assert not failed, text
    assert len(data["text"].split()) == 3_000
    assert told.task_id == data["task_id"]
    assert len(told.messages) < 500


async def test_a_task_for_later_is_answered_at_once_and_begun_then(daemon: Daemon) -> None:
    async with over_http(daemon) as client:
        later_ms = time.time_ns() // 1_000_000 + 1_500
        asked: dict[str, Any] = {"agent": "echo", "message": "later", "not_before_ms": later_ms}
        failed, text, data = await called(client, "send_task", **asked)
        assert (failed, data["state"]) == (False, "submitted"), text
        _, _, done = await called(client, "get_task", task_id=data["task_id"], wait_seconds=60)
        assert done["state"] == "completed"
        assert time.time_ns() // 1_000_000 >= later_ms
        for wrong in ({"not_before_ms": -1}, {"not_before_ms": 1 << 62}, {"task_id": data["task_id"]}):
            failed, text, _ = await called(client, "send_task", **{**asked, **wrong})
            assert failed, wrong


async def test_a_key_makes_a_repeat_the_same_task(daemon: Daemon) -> None:
    async with over_http(daemon) as client:
        asked: dict[str, Any] = {"agent": "echo", "message": "once", "idempotency_key": "mcp-1"}
        _, _, first = await called(client, "send_task", **asked)
        _, _, second = await called(client, "send_task", **asked)
        assert second == first
        failed, text, _ = await called(client, "send_task", **{**asked, "message": "twice"})
        assert failed
        assert text.startswith("idempotency_key_reused")


async def test_a_task_that_asks_back_is_answered_under_its_id(daemon: Daemon) -> None:
    async with over_http(daemon) as client:
        failed, text, data = await called(client, "send_task", agent="asker", message="paint it")
        assert (failed, data["state"], data["text"]) == (False, "input-required", "Which colour?")
        assert data["task_id"] in text
        _, _, answered = await called(client, "send_task", agent="asker", message="blue", task_id=data["task_id"])
        assert answered["task_id"] == data["task_id"]
        assert (answered["state"], answered["text"]) == ("completed", "blue it is")


async def test_a_task_is_sent_without_waiting_and_canceled(daemon: Daemon, gate: Gate) -> None:
    async with over_http(daemon) as client:
        failed, _, data = await called(client, "send_task", agent="held", message="x", wait=False)
        assert not failed
        assert data["state"] in ("submitted", "working")
        await asyncio.wait_for(gate.held.wait(), BOUND_S)
        _, text, status = await called(client, "queue_status")
        assert data["task_id"] in {each["task_id"] for each in status["waiting"]}
        assert text.startswith("queued ")
        failed, _, canceled = await called(client, "cancel_task", task_id=data["task_id"])
        assert (failed, canceled["state"]) == (False, "canceled")
        failed, text, _ = await called(client, "cancel_task", task_id=data["task_id"])
        assert failed
        assert text.startswith("not_cancelable")


async def test_what_fails_is_an_error_in_words(daemon: Daemon) -> None:
    async with over_http(daemon) as client:
        failed, text, _ = await called(client, "send_task", agent="failing", message="x")
        assert failed
        assert "canary" not in text
        refused: list[tuple[str, dict[str, Any], str]] = [
            ("send_task", {"agent": "nobody", "message": "x"}, "unknown_agent"),
            ("send_task", {"agent": "echo"}, "invalid_arguments: /message: must be given"),
            (
                "send_task",
                {"agent": "echo", "message": "x", "colour": "red"},
                "invalid_arguments: unknown key /colour",
            ),
            ("get_task", {"task_id": "nothing"}, "unknown_task"),
            ("nothing", {}, "unknown_tool"),
            (
                "invoke_remote_agent",
                {"agent_url": "https://h", "message": "x", "min_trust": "huge"},
                "invalid_arguments: /min_trust: Invalid enum value 'huge'; give one of 'untrusted', 'low'",
            ),
            ("discover_agent", {"url": ""}, "invalid_arguments"),
        ]
        for tool, arguments, said in refused:
            failed, text, _ = await called(client, tool, **arguments)
            assert failed, tool
            assert text.startswith(said), text


async def test_a_tenant_sees_its_own_and_the_operator_sees_all(daemon: Daemon) -> None:
    red, blue = tenant(daemon, "mcp-red"), tenant(daemon, "mcp-blue")
    with httpx2.Client(base_url=daemon.url, headers={"authorization": f"Bearer {red}"}, trust_env=False) as http:
        stored = http.post("/v1/agents", json={"id": "later", "kind": "worker", "description": "Works elsewhere"})
        assert stored.status_code == 201, stored.text
    async with over_http(daemon, red) as mine, over_http(daemon, blue) as theirs, over_http(daemon) as operator:
        _, text, _ = await called(mine, "list_agents")
        assert "- later: Works elsewhere" in text
        assert "echo" not in text
        assert "later" not in (await called(theirs, "list_agents"))[1]
        assert "- later@mcp-red: Works elsewhere" in (await called(operator, "list_agents"))[1]
        _, _, sent = await called(mine, "send_task", agent="later", message="x", wait=False)
        assert (await called(mine, "get_task", task_id=sent["task_id"]))[2] == sent
        for tool in ("get_task", "cancel_task"):
            failed, text, _ = await called(theirs, tool, task_id=sent["task_id"])
            assert failed
            assert text.startswith("unknown_task")
        assert (await called(theirs, "queue_status"))[2]["waiting"] == []
        _, _, status = await called(mine, "queue_status")
        assert [each["task_id"] for each in status["waiting"]] == [sent["task_id"]]
        failed, _, seen = await called(operator, "get_task", task_id=sent["task_id"])
        assert (failed, seen["agent"]) == (False, "later@mcp-red")
        failed, _, other = await called(operator, "send_task", agent="later@mcp-red", message="y", wait=False)
        assert not failed, text
        assert (await called(mine, "get_task", task_id=other["task_id"]))[2]["state"] == "submitted"
        failed, _, _ = await called(mine, "send_task", agent="echo@default", message="y")
        assert failed
        failed, _, ended = await called(operator, "cancel_task", task_id=sent["task_id"])
        assert (failed, ended["state"]) == (False, "canceled")


async def test_a_token_that_is_no_good_any_more_ends_its_calls_and_not_its_tasks(daemon: Daemon) -> None:
    token = tenant(daemon, "mcp-green")
    with httpx2.Client(base_url=daemon.url, headers={"authorization": f"Bearer {token}"}, trust_env=False) as http:
        assert http.post("/v1/agents", json={"id": "later", "kind": "worker"}).status_code == 201
    told = Told()
    async with over_http(daemon, token) as client:
        calling = asyncio.create_task(called(client, "send_task", told, agent="later", message="x"))
        await asyncio.wait_for(told.first.wait(), BOUND_S)
        daemon.json("tenants", "disable", "mcp-green")
        done, _ = await asyncio.wait((calling,), timeout=BOUND_S)
        assert done
        assert calling.exception() is not None
    async with over_http(daemon) as operator:
        failed, _, data = await called(operator, "get_task", task_id=told.task_id)
        assert (failed, data["state"]) == (False, "submitted")


@pytest.mark.parametrize("authorization", [None, "Bearer nonsense", "Basic eDp5"])
def test_nobody_gets_in_without_a_token(daemon: Daemon, authorization: str | None) -> None:
    headers = {"authorization": authorization} if authorization else {}
    answer = httpx2.post(f"{daemon.url}/mcp", json={}, headers=headers, trust_env=False)
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"


def test_there_is_nothing_to_get_and_no_session_to_delete(daemon: Daemon) -> None:
    for method in ("GET", "DELETE", "PUT"):
        answer = httpx2.request(method, f"{daemon.url}/mcp", trust_env=False)
        assert (answer.status_code, answer.headers["allow"]) == (405, "POST")


def test_without_a_daemon_the_command_says_so_and_exits_with_3(short_path: Path) -> None:
    ran = covenant("mcp", "--home", str(short_path / "none"))
    assert (ran.code, ran.out) == (3, "")
    assert "covenant serve" in ran.err


def test_a_daemon_that_was_there_once_is_unreachable_and_a_wrong_token_is_refused(
    short_path: Path, daemon: Daemon
) -> None:
    ran = covenant("mcp", "--home", str(daemon.home), "--url", "http://127.0.0.1:1")
    assert (ran.code, ran.out) == (3, "")
    wrong = short_path / "token"
    wrong.write_text("nonsense", encoding="ascii")
    ran = covenant("mcp", "--home", str(daemon.home), "--token-file", str(wrong))
    assert (ran.code, ran.out) == (1, "")
    assert "token" in ran.err


async def test_a_bridge_outlives_its_daemon(short_path: Path) -> None:
    daemon = start(short_path)
    port = daemon.url.rpartition(":")[2]
    async with over_stdio(daemon) as client:
        _, _, data = await called(client, "send_task", agent="echo", message="before")
        assert daemon.stop() == 0
        failed, text, _ = await called(client, "get_task", task_id=data["task_id"])
        assert failed
        assert text.startswith("unavailable")
        again = start(short_path, "--http-port", port)
        try:
            failed, _, found = await called(client, "get_task", task_id=data["task_id"])
            assert (failed, found) == (False, data)
        finally:
            assert again.stop() == 0
    assert not (daemon.home / "http.url").exists()


async def test_no_token_is_in_what_the_daemon_says(daemon: Daemon) -> None:
    async with over_http(daemon) as client:
        _, text, data = await called(client, "list_agents")
    assert operator_token(daemon) not in text + json.dumps(data) + daemon.log
