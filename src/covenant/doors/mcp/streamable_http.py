"""`/mcp`: MCP over streamable HTTP, for tenants and the operator, by their bearer tokens.

The first request loads the SDK, in a thread: it takes a second. Without the extra `mcp`, every request gets 501.
"""

from __future__ import annotations

import asyncio
from importlib.util import find_spec
from time import perf_counter
from typing import TYPE_CHECKING, Final

from starlette.routing import BaseRoute, Route
from starlette.types import Scope

from covenant.doors.http.bearer_auth import TenantAuth
from covenant.doors.http.endpoint import Endpoint, MethodRouter
from covenant.doors.http.openapi import DescribedRoute
from covenant.doors.http.responses import MCP_PATH, Style, problem_body
from covenant.doors.http.server.http_exchange import HttpExchange
from covenant.doors.http.server.http_refusals import HttpRefusal
from covenant.doors.mcp.tool_calls import ToolCalls
from covenant.doors.metrics import Meter
from covenant.doors.waits import CancelScope
from covenant.exchange.access.tenants import unauthenticated
from covenant.model.errors import Unavailable
from covenant.model.extras import install_command
from covenant.wire.jsonrpc import JsonRpcRequest, JsonRpcResponse

if TYPE_CHECKING:
    from mcp.server.streamable_http_manager import StreamableHTTPSessionManager

PATH: Final = MCP_PATH
CALLER: Final = "covenant.caller"
"""The key of the caller in a request's scope."""
LOAD_TIMEOUT_S: Final = 30.0
MISSING: Final = f"MCP needs a package that is not installed here: {install_command('mcp')}, and restart the daemon"
DESCRIBED: Final = (
    DescribedRoute(
        "POST", PATH, "mcp", "MCP over streamable HTTP: its JSON-RPC messages", JsonRpcResponse, request=JsonRpcRequest
    ),
)
STYLE: Final = Style(problem_body, transport="mcp", failed="mcp.failed")


def installed() -> bool:
    return find_spec("mcp") is not None


class McpDoor(Endpoint):
    """Serves requests while `run` runs, which holds the SDK's session manager."""

    _streams = True

    def __init__(
        self, calls: ToolCalls, auth: TenantAuth, meter: Meter, *, version: str, body_bytes_max: int, present: bool
    ) -> None:
        super().__init__("request", STYLE, meter)
        self._calls = calls
        self._auth = auth
        self._version = version
        self._body_bytes_max = body_bytes_max
        self._installed = present
        self._requested = asyncio.Event()
        self._manager_future: asyncio.Future[StreamableHTTPSessionManager] | None = None

    def routes(self) -> list[BaseRoute]:
        # The daemon sends nothing unasked and keeps no session: no GET, no DELETE.
        return [Route(PATH, MethodRouter({"POST": self}, STYLE), name=PATH)]

    async def run(self) -> None:
        """Runs until canceled. Running calls end then; the tasks that they began go on."""
        loop = asyncio.get_running_loop()
        await self._requested.wait()
        self._manager_future = self._manager_future or loop.create_future()
        manager = await asyncio.to_thread(self._load)
        try:
            async with manager.run():
                self._manager_future.set_result(manager)
                await loop.create_future()
        finally:
            self._manager_future = None

    async def _answer(self, scope: Scope, exchange: HttpExchange) -> None:
        started_s = perf_counter()
        caller = await self._auth.enter(scope)
        with self._auth.limiter.connected(caller):
            if not self._installed:
                raise HttpRefusal(501, "mcp_not_installed", MISSING)
            try:
                manager = await self._manager()
            finally:
                self._timer.observe(perf_counter() - started_s)
            with CancelScope() as work, self._auth.tenancy.session(caller, lambda: work.end(unauthenticated())):
                await manager.handle_request({**scope, CALLER: caller}, exchange.receive, exchange)

    def _load(self) -> StreamableHTTPSessionManager:
        from covenant.doors.mcp.mcp_server import session_manager  # noqa: PLC0415  (see the module's contract)

        return session_manager(self._calls, version=self._version, body_bytes_max=self._body_bytes_max)

    async def _manager(self) -> StreamableHTTPSessionManager:
        self._requested.set()
        if self._manager_future is None:
            self._manager_future = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(LOAD_TIMEOUT_S):
                return await asyncio.shield(self._manager_future)
        except TimeoutError:
            raise Unavailable("mcp_not_ready", "MCP is still loading; try again in a moment") from None
