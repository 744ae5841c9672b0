"""MCP servers elsewhere, over HTTP: the official SDK's own server in a process of its own, killed where it hurts."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from covenant.agents.model.mcp_tools import TEXT_BYTES_MAX, McpTools
from covenant.model.agent_definition import AgentDefinition
from covenant.model.errors import Invalid
from covenant.model.mcp_servers import McpServer, read_mcp_servers
from covenant.model.tenants import DEFAULT
from covenant.outbound.address_guard import AddressGuard, SystemResolver
from covenant.outbound.http_fetcher import Fetcher
from covenant.outbound.outbound_settings import OutboundSettings
from tests.agents.mcp_http_server import served
from tests.outbound.http_servers import Request, http_server, reply
from tests.places import free_port
from tests.waits import until

MODEL = AgentDefinition(id="thinker", kind="model")
SECRETS = {"ELSEWHERE_TOKEN": "s3cret"}


@pytest.fixture
def port() -> int:
    return free_port()


def entry(url: str, **more: object) -> McpServer:
    given = {"url": url, "auth": {"token_env": "ELSEWHERE_TOKEN"}, "headers": {"X-Team": "blue"}, **more}
    return read_mcp_servers({"servers": {"far": given}})["far"]


def at(port: int, **more: object) -> McpServer:
    return entry(f"http://127.0.0.1:{port}/mcp", **more)


@asynccontextmanager
async def opened(server: McpServer, secrets: dict[str, str] | None = None) -> AsyncIterator[McpTools]:
    resolver = SystemResolver()
    # Nothing is allowed but what the entry itself names.
    fetcher = Fetcher(AddressGuard((), resolver=resolver), OutboundSettings())
    tools = McpTools({"far": server}, {}, fetcher, SECRETS if secrets is None else secrets)
    try:
        yield tools
    finally:
        await tools.close()
        await fetcher.close()
        resolver.close()


def uses(log: Path, what: str) -> int:
    return log.read_text().splitlines().count(what) if log.exists() else 0


@pytest.mark.parametrize("kind", ["sse", "json"])
async def test_tools_elsewhere_are_listed_and_called_with_the_operators_credentials(
    port: int, tmp_path: Path, kind: str
) -> None:
    log = tmp_path / "log"
    with served(port, log, kind):
        async with opened(at(port)) as tools:
            offered = {each.tool.name: each for each in await tools.list(DEFAULT, MODEL)}
            assert {"add", "pid", "slow", "much"} <= offered.keys()
            assert await tools.call(DEFAULT, MODEL, "far", "add", {"a": 2, "b": 3}) == ("5", False, False)
            answers = await asyncio.gather(
                *(tools.call(DEFAULT, MODEL, "far", "add", {"a": number, "b": 1}) for number in range(20))
            )
            assert [answer.text for answer in answers] == [str(number + 1) for number in range(20)]
            cut = await tools.call(DEFAULT, MODEL, "far", "much", {"count": 100_000})
            assert cut.cut
            assert len(cut.text) < TEXT_BYTES_MAX + 100
    assert uses(log, "POST blue") >= 21


async def test_without_the_token_it_is_not_reached_and_says_no_secret(port: int, tmp_path: Path) -> None:
    with served(port, tmp_path / "log"):
        async with opened(at(port), secrets={}) as tools:
            answer = await tools.call(DEFAULT, MODEL, "far", "add", {"a": 1, "b": 1})
    assert answer == ("far could not be reached", True, False)
    assert "s3cret" not in repr(at(port, auth={"token": "s3cret"}, headers={"K": "s3cret"}))


@pytest.mark.parametrize("kind", ["sse", "json"])
async def test_a_server_killed_in_a_call_is_told_as_that_and_found_again(port: int, tmp_path: Path, kind: str) -> None:
    log = tmp_path / "log"
    async with opened(at(port)) as tools:
        with served(port, log, kind) as process:
            first = await tools.call(DEFAULT, MODEL, "far", "pid", {})
            calling = asyncio.create_task(tools.call(DEFAULT, MODEL, "far", "slow", {}))
            await asyncio.to_thread(until, lambda: uses(log, "slow") == 1)
            os.kill(process.pid, signal.SIGKILL)
            answer = await calling
            assert answer == ("far ended while slow ran; slow may have taken effect", True, False)
        down = await tools.call(DEFAULT, MODEL, "far", "add", {"a": 1, "b": 1})
        assert down == ("far could not be reached", True, False)
        with served(port, log, kind):
            tools.replace({"far": at(port, init_timeout_ms=59_000)})
            second = await tools.call(DEFAULT, MODEL, "far", "pid", {})
            assert second.text != first.text
            assert not second.failed
    assert uses(log, "slow") == 1


async def test_a_server_started_anew_is_greeted_anew_and_the_call_is_done_once(port: int, tmp_path: Path) -> None:
    log = tmp_path / "log"
    async with opened(at(port)) as tools:
        with served(port, log):
            assert not (await tools.call(DEFAULT, MODEL, "far", "add", {"a": 1, "b": 1})).failed
        with served(port, log):
            # It does not know the session: nothing was done, and the call is made in a new one.
            assert await tools.call(DEFAULT, MODEL, "far", "add", {"a": 2, "b": 2}) == ("4", False, False)
    assert uses(log, "add") == 2


async def test_a_call_that_takes_too_long_is_given_up(port: int, tmp_path: Path) -> None:
    with served(port, tmp_path / "log"):
        async with opened(at(port, call_timeout_ms=300)) as tools:
            answer = await tools.call(DEFAULT, MODEL, "far", "slow", {})
    assert answer == ("far.slow did not answer within 300 ms", True, False)


async def test_a_server_that_ends_its_streams_at_once_is_not_asked_for_them_without_end() -> None:
    asked: list[str] = []

    async def restless(request: Request, writer: asyncio.StreamWriter) -> None:
        asked.append(request.method)
        said: dict[str, object] = json.loads(request.body) if request.body else {}
        if said.get("method") == "initialize":
            params = said["params"]
            assert isinstance(params, dict)
            result = {
                "protocolVersion": params["protocolVersion"],
                "capabilities": {"tools": {}},
                "serverInfo": {"name": "restless", "version": "1"},
            }
        elif said.get("method") == "tools/list":
            result = {"tools": [{"name": "add", "inputSchema": {"type": "object"}}]}
        elif "id" not in said and said:
            writer.write(reply(202))
            return
        else:
            # A stream with a number, which ends before it says anything, and should be opened again at once.
            writer.write(reply(200, b"id: 1\nretry: 0\ndata:\n\n", content_type="text/event-stream"))
            return
        body = json.dumps({"jsonrpc": "2.0", "id": said["id"], "result": result}).encode()
        writer.write(reply(200, body, content_type="application/json"))

    async with http_server(restless) as server, opened(entry(server.url("/mcp"), call_timeout_ms=1_500)) as tools:
        answer = await tools.call(DEFAULT, MODEL, "far", "add", {})
    assert answer.failed
    assert 1 <= asked.count("GET") <= 10


async def test_an_answer_of_many_bytes_is_not_read(port: int, tmp_path: Path) -> None:
    with served(port, tmp_path / "log", "json"):
        async with opened(at(port)) as tools:
            answer = await tools.call(DEFAULT, MODEL, "far", "much", {"count": 9 * 1024 * 1024})
            assert answer.failed
            assert len(answer.text) < 1_000


@pytest.mark.parametrize("place", ["http://169.254.169.254/mcp", "http://[::1]:1/mcp", "http://localhost.invalid/mcp"])
async def test_what_does_not_answer_is_not_reached(place: str) -> None:
    async with opened(entry(place, init_timeout_ms=20_000)) as tools:
        answer = await tools.call(DEFAULT, MODEL, "far", "add", {})
    assert answer == ("far could not be reached", True, False)


async def test_a_redirect_to_another_place_is_not_followed_and_brings_no_credentials_there() -> None:
    heard: list[Request] = []

    async def listen(request: Request, writer: asyncio.StreamWriter) -> None:
        heard.append(request)
        writer.write(reply(200, b"{}", content_type="application/json"))

    async with http_server(listen) as other:

        async def send_away(request: Request, writer: asyncio.StreamWriter) -> None:
            place = other.url("/mcp").encode()
            writer.write(
                b"HTTP/1.1 307 Away\r\nlocation: " + place + b"\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
            )

        async with http_server(send_away) as server, opened(entry(server.url("/mcp"))) as tools:
            answer = await tools.call(DEFAULT, MODEL, "far", "add", {})
    assert answer.failed
    assert heard == []


async def test_a_compressed_answer_is_not_unpacked() -> None:
    async def bomb(request: Request, writer: asyncio.StreamWriter) -> None:
        writer.write(reply(200, b"xx", content_type="application/json", content_encoding="gzip"))

    async with http_server(bomb) as server, opened(entry(server.url("/mcp"))) as tools:
        answer = await tools.call(DEFAULT, MODEL, "far", "add", {})
    assert answer == ("far could not be reached", True, False)


async def test_servers_that_stay_as_they_are_go_on_when_the_file_changes(port: int, tmp_path: Path) -> None:
    log, far = tmp_path / "log", at(port)
    with served(port, log):
        async with opened(far) as tools:
            await tools.list(DEFAULT, MODEL)
            greeted = uses(log, "POST blue")
            slow = asyncio.create_task(tools.call(DEFAULT, MODEL, "far", "slow", {}))
            await asyncio.to_thread(until, lambda: uses(log, "slow") == 1)
            tools.replace({"far": far, "new": at(port, tenants=["acme"])})
            assert tools.tenants == {DEFAULT, "acme"}
            assert not slow.done()
            assert not (await tools.call(DEFAULT, MODEL, "far", "add", {"a": 1, "b": 1})).failed
            assert uses(log, "POST blue") == greeted + 2
            tools.replace({})
            assert tools.all == ()
            slow.cancel()
            with pytest.raises(asyncio.CancelledError):
                await slow


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({}, "give either `command` or `url`"),
        ({"url": "http://x/", "command": "y"}, "give either `command` or `url`"),
        ({"url": "ftp://x/"}, "/url"),
        ({"url": "http://x/", "env": {"A": "b"}}, "/env: is for a server with a `command`"),
        ({"command": "x", "headers": {"A": "b"}}, "/headers: is for a server with a `url`"),
        ({"url": "http://x/", "auth": {"type": "basic"}}, "/auth/type"),
        ({"url": "http://x/", "auth": {"tokn": "x"}}, "tokn"),
    ],
)
def test_an_entry_that_is_wrong_is_refused_with_its_place(given: object, why: str) -> None:
    with pytest.raises(Invalid, match=why.replace("`", ".")):
        read_mcp_servers({"servers": {"far": given}})
