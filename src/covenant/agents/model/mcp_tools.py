"""The tools of the configured MCP servers, for agents that may use them.

    tools = McpTools(servers, environment)
    for offered in await tools.list("acme", definition): …
    answer = await tools.call("acme", definition, "files", "read", {"path": "x"})

A server is a local program, or a remote server over HTTP. It is started, or connected to, when one of its tools is
first used, and again by the next call after it has ended. Its errors are failed answers. For an agent, tools that it
may not use and servers of other tenants do not exist.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from covenant.exchange.cards import usable_tools
from covenant.model.agent_definition import AgentDefinition
from covenant.model.errors import Forbidden
from covenant.model.extras import install_command
from covenant.model.mcp_servers import McpServer, Tool, tools_for, tools_of
from covenant.outbound.http_fetcher import Fetcher

if TYPE_CHECKING:
    from covenant.agents.model.mcp_stdio import McpSession

TEXT_BYTES_MAX: Final = 16 * 1024
AT_ONCE_MAX: Final = 16
"""The most calls of one server at once. Further calls wait, and their timeout runs meanwhile."""
TIMED_OUT_MAX: Final = 16
"""This many timed-out calls of a remote server end its session."""
RETRY_S: Final = 5.0
"""The pause before a server that could not be started is tried again."""
MISSING: Final = f"MCP is not installed here: {install_command('mcp')}"

log = logging.getLogger(__name__)
_name = re.compile(r"[A-Za-z0-9_./-]{1,128}").fullmatch


def is_name(given: object) -> bool:
    return isinstance(given, str) and _name(given) is not None


class OfferedTool(NamedTuple):
    tool: Tool
    input_schema: Mapping[str, Any]


class McpAnswer(NamedTuple):
    """`failed`: the tool reported a failure, or its server did not answer."""

    text: str
    failed: bool = False
    cut: bool = False


class McpUnavailable(Exception):
    """A server cannot be reached. The message is for the agent, and reveals nothing about this machine."""


class _SessionGone(McpUnavailable):
    """The call had no effect, and can be repeated in a new session."""


class McpTools:
    """Must be used on one event loop. `close` ends every server."""

    def __init__(
        self,
        servers: Mapping[str, McpServer],
        environment: Mapping[str, str],
        fetcher: Fetcher | None = None,
        secrets: Mapping[str, str] | None = None,
    ) -> None:
        """`environment` is all that a program sees of the daemon's environment.

        `fetcher` calls remote servers; None: no remote server is called. `secrets`: the variables that `token_env` may
        name.
        """
        self._environment = environment
        self._fetcher = fetcher
        self._secrets = secrets or {}
        self._servers: dict[str, McpServer] = {}
        self._hosts: dict[str, _Host] = {}
        self._declared: dict[str, dict[str, Tool]] = {}
        self._live: dict[str, dict[str, OfferedTool]] = {}
        self._retiring: set[asyncio.Task[None]] = set()
        self.replace(servers)

    def replace(self, servers: Mapping[str, McpServer]) -> None:
        """Replaces the configured servers. An unchanged server keeps running. A removed server ends after its calls."""
        changed = [name for name, server in self._servers.items() if servers.get(name) != server]
        for name in changed:
            retiring = asyncio.ensure_future(self._hosts.pop(name).retire())
            self._retiring.add(retiring)
            retiring.add_done_callback(self._retiring.discard)
            del self._servers[name], self._declared[name]
            self._live.pop(name, None)
        for name, server in servers.items():
            if name not in self._servers:
                self._hosts[name] = _Host(name, server, self._open, self._set_tools)
                self._declared[name] = {tool.name: tool for tool in tools_of({name: server})}
        self._servers = dict(servers)

    async def _open(self, name: str, server: McpServer) -> AbstractAsyncContextManager[McpSession]:
        if find_spec("mcp") is None:
            raise ModuleNotFoundError(MISSING)
        if not server.url:
            adapter = await asyncio.to_thread(import_module, "covenant.agents.model.mcp_stdio")
            program: AbstractAsyncContextManager[McpSession] = adapter.open_session(name, server, self._environment)
            return program
        if self._fetcher is None:
            raise McpUnavailable(f"{name} is a remote server, and this daemon makes no outbound calls")
        adapter = await asyncio.to_thread(import_module, "covenant.agents.model.mcp_http")
        remote: AbstractAsyncContextManager[McpSession] = adapter.open_http_session(
            name, server, self._fetcher, self._secrets
        )
        return remote

    @property
    def all(self) -> tuple[Tool, ...]:
        """The tools known now: those that a server has listed, and until then those that the settings declare."""
        found: list[Tool] = []
        for name in self._servers:
            live = self._live.get(name)
            found += [each.tool for each in live.values()] if live is not None else self._declared[name].values()
        return tuple(found)

    @property
    def tenants(self) -> frozenset[str]:
        """The tenants whose agents have any server."""
        return frozenset(tenant for server in self._servers.values() for tenant in server.tenants)

    def serves(self, tenant: str, server: str) -> bool:
        return server in self._servers and tenant in self._servers[server].tenants

    async def list(self, tenant: str, agent: AgentDefinition) -> Sequence[OfferedTool]:
        """The tools that this agent may call. A server that does not start offers none; the log says why."""
        names = [name for name, server in self._servers.items() if tenant in server.tenants]
        if not usable_tools(agent, [Tool(name, "") for name in names]) and not agent.mcp_tool_permissions:
            return ()
        started = await asyncio.gather(*(self._hosts[name].session() for name in names), return_exceptions=True)
        for each in started:
            if isinstance(each, BaseException) and not isinstance(each, McpUnavailable):
                raise each
        allowed = set(usable_tools(agent, tools_for(tenant, self.all)))
        return [offered for live in self._live.values() for offered in live.values() if offered.tool in allowed]

    async def call(
        self, tenant: str, agent: AgentDefinition | None, server: str, tool: str, arguments: Mapping[str, Any]
    ) -> McpAnswer:
        """`agent`: None where the daemon's own settings name the tool, for all agents of the server's tenants."""
        host = self._hosts.get(server)
        # Checked before the server is asked: the refusal must not reveal whether the server has the tool.
        wanted = Tool(server, tool)
        if not self.serves(tenant, server) or (agent is not None and not usable_tools(agent, [wanted])):
            owner = agent.id if agent is not None else tenant
            raise Forbidden("tool_not_allowed", f"{wanted.full_name} is not among the tools of {owner}")
        assert host is not None
        try:
            answered = await host.call(tool, arguments)
        except McpUnavailable as failure:
            return McpAnswer(str(failure), failed=True)
        return _bounded(answered)

    async def close(self) -> None:
        for retiring in self._retiring:
            retiring.cancel()
        await asyncio.gather(*self._retiring, return_exceptions=True)
        await asyncio.gather(*(host.close() for host in self._hosts.values()))

    def _set_tools(self, host: _Host, session: McpSession) -> None:
        name = host.name
        if self._hosts.get(name) is not host:
            return
        declared, tenants = self._declared[name], self._servers[name].tenants
        live: dict[str, OfferedTool] = {}
        for each in session.tools:
            if not is_name(each.name):
                log.warning("mcp.tool_left_out", extra={"server": name, "tool": each.name[:100]})
                continue
            about = each.description or (declared[each.name].description if each.name in declared else "")
            live[each.name] = OfferedTool(Tool(name, each.name, about, tenants), each.input_schema)
        self._live[name] = live


Opener = Callable[[str, McpServer], Awaitable[AbstractAsyncContextManager["McpSession"]]]


class _Host:
    """One server: its session while it runs, and the earliest time of the next start after a failed one."""

    def __init__(
        self, name: str, server: McpServer, open_session: Opener, set_tools: Callable[[_Host, McpSession], None]
    ) -> None:
        self.name: Final = name
        self._server = server
        self._open = open_session
        self._set_tools = set_tools
        self._call_slots = asyncio.Semaphore(AT_ONCE_MAX)
        self._serving: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[McpSession] | None = None
        self._not_before_s = 0.0
        self._failure = ""
        self._closed = False

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> McpAnswer:
        timeout_s = self._server.call_timeout_ms / 1000
        session = await self.session()
        if tool not in {each.name for each in session.tools}:
            raise McpUnavailable(f"{self.name} has no tool {tool}")
        try:
            async with asyncio.timeout(timeout_s):
                async with self._call_slots:
                    try:
                        return await self._answer(session, tool, arguments)
                    except _SessionGone:
                        # The call had no effect: the server was restarted, or has forgotten the session.
                        return await self._answer(await self.session(), tool, arguments)
        except TimeoutError:
            session.timed_out += 1
            if session.timed_out >= TIMED_OUT_MAX and self._server.url:
                # The server's unfinished calls end with the session.
                session.ended.set()
            raise McpUnavailable(
                f"{self.name}.{tool} did not answer within {self._server.call_timeout_ms} ms"
            ) from None

    async def _answer(self, session: McpSession, tool: str, arguments: Mapping[str, Any]) -> McpAnswer:
        from covenant.agents.model.mcp_stdio import McpFailed  # noqa: PLC0415  (an extra, and loaded by now)

        calling = asyncio.ensure_future(session.call(tool, arguments, self._server.call_timeout_ms / 1000))
        ending = asyncio.ensure_future(session.ended.wait())
        try:
            await asyncio.wait((calling, ending), return_when=asyncio.FIRST_COMPLETED)
            if calling.done():
                return calling.result()
            raise self._ended(tool)
        except McpFailed as failure:
            if failure.gone:
                raise _SessionGone(f"{self.name} lost its session twice") from None
            if failure.done is False:
                raise McpUnavailable(f"{self.name} could not be reached; {tool} did not run") from None
            if session.ended.is_set():
                raise self._ended(tool) from None
            raise McpUnavailable(f"{self.name}.{tool} failed: {failure}") from None
        finally:
            calling.cancel()
            ending.cancel()
            await asyncio.gather(calling, ending, return_exceptions=True)

    def _ended(self, tool: str) -> McpUnavailable:
        return McpUnavailable(f"{self.name} ended while {tool} ran; {tool} may have taken effect")

    async def session(self) -> McpSession:
        """The server's session; starts the server if it does not run."""
        loop = asyncio.get_running_loop()
        ready = self._ready
        if ready is None or (ready.done() and (self._serving is None or self._serving.done() or _has_ended(ready))):
            if loop.time() < self._not_before_s:
                raise McpUnavailable(self._failure)
            if self._serving is not None:
                await asyncio.wait((self._serving,))
            if self._closed:
                raise McpUnavailable(self._stopped)
            # Another caller may have started it meanwhile.
            if self._ready is ready:
                self._ready = loop.create_future()
                self._serving = loop.create_task(self._serve(self._ready))
            ready = self._ready
            assert ready is not None
        return await asyncio.shield(ready)

    async def _serve(self, ready: asyncio.Future[McpSession]) -> None:
        """Runs the server from start to end. `ready` gets the session, or the reason why there is none."""
        loop, failure = asyncio.get_running_loop(), self._stopped
        try:
            async with asyncio.timeout(self._server.init_timeout_ms / 1000) as limit:
                async with await self._open(self.name, self._server) as session:
                    limit.reschedule(None)
                    log.info("mcp.started", extra={"server": self.name, "tools": len(session.tools)})
                    self._set_tools(self, session)
                    ready.set_result(session)
                    await session.ended.wait()
            log.warning("mcp.ended", extra={"server": self.name})
        except Exception as error:
            log.warning("mcp.not_started", exc_info=True, extra={"server": self.name})
            failure = f"{self.name} could not be {'reached' if self._server.url else 'started'}"
            if isinstance(error, ModuleNotFoundError):
                failure = MISSING
            elif isinstance(error, TimeoutError):
                failure = f"{self.name} was not ready within {self._server.init_timeout_ms} ms"
            self._not_before_s, self._failure = loop.time() + RETRY_S, failure
        finally:
            _refuse(ready, failure)

    async def retire(self) -> None:
        """Ends the server once its running calls are over. No new call reaches it."""
        try:
            for _ in range(AT_ONCE_MAX):
                await self._call_slots.acquire()
        finally:
            await self.close()

    async def close(self) -> None:
        """Ends the server. It is not started again."""
        self._closed = True
        if self._serving is not None:
            self._serving.cancel()
            await asyncio.wait((self._serving,))
        if self._ready is not None:
            _refuse(self._ready, self._stopped)  # still open if the server's task was canceled before it ran

    @property
    def _stopped(self) -> str:
        return f"{self.name} was stopped"


def _refuse(ready: asyncio.Future[McpSession], failure: str) -> None:
    """Ends the wait for a session, unless it has ended."""
    if not ready.done():
        ready.set_exception(McpUnavailable(failure))
        ready.exception()


def _has_ended(ready: asyncio.Future[McpSession]) -> bool:
    return ready.cancelled() or ready.exception() is not None or ready.result().ended.is_set()


def _bounded(answer: McpAnswer) -> McpAnswer:
    encoded = answer.text.encode("utf-8", "replace")
    if len(encoded) <= TEXT_BYTES_MAX:
        return answer
    kept = encoded[:TEXT_BYTES_MAX].decode("utf-8", "ignore")
    return McpAnswer(f"{kept}\n[cut: {len(encoded) - TEXT_BYTES_MAX} more bytes]", answer.failed, cut=True)
