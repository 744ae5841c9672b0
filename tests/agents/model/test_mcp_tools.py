"""Tools of configured MCP servers: started when wanted, within bounds, for those who may, and again when they die."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from covenant.agents.model import mcp_stdio
from covenant.agents.model.mcp_tools import TEXT_BYTES_MAX, McpTools
from covenant.model.agent_definition import AgentDefinition
from covenant.model.errors import Forbidden
from covenant.model.mcp_servers import McpServer, Tool, read_mcp_servers
from covenant.model.tenants import DEFAULT
from tests.agents import mcp_server

SCRIPT = Path(mcp_server.__file__)
MODEL = AgentDefinition(id="thinker", kind="model")


def server(way: str = "well", **more: object) -> McpServer:
    given = {"command": sys.executable, "args": [str(SCRIPT), way], **more}
    return read_mcp_servers({"servers": {"small": given}})["small"]


@asynccontextmanager
async def opened(**servers: McpServer) -> AsyncIterator[McpTools]:
    tools = McpTools(servers or {"small": server()}, {"PATH": "/usr/bin:/bin"})
    try:
        yield tools
    finally:
        await tools.close()


async def test_a_tool_is_listed_with_its_schema_and_called() -> None:
    async with opened() as tools:
        offered = {each.tool.name: each for each in await tools.list(DEFAULT, MODEL)}
        assert offered["add"].tool == Tool("small", "add", "Adds two numbers")
        assert offered["add"].input_schema == {"type": "object"}
        assert "not a name" not in offered
        assert await tools.call(DEFAULT, MODEL, "small", "add", {"a": 2, "b": 3}) == ("5", False, False)


async def test_nothing_is_started_before_it_is_wanted() -> None:
    async with opened(small=server(command="/nonexistent/server")) as tools:
        assert tools.all == ()


async def test_what_the_file_declares_is_told_until_the_server_says_what_it_has() -> None:
    declared = [{"name": "environment", "description": "Says what it sees"}, {"name": "gone"}]
    async with opened(small=server(tools=declared)) as tools:
        assert [tool.name for tool in tools.all] == ["environment", "gone"]
        await tools.list(DEFAULT, MODEL)
        said = tools.all
        by_name = {tool.name: tool for tool in said}
        assert by_name["environment"].description == "Says what it sees"
        assert "add" in by_name
        assert "gone" not in by_name
        await tools.list(DEFAULT, MODEL)
        assert tools.all == said


async def test_a_server_sees_its_own_environment_and_the_base_and_nothing_of_ours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COVENANT_TOKEN", "canary")
    monkeypatch.setenv("OPENAI_API_KEY", "canary")
    async with opened(small=server(env={"KEY": "of its own"})) as tools:
        seen = json.loads((await tools.call(DEFAULT, MODEL, "small", "environment", {})).text)
    assert seen["KEY"] == "of its own"
    assert seen["PATH"] == "/usr/bin:/bin"
    assert not {name for name, value in seen.items() if value == "canary"}
    assert set(seen) <= {"KEY", "PATH", "LC_CTYPE", "PWD", "__CF_USER_TEXT_ENCODING"}


async def test_a_server_is_there_for_its_tenants_and_started_for_nobody_else() -> None:
    named = AgentDefinition(id="n", kind="model", mcp_tool_permissions=("small.add", "shared.add", "add"))
    small, shared = server(tools=["add"]), server(tools=["add"], tenants=["acme", DEFAULT])
    async with opened(small=small, shared=shared) as tools:
        assert tools.tenants == {DEFAULT, "acme"}
        for agent in (MODEL, named):
            assert not await tools.list("other", agent)
            for name in ("small", "shared"):
                with pytest.raises(Forbidden) as refused:
                    await tools.call("other", agent, name, "add", {"a": 1, "b": 1})
                with pytest.raises(Forbidden) as unknown:
                    await tools.call("other", agent, "unknown", "add", {})
                assert refused.value.message == unknown.value.message.replace("unknown", name)
        assert not tools._live, "nothing was started"
        assert {each.tool.server for each in await tools.list("acme", MODEL)} == {"shared"}
        assert set(tools._live) == {"shared"}
        assert (await tools.call("acme", MODEL, "shared", "add", {"a": 1, "b": 1})).text == "2"
        with pytest.raises(Forbidden):
            await tools.call("acme", MODEL, "small", "add", {"a": 1, "b": 1})
        assert {each.tool.server for each in await tools.list(DEFAULT, MODEL)} == {"small", "shared"}


async def test_an_agent_calls_only_what_it_may() -> None:
    worker = AgentDefinition(id="w", kind="worker", mcp_tool_permissions=("add",))
    other = AgentDefinition(id="o", kind="worker")
    narrow = AgentDefinition(id="n", kind="model", capabilities=("/fetch",))
    by_full_name = AgentDefinition(id="f", kind="model", mcp_tool_permissions=("small.add",))
    async with opened() as tools:
        for agent in (worker, by_full_name):
            assert [each.tool.name for each in await tools.list(DEFAULT, agent)] == ["add"]
            assert (await tools.call(DEFAULT, agent, "small", "add", {"a": 1, "b": 1})).text == "2"
            with pytest.raises(Forbidden):
                await tools.call(DEFAULT, agent, "small", "pid", {})
        for agent in (other, narrow):
            assert await tools.list(DEFAULT, agent) == ()
            with pytest.raises(Forbidden):
                await tools.call(DEFAULT, agent, "small", "add", {})
        with pytest.raises(Forbidden):
            await tools.call(DEFAULT, MODEL, "unknown", "add", {})


async def test_much_text_is_cut_and_says_so() -> None:
    async with opened() as tools:
        answer = await tools.call(DEFAULT, MODEL, "small", "much", {})
    assert answer.cut
    assert answer.text.startswith("x" * TEXT_BYTES_MAX)
    assert answer.text.endswith(f"[cut: {100_000 - TEXT_BYTES_MAX} more bytes]")


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that does not leave is soon killed."""
    monkeypatch.setattr(mcp_stdio, "LEAVE_S", 0.2)


@pytest.mark.usefixtures("impatient")
async def test_a_server_that_floods_is_ended_and_the_next_call_finds_a_new_one() -> None:
    async with opened() as tools:
        answer = await tools.call(DEFAULT, MODEL, "small", "flood", {})
        assert answer.failed
        assert "ended while flood ran" in answer.text
        assert (await tools.call(DEFAULT, MODEL, "small", "add", {"a": 1, "b": 2})).text == "3"


async def test_a_server_that_died_is_started_again_by_the_next_call() -> None:
    async with opened() as tools:
        first = (await tools.call(DEFAULT, MODEL, "small", "pid", {})).text
        died = await tools.call(DEFAULT, MODEL, "small", "die", {})
        assert died.failed
        again = await tools.call(DEFAULT, MODEL, "small", "pid", {})
        assert not again.failed
        assert again.text != first


@pytest.mark.usefixtures("impatient")
async def test_a_slow_tool_is_given_up_and_its_server_goes_on() -> None:
    async with opened(small=server(call_timeout_ms=200)) as tools:
        await tools.list(DEFAULT, MODEL)
        answer = await tools.call(DEFAULT, MODEL, "small", "slow", {})
        assert answer == ("small.slow did not answer within 200 ms", True, False)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("busy", [False, True])
async def test_no_server_is_left_when_the_tools_are_closed(busy: bool) -> None:
    async with opened(small=server(call_timeout_ms=2_000)) as tools:
        pid = int((await tools.call(DEFAULT, MODEL, "small", "pid", {})).text)
        os.kill(pid, 0)
        if busy:
            assert (await tools.call(DEFAULT, MODEL, "small", "slow", {})).failed
    assert not alive(pid)


async def test_a_call_that_waits_for_the_end_of_a_removed_server_does_not_start_it_again() -> None:
    async with opened() as tools:
        assert (await tools.call(DEFAULT, MODEL, "small", "flood", {})).failed
        # The old process still ends: it blocks on its output until it is killed.
        waiting = asyncio.create_task(tools.call(DEFAULT, MODEL, "small", "add", {"a": 1, "b": 2}))
        await asyncio.sleep(0)
        tools.replace({})
        assert await waiting == ("small was stopped", True, False)


@pytest.mark.usefixtures("impatient")
async def test_a_call_ends_even_if_its_server_is_removed_just_when_it_starts() -> None:
    async with opened() as tools:
        assert (await tools.call(DEFAULT, MODEL, "small", "flood", {})).failed
        waiting = asyncio.create_task(tools.call(DEFAULT, MODEL, "small", "add", {"a": 1, "b": 2}))
        await asyncio.sleep(0)
        old = tools._hosts["small"]._serving
        assert old is not None
        # The new server's task is made in the same turn of the loop in which the removal cancels it.
        old.add_done_callback(lambda _: tools.replace({}))
        assert await waiting == ("small was stopped", True, False)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def test_what_a_tool_calls_a_failure_is_one_and_what_is_no_text_is_named() -> None:
    async with opened() as tools:
        assert await tools.call(DEFAULT, MODEL, "small", "fail", {}) == ("it did not work", True, False)
        assert (await tools.call(DEFAULT, MODEL, "small", "picture", {})).text == "[image left out]"
        missing = await tools.call(DEFAULT, MODEL, "small", "nothing", {})
        assert missing == ("small has no tool nothing", True, False)


@pytest.mark.parametrize(
    ("way", "init_ms", "said"),
    [("dead", 60_000, "small could not be started"), ("mute", 800, "small was not ready within 800 ms")],
)
async def test_a_server_that_does_not_come_up_fails_the_call_and_leaves_others_alone(
    way: str, init_ms: int, said: str
) -> None:
    async with opened(small=server(way, init_timeout_ms=init_ms), well=server()) as tools:
        # Loaded first, so that the limit below is the server's alone.
        assert (await tools.call(DEFAULT, MODEL, "well", "add", {"a": 1, "b": 1})).text == "2"
        answer = await tools.call(DEFAULT, MODEL, "small", "add", {})
        assert answer == (said, True, False)
        # Not tried again at once: the same answer, without another process.
        assert await tools.call(DEFAULT, MODEL, "small", "add", {}) == (said, True, False)
        assert {each.tool.server for each in await tools.list(DEFAULT, MODEL)} == {"well"}


async def test_a_program_that_is_not_there_is_a_failed_answer() -> None:
    async with opened(small=server(command="/nonexistent/server")) as tools:
        assert await tools.call(DEFAULT, MODEL, "small", "add", {}) == ("small could not be started", True, False)
