"""The A2A door on a real socket, over a real ledger in a folder, with agents behind it that a test brings."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import httpx2
from starlette.routing import Router
from starlette.types import ASGIApp, Receive, Scope, Send

from covenant.agents.api import Agent
from covenant.agents.function_agent import FunctionAgent
from covenant.agents.runtime.worker_pool import WorkerPool
from covenant.daemon.environment import now_ms
from covenant.daemon.keystore import admit_operator
from covenant.daemon.wiring.agents import check_push
from covenant.doors.a2a.admission import Admission
from covenant.doors.a2a.cards import CardPages, PublishedAgent, extended_cards
from covenant.doors.a2a.http_bindings import PREFIX, A2ADoor
from covenant.doors.a2a.operations import A2AServices
from covenant.doors.http.bearer_auth import TenantAuth
from covenant.doors.http.host_names import BaseUrl
from covenant.doors.http.request_body import AnonymousPool
from covenant.doors.http.server.http_exchange import exchange_of
from covenant.doors.metrics import Meter
from covenant.exchange.a2a_service import A2AExchange
from covenant.exchange.access.identities import operator_agent
from covenant.exchange.access.principals import IdentityAuth, Principal
from covenant.exchange.access.tenants import TenantAccess, TenantLimiter
from covenant.exchange.cards import CardFeatures, Cards
from covenant.exchange.catalogue import Catalogue
from covenant.exchange.delegation import Delegations
from covenant.exchange.push import PushConfigs
from covenant.ledger.clock import uuid_source
from covenant.ledger.contract.ledger import Ledger
from covenant.model.agent_definition import AgentDefinition
from covenant.model.settings import A2aSettings
from covenant.model.tenants import DEFAULT
from covenant.model.tracing import OFF, Tracer
from covenant.seal.cards import CardSigner
from covenant.seal.keys import new_private_key, new_token
from tests.daemon_under_test import NO_AUTHORITIES
from tests.doors.http.server.server_under_test import make as make_server
from tests.engine_under_test import open_ledger
from tests.waits import BOUND_S


@dataclass(slots=True, kw_only=True)
class A2AUnderTest:
    ledger: Ledger
    workers: WorkerPool
    catalogue: Catalogue
    tenancy: TenantAccess
    operator: Principal
    port: int
    token: str
    http: httpx2.AsyncClient
    tokens: dict[str, str]
    """Of the tenants besides the first."""
    gate: Admission
    office: A2AServices
    cards: Cards
    features: list[CardFeatures]
    """What cards say is switched on: the last of them."""

    def url(self, agent: str) -> str:
        return f"http://127.0.0.1:{self.port}{PREFIX}{agent}"

    async def rpc(self, agent: str, method: str, params: Any = None, **headers: str) -> dict[str, Any]:
        """The whole JSON-RPC response."""
        body: dict[str, Any] = {"jsonrpc": "2.0", "id": 1, "method": method}
        if params is not None:
            body["params"] = params
        response = await self.http.post(self.url(agent), json=body, headers=self._headers(headers))
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        assert answer["id"] == 1
        return answer

    async def result(self, agent: str, method: str, params: Any = None, **headers: str) -> Any:
        answer = await self.rpc(agent, method, params, **headers)
        assert "result" in answer, answer
        return answer["result"]

    async def refused(self, agent: str, method: str, params: Any = None, **headers: str) -> int:
        answer = await self.rpc(agent, method, params, **headers)
        assert "error" in answer, answer
        code: int = answer["error"]["code"]
        return code

    @asynccontextmanager
    async def frames(
        self, agent: str, method: str, params: Any, **headers: str
    ) -> AsyncIterator[AsyncIterator[tuple[int, dict[str, Any]]]]:
        """The frames of a stream, each with its number."""
        body = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
        async with self.http.stream("POST", self.url(agent), json=body, headers=self._headers(headers)) as response:
            assert response.headers["content-type"].startswith("text/event-stream"), await response.aread()
            yield frames_of(response)

    async def streamed(self, agent: str, method: str, params: Any, **headers: str) -> list[tuple[int, dict[str, Any]]]:
        async with asyncio.timeout(BOUND_S), self.frames(agent, method, params, **headers) as frames:
            return [frame async for frame in frames]

    def _headers(self, more: dict[str, str]) -> dict[str, str]:
        named = {name.replace("_", "-"): value for name, value in more.items()}
        return {"authorization": f"Bearer {self.token}", **named}


async def frames_of(response: httpx2.Response) -> AsyncIterator[tuple[int, dict[str, Any]]]:
    number = 0
    async for line in response.aiter_lines():
        name, _, value = line.partition(": ")
        if name == "id":
            number = int(value)
        elif name == "data":
            payload = json.loads(value)
            yield number, payload.get("result", payload)


@dataclass(frozen=True, slots=True)
class Front:
    """What listens: the door, and the cards."""

    door: A2ADoor
    pages: ASGIApp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"].startswith(PREFIX):
            await self.door.serve(scope, exchange_of(send))
        else:
            await self.pages(scope, receive, send)


@dataclass(frozen=True, slots=True, kw_only=True)
class A2AOptions:
    """What a door under test may have besides its agents. The same key and token find a home as it was left."""

    key: bytes = field(default_factory=new_private_key)
    token: str = field(default_factory=new_token)
    tenants: Sequence[str] = ()
    """Besides the first: each has the same agents."""
    open_agent: str = ""
    """Published, and may be called without a token."""
    push_notifications: bool = False
    jobs: A2aSettings | None = None
    concurrency: int = 64
    tracer: Tracer = OFF
    port: int = 0
    send_bytes: int = 0
    """How much of an answer the system takes off the server's hands; 0: as much as it likes."""


@asynccontextmanager
async def open_a2a(
    home: Path, *agents: Agent, limits: A2aSettings | None = None, options: A2AOptions | None = None
) -> AsyncIterator[A2AUnderTest]:
    options = options or A2AOptions()
    ledger = await open_ledger(home, clock=now_ms)
    key, token = options.key, options.token
    operator = operator_agent("operator@test", key)
    principal = await admit_operator(ledger, operator, token, lambda _: None)
    identity_auth = IdentityAuth(ledger, operator)
    catalogue, tenancy, meter = Catalogue(ledger, key), TenantAccess(ledger, operator, identity_auth), Meter()
    await tenancy.open()
    tokens = {name: (await tenancy.add(principal, name)).token for name in options.tenants}
    workers = WorkerPool(
        ledger,
        limits=options.jobs,
        concurrency=options.concurrency,
        delegations=lambda pool: Delegations(ledger, catalogue, pool, tracer=options.tracer),
        tracer=options.tracer,
    )
    for tenant, agent in product((DEFAULT, *tokens), agents):
        definition = AgentDefinition(
            id=agent.name,
            kind="function",
            description=agent.description,
            input_modes=agent.input_modes,
            extensions=agent.extensions,
            timeout_ms=agent.timeout_ms,
        )
        catalogue.add_resident(tenant, definition, "code")
        workers.register(catalogue.identity(tenant, agent.name), FunctionAgent(agent), concurrency=agent.concurrency)
    check = check_push if options.push_notifications else None
    conversations = A2AExchange(
        ledger,
        catalogue,
        workers,
        uuid_source(),
        limits or A2aSettings(),
        check_push=check,
        tracer=options.tracer,
    )
    pushes = PushConfigs(ledger, conversations.scope, check_push) if options.push_notifications else None
    base_url, publishing = BaseUrl(), PublishedAgent(options.open_agent, "loopback" if options.open_agent else "never")
    pool = AnonymousPool(bytes_max=64 * 2**20, body_ms=20_000)
    gate = Admission(TenantAuth(tenancy, TenantLimiter(now_ms)), catalogue, meter, base_url.of, publishing.admits, pool)
    features = [CardFeatures()]
    cards = Cards(lambda: features[-1], CardSigner(key))
    pages = CardPages(
        cards, catalogue, gate.tenants, meter, base_url=base_url, publishing=publishing, started_ms=now_ms()
    )
    office = A2AServices(conversations, extended_cards(cards), pushes)
    door = A2ADoor(gate, office, pages.agent_page(), body_bytes_max=1 << 20)
    front = Front(door, Router(pages.routes(), redirect_slashes=False))
    server = make_server(front)
    working = asyncio.create_task(workers.run())
    listener = socket.create_server(("127.0.0.1", options.port))
    if options.send_bytes:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, options.send_bytes)
    await server.start(listener)
    try:
        async with httpx2.AsyncClient(timeout=BOUND_S, verify=NO_AUTHORITIES) as http:
            yield A2AUnderTest(
                ledger=ledger,
                workers=workers,
                catalogue=catalogue,
                tenancy=tenancy,
                operator=principal,
                port=listener.getsockname()[1],
                token=token,
                http=http,
                tokens=tokens,
                gate=gate,
                office=office,
                cards=cards,
                features=features,
            )
    finally:
        await server.stop(grace_s=1)
        workers.stop()
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
        await ledger.close()
