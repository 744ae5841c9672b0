"""The simple door's tasks: a text in, for the first agent that has a project, and its state out.

The ledger keeps these tasks like all others. Only this door's own view of them is bounded: it shows a tenant its last
thousand tasks, and forgets the oldest finished hundred when there is one more. A task that has not ended is never
forgotten. After a start the view begins with the newest thousand that the ledger has.

Each daemon of a shared ledger has a view of its own. A task that was sent at another daemon enters the view when a
caller asks for it, if it is newer than all tasks that this view has forgotten.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import msgspec

from covenant.exchange.a2a_service import A2AExchange
from covenant.exchange.access.tenants import MESSAGE, RATE, Caller, share
from covenant.exchange.cards import skills_of
from covenant.exchange.catalogue import Catalogue
from covenant.exchange.tasks.builder import build_task, check_message
from covenant.exchange.tasks.reader import parse_known_id
from covenant.ledger.contract.tasks import TaskLedger, TaskScope
from covenant.ledger.machine.decisions.context import unknown_task
from covenant.model.a2a_requests import Message
from covenant.model.agent_definition import CatalogueAgent
from covenant.model.content import Text
from covenant.model.errors import Invalid, NotFound, OverLimit
from covenant.model.ids import TaskId
from covenant.model.mcp_servers import Tool, tools_for
from covenant.model.rate_limits import MINUTE_MS, SlidingWindow
from covenant.model.task import SIMPLE, Hop, Task, check_chain
from covenant.model.task_view import TaskView

TIMEOUT_MS: Final = 300_000
KEPT_MAX: Final = 1_000
PRUNED: Final = 100
VIEWS_MAX: Final = 256
"""The most tenants whose view is in memory; other views are read again on demand."""

NO_AGENT: Final = "Agent with default project not found"
TOO_DEEP: Final = "Invocation depth limit exceeded."


class SimpleSend(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """A request at the simple door. `source_agent` is the caller's own name for itself, and decides nothing."""

    message: str
    skill: str | None = None
    timeout_ms: int | None = None
    not_before_ms: int | None = None
    depth: int = 1
    source_agent: str | None = None
    hop: Hop | None = None
    """The chain of calls before this one; the stricter of its depth and `depth` counts."""


class _TenantView:
    """The tasks that a tenant is shown, each with the time when it was sent, oldest first."""

    def __init__(self, forgotten_ms: int = -1, tasks: Iterable[tuple[TaskId, int]] = ()) -> None:
        self.tasks = dict(tasks)
        self.forgotten_ms = forgotten_ms
        """When the newest forgotten task was sent."""


class SimpleLimits(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    rate_per_min: int = 0
    """The most sends by one credential in any minute, divided by the number of living daemons; 0: no limit."""
    kept_max: int = KEPT_MAX
    pruned: int = PRUNED


class SimpleExchange:
    def __init__(
        self,
        ledger: TaskLedger,
        catalogue: Catalogue,
        a2a: A2AExchange,
        new_id: Callable[[], str],
        *,
        tools: Sequence[Tool] = (),
        limits: SimpleLimits | None = None,
        living: Callable[[], int] = lambda: 1,
    ) -> None:
        """`tools` are those that agents may have as skills; `living` returns how many daemons serve the ledger."""
        self._ledger = ledger
        self._catalogue = catalogue
        self._a2a = a2a
        self._new_id = new_id
        self._tools = tools
        self._limits = limits or SimpleLimits()
        self._window = SlidingWindow(self._limits.rate_per_min, MINUTE_MS)
        self._living = living
        self._views: OrderedDict[str, _TenantView] = OrderedDict()
        self._cleared: set[str] = set()
        self._loading = asyncio.Lock()

    async def send(self, caller: Caller, sent: SimpleSend) -> TaskView:
        """Accepts a task; returns it as accepted, already at work if its agent is free."""
        hop = sent.hop or Hop()
        depth = max(sent.depth, hop.depth)
        if depth > self._a2a.depth_max:
            # Before the rate: a call refused for its depth must not use up the caller's rate.
            raise Invalid("depth_exceeded", TOO_DEEP)
        tenant = caller.tenant.name
        agent, ignored = self._choose(tenant, sent.skill)
        check_chain(depth, hop.chain, self._catalogue.identity(tenant, agent.id), self._a2a.depth_max)
        most = share(self._limits.rate_per_min, self._living())
        wait_ms = self._window.take(caller.token_sha256, self._ledger.clock.monotonic_ms(), most)
        if wait_ms is not None:
            raise OverLimit(RATE, MESSAGE, retry_after_ms=wait_ms)
        task = self._task(agent, sent, msgspec.structs.replace(hop, depth=depth), ignored)
        message = Message(message_id=task.id, parts=(Text(sent.message),))
        check_message(message, agent, ())
        with self._ledger.watch(task.id, new=True) as watch:
            await self._a2a.writer.submit(task, bytes_max=self._a2a.settings.message_bytes_max, minted=True)
            view = (await self._a2a.reader.accepted(task.id, watch)).existing_view()
        await self._add(await self._view_of(tenant), view)
        return view

    async def get(self, caller: Caller, task_id: str) -> TaskView:
        wanted, tenant = parse_known_id(task_id), caller.tenant.name
        view = await self._a2a.reader.get(wanted, TaskScope(tenant=tenant))
        if view.task.origin != SIMPLE:
            raise unknown_task(task_id)
        known = await self._view_of(tenant)
        if wanted not in known.tasks:
            if view.created_at_ms > known.forgotten_ms:  # sent at another daemon
                await self._add(known, view)
            elif view.state.terminal or tenant in self._cleared:
                raise unknown_task(task_id)
        return view

    def clear(self, tenant: str) -> None:
        """Empties this door's view. The ledger forgets nothing, and running tasks go on."""
        self._cleared.add(tenant)
        self._cache_view(tenant, _TenantView(self._ledger.now_ms()))

    def _choose(self, tenant: str, skill: str | None) -> tuple[CatalogueAgent, tuple[str, ...]]:
        """The first agent that has a project, and the skill if one has it; and the request fields that were ignored."""
        candidates = [agent for agent in self._catalogue.agents(tenant) if agent.definition.default_project]
        if not candidates:
            raise NotFound("no_default_project", NO_AGENT)
        if skill is None:
            return candidates[0], ()
        tools = tools_for(tenant, self._tools)
        for agent in candidates:
            if any(skill in (each.id, each.name) for each in skills_of(agent.definition, tools)):
                return agent, ()
        return candidates[0], ("skill",)

    def _task(self, agent: CatalogueAgent, sent: SimpleSend, hop: Hop, ignored: tuple[str, ...]) -> Task:
        task_id, own_ms = TaskId(self._new_id()), agent.definition.turn_timeout_ms
        timeout_ms = min(filter(None, (sent.timeout_ms, own_ms)), default=TIMEOUT_MS)
        left_ms = None if hop.deadline_ms is None else self._ledger.clock.left_ms(hop.deadline_ms)
        if left_ms is not None:
            timeout_ms = max(1, min(timeout_ms, left_ms))
        about: dict[str, Any] = {"source": "agent", "project": agent.definition.default_project}
        if sent.skill is not None:
            about["skill"] = sent.skill
        if sent.source_agent is not None:
            about["sourceAgent"] = sent.source_agent
        if ignored:
            about["ignored"] = list(ignored)
        return build_task(
            task_id,
            sender=self._catalogue.client(agent.tenant),
            recipient=self._catalogue.identity(agent.tenant, agent.id),
            parts=(Text(sent.message),),
            tenant=agent.tenant,
            origin=SIMPLE,
            definition=agent.definition,
            timeout_ms=timeout_ms,
            hop=hop,
            # A task that is not begun in this time ends, and one that waits for an answer: this door sends none.
            deadline_ms=max(self._ledger.now_ms(), sent.not_before_ms or 0) + timeout_ms,
            not_before_ms=sent.not_before_ms,
            request_metadata=about,
        )

    async def _view_of(self, tenant: str) -> _TenantView:
        async with self._loading:
            known = self._views.get(tenant)
            if known is None:
                rows = await self._ledger.of_tenant(tenant, self._limits.kept_max + 1, simple=True)
                shown = rows[: self._limits.kept_max]
                forgotten_ms = rows[-1].created_at_ms if len(rows) > len(shown) else -1
                known = _TenantView(forgotten_ms, ((row.task_id, row.created_at_ms) for row in reversed(shown)))
            self._cache_view(tenant, known)
            return known

    def _cache_view(self, tenant: str, known: _TenantView) -> None:
        self._views[tenant] = known
        self._views.move_to_end(tenant)
        if len(self._views) > VIEWS_MAX:
            self._views.popitem(last=False)

    async def _add(self, known: _TenantView, view: TaskView) -> None:
        """Adds a task to the view. If the view is full, forgets the oldest finished tasks: `pruned` of them, or more if
        earlier ones could not be forgotten."""
        known.tasks[view.task.id] = view.created_at_ms
        if len(known.tasks) <= self._limits.kept_max:
            return
        most = max(self._limits.pruned, len(known.tasks) - self._limits.kept_max)
        for task_id in tuple(known.tasks):
            entry = await self._ledger.entry(task_id)
            if entry is None or entry.finished:
                known.forgotten_ms = max(known.forgotten_ms, known.tasks.pop(task_id, -1))
                most -= 1
                if not most:
                    return
