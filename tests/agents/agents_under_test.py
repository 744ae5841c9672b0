"""A ledger with a catalogue, a worker pool that can delegate, and agents that models and functions play."""

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from pydantic_ai.models import Model

from covenant.agents.agent_directory import AgentDirectory, RemoteCards
from covenant.agents.agent_loader import load_agent
from covenant.agents.api import Agent
from covenant.agents.model.agent_memory import AgentMemories
from covenant.agents.model.mcp_tools import McpTools
from covenant.agents.model.model_agent import ModelAdvisor, ModelAgent
from covenant.agents.model.toolbox import ToolServices
from covenant.agents.model.web_fetch import WebPages
from covenant.agents.remote_agent import RemoteAgents
from covenant.agents.router import IndexAgent, UnavailableAgent
from covenant.agents.runtime.job import RunnableAgent
from covenant.agents.runtime.model_calls import ModelCalls
from covenant.agents.runtime.worker_pool import WorkerPool
from covenant.daemon.environment import environment
from covenant.daemon.keystore import admit_operator
from covenant.exchange.a2a_service import A2AExchange, A2ARequest
from covenant.exchange.access.identities import operator_agent
from covenant.exchange.access.principals import IdentityAuth
from covenant.exchange.access.tenants import Caller, TenantAccess
from covenant.exchange.catalogue import Catalogue
from covenant.exchange.delegation import Delegations
from covenant.ledger.clock import uuid_source
from covenant.ledger.contract.ledger import Ledger
from covenant.model.a2a_requests import Message, SendMessage
from covenant.model.agent_definition import INDEX, Advisor, AgentDefinition, read_agent_definition
from covenant.model.content import Content, Json, Text
from covenant.model.settings import A2aSettings, DelegationSettings
from covenant.model.task import URL_RECIPIENT
from covenant.model.task_event import ArtifactUpdate, Step
from covenant.model.task_view import TaskView
from covenant.model.tenants import DEFAULT
from covenant.model.tracing import OFF, Tracer
from covenant.outbound.address_guard import AddressGuard, SystemResolver
from covenant.outbound.http_fetcher import Fetcher
from covenant.outbound.outbound_settings import OutboundSettings
from covenant.outbound.remote.remote_registry import FILE
from covenant.seal.keys import new_private_key, new_token
from tests.agents.pool_under_test import now_ms
from tests.engine_under_test import open_ledger
from tests.waits import BOUND_S

KEY: Final = new_private_key()
TOKEN: Final = new_token()
"""The same for all: a home can be left and opened again."""
DEAD: Final = "http://127.0.0.1:9/"
"""Nobody listens there."""


@dataclass(slots=True, kw_only=True)
class AgentsUnderTest:
    home: Path
    ledger: Ledger
    catalogue: Catalogue
    tenancy: TenantAccess
    workers: WorkerPool
    conversations: A2AExchange
    caller: Caller
    directory: AgentDirectory
    elsewhere: RemoteAgents
    remote_cards: RemoteCards
    services: ToolServices
    models: dict[str, Model] = field(default_factory=dict)
    """Of the model agents by id; under "" that of all others."""
    fallbacks: list[Model] = field(default_factory=list)
    token: str = ""

    def model(self, definition: AgentDefinition, *, remembers: bool = True) -> RunnableAgent | None:
        model = self.models.get(definition.id) or self.models.get("")
        if model is None:
            return None
        advisor = definition.advisor
        model_advisor = self._advisor(advisor) if advisor is not None else None
        return ModelAgent(
            model,
            definition,
            self.services,
            remembers=remembers,
            model_advisor=model_advisor,
            fallbacks=self.fallbacks,
        )

    def _advisor(self, advisor: Advisor) -> ModelAdvisor:
        model, *others = (self.models[name] for name in (advisor.model, *advisor.fallback_models))
        return ModelAdvisor(model, advisor, request_s=BOUND_S, fallbacks=others)

    def add(self, agent: Agent | dict[str, Any], tenant: str = DEFAULT) -> None:
        if isinstance(agent, Agent):
            definition, body = load_agent(agent)
        else:
            definition = read_agent_definition(agent)
            body = self.model(definition) or UnavailableAgent()
        self.catalogue.add_resident(tenant, definition, "code")
        self.workers.register(self.catalogue.identity(tenant, definition.id), body)

    def open_index(self, tenant: str = DEFAULT) -> None:
        self.workers.register(self.catalogue.identity(tenant, INDEX), IndexAgent(self, self.directory))

    async def ask(self, agent_id: str, said: str | Sequence[Content], *, task_id: str | None = None) -> TaskView:
        agent = self.catalogue.agent(self.caller.tenant.name, agent_id)
        assert agent is not None
        parts = (Text(said),) if isinstance(said, str) else tuple(said)
        message = Message(message_id=uuid_source()(), parts=parts, task_id=task_id)
        async with asyncio.timeout(BOUND_S):
            return await self.conversations.send(
                A2ARequest(caller=self.caller, agent=agent), SendMessage(message=message)
            )

    async def steps(self, view: TaskView) -> list[Step]:
        return list(await self.ledger.steps(view.task.id, 0, 100_000))

    async def known(self) -> None:
        """The cards of all remote agents were looked for."""
        self.remote_cards.refresh()
        await asyncio.wait_for(self.remote_cards.settled(), BOUND_S)

    def register(self, **urls: str) -> None:
        (self.home / FILE).write_text(json.dumps({"agents": {name: {"url": url} for name, url in urls.items()}}))


def said(view: TaskView) -> str:
    return "".join(part.text for part in view.message.parts if isinstance(part, Text)) if view.message else ""


def values(steps: Sequence[Step], name: str) -> list[Any]:
    """The data of the artifacts of this name."""
    return [
        part.value
        for step in steps
        if isinstance(step.what, ArtifactUpdate) and step.what.name == name
        for part in step.what.parts
        if isinstance(part, Json)
    ]


def function(name: str, answer: str, **declared: Any) -> Agent:
    """An agent that says this, with what it was asked in place of {}."""
    agent = Agent(name, **declared)

    @agent
    async def speak(turn: Any) -> str:
        return answer.replace("{}", turn.text)

    return agent


@asynccontextmanager
async def open_agents(
    home: Path,
    *agents: Agent | dict[str, Any],
    models: dict[str, Model] | None = None,
    tokens_max: int = 0,
    tools: McpTools | None = None,
    limits: DelegationSettings | None = None,
    tracer: Tracer = OFF,
    model_calls: ModelCalls | None = None,
) -> AsyncIterator[AgentsUnderTest]:
    home.mkdir(parents=True, exist_ok=True)
    key, token = KEY, TOKEN
    ledger = await open_ledger(home / "ledger", clock=now_ms)
    operator = operator_agent("operator@test", key)
    await admit_operator(ledger, operator, token, lambda _: None)
    tenancy = TenantAccess(ledger, operator, IdentityAuth(ledger, operator))
    await tenancy.open()
    caller = tenancy.recognise(token)
    assert caller is not None
    catalogue = Catalogue(ledger, key)
    resolver = SystemResolver()
    fetcher = Fetcher(AddressGuard(("127.0.0.0/8",), resolver=resolver), OutboundSettings())
    elsewhere = RemoteAgents(home, fetcher, ledger, depth_max=3, environment=environment, chance=random.random)
    limits = limits or DelegationSettings(cooldown_ms=0)
    workers = WorkerPool(
        ledger,
        stop_s=0.2,
        delegations=lambda pool: Delegations(ledger, catalogue, pool, limits, registered=elsewhere.registered),
        tracer=tracer,
        model_calls=model_calls or ModelCalls(tracer, task_tokens_max=tokens_max),
    )
    workers.register(catalogue.identity(DEFAULT, URL_RECIPIENT), elsewhere.body())
    remote_cards = RemoteCards(elsewhere.registry, elsewhere.card, time.monotonic)
    known = dict(models or {})
    directory = AgentDirectory(catalogue, lambda definition: definition.kind != "model" or bool(known), remote_cards)
    services = ToolServices(
        directory=directory, pages=WebPages(fetcher), memories=AgentMemories(home / "memory", now_ms), mcp=tools
    )
    under_test = AgentsUnderTest(
        home=home,
        ledger=ledger,
        catalogue=catalogue,
        tenancy=tenancy,
        workers=workers,
        conversations=A2AExchange(ledger, catalogue, workers, uuid_source(), A2aSettings()),
        caller=caller,
        directory=directory,
        elsewhere=elsewhere,
        remote_cards=remote_cards,
        services=services,
        models=known,
        token=token,
    )
    for agent in agents:
        under_test.add(agent)
    under_test.open_index()
    working = asyncio.create_task(workers.run())
    await asyncio.sleep(0)
    try:
        yield under_test
    finally:
        workers.stop()
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
        await elsewhere.close()
        await fetcher.close()
        resolver.close()
        await ledger.close()
