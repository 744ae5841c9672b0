"""The MCP server: the official SDK over our tools. Importing this module takes a second, and needs the extra `mcp`.

Each request stands alone (the SDK calls this stateless), so clients do not notice a restart of the daemon.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

import httpx2
import mcp_types as types
from mcp import Client
from mcp.client.streamable_http import streamable_http_client
from mcp.server.lowlevel.server import Server
from mcp.server.stdio import stdio_server
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS

from covenant.doors.mcp.render import ToolAnswer
from covenant.doors.mcp.streamable_http import CALLER
from covenant.doors.mcp.tool_arguments import BY_NAME, TOOLS, ToolRow
from covenant.doors.mcp.tool_calls import ReportProgress, ToolCalls
from covenant.exchange.access.tenants import Caller
from covenant.model.errors import Refusal

NAME: Final = "covenant"
INSTRUCTIONS: Final = (
    "Agents that work on durable tasks. list_agents lists them; send_task gives one of them work and "
    "reports its progress. A task that was accepted goes on when you disconnect: get_task finds it by its id. "
    "discover_agent and invoke_remote_agent reach A2A agents elsewhere."
)

log = logging.getLogger(__name__)

Run = Callable[[Caller, str, Mapping[str, Any] | None, ReportProgress], Awaitable[ToolAnswer]]
CONNECT_S: Final = 5.0
CALL_S: Final = 24 * 3_600.0
"""Longer than any call: the daemon decides how long a call may take."""


def session_manager(calls: ToolCalls, *, version: str, body_bytes_max: int) -> StreamableHTTPSessionManager:
    """A manager that serves requests of an ASGI application while its `run()` is open."""
    server = make_server(calls.call, version)
    return StreamableHTTPSessionManager(server, stateless=True, max_request_body_size=body_bytes_max)


def make_server(run: Run, version: str) -> Server[Any]:
    async def list_tools(_: Any, __: types.PaginatedRequestParams | None) -> types.ListToolsResult:
        return types.ListToolsResult(tools=[tool_declaration(tool) for tool in TOOLS])

    async def call_tool(context: Any, request: types.CallToolRequestParams) -> types.CallToolResult:
        caller: Caller = context.request.scope[CALLER]
        try:
            answer = await run(caller, request.name, request.arguments, progress_of(context))
        except Refusal as refusal:
            return _result(ToolAnswer(f"{refusal.code}: {refusal.message}", {"code": refusal.code}, failed=True))
        except Exception:  # the details are for the daemon's log alone
            log.exception("mcp.failed", extra={"tool": request.name})
            failed = "internal: the call failed in the daemon; its log says why"
            return _result(ToolAnswer(failed, {"code": "internal"}, failed=True))
        return _result(answer)

    server = _server(version, list_tools, call_tool, get_tool_input_schema=_input_schema)
    server.add_request_handler("logging/setLevel", types.SetLevelRequestParams, _set_level)
    return server


def _server(version: str, list_tools: Any, call_tool: Any, **more: Any) -> Server[Any]:
    fields: dict[str, Any] = {"version": version, "title": "Covenant", "instructions": INSTRUCTIONS}
    return Server(NAME, **fields, on_list_tools=list_tools, on_call_tool=call_tool, **more)


async def _set_level(_: Any, __: types.SetLevelRequestParams) -> types.EmptyResult:
    """Accepts the level and ignores it: no state is kept between two requests, and only few lines are sent."""
    return types.EmptyResult()


def tool_declaration(tool: ToolRow) -> types.Tool:
    return types.Tool(
        name=tool.name,
        description=tool.description,
        input_schema=tool.schema,
        annotations=types.ToolAnnotations(
            read_only_hint=tool.read_only,
            destructive_hint=not tool.read_only and tool.name == "cancel_task",
            idempotent_hint=tool.idempotent,
            open_world_hint=tool.open_world,
        ),
    )


def _input_schema(name: str) -> Mapping[str, Any] | None:
    tool = BY_NAME.get(name)
    return tool.schema if tool is not None else None


def progress_of(context: Any) -> ReportProgress:
    """Reports progress to a client that asked for it; to others as log lines, if their protocol version has these."""
    session, count = context.session, 0
    requested = (context.meta or {}).get("progress_token") is not None
    logs = not requested and session.protocol_version in HANDSHAKE_PROTOCOL_VERSIONS

    async def report(message: str) -> None:
        nonlocal count
        count += 1
        if requested:
            await session.report_progress(float(count), None, message)
        elif logs:
            params = types.LoggingMessageNotificationParams(level="info", data=message, logger=NAME)
            await session.send_notification(types.LoggingMessageNotification(params=params), context.request_id)

    return report


def _result(answer: ToolAnswer) -> types.CallToolResult:
    return types.CallToolResult(
        content=[types.TextContent(type="text", text=answer.text)],
        structured_content=answer.data,
        is_error=answer.failed,
    )


async def bridge(url: str, token: str, version: str) -> None:
    """Serves standard input and output until standard input ends, and forwards each call to the daemon at `url`."""
    headers = {"authorization": f"Bearer {token}"}
    timeout = httpx2.Timeout(CALL_S, connect=CONNECT_S)
    # No proxy from the environment: the token is for the daemon alone.
    async with (
        httpx2.AsyncClient(headers=headers, timeout=timeout, trust_env=False) as http,
        stdio_server() as (reading, writing),
    ):
        # A client for each call: an SDK client does not survive a restart of the daemon, and a new one is cheap.
        server = _bridge_server(lambda: Client(streamable_http_client(url, http_client=http)), version)
        await server.run(reading, writing, server.create_initialization_options())


def _bridge_server(daemon: Callable[[], Client], version: str) -> Server[Any]:
    async def list_tools(_: Any, __: types.PaginatedRequestParams | None) -> types.ListToolsResult:
        async with daemon() as client:
            return await client.list_tools()

    async def call_tool(context: Any, request: types.CallToolRequestParams) -> types.CallToolResult:
        report_message = progress_of(context)

        async def report(progress: float, total: float | None, message: str | None) -> None:  # noqa: ARG001  (as called)
            await report_message(message or "")

        try:
            async with daemon() as client:
                return await client.call_tool(request.name, request.arguments, progress_callback=report)
        except Exception as error:  # noqa: BLE001  (the client is told of any failure on the way to the daemon)
            problem = f"unavailable: the daemon did not answer ({_cause(error)}); tasks go on, see get_task"
            return types.CallToolResult(content=[types.TextContent(type="text", text=problem)], is_error=True)

    return _server(version, list_tools, call_tool)


def _cause(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error) or type(error).__name__
