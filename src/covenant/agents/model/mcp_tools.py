"""The tools of the configured MCP servers, for agents that may use them.

    tools = McpTools(servers, environment)
    for offered in await tools.list("acme", definition): …
    answer = await tools.call("acme", definition, "files", "read", {"path": "x"})

A server is started when one of its tools is first wanted, and by the next call after it has ended. Its errors are
failed answers. A tool that an agent may not use, and a server of another tenant, do not exist for that agent.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from covenant.exchange.cards import usable_tools
from covenant.model.agent_definition import AgentDefinition
from covenant.model.errors import Forbidden
from covenant.model.extras import install_command
from covenant.model.mcp_servers import McpServer, Tool, tools_for, tools_of

if TYPE_CHECKING:
    from covenant.agents.model.mcp_stdio import McpSession

TEXT_BYTES_MAX: Final = 16 * 1024
AT_ONCE_MAX: Final = 16
"""Calls of one server under way; others wait, and their time runs."""
RETRY_S: Final = 5.0
"""How long a server that could not be started is left alone."""
MISSING: Final = f"MCP is not installed here: {install_command('mcp')}"

log = logging.getLogger(__name__)
_name = re.compile(r"[A-Za-z0-9_./-]{1,128}").fullmatch


class OfferedTool(NamedTuple):
    tool: Tool
    input_schema: Mapping[str, Any]


class McpAnswer(NamedTuple):
    """`failed`: the tool says so, or its server did not answer."""

    text: str
    failed: bool = False
    cut: bool = False


class McpUnavailable(Exception):
    """A server cannot be spoken to. The message is for the agent, and says nothing of our machine."""


class McpTools:
    """Lives on one loop. `close` ends every server."""

    def __init__(self, servers: Mapping[str, McpServer], environment: Mapping[str, str]) -> None:
        """`environment` is all that a server sees of ours."""
        self._servers = dict(servers)
        self._hosts = {name: _Host(name, server, environment, self._listed) for name, server in self._servers.items()}
        self._declared = {
            name: {tool.name: tool for tool in tools_of({name: server})} for name, server in servers.items()
        }
        self._live: dict[str, dict[str, OfferedTool]] = {}

    @property
    def all(self) -> tuple[Tool, ...]:
        """What is known now: what a server said it has, and until then what the file says."""
        found: list[Tool] = []
        for name in self._servers:
            live = self._live.get(name)
            found += [each.tool for each in live.values()] if live is not None else self._declared[name].values()
        return tuple(found)

    @property
    def tenants(self) -> frozenset[str]:
        """Whose agents have any server."""
        return frozenset(tenant for server in self._servers.values() for tenant in server.tenants)

    def serves(self, tenant: str, server: str) -> bool:
        return server in self._servers and tenant in self._servers[server].tenants

    async def list(self, tenant: str, agent: AgentDefinition) -> Sequence[OfferedTool]:
        """What this agent may call. A server that does not start has nothing to offer; the log says why."""
        theirs = [name for name, server in self._servers.items() if tenant in server.tenants]
        if not usable_tools(agent, [Tool(name, "") for name in theirs]) and not agent.mcp_tool_permissions:
            return ()
        started = await asyncio.gather(*(self._hosts[name].session() for name in theirs), return_exceptions=True)
        for each in started:
            if isinstance(each, BaseException) and not isinstance(each, McpUnavailable):
                raise each
        may = set(usable_tools(agent, tools_for(tenant, self.all)))
        return [offered for live in self._live.values() for offered in live.values() if offered.tool in may]

    async def call(
        self, tenant: str, agent: AgentDefinition | None, server: str, tool: str, arguments: Mapping[str, Any]
    ) -> McpAnswer:
        """`agent`: None where the daemon's own settings name the tool, for all agents of the server's tenants."""
        host = self._hosts.get(server)
        # Before the server is asked for anything: what it is may not depend on who asks.
        wanted = Tool(server, tool)
        if not self.serves(tenant, server) or (agent is not None and not usable_tools(agent, [wanted])):
            whose = agent.id if agent is not None else tenant
            raise Forbidden("tool_not_allowed", f"{wanted.full_name} is not among the tools of {whose}")
        assert host is not None
        try:
            answered = await host.call(tool, arguments)
        except McpUnavailable as trouble:
            return McpAnswer(str(trouble), failed=True)
        return _bounded(answered)

    async def close(self) -> None:
        await asyncio.gather(*(host.close() for host in self._hosts.values()))

    def _listed(self, name: str, session: McpSession) -> None:
        declared, tenants = self._declared[name], self._servers[name].tenants
        live: dict[str, OfferedTool] = {}
        for each in session.tools:
            if _name(each.name) is None:
                log.warning("mcp.tool_left_out", extra={"server": name, "tool": each.name[:100]})
                continue
            said = each.description or (declared[each.name].description if each.name in declared else "")
            live[each.name] = OfferedTool(Tool(name, each.name, said, tenants), each.input_schema)
        self._live[name] = live


class _Host:
    """One server: its process while it runs, and when it may be tried again."""

    def __init__(
        self, name: str, server: McpServer, environment: Mapping[str, str], listed: Callable[[str, McpSession], None]
    ) -> None:
        self._name = name
        self._server = server
        self._environment = environment
        self._listed = listed
        self._places = asyncio.Semaphore(AT_ONCE_MAX)
        self._life: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[McpSession] | None = None
        self._not_before_s = 0.0
        self._trouble = ""

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> McpAnswer:
        within_s = self._server.call_timeout_ms / 1000
        session = await self.session()
        if tool not in {each.name for each in session.tools}:
            raise McpUnavailable(f"{self._name} has no tool {tool}")
        try:
            async with asyncio.timeout(within_s):
                async with self._places:
                    return await self._answer(session, tool, arguments)
        except TimeoutError:
            raise McpUnavailable(
                f"{self._name}.{tool} did not answer within {self._server.call_timeout_ms} ms"
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
        except McpFailed as trouble:
            if session.ended.is_set():
                raise self._ended(tool) from None
            raise McpUnavailable(f"{self._name}.{tool} failed: {trouble}") from None
        finally:
            calling.cancel()
            ending.cancel()
            await asyncio.gather(calling, ending, return_exceptions=True)

    def _ended(self, tool: str) -> McpUnavailable:
        return McpUnavailable(f"{self._name} ended before {tool} was done; it may have been done")

    async def session(self) -> McpSession:
        """The server, started if it does not run."""
        loop = asyncio.get_running_loop()
        ready = self._ready
        if ready is None or (ready.done() and (self._life is None or self._life.done() or _over(ready))):
            if loop.time() < self._not_before_s:
                raise McpUnavailable(self._trouble)
            if self._life is not None:
                await asyncio.wait((self._life,))
            # Whoever else waited may have started it meanwhile.
            if self._ready is ready:
                self._ready = loop.create_future()
                self._life = loop.create_task(self._live(self._ready))
            ready = self._ready
            assert ready is not None
        return await asyncio.shield(ready)

    async def _live(self, ready: asyncio.Future[McpSession]) -> None:
        """From its start to its end. Whoever waits for it hears one or the other."""
        loop, said = asyncio.get_running_loop(), f"{self._name} was stopped"
        try:
            async with asyncio.timeout(self._server.init_timeout_ms / 1000) as limit:
                if find_spec("mcp") is None:
                    raise ModuleNotFoundError(MISSING)
                adapter = await asyncio.to_thread(import_module, "covenant.agents.model.mcp_stdio")
                async with adapter.open_session(self._name, self._server, self._environment) as session:
                    limit.reschedule(None)
                    log.info("mcp.started", extra={"server": self._name, "tools": len(session.tools)})
                    self._listed(self._name, session)
                    ready.set_result(session)
                    await session.ended.wait()
            log.warning("mcp.ended", extra={"server": self._name})
        except Exception as trouble:
            log.warning("mcp.not_started", exc_info=True, extra={"server": self._name})
            said = f"{self._name} could not be started"
            if isinstance(trouble, ModuleNotFoundError):
                said = MISSING
            elif isinstance(trouble, TimeoutError):
                said = f"{self._name} was not ready within {self._server.init_timeout_ms} ms"
            self._not_before_s, self._trouble = loop.time() + RETRY_S, said
        finally:
            if not ready.done():
                ready.set_exception(McpUnavailable(said))
                ready.exception()

    async def close(self) -> None:
        if self._life is not None:
            self._life.cancel()
            await asyncio.wait((self._life,))


def _over(ready: asyncio.Future[McpSession]) -> bool:
    return ready.cancelled() or ready.exception() is not None or ready.result().ended.is_set()


def _bounded(answer: McpAnswer) -> McpAnswer:
    encoded = answer.text.encode("utf-8", "replace")
    if len(encoded) <= TEXT_BYTES_MAX:
        return answer
    kept = encoded[:TEXT_BYTES_MAX].decode("utf-8", "ignore")
    return McpAnswer(f"{kept}\n[cut: {len(encoded) - TEXT_BYTES_MAX} more bytes]", answer.failed, cut=True)
