"""Runs the tools. A tenant uses its own agents and tasks, the operator those of all tenants.

A call that begins a task reports the task's id before it waits. A caller that leaves ends no task.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, assert_never

import msgspec

from covenant.doors.mcp import tool_arguments as tools
from covenant.doors.mcp.remote_tools import RemoteTools, render_answer
from covenant.doors.mcp.render import ToolAnswer, agent_name, render_agents, render_queue, render_step, render_task
from covenant.exchange.a2a_service import A2AExchange, A2ARequest
from covenant.exchange.access.tenants import Caller, TenantAccess, TenantLimiter
from covenant.exchange.catalogue import Catalogue
from covenant.exchange.task_lookup import TaskLookup
from covenant.exchange.tasks.builder import NOT_BEFORE
from covenant.exchange.tasks.reader import TaskStream
from covenant.ledger.machine.decisions.identities import unknown_agent
from covenant.model.a2a_requests import Message, SendMessage
from covenant.model.agent_definition import CatalogueAgent
from covenant.model.content import Text
from covenant.model.errors import Invalid
from covenant.model.rate_limits import TokenBucket
from covenant.model.task import target_of
from covenant.model.task_view import TaskView
from covenant.model.tenants import DEFAULT
from covenant.wire.a2a.parts_v1 import Link

ReportProgress = Callable[[str], Awaitable[None]]
"""Reports progress to the caller. Does nothing for a caller that did not ask."""

REPORTS_AT_ONCE_MAX: Final = 50
REPORTS_PER_MIN: Final = 600
"""The most progress reports of one call, at once and in the long run."""


class ToolCalls:
    def __init__(
        self,
        exchange: A2AExchange,
        lookup: TaskLookup,
        catalogue: Catalogue,
        tenancy: TenantAccess,
        *,
        limiter: TenantLimiter,
        new_id: Callable[[], str],
        remote: RemoteTools,
        link: Link,
    ) -> None:
        """`link`: makes the download URL of a task's file."""
        self._exchange = exchange
        self._lookup = lookup
        self._catalogue = catalogue
        self._tenancy = tenancy
        self._limiter = limiter
        self._new_id = new_id
        self._remote = remote
        self._link = link

    async def call(
        self, caller: Caller, name: str, given: Mapping[str, Any] | None, report: ReportProgress
    ) -> ToolAnswer:
        """Runs a tool. Raises Refusal."""
        arguments = tools.read_arguments(name, given)
        match arguments:
            case tools.DiscoverAgentArguments():
                return await self._remote.discover(caller, arguments.url)
            case tools.InvokeRemoteAgentArguments():
                with self._limiter.streaming(caller):
                    stream = await self._remote.invoke(caller, arguments)
                    view = await self._follow(caller, stream, report)
                return render_answer(view, self._render(caller, view))
            case tools.ListAgentsArguments():
                return await self._list_agents(caller)
            case tools.SendTaskArguments():
                return await self._send(caller, arguments, report)
            case tools.GetTaskArguments():
                return await self._get(caller, arguments, report)
            case tools.CancelTaskArguments():
                return self._render(caller, await self._lookup.cancel(caller, arguments.task_id))
            case tools.QueueStatusArguments():
                return render_queue(await self._lookup.queue(caller, arguments.limit))
            case _:
                assert_never(arguments)

    async def _list_agents(self, caller: Caller) -> ToolAnswer:
        found = await self._lookup.agents(caller)
        return render_agents([(agent_name(agent) if caller.operator else agent.id, agent) for agent in found])

    async def _send(self, caller: Caller, arguments: tools.SendTaskArguments, report: ReportProgress) -> ToolAnswer:
        agent, caller = self._agent(caller, arguments.agent)
        away = self._catalogue.agent(caller.tenant.name, agent.id) is None
        ask = A2ARequest(caller=caller, agent=agent, away=away, idempotency_key=arguments.idempotency_key)
        # With a key, a repeated message must be the same, so its id must be the same, too.
        message_id = arguments.idempotency_key or self._new_id()
        message = Message(message_id=message_id, parts=(Text(arguments.message),), task_id=arguments.task_id)
        not_before_ms = arguments.not_before_ms
        wait = arguments.wait and not_before_ms is None
        if not_before_ms is not None and arguments.task_id is not None:
            raise Invalid("invalid_task", "not_before_ms is for a new task, but task_id names an existing one")
        metadata = {NOT_BEFORE: not_before_ms} if not_before_ms is not None else None
        sent = SendMessage(message=message, blocking=wait, metadata=metadata)
        if not wait:
            return self._render(caller, await self._exchange.send(ask, sent))
        with self._limiter.streaming(caller):
            stream = await self._exchange.stream(ask, sent)
            return self._render(caller, await self._follow(caller, stream, report))

    async def _get(self, caller: Caller, arguments: tools.GetTaskArguments, report: ReportProgress) -> ToolAnswer:
        if not arguments.wait_seconds:
            view = await self._lookup.get(caller, arguments.task_id)
            return self._render(caller, self._exchange.explain_wait(view))
        with self._limiter.streaming(caller):
            stream = await self._lookup.follow(caller, arguments.task_id)
            return self._render(caller, await self._follow(caller, stream, report, within_s=arguments.wait_seconds))

    async def _follow(
        self, caller: Caller, stream: TaskStream, report: ReportProgress, *, within_s: float | None = None
    ) -> TaskView:
        """The task when it has ended or waits for its sender, or in its state when the wait times out."""
        task = stream.first.task
        with stream:
            await report(f"task {task.id}: {stream.first.state}")
            if within_s is None:
                within_s = self._exchange.settings.blocking_ms_max / 1000
            try:
                async with asyncio.timeout(within_s):
                    await _report_steps(stream, report)
            except TimeoutError:
                pass
        return self._exchange.explain_wait(await self._lookup.get(caller, task.id))

    def _agent(self, caller: Caller, name: str) -> tuple[CatalogueAgent, Caller]:
        """The agent of this name, and its caller. The operator may name another tenant's agent as `agent@tenant`."""
        agent_id, _, tenant = name.partition("@")
        if caller.operator and tenant not in ("", DEFAULT):
            known = self._tenancy.tenant(tenant)
            if known is None:
                raise unknown_agent(name)
            caller = msgspec.structs.replace(caller, tenant=known)
        elif tenant not in ("", caller.tenant.name):
            raise unknown_agent(name)
        agent = self._catalogue.known(caller.tenant.name, agent_id)
        if agent is None:
            raise self._catalogue.missing(caller.tenant.name, agent_id)
        return agent, caller

    def _render(self, caller: Caller, view: TaskView) -> ToolAnswer:
        recipient = view.task.recipient
        remote = target_of(view.task)
        if remote is not None:
            return render_task(view, agent=remote.url or remote.name or recipient.display, link=self._link)
        agent_id, _, tenant = recipient.display.partition("@")
        own_tenant = tenant == (DEFAULT if caller.operator else caller.tenant.name)
        return render_task(view, agent=agent_id if own_tenant else recipient.display, link=self._link)


async def _report_steps(stream: TaskStream, report: ReportProgress) -> None:
    """Reports each step. Reports above the rate are dropped: the answer has everything."""
    loop = asyncio.get_running_loop()
    bucket = TokenBucket(REPORTS_AT_ONCE_MAX, int(loop.time() * 1000))
    async for steps in stream:
        now_ms = int(loop.time() * 1000)
        for step in steps:
            line = render_step(step)
            if line and bucket.take(now_ms, REPORTS_PER_MIN, REPORTS_AT_ONCE_MAX) is None:
                await report(line)
