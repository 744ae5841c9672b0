"""The doors of tenants on a real socket, over a real ledger in a folder, with agents that a test brings."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx2
from starlette.routing import Router

from covenant.agents.agent_loader import load_agent
from covenant.agents.api import Agent
from covenant.agents.process_agent import ProcessAgent
from covenant.agents.runtime.worker_pool import WorkerPool
from covenant.daemon.keystore import admit_operator
from covenant.daemon.wiring.doors import tenant_routes
from covenant.doors.http.bearer_auth import TenantAuth
from covenant.doors.metrics import Meter
from covenant.exchange.a2a_service import A2AExchange
from covenant.exchange.access.identities import operator_agent
from covenant.exchange.access.principals import IdentityAuth, Principal
from covenant.exchange.access.tenants import TenantAccess, TenantLimiter
from covenant.exchange.catalogue import Catalogue
from covenant.exchange.delegation import Delegations
from covenant.ledger.clock import uuid_source
from covenant.ledger.contract.ledger import Ledger
from covenant.ledger.machine.commands import Sweep, Swept
from covenant.model.agent_definition import AgentDefinition
from covenant.model.ids import TaskId
from covenant.model.mcp_servers import Tool
from covenant.model.settings import A2aSettings
from covenant.model.tenants import DEFAULT
from covenant.seal.keys import new_private_key, new_token
from covenant.wire.a2a.parts_v1 import unlinked
from tests.daemon_under_test import NO_AUTHORITIES
from tests.doors.http.server.server_under_test import make as make_server
from tests.engine_under_test import open_ledger
from tests.ledger_contract.fake_clock import FakeClock
from tests.waits import BOUND_S

KEY: Final = new_private_key()
TOKEN: Final = new_token()


@dataclass(slots=True, kw_only=True)
class SimpleUnderTest:
    ledger: Ledger
    workers: WorkerPool
    catalogue: Catalogue
    conversations: A2AExchange
    tenancy: TenantAccess
    operator: Principal
    clock: FakeClock
    port: int
    http: httpx2.AsyncClient

    async def ask(self, method: str, path: str, *, token: str | None = TOKEN, **more: Any) -> httpx2.Response:
        headers = {} if token is None else {"authorization": f"Bearer {token}"}
        headers |= more.pop("headers", {})
        return await self.http.request(method, f"http://127.0.0.1:{self.port}{path}", headers=headers, **more)

    async def send(self, body: Any, **more: Any) -> httpx2.Response:
        return await self.ask("POST", "/a2a/tasks/send", json=body, **more)

    async def sent(self, message: str = "Hello", **more: Any) -> dict[str, Any]:
        response = await self.send({"message": message, **more})
        assert response.status_code == 200, response.text
        task: dict[str, Any] = response.json()
        return task

    async def get(self, task_id: str, **more: Any) -> httpx2.Response:
        return await self.ask("GET", f"/a2a/tasks/{task_id}", **more)

    async def ended(self, task_id: str) -> dict[str, Any]:
        """The task, when it has ended."""
        assert await self.ledger.finished(TaskId(task_id), int(BOUND_S * 1000))
        task: dict[str, Any] = (await self.get(task_id)).json()
        return task

    async def later(self, ms: int) -> Swept:
        """So much time passes, and the ledger looks at what is due."""
        self.clock.advance(ms)
        return await self.ledger.commit(Sweep())

    async def tenant(self, name: str) -> str:
        """A new tenant's token."""
        return (await self.tenancy.add(self.operator, name)).token

    def resident(self, agent: Agent | AgentDefinition, tenant: str = DEFAULT) -> None:
        definition, body = load_agent(agent) if isinstance(agent, Agent) else (agent, None)
        self.catalogue.add_resident(tenant, definition, "code")
        if body is None and definition.kind == "process":
            body = ProcessAgent(definition.command, environment={})
        if body is not None:
            self.workers.register(self.catalogue.identity(tenant, definition.id), body)

    @asynccontextmanager
    async def frames(self, request_id: str, query: str = "", **more: Any) -> AsyncIterator[AsyncIterator[Frame]]:
        url = f"http://127.0.0.1:{self.port}/v1/requests/{request_id}/events{query}"
        headers = {"authorization": f"Bearer {TOKEN}", **more}
        async with asyncio.timeout(BOUND_S), self.http.stream("GET", url, headers=headers) as response:
            assert response.headers["content-type"].startswith("text/event-stream"), await response.aread()
            yield frames_of(response)

    async def events(self, request_id: str, query: str = "", **more: Any) -> list[Frame]:
        async with self.frames(request_id, query, **more) as frames:
            return [frame async for frame in frames]


Frame = tuple[int, str, dict[str, Any]]


async def frames_of(response: httpx2.Response) -> AsyncIterator[Frame]:
    """An event without a number is part of the step of the next one that has one."""
    number, event = 0, ""
    part_of_next: list[tuple[str, dict[str, Any]]] = []
    async for line in response.aiter_lines():
        name, _, value = line.partition(": ")
        if name == "id":
            number = int(value)
        elif name == "event":
            event = value
        elif name == "data":
            part_of_next.append((event, json.loads(value)))
            if number:
                for each, data in part_of_next:
                    yield number, each, data
                number, part_of_next = 0, []


def text_of(task: dict[str, Any]) -> str:
    """What the agent said last."""
    said = [message for message in task["messages"] if message["role"] == "agent"]
    return "".join(part["text"] for part in said[-1]["parts"])


@asynccontextmanager
async def open_simple(
    home: Path,
    *agents: Agent | AgentDefinition,
    settings: A2aSettings | None = None,
    tools: Sequence[Tool] = (),
    clock: FakeClock | None = None,
) -> AsyncIterator[SimpleUnderTest]:
    clock = clock or FakeClock()
    ledger = await open_ledger(home, clock=clock)
    operator = operator_agent("operator@test", KEY)
    principal = await admit_operator(ledger, operator, TOKEN, lambda _: None)
    identity_auth = IdentityAuth(ledger, operator)
    catalogue, tenancy = Catalogue(ledger, KEY), TenantAccess(ledger, operator, identity_auth)
    workers = WorkerPool(ledger, delegations=lambda pool: Delegations(ledger, catalogue, pool))
    await tenancy.open()
    conversations = A2AExchange(ledger, catalogue, workers, uuid_source(), A2aSettings())
    gate, a2a = TenantAuth(tenancy, TenantLimiter(clock)), settings or A2aSettings(inbound_rate_per_min=0)
    router = Router(
        tenant_routes(a2a, ledger, catalogue, conversations, gate, meter=Meter(), tools=tools, link=unlinked)
    )
    working = asyncio.create_task(workers.run())
    server, listener = make_server(router), socket.create_server(("127.0.0.1", 0))
    await server.start(listener)
    try:
        async with httpx2.AsyncClient(timeout=BOUND_S, verify=NO_AUTHORITIES) as http:
            made = SimpleUnderTest(
                ledger=ledger,
                workers=workers,
                catalogue=catalogue,
                conversations=conversations,
                tenancy=tenancy,
                operator=principal,
                clock=clock,
                port=listener.getsockname()[1],
                http=http,
            )
            for agent in agents:
                made.resident(agent)
            yield made
    finally:
        await server.stop(grace_s=1)
        workers.stop()
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
        await ledger.close()


def echo(name: str = "echo", *, project: str = "work", **declared: Any) -> Agent:
    agent = Agent(name, default_project=project, **declared)

    @agent
    async def answer(turn: Any) -> str:
        return f"{name}: {turn.text}"

    return agent


class Patient:
    """An agent that says something, and then waits until a test lets it go on."""

    def __init__(self, name: str = "patient", *, project: str = "work") -> None:
        self.spoke = asyncio.Event()
        self.go_on = asyncio.Event()
        self.stopped = asyncio.Event()
        self.agent = Agent(name, default_project=project)

        @self.agent
        async def answer(turn: Any) -> AsyncIterator[Any]:
            yield f"{turn.text}: first, "
            self.spoke.set()
            try:
                await self.go_on.wait()
            except asyncio.CancelledError:
                self.stopped.set()
                raise
            yield "second"
