"""The simple exchange as a library: sends a text to the first agent that has a project, and reads the task.

    async with A2ATaskDeps.open("home", agent) as deps:         # or A2ATaskDeps.memory(agent)
        task = await handle_task_send(deps, {"message": "Hello"})
        task = await handle_task_get(task.id)

The engine and the promises are those of the daemon's simple door: a task is on disk when `handle_task_send` returns,
its states only go forward, a timeout fails it and stops its agent. The process is trusted: no call is authorised or
rate-limited. Cards follow the settings of the home.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from covenant.agents.agent_loader import load_agent
from covenant.agents.api import Agent
from covenant.agents.process_agent import ProcessAgent
from covenant.agents.runtime.job import RunnableAgent
from covenant.agents.runtime.worker_pool import WorkerPool
from covenant.daemon.environment import environment, monotonic_ms, now_ms, program_environment
from covenant.daemon.home import make_home
from covenant.daemon.keystore import Keystore, find_passphrase
from covenant.daemon.schedulers import Sweeper
from covenant.daemon.settings_loader import load
from covenant.daemon.telemetry import Log
from covenant.daemon.wiring.core import card_features, mcp_servers
from covenant.doors.http.host_names import as_host
from covenant.doors.simple import (
    A2AMessage,
    A2APart,
    A2ATask,
    A2ATaskParams,
    A2ATaskSendRequest,
    A2ATaskState,
    decode_send,
    read_send,
    task_of,
)
from covenant.exchange.a2a_service import A2AExchange
from covenant.exchange.access.identities import operator_agent
from covenant.exchange.access.principals import IdentityAuth
from covenant.exchange.access.tenants import Caller, TenantAccess
from covenant.exchange.argument_checks import checks_arguments
from covenant.exchange.cards import CardFeatures, agent_card
from covenant.exchange.catalogue import Catalogue
from covenant.exchange.simple import SimpleExchange, SimpleLimits
from covenant.ledger.clock import uuid_source
from covenant.ledger.embedded.engine import EmbeddedLedger
from covenant.ledger.embedded.open import memory_ledger, open_ledger
from covenant.model.agent_definition import INDEX_DEFINITION, AgentDefinition, CatalogueAgent
from covenant.model.errors import Invalid, NotFound
from covenant.model.mcp_servers import Tool
from covenant.model.settings import A2aSettings
from covenant.model.tenants import DEFAULT, Tenant
from covenant.outbound.remote.simple import (
    ExternalServiceError,
    RemoteInvocationResult,
    ValidationError,
    clear_agent_card_cache,
    discover_agent,
    fetch_agent_card,
    invoke_remote_agent,
)
from covenant.seal.keys import new_private_key
from covenant.wire.a2a.card_codec import CombinedCard as A2AAgentCard
from covenant.wire.a2a.card_codec import combined_card
from covenant.wire.validation import checked

__all__ = [
    "A2AAgentCard",
    "A2AMessage",
    "A2APart",
    "A2ATask",
    "A2ATaskDeps",
    "A2ATaskParams",
    "A2ATaskSendRequest",
    "A2ATaskState",
    "ExternalServiceError",
    "NotFoundError",
    "RemoteInvocationResult",
    "ValidationError",
    "build_agent_card",
    "build_agent_card_for_agent",
    "clear_agent_card_cache",
    "clear_task_store",
    "discover_agent",
    "fetch_agent_card",
    "handle_task_get",
    "handle_task_send",
    "invoke_remote_agent",
]

SWEEP_MS: Final = 250
_PROCESS: Final = "process"
_UNLIMITED: Final = SimpleLimits()
_INSTANCE: Final = msgspec.structs.replace(INDEX_DEFINITION, name="covenant")


class NotFoundError(NotFound):
    """No agent has a project, so none can take the text."""


@dataclass(frozen=True, slots=True, eq=False)
class A2ATaskDeps:
    """The ledger and services that tasks are sent through. Built by `open` or `memory`, or from existing parts."""

    tasks: SimpleExchange
    tenant: str = DEFAULT
    ledger: EmbeddedLedger | None = field(default=None)

    @property
    def caller(self) -> Caller:
        return Caller(Tenant(name=self.tenant), _PROCESS, operator=True, name=f"{_PROCESS}@{self.tenant}")

    @staticmethod
    @asynccontextmanager
    async def open(
        home: str | Path,
        *agents: Agent | AgentDefinition,
        limits: SimpleLimits = _UNLIMITED,
        clock: Callable[[], int] = now_ms,
    ) -> AsyncIterator[A2ATaskDeps]:
        """Opens the exchange in a folder, which is created if needed. An agent definition is a process agent's."""
        folder = Path(home)
        make_home(folder)
        keystore = Keystore(folder, find_passphrase(environment()))
        key = await asyncio.to_thread(lambda: keystore.read_key() or keystore.make_key(new_private_key))
        ledger = await open_ledger(folder, clock=clock, monotonic_ms=_monotonic_beside(clock))
        async with _open_exchange(ledger, key, agents, limits) as deps:
            await asyncio.to_thread(keystore.lock_key)
            yield deps

    @staticmethod
    @asynccontextmanager
    async def memory(
        *agents: Agent | AgentDefinition, limits: SimpleLimits = _UNLIMITED, clock: Callable[[], int] = now_ms
    ) -> AsyncIterator[A2ATaskDeps]:
        """An exchange that ends with the process: for tests and experiments."""
        ledger = await memory_ledger(clock=clock, monotonic_ms=_monotonic_beside(clock))
        async with _open_exchange(ledger, new_private_key(), agents, limits) as deps:
            yield deps


def _monotonic_beside(clock: Callable[[], int]) -> Callable[[], int]:
    """The clock by which steps of `clock` are noticed. A caller's own clock is trusted."""
    return monotonic_ms if clock is now_ms else clock


@asynccontextmanager
async def _open_exchange(
    ledger: EmbeddedLedger, key: bytes, agents: tuple[Agent | AgentDefinition, ...], limits: SimpleLimits
) -> AsyncIterator[A2ATaskDeps]:
    async with AsyncExitStack() as stack:
        stack.push_async_callback(ledger.close)
        operator = operator_agent("operator@local", key)
        await TenantAccess(ledger, operator, IdentityAuth(ledger, operator)).open()
        catalogue, workers = Catalogue(ledger, key), WorkerPool(ledger)
        for agent in agents:
            body: RunnableAgent
            if isinstance(agent, Agent):
                definition, body = load_agent(agent)
            else:
                definition = checked("agent", agent, AgentDefinition)
                body = ProcessAgent(definition.command, environment=program_environment())
            catalogue.add_resident(DEFAULT, definition, "code")
            workers.register(
                catalogue.identity(DEFAULT, definition.id),
                body,
                concurrency=definition.concurrency,
                rate_per_min=definition.rate_per_min,
            )
        conversations = A2AExchange(ledger, catalogue, workers, uuid_source(), A2aSettings())
        sweeper = Sweeper(ledger, operator, log=Log(), interval_ms=SWEEP_MS)
        deps = A2ATaskDeps(
            SimpleExchange(ledger, catalogue, conversations, uuid_source(), limits=limits), ledger=ledger
        )
        running = [asyncio.create_task(workers.run()), asyncio.create_task(sweeper.run())]
        await asyncio.sleep(0)  # the pool registers its waiters before the first task is sent
        _stores[deps] = None
        try:
            yield deps
        finally:
            _stores.pop(deps, None)
            for each in running:
                each.cancel()
            await asyncio.gather(*running, return_exceptions=True)


_stores: dict[A2ATaskDeps, None] = {}
"""The open exchanges that tasks were sent through: `handle_task_get` gets only an id and searches them all."""


async def handle_task_send(deps: A2ATaskDeps, body: Mapping[str, Any] | A2ATaskSendRequest | bytes) -> A2ATask:
    """Sends a text to the first agent that has a project.

    Raises `Invalid` if the body is invalid or its chain of calls too long, `NotFoundError` if no agent has a project.
    """
    if isinstance(body, A2ATaskSendRequest):
        request = checked("body", body, A2ATaskSendRequest)
    elif isinstance(body, bytes):
        request = decode_send(body)
    else:
        try:
            request = msgspec.convert(body, A2ATaskSendRequest)
        except msgspec.ValidationError as wrong:
            raise Invalid("invalid_request", str(wrong)) from None
    try:
        task = task_of(await deps.tasks.send(deps.caller, read_send(request)))
    except NotFound as missing:
        raise NotFoundError(missing.code, missing.message) from None
    _stores[deps] = None
    return task


@checks_arguments
async def handle_task_get(task_id: str) -> A2ATask | None:
    """The task as it is now; None if it is unknown or was cleared."""
    for deps in tuple(_stores):
        try:
            return task_of(await deps.tasks.get(deps.caller, task_id))
        except NotFound:
            continue
    return None


def clear_task_store() -> None:
    """Hides all tasks that were sent so far from `handle_task_get`. They stay in their ledgers and go on."""
    for deps in _stores:
        deps.tasks.clear(deps.tenant)


@checks_arguments
def build_agent_card(base_url: str | None = None, *, home: str | Path | None = None) -> A2AAgentCard:
    """The card of this instance, with a skill for chat and one for every registered MCP tool."""
    return build_agent_card_for_agent(_INSTANCE, base_url, home=home)


def build_agent_card_for_agent(
    agent: CatalogueAgent | AgentDefinition,
    base_url: str | None = None,
    *,
    home: str | Path | None = None,
    tools: tuple[Tool, ...] | None = None,
) -> A2AAgentCard:
    """The card of one agent, with the given tools or those that are registered in the home."""
    if isinstance(agent, AgentDefinition):
        agent = CatalogueAgent(tenant=DEFAULT, definition=agent, source="code")
    settings = load({}, environment(), home=home).settings
    offer: CardFeatures = card_features(settings, mcp_servers(settings.home))
    if tools is not None:
        offer = msgspec.structs.replace(offer, tools=tools)
    base = (
        base_url or settings.http.public_base_url or f"http://{as_host(settings.http.bind_addr)}:{settings.http.port}"
    )
    return combined_card(agent_card(agent, base.rstrip("/"), offer))
