"""`/mcp`: MCP over streamable HTTP, for tenants and the operator, by their bearer tokens.

The SDK is loaded by the first request and not before, beside the loop: it takes a second. Without the extra every
request is answered with 501 and what to install.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from time import perf_counter
from typing import Any, Final

import msgspec
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from covenant.doors.http.app import MCP
from covenant.doors.http.bearer_auth import TenantGate
from covenant.doors.http.responses import Problem, reply, reply_internal, reply_not_allowed, reply_problem
from covenant.doors.mcp.tool_handlers import ToolHandlers
from covenant.doors.metrics import Meter
from covenant.exchange.access.tenants import Caller
from covenant.model.errors import Refusal, Unavailable

PATH: Final = MCP
TRANSPORT: Final = "mcp"
CALLER: Final = "covenant.caller"
"""Where a request's scope says who is calling."""
OPENING_S: Final = 30.0
MISSING: Final = msgspec.json.encode(
    Problem(
        error="MCP needs a package that is not installed here: pip install 'covenant[mcp]', and restart the daemon",
        code="mcp_not_installed",
    )
)

log = logging.getLogger(__name__)


def installed() -> bool:
    return find_spec("mcp") is not None


class McpDoor:
    """An ASGI callable. `run` it beside: what it serves lives there."""

    def __init__(
        self, desk: ToolHandlers, gate: TenantGate, meter: Meter, *, version: str, body_bytes_max: int, present: bool
    ) -> None:
        self._desk = desk
        self._gate = gate
        self._meter = meter
        self._timer = meter.timer(TRANSPORT, "request")
        self._version = version
        self._body_bytes_max = body_bytes_max
        self._present = present
        self._wanted = asyncio.Event()
        self._opened: asyncio.Future[Any] | None = None

    def routes(self) -> list[BaseRoute]:
        return [Route(PATH, self, name=PATH)]

    async def run(self) -> None:
        """Until canceled. Calls under way end then; the tasks they began do not."""
        loop = asyncio.get_running_loop()
        await self._wanted.wait()
        self._opened = self._opened or loop.create_future()
        module = await asyncio.to_thread(import_module, "covenant.doors.mcp.mcp_server")
        manager = module.session_manager(self._desk, version=self._version, body_bytes_max=self._body_bytes_max)
        try:
            async with manager.run():
                self._opened.set_result(manager)
                await loop.create_future()
        finally:
            self._opened = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] != "POST":
            # There is nothing that we would say unasked, and no session to end.
            await reply_not_allowed(send, ("POST",), plain=True)
            return
        started_s = perf_counter()
        try:
            caller = await self._gate.enter(scope)
            with self._gate.limiter.connected(caller):
                if not self._present:
                    await reply(send, 501, MISSING)
                    return
                manager = await self._manager()
                self._timer.observe(perf_counter() - started_s)
                await self._serve(manager, caller, scope, receive, send)
        except Refusal as refusal:
            self._timer.observe(perf_counter() - started_s)
            self._meter.refused(TRANSPORT, refusal.code)
            await reply_problem(send, refusal)

    async def _manager(self) -> Any:
        self._wanted.set()
        if self._opened is None:
            self._opened = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(OPENING_S):
                return await asyncio.shield(self._opened)
        except TimeoutError:
            raise Unavailable("mcp_not_ready", "MCP is not ready yet; come back in a moment") from None

    async def _serve(self, manager: Any, caller: Caller, scope: Scope, receive: Receive, send: Send) -> None:
        sending = _Sending(send)
        leaving = _Leaving()
        try:
            with self._gate.tenancy.session(caller, leaving.leave), leaving:
                await manager.handle_request({**scope, CALLER: caller}, receive, sending)
        except Exception:  # the last stand before the client: it hears nothing of what went wrong
            log.exception("mcp.failed")
            if not sending.started:
                await reply_internal(send, plain=True)


class _Sending:
    """Knows whether an answer has begun."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.started = False

    async def __call__(self, message: Any) -> None:
        self.started = True
        await self._send(message)


class _Leaving:
    """A context that a caller can be made to leave, when its token is no good any more."""

    def __init__(self) -> None:
        self._gone = False
        self._task: asyncio.Task[Any] | None = None

    def __enter__(self) -> Callable[[], None]:
        self._task = asyncio.current_task()
        if self._gone and self._task is not None:
            self._task.cancel()
        return self.leave

    def leave(self) -> None:
        if not self._gone:
            self._gone = True
            if self._task is not None:
                self._task.cancel()

    def __exit__(self, kind: type[BaseException] | None, error: object, at: object) -> bool:
        task, self._task = self._task, None
        if self._gone and kind is not None and issubclass(kind, asyncio.CancelledError) and task is not None:
            task.uncancel()
            return True
        return False
