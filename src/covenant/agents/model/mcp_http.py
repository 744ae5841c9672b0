"""One remote MCP server over streamable HTTP, each request through the address guard.

The SDK makes the requests, and `_GuardedTransport` sends them within limits. A transport failure returns to the SDK as
a JSON-RPC error of that one request, with a code of ours, so no exception ends the session. Imports the official SDK:
load this module in a thread, when a tool is first needed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Final

import httpx2
import msgspec
from mcp import Client
from mcp.client.streamable_http import streamable_http_client

from covenant.agents.model.mcp_stdio import GONE, LINE_BYTES_MAX, LOST, UNREACHED, McpSession, list_tools
from covenant.model.mcp_servers import McpServer
from covenant.outbound.call_errors import AddressRefused, CallFailed, too_large
from covenant.outbound.http_fetcher import Fetcher, check_headers
from covenant.outbound.remote.remote_registry import host_and_port

REFUSED: Final = -32_073
"""A JSON-RPC code of ours: the server refuses the daemon's credentials."""
CONNECT_S: Final = 10.0
QUIET_S: Final = 300.0
"""How long a stream of the server may be silent before it is closed; the SDK may open it again."""
STREAM_PAUSE_S: Final = 0.5
"""The pause before each request for a server's stream."""
SESSION: Final = "mcp-session-id"
REFUSALS: Final = frozenset({401, 403})

log = logging.getLogger(__name__)


@asynccontextmanager
async def open_http_session(
    name: str, server: McpServer, fetcher: Fetcher, secrets: Mapping[str, str]
) -> AsyncIterator[McpSession]:
    """Opens a session. `secrets` has the variables that a server's `auth` may name.

    Raises MCPError, CovenantError, and TimeoutError where the caller set a limit.
    """
    headers = server.sent_headers(secrets)
    check_headers(headers)
    # The settings name this server, so its address is allowed even if it is private.
    server_fetcher, ended = fetcher.allowing(host_and_port(server.url)), asyncio.Event()
    try:
        server_fetcher.guard.read(server.url)
        transport = _GuardedTransport(name, await server_fetcher.transport())
        times = httpx2.Timeout(CONNECT_S, read=QUIET_S)
        async with httpx2.AsyncClient(transport=transport, headers=headers, timeout=times, trust_env=False) as http:
            streams = streamable_http_client(server.url, http_client=http, max_sse_event_size=LINE_BYTES_MAX)
            # Every existing server understands the older handshake.
            async with Client(streams, mode="legacy") as client:
                yield McpSession(client, await list_tools(client), ended)
    finally:
        ended.set()
        await server_fetcher.close()


class _GuardedTransport(httpx2.AsyncBaseTransport):
    """Answers every request; a transport failure becomes an error response."""

    def __init__(self, server: str, transport: httpx2.AsyncBaseTransport) -> None:
        self._server = server
        self._transport = transport
        self._stream_lock = asyncio.Lock()

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        request.headers["accept-encoding"] = "identity"
        request.headers["connection"] = "close"
        if request.method == "GET":
            # The server tells the SDK how soon to reconnect, and only the SDK reads that: this bounds the rate.
            async with self._stream_lock:
                await asyncio.sleep(STREAM_PAUSE_S)
        if request.method == "POST":
            request.extensions = {**request.extensions, "wire_bytes_max": LINE_BYTES_MAX}
        try:
            response = await self._transport.handle_async_request(request)
        except CallFailed as failed:
            self._log(failed.detail)
            return _error(request, LOST if failed.sent else UNREACHED, failed.message)
        except AddressRefused as refused:
            self._log(refused.detail)
            return _error(request, UNREACHED, "the address guard refuses its address")
        failure = _failure_of(request, response)
        if failure is not None:
            await response.aclose()
            return _error(request, *failure)
        assert isinstance(response.stream, httpx2.AsyncByteStream)
        response.stream = _Body(self._server, response.stream)
        return response

    def _log(self, why: str) -> None:
        log.warning("mcp.call_failed", extra={"server": self._server, "why": why})


def _failure_of(request: httpx2.Request, response: httpx2.Response) -> tuple[int, str] | None:
    """The error code and message for a response that the SDK should not read; None if it may."""
    if response.headers.get("content-encoding", "identity") != "identity":
        return LOST, "the answer is compressed although the request asked for no compression"
    length = response.headers.get("content-length", "0")
    if not length.isdecimal() or int(length[:20]) > LINE_BYTES_MAX:
        return LOST, str(too_large(LINE_BYTES_MAX))
    if response.status_code in REFUSALS:
        return REFUSED, f"it refuses the daemon's credentials (HTTP {response.status_code})"
    if response.status_code == 404 and request.method == "POST" and SESSION in request.headers:
        return GONE, "it does not know the session any more"
    return None


def _error(request: httpx2.Request, code: int, message: str) -> httpx2.Response:
    body = {"jsonrpc": "2.0", "id": None, "error": {"code": code, "message": message}}
    headers = {"content-type": "application/json"}
    return httpx2.Response(502, headers=headers, content=msgspec.json.encode(body), request=request)


class _Body(httpx2.AsyncByteStream):
    """A body as it arrives. A broken transfer becomes an error that the SDK knows."""

    def __init__(self, server: str, stream: httpx2.AsyncByteStream) -> None:
        self._server = server
        self._stream = stream

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            async for piece in self._stream:
                yield piece
        except CallFailed as failed:
            log.warning("mcp.call_failed", extra={"server": self._server, "why": failed.detail})
            raise httpx2.StreamError(failed.message) from failed

    async def aclose(self) -> None:
        await self._stream.aclose()
