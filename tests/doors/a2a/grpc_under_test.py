"""The gRPC binding on a real port, beside the HTTP one, over the same ledger and agents."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc  # type: ignore[import-untyped]
from a2a.client import ClientConfig, ClientFactory
from a2a.client.auth import AuthInterceptor, InMemoryContextCredentialStore
from a2a.client.client import Client, ClientCallContext
from a2a.types import a2a_pb2 as pb
from a2a.types.a2a_pb2_grpc import A2AServiceStub
from google.protobuf.json_format import Parse
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

from covenant.agents.api import Agent
from covenant.daemon.environment import now_ms
from covenant.doors.a2a.admission import Admission
from covenant.doors.a2a.cards import PublishedAgent, extended_cards
from covenant.doors.a2a.grpc import DETAILS, GrpcCalls, GrpcServer, GrpcTenants
from covenant.doors.a2a.operations import A2AServices
from covenant.doors.http.host_names import BaseUrl
from covenant.doors.http.request_body import AnonymousPool
from covenant.doors.metrics import Meter
from covenant.exchange.a2a_service import A2AExchange
from covenant.exchange.access.tenants import TenantLimiter
from covenant.exchange.cards import CardFeatures, Cards
from covenant.exchange.push import PushConfigs, check_config
from covenant.ledger.clock import uuid_source
from covenant.model.settings import A2aSettings, TenantSettings
from covenant.model.tenants import DEFAULT
from covenant.wire.a2a.card_codec import encode_card
from tests.doors.a2a.a2a_under_test import A2AUnderTest, open_a2a
from tests.waits import BOUND_S

SESSION: Final = "session"
UNLIMITED: Final = (("grpc.max_receive_message_length", -1),)
"""Clients take 4 MiB in one message unless told otherwise."""


@dataclass(frozen=True, slots=True)
class Told:
    """A refusal, taken apart."""

    code: str
    message: str
    reason: str = ""
    machine_code: str = ""
    domain: str = ""
    violations: tuple[tuple[str, str], ...] = ()
    retry_s: float | None = None
    trailers: tuple[tuple[str, Any], ...] = ()


def told_by(error: grpc.aio.AioRpcError) -> Told:
    trailers = dict(error.trailing_metadata() or ())
    found: dict[str, Any] = {}
    if DETAILS in trailers:
        status = status_pb2.Status.FromString(trailers[DETAILS])
        assert (status.code, status.message) == (error.code().value[0], error.details())
        for detail in status.details:
            info, request, retry = (
                error_details_pb2.ErrorInfo(),
                error_details_pb2.BadRequest(),
                error_details_pb2.RetryInfo(),
            )
            if detail.Unpack(info):
                found |= {"reason": info.reason, "domain": info.domain, "machine_code": info.metadata.get("code", "")}
            elif detail.Unpack(request):
                found["violations"] = tuple((each.field, each.description) for each in request.field_violations)
            elif detail.Unpack(retry):
                found["retry_s"] = retry.retry_delay.ToTimedelta().total_seconds()
    return Told(error.code().name, error.details(), trailers=tuple(trailers.items()), **found)


@dataclass(slots=True, kw_only=True)
class GrpcUnderTest:
    http: A2AUnderTest
    server: GrpcServer
    channel: grpc.aio.Channel
    cards: Cards
    calls: GrpcCalls

    @property
    def stub(self) -> Any:
        return A2AServiceStub(self.channel)  # type: ignore[no-untyped-call]

    def metadata(self, token: str | None = None, **more: str) -> list[tuple[str, str]]:
        """With the operator's token unless told otherwise; an empty one is left out."""
        said = self.http.token if token is None else token
        bearer = [("authorization", f"Bearer {said}")] if said else []
        return [*bearer, *((name.replace("_", "-"), value) for name, value in more.items())]

    async def call(self, method: str, request: Any, token: str | None = None, **more: str) -> Any:
        return await getattr(self.stub, method)(request, metadata=self.metadata(token, **more), timeout=BOUND_S)

    async def refused(self, method: str, request: Any, token: str | None = None, **more: str) -> Told:
        call = getattr(self.stub, method)(request, metadata=self.metadata(token, **more), timeout=BOUND_S)
        try:
            if hasattr(call, "read"):
                await call.read()
            await call
        except grpc.aio.AioRpcError as error:
            return told_by(error)
        raise AssertionError(f"{method} was not refused")

    def stream(self, method: str, request: Any, token: str | None = None, **more: str) -> Any:
        return getattr(self.stub, method)(request, metadata=self.metadata(token, **more), timeout=BOUND_S)

    async def streamed(self, method: str, request: Any, token: str | None = None, **more: str) -> list[Any]:
        return [event async for event in self.stream(method, request, token, **more)]

    async def stranger(self, agent: str, token: str | None = None, *, streaming: bool = True) -> Client:
        """The official client, which knows nothing but the agent's card and its credential."""
        found = self.http.catalogue.agent(DEFAULT, agent)
        assert found is not None
        card = Parse(encode_card(self.cards.card(found, f"http://127.0.0.1:{self.http.port}")), pb.AgentCard())
        credentials = InMemoryContextCredentialStore()
        await credentials.set_credentials(SESSION, "bearer", token or self.http.token)
        config = ClientConfig(
            streaming=streaming,
            grpc_channel_factory=grpc.aio.insecure_channel,
            supported_protocol_bindings=["GRPC"],
        )
        return ClientFactory(config).create(card, [AuthInterceptor(credentials)])

    async def audited(self, kind: str) -> list[dict[str, Any]]:
        rows = [json.loads(record.row) for record in await self.http.ledger.audit_recent(None, 1_000, None)]
        return [row for row in rows if row["kind"]["type"] == kind]


def in_session() -> ClientCallContext:
    return ClientCallContext(state={"sessionId": SESSION})


def asks(text: str, agent: str = "", **message: Any) -> pb.SendMessageRequest:
    said = pb.Message(message_id=f"m-{text}", role=pb.ROLE_USER, parts=[pb.Part(text=text)], **message)
    return pb.SendMessageRequest(tenant=agent, message=said)


def kind_of(event: Any) -> str:
    kind: str = event.WhichOneof("payload")
    return kind


def generation_of(event: Any) -> int:
    return int(getattr(event, kind_of(event)).metadata["covenant.generation"])


@asynccontextmanager
async def open_grpc(
    home: Path,
    *agents: Agent,
    publishing: PublishedAgent | None = None,
    limits: TenantSettings | None = None,
    push: bool = False,
    pushes: PushConfigs | None = None,
    message_bytes_max: int = 1 << 20,
    calls_max: int = 100,
) -> AsyncIterator[GrpcUnderTest]:
    publishing = publishing or PublishedAgent()
    async with open_a2a(home, *agents) as http:
        conversations = A2AExchange(http.ledger, http.catalogue, http.workers, uuid_source(), A2aSettings())
        tenants = GrpcTenants(http.tenancy, TenantLimiter(now_ms, limits))
        pool = AnonymousPool(bytes_max=64 * 2**20, body_ms=20_000)
        gate = Admission(tenants, http.catalogue, Meter(), BaseUrl().of, publishing.admits, pool)
        if push:
            pushes = PushConfigs(http.ledger, conversations.scope, lambda config: check_config(config, lambda _: None))
        server = GrpcServer(bind_addr="127.0.0.1", port=0, message_bytes_max=message_bytes_max, calls_max=calls_max)
        features = CardFeatures(grpc_port=server.port, push_notifications=pushes is not None)
        cards = Cards(lambda: features)
        calls = GrpcCalls(
            gate,
            A2AServices(conversations, extended_cards(cards), pushes),
            pool,
            message_bytes_max=message_bytes_max,
            published=publishing.agent_id,
            http_at=("127.0.0.1", http.port),
        )
        await server.start(calls)
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}", options=UNLIMITED) as channel:
                yield GrpcUnderTest(http=http, server=server, channel=channel, cards=cards, calls=calls)
        finally:
            await asyncio.wait_for(server.stop(0), BOUND_S)
