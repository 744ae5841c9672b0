"""The operator's operations on tenants and their agents."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from covenant.doors.operator_api.operation import AnyApiOperation, ApiAnswer, ApiOperation, Services, fill, fit
from covenant.exchange.access.principals import Principal
from covenant.model.agent_definition import AgentDefinition, CatalogueAgent, ignored_keys, read_agent_definition
from covenant.model.errors import Invalid
from covenant.model.ids import AgentId
from covenant.model.tenants import DEFAULT, Tenant, TenantLimits
from covenant.wire.mailbox import EmptyRequest, Request, StrictRequest


class AddTenantRequest(StrictRequest, frozen=True, kw_only=True):
    """`certificate`: the name of one that stands for the tenant, instead of a token."""

    name: str
    limits: TenantLimits | None = None
    certificate: str | None = None


class TenantRequest(StrictRequest, frozen=True, kw_only=True):
    name: str = ""


class RotateTenantRequest(TenantRequest, frozen=True, kw_only=True):
    """`certificate`: as when a tenant is added."""

    certificate: str | None = None


class ChangeTenantRequest(TenantRequest, frozen=True, kw_only=True):
    """What is left out stays as it is; limits change together."""

    disabled: bool | None = None
    limits: TenantLimits | None = None


class ListAgentsRequest(Request, frozen=True, kw_only=True):
    tenant: str = DEFAULT


class AgentRequest(Request, frozen=True, kw_only=True):
    tenant: str = DEFAULT
    agent_id: str = ""


class AddAgentRequest(StrictRequest, frozen=True, kw_only=True):
    """`agent_def` is the definition. With `replace` it takes the place of the stored one with its id."""

    agent_def: dict[str, Any]
    tenant: str = DEFAULT
    replace: bool | None = None


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
    """`token` is told here and never again; it is empty where a certificate stands for the tenant."""

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
    """`source`: stored, file, code or builtin. `ignored` are the keys of its definition that nothing acts on."""

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
        of_agent = {name: getattr(agent, name) for name in ("source", "created_at_ms", "updated_at_ms")}
        return fill(cls, made, agent_def=made, ignored=ignored_keys(made), **of_agent)


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


def _shown(services: Services, tenant: Tenant) -> TenantShown:
    disabled, agents = tenant.disabled_at_ms is not None, len(services.catalogue.agents(tenant.name))
    return fill(TenantShown, tenant, disabled=disabled, agents=agents)


async def add_tenant(services: Services, caller: Principal, request: AddTenantRequest) -> TenantAdded:
    minted = await services.tenancy.add(caller, request.name, request.limits, certificate=request.certificate)
    return TenantAdded(tenant=_shown(services, minted.tenant), token=minted.token)


async def list_tenants(services: Services, caller: Principal, _: EmptyRequest) -> TenantList:
    found = await services.tenancy.list(caller)
    return TenantList(tenants=fit([_shown(services, tenant) for tenant in found]))


async def change_tenant(services: Services, caller: Principal, request: ChangeTenantRequest) -> TenantChanged:
    if request.disabled is None and request.limits is None:
        raise Invalid("invalid_request", "give disabled, limits, or both")
    changed = await services.tenancy.change(caller, request.name, disabled=request.disabled, limits=request.limits)
    return TenantChanged(tenant=_shown(services, changed))


async def rotate_tenant(services: Services, caller: Principal, request: RotateTenantRequest) -> TenantRotated:
    minted = await services.tenancy.rotate(caller, request.name, certificate=request.certificate)
    return TenantRotated(tenant=_shown(services, minted.tenant), token=minted.token)


async def add_agent(services: Services, caller: Principal, request: AddAgentRequest) -> AgentAdded:
    acting = await services.tenancy.acting(caller, request.tenant)
    definition = read_agent_definition(request.agent_def)
    put = services.catalogue.replace if request.replace else services.catalogue.store
    return AgentAdded(tenant=request.tenant, agent=AgentShown.of(await put(acting, definition)))


async def list_agents(services: Services, caller: Principal, request: ListAgentsRequest) -> AgentList:
    acting = await services.tenancy.acting(caller, request.tenant)
    found = await services.catalogue.list(acting.tenant.name)
    return AgentList(tenant=request.tenant, count=len(found), agents=fit([AgentShown.of(agent) for agent in found]))


async def show_agent(services: Services, caller: Principal, request: AgentRequest) -> AgentAnswer:
    acting = await services.tenancy.acting(caller, request.tenant)
    agent = await services.catalogue.show(acting.tenant.name, request.agent_id)
    identity = services.catalogue.identity(request.tenant, agent.id)
    return AgentAnswer(tenant=request.tenant, agent=AgentShown.of(agent), identity=identity)


async def remove_agent(services: Services, caller: Principal, request: AgentRequest) -> AgentRemovedAnswer:
    acting = await services.tenancy.acting(caller, request.tenant)
    removed = await services.catalogue.remove(acting, request.agent_id)
    return AgentRemovedAnswer(tenant=request.tenant, agent_id=removed.id)


OPERATIONS: Final[tuple[AnyApiOperation, ...]] = (
    ApiOperation("POST", TENANTS, add_tenant, "Add a tenant and mint its token", status=201),
    ApiOperation("GET", TENANTS, list_tenants, "All tenants, the oldest first"),
    ApiOperation("PATCH", f"{TENANTS}/{{name}}", change_tenant, "Disable or enable a tenant, or change its limits"),
    ApiOperation(
        "POST", f"{TENANTS}/{{name}}/rotate-token", rotate_tenant, "Replace a tenant's token; the old one ends at once"
    ),
    ApiOperation("POST", AGENTS, add_agent, "Store an agent for a tenant", status=201),
    ApiOperation(
        "GET",
        AGENTS,
        list_agents,
        "A tenant's agents: index, those of code and files, then the stored ones, the oldest first",
    ),
    ApiOperation("GET", f"{AGENTS}/{{agent_id}}", show_agent, "One agent of a tenant"),
    ApiOperation("DELETE", f"{AGENTS}/{{agent_id}}", remove_agent, "Remove a stored agent; its tasks stay"),
)
