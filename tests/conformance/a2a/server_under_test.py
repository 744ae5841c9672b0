"""The A2A door with every agent of this suite, two tenants, and clients for whatever is to be spoken.

When it is taken down, every task that any test made is looked at: its story has no gap, and at most one end.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar
from uuid import uuid4

import grpc  # type: ignore[import-untyped]

from covenant.doors.a2a.grpc import GrpcCalls, GrpcServer
from covenant.doors.http.request_body import AnonymousPool
from covenant.exchange.cards import CardFeatures
from covenant.ledger.contract.tasks import ListQuery
from covenant.ledger.machine.commands import Sweep
from covenant.model.ids import TaskId
from covenant.model.settings import A2aSettings
from covenant.model.task_event import Ended, Step
from covenant.model.task_view import fold
from covenant.model.tenants import DEFAULT
from tests.conformance.a2a.agents import Gates, make_agents
from tests.conformance.a2a.bindings import Binding
from tests.doors.a2a.a2a_under_test import A2AOptions, A2AUnderTest, open_a2a
from tests.waits import BOUND_S

NEIGHBOUR: Final = "neighbour"
SWEEP_S: Final = 0.05

B = TypeVar("B", bound=Binding)


@dataclass(frozen=True)
class ServerUnderTest:
    a2a: A2AUnderTest
    gates: Gates
    channel: Any

    def client(self, kind: type[B], agent: str = "actor", token: str | None = "") -> B:
        """As the operator, who speaks for the first tenant, unless another token is given."""
        url = f"http://127.0.0.1:{self.a2a.port}"
        said = self.a2a.token if token == "" else token
        return kind(base_url=url, http=self.a2a.http, agent=agent, token=said, channel=self.channel)

    @property
    def neighbour(self) -> str:
        """Another tenant's token."""
        return self.a2a.tokens[NEIGHBOUR]

    async def steps(self, task_id: str) -> list[Step]:
        return list(await self.a2a.ledger.steps(TaskId(task_id), 0, 1_000_000))

    async def whole(self, task_id: str) -> None:
        """The story of a task: every number once, one beginning, at most one end, and that last."""
        steps = await self.steps(task_id)
        assert [step.generation for step in steps] == list(range(1, len(steps) + 1)), steps
        ends = [step for step in steps if isinstance(step.what, Ended)]
        assert len(ends) <= 1
        assert not ends or ends[0] is steps[-1]
        assert fold(steps) is not None

    async def all_whole(self) -> int:
        """How many tasks there are; each of them is whole."""
        seen = 0
        for tenant in (DEFAULT, NEIGHBOUR):
            for agent in self.a2a.catalogue.agents(tenant):
                recipient, after = self.a2a.catalogue.identity(tenant, agent.id).pubkey, ""
                while True:
                    listing = await self.a2a.ledger.listing(ListQuery(recipient=recipient, after=after, limit=100))
                    for steps in listing.tasks:
                        view = fold(steps)
                        assert view is not None
                        await self.whole(view.task.id)
                        seen += 1
                    after = listing.next
                    if not after:
                        break
        return seen


def unique(word: str = "x") -> str:
    return f"{word}-{uuid4()}"


@asynccontextmanager
async def open_server(home: Path, *, push_notifications: bool = False) -> AsyncIterator[ServerUnderTest]:
    gates = Gates()
    options = A2AOptions(
        tenants=(NEIGHBOUR,),
        open_agent="open",
        jobs=A2aSettings(turn_updates_max=300, turn_bytes_max=1 << 20),
        push_notifications=push_notifications,
    )
    async with open_a2a(home, *make_agents(gates), options=options) as opened, calling(opened, options) as channel:
        under_test = ServerUnderTest(opened, gates, channel)
        sweeping = asyncio.create_task(_sweep(under_test))
        try:
            yield under_test
            await under_test.all_whole()
        finally:
            sweeping.cancel()
            await asyncio.gather(sweeping, return_exceptions=True)


@asynccontextmanager
async def calling(opened: A2AUnderTest, options: A2AOptions) -> AsyncIterator[Any]:
    """The same agents over gRPC, beside HTTP."""
    pool = AnonymousPool(bytes_max=64 * 2**20, body_ms=20_000)
    calls = GrpcCalls(
        opened.gate,
        opened.office,
        pool,
        message_bytes_max=1 << 20,
        published=options.open_agent,
        http_at=("127.0.0.1", opened.port),
    )
    server = GrpcServer(bind_addr="127.0.0.1", port=0, message_bytes_max=1 << 20, calls_max=1_000)
    opened.features.append(CardFeatures(grpc_port=server.port, push_notifications=options.push_notifications))
    await server.start(calls)
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            yield channel
    finally:
        await asyncio.wait_for(server.stop(0), BOUND_S)


async def _sweep(under_test: ServerUnderTest) -> None:
    """As the daemon does, only more often."""
    while True:
        await under_test.a2a.ledger.commit(Sweep())
        await asyncio.sleep(SWEEP_S)
