"""The A2A door on a real socket, over a real ledger in a folder, with agents behind it that a test brings."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx2
import uvicorn
from starlette.types import Receive, Scope, Send

from covenant.agents.authoring import Agent
from covenant.agents.crew import Crew
from covenant.agents.function import FunctionBody
from covenant.daemon.environment import now_ms
from covenant.daemon.operator import admit_operator
from covenant.doors.a2a.calling import Gate
from covenant.doors.a2a.door import PREFIX, A2ADoor
from covenant.doors.a2a.operations import Office
from covenant.doors.http.reply import reply_not_found
from covenant.doors.http.tenant import TenantGate
from covenant.doors.metrics import Meter
from covenant.exchange.catalogue import Catalogue
from covenant.exchange.conversation import ConversationLimits, Conversations
from covenant.exchange.doorkeeper import Doorkeeper
from covenant.exchange.limiter import Limiter
from covenant.exchange.principal import Principal
from covenant.exchange.registry import operator_agent
from covenant.exchange.tenancy import Tenancy
from covenant.ledger.log.engine import LogLedger
from covenant.ledger.log.homes import open_ledger
from covenant.ledger.log.uuids import Uuids
from covenant.model.constitution import Constitution
from covenant.model.tenant import DEFAULT
from covenant.seal.keys import new_private_key, new_token

BOUND_S: Final = 20.0


@dataclass(slots=True, kw_only=True)
class Stage:
    ledger: LogLedger
    crew: Crew
    catalogue: Catalogue
    tenancy: Tenancy
    operator: Principal
    port: int
    token: str
    http: httpx2.AsyncClient

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


@dataclass(slots=True)
class Front:
    """What listens; the door is put behind it once the port is known."""

    door: A2ADoor | None = field(default=None)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.door is not None and scope["type"] == "http" and scope["path"].startswith(PREFIX):
            await self.door(scope, receive, send)
        else:
            await reply_not_found(send)


@asynccontextmanager
async def stage(home: Path, *agents: Agent, limits: ConversationLimits | None = None) -> AsyncIterator[Stage]:
    ledger = await open_ledger(home, clock=now_ms)
    key, token = new_private_key(), new_token()
    operator = operator_agent("operator@test", key)
    principal = await admit_operator(ledger, operator, token, lambda _: None)
    doorkeeper = Doorkeeper(ledger, operator)
    catalogue, tenancy, meter = Catalogue(ledger, key), Tenancy(ledger, operator, doorkeeper), Meter()
    await tenancy.open()
    crew = Crew(ledger)
    for agent in agents:
        constitution = Constitution(
            id=agent.name,
            kind="function",
            description=agent.description,
            input_modes=agent.input_modes,
            extensions=agent.extensions,
            timeout_ms=agent.timeout_ms,
        )
        catalogue.add_resident(DEFAULT, constitution, "code")
        crew.employ(catalogue.identity(DEFAULT, agent.name), FunctionBody(agent))
    conversations = Conversations(ledger, catalogue, crew, Uuids(), limits or ConversationLimits())
    gate = Gate(TenantGate(tenancy, Limiter(now_ms)), catalogue, meter, lambda _: "http://test", lambda _, __: False)
    front = Front()

    async def no_cards(_: Scope, __: Receive, send: Send) -> None:
        await reply_not_found(send)

    front.door = A2ADoor(gate, Office(conversations), no_cards, body_bytes_max=1 << 20)
    config = uvicorn.Config(front, port=0, log_level="warning", lifespan="off", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    working = asyncio.create_task(crew.run())
    sockets = [config.bind_socket()]
    serving = asyncio.create_task(server.serve(sockets))
    try:
        async with httpx2.AsyncClient(timeout=BOUND_S) as http:
            yield Stage(
                ledger=ledger,
                crew=crew,
                catalogue=catalogue,
                tenancy=tenancy,
                operator=principal,
                port=sockets[0].getsockname()[1],
                token=token,
                http=http,
            )
    finally:
        server.should_exit = True
        await serving
        crew.stop()
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
        await ledger.close()
