"""`/v1/agents`: a tenant's own catalogue. What is another tenant's is not there.

An agent comes as its bare definition, or wrapped as `{"agent_def": {…}}` beside what an answer shows of it, so that
what was read can be changed and sent back. PATCH replaces the whole definition.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
from starlette.routing import BaseRoute

from covenant.doors.http.bearer_auth import TenantGate
from covenant.doors.http.endpoint import TenantCall, tenant_routes
from covenant.doors.http.openapi import Described
from covenant.doors.http.responses import AlreadyExists
from covenant.doors.metrics import Meter
from covenant.doors.operator_api.tenants import AgentShown
from covenant.exchange.catalogue import Catalogue
from covenant.model.agent_definition import AgentDefinition, CatalogueAgent, read_agent_definition
from covenant.model.errors import Conflict, Invalid
from covenant.wire.json_input import decode

AGENTS: Final = "/v1/agents"
AGENT: Final = "/v1/agents/{agent_id}"
WRAPPER: Final = "agent_def"
BODY_BYTES_MAX: Final = 1024 * 1024

_JSON: Final = msgspec.json.Decoder(dict[str, Any])
_SHOWN: Final = frozenset(AgentShown.__struct_fields__)


class Agents(msgspec.Struct, frozen=True, gc=False):
    count: int
    agents: tuple[AgentShown, ...]


class Deleted(msgspec.Struct, frozen=True, gc=False):
    deleted: bool = True


class AgentDoor:
    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue

    async def list_own_agents(self, asked: TenantCall) -> tuple[int, Agents]:
        found = await self._catalogue.list(asked.caller.tenant.name)
        return 200, Agents(len(found), tuple(AgentShown.of(agent) for agent in found))

    async def show_own_agent(self, asked: TenantCall) -> tuple[int, AgentShown]:
        return 200, AgentShown.of(await self._agent(asked))

    async def add_own_agent(self, asked: TenantCall) -> tuple[int, AgentShown]:
        definition = read_agent_definition(_definition(asked.body))
        try:
            return 201, AgentShown.of(await self._catalogue.store(asked.caller, definition))
        except Conflict as conflict:
            existing = self._catalogue.agent(asked.caller.tenant.name, definition.id)
            if existing is None:
                raise
            raise AlreadyExists(conflict, AgentShown.of(existing)) from None

    async def replace_own_agent(self, asked: TenantCall) -> tuple[int, AgentShown]:
        definition = _definition(asked.body)
        agent = await self._agent(asked)
        if definition.setdefault("id", agent.id) != agent.id:
            raise Invalid("invalid_agent", f"/id: must be {agent.id!r}, as in the path")
        if agent.source == "builtin":
            # Its own id is reserved, which would be the wrong thing to say.
            return 200, AgentShown.of(await self._catalogue.replace(asked.caller, agent.definition))
        return 200, AgentShown.of(await self._catalogue.replace(asked.caller, read_agent_definition(definition)))

    async def remove_own_agent(self, asked: TenantCall) -> tuple[int, Deleted]:
        agent = await self._agent(asked)
        await self._catalogue.remove(asked.caller, agent.id)
        return 200, Deleted()

    async def _agent(self, asked: TenantCall) -> CatalogueAgent:
        return await self._catalogue.show(asked.caller.tenant.name, asked.path["agent_id"])


def _definition(body: bytes) -> dict[str, Any]:
    given = decode(_JSON, body)
    definition = given.get(WRAPPER)
    if definition is None:
        return given
    for key in given.keys() - _SHOWN:
        raise Invalid("invalid_agent", f"unknown key /{key[:200]}; the definition goes into /{WRAPPER}")
    if not isinstance(definition, dict):
        raise Invalid("invalid_agent", f"/{WRAPPER}: must be an object")
    return definition


DESCRIBED: Final = (
    Described(path=AGENTS, method="GET", name="list_own_agents", summary="Your agents, index first", answer=Agents),
    Described(
        path=AGENTS,
        method="POST",
        name="add_own_agent",
        summary="Add an agent: its definition, bare or as agent_def; 409 shows the existing one",
        request=AgentDefinition,
        answer=AgentShown,
        status=201,
    ),
    Described(path=AGENT, method="GET", name="show_own_agent", summary="One of your agents", answer=AgentShown),
    Described(
        path=AGENT,
        method="PATCH",
        name="replace_own_agent",
        summary="Replace an agent's definition wholesale",
        request=AgentDefinition,
        answer=AgentShown,
    ),
    Described(path=AGENT, method="DELETE", name="remove_own_agent", summary="Remove an agent", answer=Deleted),
)


def agent_routes(catalogue: Catalogue, gate: TenantGate, meter: Meter) -> list[BaseRoute]:
    return tenant_routes(DESCRIBED, AgentDoor(catalogue), gate, meter, body_bytes_max=BODY_BYTES_MAX)
