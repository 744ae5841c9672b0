"""MCP on standard input and output, for clients that start their servers: every call goes on to a daemon's `/mcp`.

The daemon has the tools, the tasks and the limits; this has nothing, and can end at any moment. A daemon that goes away
fails the calls made meanwhile, and is found again by the next one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import httpx2
import mcp_types as types
from mcp import Client
from mcp.client.streamable_http import streamable_http_client
from mcp.server.lowlevel.server import Server
from mcp.server.stdio import stdio_server

from covenant.doors.mcp.mcp_server import INSTRUCTIONS, NAME, progress_of

CONNECT_S: Final = 5.0
CALL_S: Final = 24 * 3_600.0
"""The daemon decides how long a call may take."""


async def bridge(url: str, token: str, version: str) -> None:
    """Until standard input ends."""
    headers = {"authorization": f"Bearer {token}"}
    timeout = httpx2.Timeout(CALL_S, connect=CONNECT_S)
    # Not through a proxy from the environment: the token is for the daemon alone.
    async with (
        httpx2.AsyncClient(headers=headers, timeout=timeout, trust_env=False) as http,
        stdio_server() as (reading, writing),
    ):
        # A client for each call: the SDK's does not survive a daemon that is away for a moment, and one costs little.
        server = _server(lambda: Client(streamable_http_client(url, http_client=http)), version)
        await server.run(reading, writing, server.create_initialization_options())


def _server(daemon: Callable[[], Client], version: str) -> Server[Any]:
    async def list_tools(_: Any, __: types.PaginatedRequestParams | None) -> types.ListToolsResult:
        async with daemon() as client:
            return await client.list_tools()

    async def call_tool(context: Any, asked: types.CallToolRequestParams) -> types.CallToolResult:
        tell = progress_of(context)

        async def told(progress: float, total: float | None, message: str | None) -> None:  # noqa: ARG001  (as called)
            await tell(message or "")

        try:
            async with daemon() as client:
                return await client.call_tool(asked.name, asked.arguments, progress_callback=told)
        except Exception as error:  # noqa: BLE001  (whatever stands between us and the daemon, the client hears of it)
            said = f"unavailable: the daemon did not answer ({_cause(error)}); tasks go on, see get_task"
            return types.CallToolResult(content=[types.TextContent(type="text", text=said)], is_error=True)

    return Server(
        NAME,
        version=version,
        title="Covenant",
        instructions=INSTRUCTIONS,
        on_list_tools=list_tools,
        on_call_tool=call_tool,
    )


def _cause(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error) or type(error).__name__
