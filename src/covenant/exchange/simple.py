"""The simple door's tasks: a text in, for the first agent that has a project, and its state out.

They are tasks like all others, and the ledger keeps them like all others. Only this door's own view of them is bounded:
it shows a tenant its last thousand, and forgets the oldest finished hundred when there is one more. A task that has not
ended is never forgotten. After a start the view begins with the newest thousand that the ledger has.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from covenant.exchange.a2a_service import A2AExchange
from covenant.exchange.access.tenants import MESSAGE, RATE, Caller
from covenant.exchange.cards import skills_of
from covenant.exchange.catalogue import Catalogue
from covenant.exchange.tasks.builder import build_task, check_message
from covenant.exchange.tasks.reader import WATCH_S, parse_known_id, unknown_task
from covenant.ledger.contract.tasks import TaskLedger, TaskScope
from covenant.model.a2a_requests import Message
from covenant.model.agent_definition import CatalogueAgent
from covenant.model.content import Text
from covenant.model.errors import Invalid, NotFound, OverLimit
from covenant.model.ids import TaskId
from covenant.model.mcp_servers import Tool, tools_for
from covenant.model.rate_limits import MINUTE_MS, SlidingWindow
from covenant.model.task import SIMPLE, Hop, Task, check_chain
from covenant.model.task_view import TaskView, TaskViewBuilder

TIMEOUT_MS: Final = 300_000
KEPT_MAX: Final = 1_000
PRUNED: Final = 100
SHELVES_MAX: Final = 256
"""Tenants whose view is in memory; others are read again when they come back."""

NO_AGENT: Final = "Agent with default project not found"
TOO_DEEP: Final = "Invocation depth limit exceeded."


class SimpleSend(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """What a caller of the simple door asks. `source_agent` is what it calls itself, and decides nothing."""

    message: str
    skill: str | None = None
    timeout_ms: int | None = None
    not_before_ms: int | None = None
    depth: int = 1
    source_agent: str | None = None
    hop: Hop | None = None
    """What it says of the calls before this one, besides: whichever is stricter counts."""


class SimpleLimits(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    rate_per_min: int = 0
    """Sends by one credential in any minute; 0: no limit."""
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
    ) -> None:
        """`tools` are those that agents may have as skills."""
        self._ledger = ledger
        self._catalogue = catalogue
        self._a2a = a2a
        self._new_id = new_id
        self._tools = tools
        self._limits = limits or SimpleLimits()
        self._window = SlidingWindow(self._limits.rate_per_min, MINUTE_MS)
        self._shelves: OrderedDict[str, dict[TaskId, None]] = OrderedDict()
        self._cleared: set[str] = set()
        self._loading = asyncio.Lock()

    async def send(self, caller: Caller, sent: SimpleSend) -> TaskView:
        """The task as it was accepted: at work already, if its agent is free."""
        hop = sent.hop or Hop()
        depth = max(sent.depth, hop.depth)
        if depth > self._a2a.depth_max:
            # Before the rate: a circle that is cut must not cost its caller what it may still ask.
            raise Invalid("depth_exceeded", TOO_DEEP)
        tenant = caller.tenant.name
        agent, ignored = self._choose(tenant, sent.skill)
        check_chain(depth, hop.chain, self._catalogue.identity(tenant, agent.id), self._a2a.depth_max)
        wait_ms = self._window.take(caller.token_sha256, self._ledger.clock.monotonic_ms())
        if wait_ms is not None:
            raise OverLimit(RATE, MESSAGE, retry_after_ms=wait_ms)
        task = self._task(agent, sent, msgspec.structs.replace(hop, depth=depth), ignored)
        message = Message(message_id=task.id, parts=(Text(sent.message),))
        check_message(message, agent, ())
        with self._ledger.watch(task.id, new=True) as watch:
            await self._a2a.writer.submit(task, bytes_max=self._a2a.settings.message_bytes_max, minted=True)
            builder = TaskViewBuilder()
            builder.catch_up(await watch.next(WATCH_S))
        shelf = await self._shelf(tenant)
        shelf[task.id] = None
        if len(shelf) > self._limits.kept_max:
            await self._prune(shelf)
        return builder.known()

    async def get(self, caller: Caller, task_id: str) -> TaskView:
        wanted, tenant = parse_known_id(task_id), caller.tenant.name
        view = await self._a2a.reader.get(wanted, TaskScope(tenant=tenant))
        shown = wanted in await self._shelf(tenant) or not (view.state.terminal or tenant in self._cleared)
        if view.task.origin != SIMPLE or not shown:
            raise unknown_task(task_id)
        return view

    def clear(self, tenant: str) -> None:
        """Begin this door's view anew, with nothing in it. The ledger forgets nothing, and what runs goes on."""
        self._cleared.add(tenant)
        self._keep(tenant, {})

    def _choose(self, tenant: str, skill: str | None) -> tuple[CatalogueAgent, tuple[str, ...]]:
        """The first agent that has a project, and the skill if one has it; and what of the wish was ignored."""
        able = [agent for agent in self._catalogue.agents(tenant) if agent.definition.default_project]
        if not able:
            raise NotFound("no_default_project", NO_AGENT)
        if skill is None:
            return able[0], ()
        tools = tools_for(tenant, self._tools)
        for agent in able:
            if any(skill in (each.id, each.name) for each in skills_of(agent.definition, tools)):
                return agent, ()
        return able[0], ("skill",)

    def _task(self, agent: CatalogueAgent, sent: SimpleSend, hop: Hop, ignored: tuple[str, ...]) -> Task:
        task_id, own_ms = TaskId(self._new_id()), agent.definition.turn_timeout_ms
        timeout_ms = min(filter(None, (sent.timeout_ms, own_ms)), default=TIMEOUT_MS)
        left_ms = None if hop.deadline_ms is None else self._ledger.clock.left_ms(hop.deadline_ms)
        if left_ms is not None:
            timeout_ms = max(1, min(timeout_ms, left_ms))
        said: dict[str, Any] = {"source": "agent", "project": agent.definition.default_project}
        if sent.skill is not None:
            said["skill"] = sent.skill
        if sent.source_agent is not None:
            said["sourceAgent"] = sent.source_agent
        if ignored:
            said["ignored"] = list(ignored)
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
            # What nobody begins in this time, or what waits for a word that this door cannot bring, ends too.
            deadline_ms=max(self._ledger.now_ms(), sent.not_before_ms or 0) + timeout_ms,
            not_before_ms=sent.not_before_ms,
            request_metadata=said,
        )

    async def _shelf(self, tenant: str) -> dict[TaskId, None]:
        """The finished tasks that a tenant is shown, and those that are under way, the oldest first."""
        async with self._loading:
            shelf = self._shelves.get(tenant)
            if shelf is None:
                rows = await self._ledger.of_tenant(tenant, self._limits.kept_max, simple=True)
                shelf = dict.fromkeys(row.task_id for row in reversed(rows))
            self._keep(tenant, shelf)
            return shelf

    def _keep(self, tenant: str, shelf: dict[TaskId, None]) -> None:
        self._shelves[tenant] = shelf
        self._shelves.move_to_end(tenant)
        if len(self._shelves) > SHELVES_MAX:
            self._shelves.popitem(last=False)

    async def _prune(self, shelf: dict[TaskId, None]) -> None:
        """Take the oldest that have ended off the shelf; as many more as those that could not be taken off before."""
        most = max(self._limits.pruned, len(shelf) - self._limits.kept_max)
        for task_id in tuple(shelf):
            entry = await self._ledger.entry(task_id)
            if entry is None or entry.finished:
                shelf.pop(task_id, None)
                most -= 1
                if not most:
                    return
