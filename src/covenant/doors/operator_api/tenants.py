"""The operator's operations on tenants and their agents."""

from __future__ import annotations

from typing import Final

import msgspec

from covenant.doors.operator_api.answers import ApiAnswer
from covenant.doors.operator_api.operation import AnyApiOperation, ApiOperation, Services
from covenant.doors.operator_api.paging import fit
from covenant.exchange.access.principals import Principal
from covenant.model.agent_definition import AgentDefinition, CatalogueAgent, ignored_keys, read_agent_definition
from covenant.model.errors import Invalid
from covenant.model.ids import AgentId
from covenant.model.tenants import Tenant, TenantLimits
from covenant.wire.operator_requests import (
    AddAgentRequest,
    AddTenantRequest,
    ChangeTenantRequest,
    ListAgentsRequest,
    ListTenantsRequest,
    RemoveAgentRequest,
    RotateTenantRequest,
    ShowAgentRequest,
    TenantLimitsInput,
)


class TenantShown(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """`token_prefix` is empty where no token was made yet. `agents` counts those it can call."""

    name: str
    token_prefix: str
    created_at_ms: int
    disabled: bool
    disabled_at_ms: int | None
    limits: TenantLimits
    agents: int


class TenantAdded(ApiAnswer, frozen=True, kw_only=True, tag="tenant_added"):
    """`token` is told here and never again."""

    tenant: TenantShown
    token: str


class TenantList(ApiAnswer, frozen=True, kw_only=True, tag="tenant_list"):
    tenants: tuple[TenantShown, ...]


class TenantChanged(ApiAnswer, frozen=True, kw_only=True, tag="tenant_changed"):
    tenant: TenantShown


class TenantRotated(ApiAnswer, frozen=True, kw_only=True, tag="tenant_rotated"):
    tenant: TenantShown
    token: str


class AgentShown(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """An agent of a catalogue. `source`: stored, file, code or builtin. `agent_def` is its whole definition.

    `ignored` are the keys of it that nothing acts on.
    """

    id: str
    name: str
    role: str
    kind: str
    model: str
    source: str
    created_at_ms: int
    updated_at_ms: int
    agent_def: AgentDefinition
    ignored: tuple[str, ...] = ()

    @classmethod
    def of(cls, agent: CatalogueAgent) -> AgentShown:
        made = agent.definition
        return cls(
            id=made.id,
            name=made.name,
            role=made.role,
            kind=made.kind,
            model=made.model,
            source=agent.source,
            created_at_ms=agent.created_at_ms,
            updated_at_ms=agent.updated_at_ms,
            agent_def=made,
            ignored=ignored_keys(made),
        )


class AgentList(ApiAnswer, frozen=True, kw_only=True, tag="agent_list"):
    tenant: str
    count: int
    agents: tuple[AgentShown, ...]


class AgentAdded(ApiAnswer, frozen=True, kw_only=True, tag="agent_added"):
    tenant: str
    agent: AgentShown


class AgentAnswer(ApiAnswer, frozen=True, kw_only=True, tag="agent"):
    """`identity` is who it is in the ledger: as whom a worker of it is enrolled."""

    tenant: str
    agent: AgentShown
    identity: AgentId


class AgentRemovedAnswer(ApiAnswer, frozen=True, kw_only=True, tag="agent_removed"):
    tenant: str
    agent_id: str


TENANTS: Final = "/v1/admin/tenants"
AGENTS: Final = "/v1/admin/tenants/{tenant}/agents"


def _shown(office: Services, tenant: Tenant) -> TenantShown:
    return TenantShown(
        name=tenant.name,
        token_prefix=tenant.token_prefix,
        created_at_ms=tenant.created_at_ms,
        disabled=tenant.disabled_at_ms is not None,
        disabled_at_ms=tenant.disabled_at_ms,
        limits=tenant.limits,
        agents=len(office.catalogue.agents(tenant.name)),
    )


def _limits(given: TenantLimitsInput | None) -> TenantLimits | None:
    return TenantLimits(**msgspec.structs.asdict(given)) if given is not None else None


async def add_tenant(office: Services, caller: Principal, request: AddTenantRequest) -> TenantAdded:
    minted = await office.tenancy.add(caller, request.name, _limits(request.limits))
    return TenantAdded(tenant=_shown(office, minted.tenant), token=minted.token)


async def list_tenants(office: Services, caller: Principal, _: ListTenantsRequest) -> TenantList:
    found = await office.tenancy.list(caller)
    return TenantList(tenants=fit([_shown(office, tenant) for tenant in found]))


async def change_tenant(office: Services, caller: Principal, request: ChangeTenantRequest) -> TenantChanged:
    if request.disabled is None and request.limits is None:
        raise Invalid("invalid_request", "give disabled, limits, or both")
    changed = await office.tenancy.change(
        caller, request.name, disabled=request.disabled, limits=_limits(request.limits)
    )
    return TenantChanged(tenant=_shown(office, changed))


async def rotate_tenant(office: Services, caller: Principal, request: RotateTenantRequest) -> TenantRotated:
    minted = await office.tenancy.rotate(caller, request.name)
    return TenantRotated(tenant=_shown(office, minted.tenant), token=minted.token)


async def add_agent(office: Services, caller: Principal, request: AddAgentRequest) -> AgentAdded:
    acting = await office.tenancy.acting(caller, request.tenant)
    definition = read_agent_definition(request.agent_def)
    put = office.catalogue.replace if request.replace else office.catalogue.store
    return AgentAdded(tenant=request.tenant, agent=AgentShown.of(await put(acting, definition)))


async def list_agents(office: Services, caller: Principal, request: ListAgentsRequest) -> AgentList:
    acting = await office.tenancy.acting(caller, request.tenant)
    found = await office.catalogue.list(acting.tenant.name)
    return AgentList(tenant=request.tenant, count=len(found), agents=fit([AgentShown.of(agent) for agent in found]))


async def show_agent(office: Services, caller: Principal, request: ShowAgentRequest) -> AgentAnswer:
    acting = await office.tenancy.acting(caller, request.tenant)
    agent = await office.catalogue.show(acting.tenant.name, request.agent_id)
    identity = office.catalogue.identity(request.tenant, agent.id)
    return AgentAnswer(tenant=request.tenant, agent=AgentShown.of(agent), identity=identity)


async def remove_agent(office: Services, caller: Principal, request: RemoveAgentRequest) -> AgentRemovedAnswer:
    acting = await office.tenancy.acting(caller, request.tenant)
    removed = await office.catalogue.remove(acting, request.agent_id)
    return AgentRemovedAnswer(tenant=request.tenant, agent_id=removed.id)


OPERATIONS: Final[tuple[AnyApiOperation, ...]] = (
    ApiOperation(
        kind="add_tenant",
        method="POST",
        path=TENANTS,
        request=AddTenantRequest,
        answer=TenantAdded,
        run=add_tenant,
        summary="Add a tenant and mint its token",
        status=201,
    ),
    ApiOperation(
        kind="list_tenants",
        method="GET",
        path=TENANTS,
        request=ListTenantsRequest,
        answer=TenantList,
        run=list_tenants,
        summary="All tenants, the oldest first",
    ),
    ApiOperation(
        kind="change_tenant",
        method="PATCH",
        path=f"{TENANTS}/{{name}}",
        request=ChangeTenantRequest,
        answer=TenantChanged,
        run=change_tenant,
        summary="Disable or enable a tenant, or change its limits",
    ),
    ApiOperation(
        kind="rotate_tenant",
        method="POST",
        path=f"{TENANTS}/{{name}}/rotate-token",
        request=RotateTenantRequest,
        answer=TenantRotated,
        run=rotate_tenant,
        summary="Replace a tenant's token; the old one ends at once",
    ),
    ApiOperation(
        kind="add_agent",
        method="POST",
        path=AGENTS,
        request=AddAgentRequest,
        answer=AgentAdded,
        run=add_agent,
        summary="Store an agent for a tenant",
        status=201,
    ),
    ApiOperation(
        kind="list_agents",
        method="GET",
        path=AGENTS,
        request=ListAgentsRequest,
        answer=AgentList,
        run=list_agents,
        summary="A tenant's agents: index, those of code and files, then the stored ones, the oldest first",
    ),
    ApiOperation(
        kind="show_agent",
        method="GET",
        path=f"{AGENTS}/{{agent_id}}",
        request=ShowAgentRequest,
        answer=AgentAnswer,
        run=show_agent,
        summary="One agent of a tenant",
    ),
    ApiOperation(
        kind="remove_agent",
        method="DELETE",
        path=f"{AGENTS}/{{agent_id}}",
        request=RemoveAgentRequest,
        answer=AgentRemovedAnswer,
        run=remove_agent,
        summary="Remove a stored agent; its tasks stay",
    ),
)
