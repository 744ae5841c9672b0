"""One MCP server as a program: started, spoken to over standard input and output, and ended with all its children.

The program sees only the environment that it is given. A line that is too long ends it. Imports the official SDK: load
this module in a thread, when a tool is first needed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final, NamedTuple

import anyio
import mcp_types as types
from mcp import Client
from mcp.shared.exceptions import MCPError
from mcp.shared.message import SessionMessage

from covenant.agents.model.mcp_tools import McpAnswer
from covenant.agents.process_agent import end_program, log_stderr, start_program
from covenant.agents.runtime.durable_step import finish
from covenant.model.mcp_servers import McpServer

LINE_BYTES_MAX: Final = 8 * 1024 * 1024
PAGES_MAX: Final = 100
TOOLS_MAX: Final = 1_000
LEAVE_S: Final = 2.0
"""How long a server has to exit once its input has ended, and again after SIGTERM."""

UNREACHED: Final = -32_070
"""JSON-RPC codes of ours for transport failures. This one: the server never received the call."""
LOST: Final = -32_071
"""The server may have received the call, and gave no answer."""
GONE: Final = -32_072
"""The server does not know the session, and so has not done anything."""

log = logging.getLogger(__name__)
read_message = types.jsonrpc_message_adapter.validate_json


class McpFailed(Exception):
    """A server's failure. `done`: None if it is unknown whether the tool ran."""

    def __init__(self, message: str, *, done: bool | None = None, gone: bool = False) -> None:
        super().__init__(message)
        self.done = done
        self.gone = gone
        """The server does not know the session: another session can be opened at once."""


class McpTool(NamedTuple):
    name: str
    description: str
    input_schema: Mapping[str, Any]


class McpSession:
    def __init__(self, client: Client, tools: tuple[McpTool, ...], ended: asyncio.Event) -> None:
        self._client = client
        self.tools = tools
        self.ended = ended
        self.timed_out = 0
        """Calls that timed out."""

    async def call(self, tool: str, arguments: Mapping[str, Any], timeout_s: float) -> McpAnswer:
        try:
            result = await self._client.call_tool(tool, dict(arguments), read_timeout_seconds=timeout_s)
        except MCPError as error:
            if error.code in (UNREACHED, LOST, GONE, types.CONNECTION_CLOSED):
                self.ended.set()
            done = False if error.code in (UNREACHED, GONE) else None
            raise McpFailed(error.message, done=done, gone=error.code == GONE) from error
        return McpAnswer(_text(result), failed=bool(result.is_error))


@asynccontextmanager
async def open_session(name: str, server: McpServer, environment: Mapping[str, str]) -> AsyncIterator[McpSession]:
    """Raises McpFailed, OSError if the program cannot be started, and TimeoutError where the caller set a limit."""
    ended = asyncio.Event()
    program = _program(name, server, environment, ended)
    # Every existing server understands the older handshake.
    async with Client(program, mode="legacy") as client:
        yield McpSession(client, await list_tools(client), ended)


async def list_tools(client: Client) -> tuple[McpTool, ...]:
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
    """The readable text of a result. Other blocks are named, so that the result does not look empty."""
    texts: list[str] = []
    for block in result.content:
        match block:
            case types.TextContent(text=text):
                texts.append(text)
            case types.EmbeddedResource(resource=types.TextResourceContents(text=text)):
                texts.append(text)
            case types.ResourceLink(uri=uri):
                texts.append(str(uri))
            case _:
                texts.append(f"[{block.type} left out]")
    return "\n".join(texts)


@asynccontextmanager
async def _program(
    name: str, server: McpServer, environment: Mapping[str, str], ended: asyncio.Event
) -> AsyncIterator[tuple[Any, Any]]:
    command = (server.command, *server.args)
    process = await start_program(command, {**environment, **server.env}, LINE_BYTES_MAX)
    received, incoming = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    outgoing, outgoing_receive = anyio.create_memory_object_stream[SessionMessage](0)
    stderr_reader = asyncio.create_task(
        log_stderr(process, lambda line: log.info("mcp.said", extra={"server": name, "said": line}))
    )
    pumps = [
        stderr_reader,
        asyncio.create_task(_read_output(name, process, received, ended)),
        asyncio.create_task(_write_input(process, outgoing_receive)),
    ]
    try:
        yield incoming, outgoing
    finally:
        ended.set()
        try:
            # However often this is canceled: the server's exit is awaited, or nobody fetches its status.
            _, canceled = await finish(end_program(process, LEAVE_S, stderr_reader, by_input=True))
        finally:
            for each in pumps:
                each.cancel()
            await asyncio.wait(pumps)
            for stream in (received, incoming, outgoing, outgoing_receive):
                stream.close()
    if canceled:
        raise asyncio.CancelledError


async def _read_output(name: str, process: asyncio.subprocess.Process, received: Any, ended: asyncio.Event) -> None:
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
                # Many servers print lines to standard output that are no messages.
                log.debug("mcp.not_a_message", extra={"server": name})
                continue
            await received.send(message)
    except (anyio.ClosedResourceError, anyio.BrokenResourceError):
        return
    finally:
        ended.set()
        received.close()


async def _write_input(process: asyncio.subprocess.Process, outgoing: Any) -> None:
    assert process.stdin is not None
    with contextlib.suppress(ConnectionError, anyio.ClosedResourceError, anyio.EndOfStream):
        async for message in outgoing:
            process.stdin.write(message.message.model_dump_json(by_alias=True, exclude_unset=True).encode() + b"\n")
            await process.stdin.drain()
