"""One MCP server as a program: started, spoken to over its standard input and output, and ended with all it started.

The program sees only the environment that it is given. A line that is too long ends it. Imports the official SDK: load
this module in a thread, when a tool is first wanted.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final, NamedTuple

import anyio
import mcp_types as types
from mcp import Client
from mcp.shared.exceptions import MCPError
from mcp.shared.message import SessionMessage

from covenant.agents.model.mcp_tools import McpAnswer
from covenant.agents.process_agent import log_stderr, signal_group, start_program
from covenant.model.mcp_servers import McpServer

LINE_BYTES_MAX: Final = 8 * 1024 * 1024
PAGES_MAX: Final = 100
TOOLS_MAX: Final = 1_000
LEAVE_S: Final = 2.0
"""How long a server has to end by itself once its input has ended, and again once it was asked to."""

log = logging.getLogger(__name__)
read_message = types.jsonrpc_message_adapter.validate_json


class McpFailed(Exception):
    """What went wrong with a server, in words."""


class McpTool(NamedTuple):
    name: str
    description: str
    input_schema: Mapping[str, Any]


class McpSession:
    def __init__(self, client: Client, tools: tuple[McpTool, ...], ended: asyncio.Event) -> None:
        self._client = client
        self.tools = tools
        self.ended = ended

    async def call(self, tool: str, arguments: Mapping[str, Any], within_s: float) -> McpAnswer:
        try:
            result = await self._client.call_tool(tool, dict(arguments), read_timeout_seconds=within_s)
        except MCPError as error:
            raise McpFailed(str(error)) from error
        return McpAnswer(_text(result), failed=bool(result.is_error))


@asynccontextmanager
async def open_session(name: str, server: McpServer, environment: Mapping[str, str]) -> AsyncIterator[McpSession]:
    """Raises McpFailed, OSError if it cannot be started, and TimeoutError where the caller set a limit."""
    ended = asyncio.Event()
    program = _program(name, server, environment, ended)
    # The older greeting is what every server there is understands.
    async with Client(program, mode="legacy") as client:
        yield McpSession(client, await _tools(client), ended)


async def _tools(client: Client) -> tuple[McpTool, ...]:
    found: list[McpTool] = []
    cursor: str | None = None
    for _ in range(PAGES_MAX):
        page = await client.list_tools(cursor=cursor)
        found += [McpTool(tool.name, tool.description or "", tool.input_schema) for tool in page.tools]
        cursor = page.next_cursor
        if cursor is None or len(found) >= TOOLS_MAX:
            break
    return tuple(found[:TOOLS_MAX])


def _text(result: types.CallToolResult) -> str:
    """What can be read of it. The rest is named, so that nobody thinks that there was nothing."""
    said: list[str] = []
    for block in result.content:
        match block:
            case types.TextContent(text=text):
                said.append(text)
            case types.EmbeddedResource(resource=types.TextResourceContents(text=text)):
                said.append(text)
            case types.ResourceLink(uri=uri):
                said.append(str(uri))
            case _:
                said.append(f"[{block.type} left out]")
    return "\n".join(said)


@asynccontextmanager
async def _program(
    name: str, server: McpServer, environment: Mapping[str, str], ended: asyncio.Event
) -> AsyncIterator[tuple[Any, Any]]:
    command = (server.command, *server.args)
    process = await start_program(command, {**environment, **server.env}, LINE_BYTES_MAX)
    heard, hearing = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    saying, said = anyio.create_memory_object_stream[SessionMessage](0)
    beside = [
        asyncio.create_task(_hear(name, process, heard, ended)),
        asyncio.create_task(_say(process, said)),
        asyncio.create_task(
            log_stderr(process, lambda said: log.info("mcp.said", extra={"server": name, "said": said}))
        ),
    ]
    try:
        yield hearing, saying
    finally:
        ended.set()
        await _end(process)
        for each in beside:
            each.cancel()
        await asyncio.wait(beside)
        for stream in (heard, hearing, saying, said):
            stream.close()


async def _hear(name: str, process: asyncio.subprocess.Process, heard: Any, ended: asyncio.Event) -> None:
    assert process.stdout is not None
    try:
        while True:
            try:
                line = await process.stdout.readline()
            except ValueError:
                log.warning("mcp.line_too_long", extra={"server": name, "bytes_max": LINE_BYTES_MAX})
                return
            if not line:
                return
            if line.isspace():
                continue
            try:
                message = SessionMessage(read_message(line, by_name=False))
            except ValueError:
                # Many servers print a word to standard output that is none of the protocol's.
                log.debug("mcp.not_a_message", extra={"server": name})
                continue
            await heard.send(message)
    except (anyio.ClosedResourceError, anyio.BrokenResourceError):
        return
    finally:
        ended.set()
        heard.close()


async def _say(process: asyncio.subprocess.Process, said: Any) -> None:
    assert process.stdin is not None
    with contextlib.suppress(ConnectionError, anyio.ClosedResourceError, anyio.EndOfStream):
        async for message in said:
            process.stdin.write(message.message.model_dump_json(by_alias=True, exclude_unset=True).encode() + b"\n")
            await process.stdin.drain()


async def _end(process: asyncio.subprocess.Process) -> None:
    """Close its input, then terminate it, then kill it with all that it started."""
    assert process.stdin is not None
    try:
        process.stdin.close()
        if not await _exited(process):
            signal_group(process, signal.SIGTERM)
            await _exited(process)
    finally:
        # Also for what the server left behind, whether it ended by itself or not; and if this was canceled.
        signal_group(process, signal.SIGKILL)
        process._transport.close()  # type: ignore[attr-defined]  # noqa: SLF001  (nothing else lets go of its pipes)
    await _exited(process)


async def _exited(process: asyncio.subprocess.Process) -> bool:
    try:
        async with asyncio.timeout(LEAVE_S):
            await process.wait()
    except TimeoutError:
        return False
    return True
