"""The operator's operations on any A2A agent: talk to it, see every frame, and read its card with its signature."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final, Literal
from urllib.parse import quote, urlsplit

import msgspec

from covenant.doors.operator_api.operation import AnyApiOperation, ApiAnswer, ApiOperation, Services, fill
from covenant.exchange.access.principals import Principal, require_operator
from covenant.exchange.access.tenants import Caller
from covenant.exchange.cards import AGENTS_PATH
from covenant.model.agent_card import JSONRPC
from covenant.model.content import Content, Text
from covenant.model.errors import Conflict, Invalid, Unavailable
from covenant.model.tenants import DEFAULT
from covenant.outbound.call_errors import AddressRefused
from covenant.outbound.remote.card_lookup import CardSignature
from covenant.outbound.remote.inspector import InspectedCall, Inspection, Inspector, Method
from covenant.wire.a2a.conformance import BINDINGS
from covenant.wire.a2a.parts_v1 import PartV1, contents_of
from covenant.wire.json_input import shorten
from covenant.wire.mailbox import Request, StrictRequest

if TYPE_CHECKING:
    from covenant.doors.a2a.own_agents import OwnAgents

HEADERS_MAX: Final = 32
PARTS_MAX: Final = 100
Name = Annotated[str, msgspec.Meta(max_length=256)]
HeaderValue = Annotated[str, msgspec.Meta(max_length=8_192)]


class InspectRequest(StrictRequest, frozen=True, kw_only=True):
    """`url`, or `agent` of a `tenant` of this daemon. `interface`: where a call before this one went, so that the card
    need not be read again. `parts` are those of A2A 1.0, in place of `text`."""

    url: str | None = None
    tenant: Name = DEFAULT
    agent: Name | None = None
    interface: str | None = None
    method: Method = "send"
    text: str | None = None
    parts: Annotated[list[dict[str, Any]], msgspec.Meta(max_length=PARTS_MAX)] | None = None
    headers: Annotated[dict[Name, HeaderValue], msgspec.Meta(max_length=HEADERS_MAX)] | None = None
    dialect: Literal["1.0", "0.3"] = "1.0"
    binding: Literal["jsonrpc", "rest", "grpc"] = "jsonrpc"
    stream: bool = False
    key: Name | None = None
    task_id: Name | None = None
    context_id: Name | None = None

    def content(self) -> tuple[Content, ...]:
        if self.method != "send":
            return ()
        if self.parts is None:
            if not self.text:
                raise Invalid("empty_message", "a message needs text, or parts")
            return (Text(self.text),)
        try:
            parts = contents_of(msgspec.convert(self.parts, list[PartV1]), "parts")
        except msgspec.ValidationError as wrong:
            raise Invalid("invalid_request", f"parts: {shorten(str(wrong))}") from None
        if not parts:
            raise Invalid("empty_message", "a message needs at least one part")
        return parts

    def call(self, url: str, interface: str | None, agent: str = "") -> InspectedCall:
        if self.method in ("get", "cancel") and not self.task_id:
            raise Invalid("invalid_request", f"{self.method} needs task_id")
        return InspectedCall(
            url=url,
            method=self.method,
            binding=BINDINGS[self.binding],
            version=self.dialect,
            interface=interface,
            parts=self.content(),
            headers=self.headers or {},
            key=self.key or None,
            task_id=self.task_id or None,
            context_id=self.context_id or None,
            stream=self.stream,
            agent=agent,
        )


class Inspected(ApiAnswer, Inspection, frozen=True, kw_only=True, tag="a2a_inspected", omit_defaults=False):
    """No field is left out, also if it has its default."""


class AgentCardRequest(Request, frozen=True, kw_only=True):
    tenant: str = DEFAULT
    agent_id: str = ""


class AgentCardShown(ApiAnswer, frozen=True, kw_only=True, tag="agent_card", omit_defaults=False):
    """`raw` is the card as callers get it, byte for byte. `signature` is checked as a caller would check it."""

    card: dict[str, Any]
    raw: str
    signature: CardSignature


class AgentInspector:
    """Inspects the agents of this daemon, in its own process, and others over the network."""

    def __init__(self, inspector: Inspector, own: OwnAgents, base_url: str, *, published: str) -> None:
        """`published`: the agent that gRPC of 0.3 reaches, whose calls name no agent."""
        self._inspector = inspector
        self._own = own
        self._base_url = base_url
        self._published = published

    async def inspect(self, services: Services, caller: Principal, request: InspectRequest) -> Inspection:
        if (request.url is None) == (request.agent is None):
            raise Invalid("invalid_request", "give either url, or agent and its tenant")
        if request.url is not None:
            return await self._inspect_url(services, caller, request, request.url)
        acting = await services.tenancy.acting(caller, request.tenant)
        if acting.tenant.disabled_at_ms is not None:
            raise Conflict("tenant_disabled", f"the tenant {request.tenant} is disabled: nobody calls its agents")
        url = self._url(request.agent or "")
        call = request.call(url, url, request.agent or "")
        channel = self._channel(request, acting) if request.binding == "grpc" else None
        inspected = {"method": request.method, "agent": f"{request.agent}@{request.tenant}", "host": None}
        await services.exchange.note(caller, "agent_inspected", **inspected)
        return await self._inspector.inspect(call, self._own.transport(acting), channel)

    def _channel(self, request: InspectRequest, acting: Caller) -> object:
        channel = self._own.channel(acting)
        if channel is None:
            raise Conflict("grpc_off", "this daemon serves no gRPC: see the setting grpc.enabled")
        if request.dialect == "0.3" and (request.tenant, request.agent) != (DEFAULT, self._published):
            raise Conflict(
                "not_published", "gRPC of 0.3 names no agent: it reaches the published one alone (a2a.publish)"
            )
        return channel

    async def card(self, services: Services, caller: Principal, tenant: str, agent_id: str) -> AgentCardShown:
        acting = await services.tenancy.acting(caller, tenant)
        url = self._url((await services.catalogue.show(tenant, agent_id)).id)
        call = InspectedCall(url=url, method="card", binding=JSONRPC, version="1.0")
        found = await self._inspector.inspect(call, self._own.transport(acting))
        raw = next((frame.text for frame in found.frames if frame.status == 200), "")
        if found.card is None or found.signature is None:
            raise Unavailable("no_card", found.error or "the agent has no card")
        return AgentCardShown(card=found.card, raw=raw, signature=found.signature)

    def _url(self, agent_id: str) -> str:
        return f"{self._base_url}{AGENTS_PATH}/{quote(agent_id, safe='')}"

    async def _inspect_url(
        self, services: Services, caller: Principal, request: InspectRequest, url: str
    ) -> Inspection:
        call = request.call(url, request.interface)
        host = urlsplit(url).netloc.rpartition("@")[2]
        await services.exchange.note(caller, "agent_inspected", method=request.method, agent=None, host=host)
        try:
            return await self._inspector.inspect(call)
        except AddressRefused as refused:
            # Only the operator gets here, who may see the details.
            raise Invalid(refused.code, refused.detail) from refused


async def inspect_a2a_agent(services: Services, caller: Principal, request: InspectRequest) -> Inspected:
    await require_operator(services.ledger, caller, "inspecting an agent")
    if services.inspector is None:
        raise Unavailable("no_inspector", "this daemon calls no agents")
    return fill(Inspected, await services.inspector.inspect(services, caller, request))


async def show_agent_card(services: Services, caller: Principal, request: AgentCardRequest) -> AgentCardShown:
    await require_operator(services.ledger, caller, "an agent's card")
    if services.inspector is None:
        raise Unavailable("no_inspector", "this daemon calls no agents")
    return await services.inspector.card(services, caller, request.tenant, request.agent_id)


OPERATIONS: Final[tuple[AnyApiOperation, ...]] = (
    ApiOperation("POST", "/a2a/inspect", inspect_a2a_agent, "Talk to any A2A agent, and see every frame"),
    ApiOperation(
        "GET", "/agents/{tenant}/{agent_id}/card", show_agent_card, "An agent's card, and whether its signature holds"
    ),
)
