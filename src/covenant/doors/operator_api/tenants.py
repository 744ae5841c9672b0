"""The operator's operations on tenants, their agents, and the schedules of these."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from covenant.doors.operator_api.operation import AnyApiOperation, ApiAnswer, ApiOperation, Services, fill, fit
from covenant.exchange.access.principals import Principal
from covenant.exchange.cron import invalid_schedule
from covenant.exchange.schedules import Moment, ScheduleAdmin, ScheduleFound
from covenant.exchange.tenant_removal import RemovalReport, TenantHoldings, TenantRemovals
from covenant.ledger.contract.retention import SearchedPlace
from covenant.model.agent_definition import (
    AgentDefinition,
    CatalogueAgent,
    Schedule,
    explain_invalid,
    ignored_keys,
    read_agent_definition,
)
from covenant.model.errors import Invalid, Unavailable
from covenant.model.ids import AgentId, TaskId
from covenant.model.tenants import DEFAULT, Tenant, TenantLimits, TenantRemoval, TenantUse
from covenant.wire.mailbox import EmptyRequest, Request, StrictRequest

TENANTS: Final = "/v1/admin/tenants"
AGENTS: Final = "/v1/admin/tenants/{tenant}/agents"
WAIT_MS_MAX: Final = 30_000


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
    """A field that is left out stays as it is; limits change together."""

    disabled: bool | None = None
    limits: TenantLimits | None = None


class RemoveTenantRequest(TenantRequest, frozen=True, kw_only=True):
    """A dry run unless `dry_run` is false. `wait_ms`: how long to wait for the end."""

    dry_run: bool | None = None
    reason: str = ""
    cancel_live: bool = False
    wait_ms: int = 0


class RemovalRequest(TenantRequest, frozen=True, kw_only=True):
    wait_ms: int = 0


class ListAgentsRequest(Request, frozen=True, kw_only=True):
    tenant: str = DEFAULT


class AgentRequest(Request, frozen=True, kw_only=True):
    """Of a list: without `agent_id`, of all agents of the tenant."""

    tenant: str = DEFAULT
    agent_id: str = ""


class AddAgentRequest(StrictRequest, frozen=True, kw_only=True):
    """`agent_def` is the definition. With `replace` it replaces the stored one with the same id."""

    agent_def: dict[str, Any]
    tenant: str = DEFAULT
    replace: bool | None = None


class TenantShown(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """`token_prefix` is empty if no token was made yet. `agents` counts the agents that the tenant can call."""

    name: str
    token_prefix: str
    created_at_ms: int
    disabled: bool
    disabled_at_ms: int | None
    limits: TenantLimits
    agents: int


class TenantListed(TenantShown, frozen=True, gc=False, kw_only=True):
    use: TenantUse


class TenantAdded(ApiAnswer, frozen=True, kw_only=True, tag="tenant_added"):
    """`token` is shown here and never again; it is empty if a certificate stands for the tenant."""

    tenant: TenantShown
    token: str


class TenantList(ApiAnswer, frozen=True, kw_only=True, tag="tenant_list"):
    tenants: tuple[TenantListed, ...]


class TenantChanged(ApiAnswer, frozen=True, kw_only=True, tag="tenant_changed"):
    tenant: TenantShown


class TenantRotated(ApiAnswer, frozen=True, kw_only=True, tag="tenant_rotated"):
    tenant: TenantShown
    token: str


class TenantRemovalAnswer(ApiAnswer, frozen=True, kw_only=True, tag="tenant_removal"):
    """`holdings` is the answer of a dry run, which changes nothing: the data that a removal would erase.

    `places` were searched at the end. `problem` says why the removal waits.
    """

    name: str
    done: bool
    stage: str
    tasks: int
    digest: str
    canceled: int
    agents: int
    identities: int
    grants: int
    pushes: int
    cached: int
    places: tuple[SearchedPlace, ...]
    left: int
    problem: str
    holdings: TenantHoldings | None = None


class TenantTraces(ApiAnswer, frozen=True, kw_only=True, tag="tenant_traces"):
    """`left`: traces that do not stay on purpose."""

    name: str
    places: tuple[SearchedPlace, ...]
    left: int


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
    nodes: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET
    """The daemons that serve an agent from code or a file, where several daemons do."""

    @classmethod
    def of(cls, agent: CatalogueAgent, nodes: Sequence[str] = ()) -> AgentShown:
        definition = agent.definition
        of_agent = {name: getattr(agent, name) for name in ("source", "created_at_ms", "updated_at_ms")}
        node_names = tuple(nodes) or msgspec.UNSET
        return fill(
            cls, definition, agent_def=definition, ignored=ignored_keys(definition), nodes=node_names, **of_agent
        )


class AgentList(ApiAnswer, frozen=True, kw_only=True, tag="agent_list"):
    tenant: str
    count: int
    agents: tuple[AgentShown, ...]


class AgentAdded(ApiAnswer, frozen=True, kw_only=True, tag="agent_added"):
    tenant: str
    agent: AgentShown


class AgentAnswer(ApiAnswer, frozen=True, kw_only=True, tag="agent"):
    """`identity` is the agent's identity in the ledger, under which a worker of it is enrolled."""

    tenant: str
    agent: AgentShown
    identity: AgentId


class AgentRemovedAnswer(ApiAnswer, frozen=True, kw_only=True, tag="agent_removed"):
    tenant: str
    agent_id: str


def _shown(services: Services, tenant: Tenant) -> TenantShown:
    return fill(TenantShown, tenant, **_derived_fields(services, tenant))


def _derived_fields(services: Services, tenant: Tenant) -> dict[str, Any]:
    agents = len(services.catalogue.agents(tenant.name))
    return {"disabled": tenant.disabled_at_ms is not None, "agents": agents}


async def add_tenant(services: Services, caller: Principal, request: AddTenantRequest) -> TenantAdded:
    minted = await services.tenancy.add(caller, request.name, request.limits, certificate=request.certificate)
    return TenantAdded(tenant=_shown(services, minted.tenant), token=minted.token)


async def list_tenants(services: Services, caller: Principal, _: EmptyRequest) -> TenantList:
    found = await services.tenancy.list(caller)
    used = zip(found, await services.tenant_usage.measure(found), strict=True)
    listed = [fill(TenantListed, tenant, use=use, **_derived_fields(services, tenant)) for tenant, use in used]
    return TenantList(tenants=fit(listed))


async def change_tenant(services: Services, caller: Principal, request: ChangeTenantRequest) -> TenantChanged:
    if request.disabled is None and request.limits is None:
        raise Invalid("invalid_request", "give disabled, limits, or both")
    changed = await services.tenancy.change(caller, request.name, disabled=request.disabled, limits=request.limits)
    return TenantChanged(tenant=_shown(services, changed))


async def rotate_tenant(services: Services, caller: Principal, request: RotateTenantRequest) -> TenantRotated:
    minted = await services.tenancy.rotate(caller, request.name, certificate=request.certificate)
    return TenantRotated(tenant=_shown(services, minted.tenant), token=minted.token)


def _removals(services: Services) -> TenantRemovals:
    if services.removals is None:
        raise Unavailable("no_removals", "this daemon has no home, and cannot prove that a tenant is removed")
    return services.removals


async def remove_tenant(services: Services, caller: Principal, request: RemoveTenantRequest) -> TenantRemovalAnswer:
    removals = _removals(services)
    if request.dry_run is not False:
        holdings = await removals.holdings(caller, request.name)
        dry = RemovalReport(done=False, stage="dry_run", removal=TenantRemoval(begun_at_ms=0, reason=""))
        return msgspec.structs.replace(_removal_answer(request.name, dry), holdings=holdings)
    if not 0 <= request.wait_ms <= WAIT_MS_MAX:
        raise Invalid("invalid_wait", f"wait_ms must be between 0 and {WAIT_MS_MAX}")
    await removals.begin(caller, request.name, request.reason, cancel_live=request.cancel_live)
    return _removal_answer(request.name, await removals.report(caller, request.name, request.wait_ms / 1000))


async def tenant_removal(services: Services, caller: Principal, request: RemovalRequest) -> TenantRemovalAnswer:
    report = await _removals(services).report(caller, request.name, min(request.wait_ms, WAIT_MS_MAX) / 1000)
    return _removal_answer(request.name, report)


def _removal_answer(name: str, report: RemovalReport) -> TenantRemovalAnswer:
    left = sum(place.left for place in report.places)
    of_report = {each: getattr(report, each) for each in ("done", "stage", "places", "problem")}
    return fill(TenantRemovalAnswer, report.removal, name=name, left=left, **of_report)


async def tenant_traces(services: Services, caller: Principal, request: TenantRequest) -> TenantTraces:
    places = await _removals(services).search(caller, request.name)
    return TenantTraces(name=request.name, places=fit(places), left=sum(place.left for place in places))


async def add_agent(services: Services, caller: Principal, request: AddAgentRequest) -> AgentAdded:
    acting = await services.tenancy.acting(caller, request.tenant)
    definition = read_agent_definition(request.agent_def)
    save = services.catalogue.replace if request.replace else services.catalogue.store
    return AgentAdded(tenant=request.tenant, agent=AgentShown.of(await save(acting, definition)))


async def list_agents(services: Services, caller: Principal, request: ListAgentsRequest) -> AgentList:
    acting = await services.tenancy.acting(caller, request.tenant)
    found = await services.catalogue.list(acting.tenant.name)
    return AgentList(
        tenant=request.tenant, count=len(found), agents=fit([_agent_shown(services, agent) for agent in found])
    )


def _agent_shown(services: Services, agent: CatalogueAgent) -> AgentShown:
    return AgentShown.of(agent, services.catalogue.nodes(agent))


async def show_agent(services: Services, caller: Principal, request: AgentRequest) -> AgentAnswer:
    acting = await services.tenancy.acting(caller, request.tenant)
    agent = await services.catalogue.show(acting.tenant.name, request.agent_id)
    identity = services.catalogue.identity(request.tenant, agent.id)
    return AgentAnswer(tenant=request.tenant, agent=_agent_shown(services, agent), identity=identity)


async def remove_agent(services: Services, caller: Principal, request: AgentRequest) -> AgentRemovedAnswer:
    acting = await services.tenancy.acting(caller, request.tenant)
    removed = await services.catalogue.remove(acting, request.agent_id)
    return AgentRemovedAnswer(tenant=request.tenant, agent_id=removed.id)


class ScheduleRequest(AgentRequest, frozen=True, kw_only=True):
    schedule_id: str = ""


class AddScheduleRequest(StrictRequest, frozen=True, kw_only=True):
    """`schedule` is as in an agent's definition."""

    schedule: dict[str, Any]
    tenant: str = DEFAULT
    agent_id: str = ""


class ScheduleShown(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """`source` is that of the agent's definition, which the schedule is part of.

    `upcoming` has the next moments, and nothing while the schedule is paused or its tenant disabled.
    """

    agent_id: str
    id: str
    cron: str
    every_s: int
    time_zone: str
    text: str
    catch_up_s: int
    source: str
    paused_at_ms: int | None
    upcoming: tuple[Moment, ...]

    @classmethod
    def of(cls, found: ScheduleFound) -> ScheduleShown:
        return fill(
            cls,
            found.schedule,
            agent_id=found.agent.id,
            source=found.agent.source,
            paused_at_ms=found.paused_at_ms,
            upcoming=tuple(found.upcoming),
        )


class ScheduleList(ApiAnswer, frozen=True, kw_only=True, tag="schedule_list"):
    tenant: str
    count: int
    schedules: tuple[ScheduleShown, ...]


class ScheduleAnswer(ApiAnswer, frozen=True, kw_only=True, tag="schedule"):
    tenant: str
    schedule: ScheduleShown


class ScheduleRemoved(ApiAnswer, frozen=True, kw_only=True, tag="schedule_removed"):
    tenant: str
    agent_id: str
    schedule_id: str


class ScheduleRun(ApiAnswer, frozen=True, kw_only=True, tag="schedule_run"):
    tenant: str
    agent_id: str
    schedule_id: str
    task_id: TaskId


def _schedules(services: Services) -> ScheduleAdmin:
    if services.schedules is None:
        raise Unavailable("no_schedules", "this daemon runs no agents")
    return services.schedules


def _read_schedule(given: dict[str, Any]) -> Schedule:
    try:
        return msgspec.convert(given, Schedule)
    except msgspec.ValidationError as wrong:
        raise invalid_schedule(explain_invalid(str(wrong), Schedule)) from None


async def list_schedules(services: Services, caller: Principal, request: AgentRequest) -> ScheduleList:
    acting = await services.tenancy.acting(caller, request.tenant)
    found = await _schedules(services).list(acting, request.agent_id)
    shown = fit([ScheduleShown.of(each) for each in found])
    return ScheduleList(tenant=request.tenant, count=len(found), schedules=shown)


async def show_schedule(services: Services, caller: Principal, request: ScheduleRequest) -> ScheduleAnswer:
    acting = await services.tenancy.acting(caller, request.tenant)
    found = await _schedules(services).show(acting, request.agent_id, request.schedule_id)
    return ScheduleAnswer(tenant=request.tenant, schedule=ScheduleShown.of(found))


async def add_schedule(services: Services, caller: Principal, request: AddScheduleRequest) -> ScheduleAnswer:
    acting = await services.tenancy.acting(caller, request.tenant)
    found = await _schedules(services).add(acting, request.agent_id, _read_schedule(request.schedule))
    return ScheduleAnswer(tenant=request.tenant, schedule=ScheduleShown.of(found))


async def remove_schedule(services: Services, caller: Principal, request: ScheduleRequest) -> ScheduleRemoved:
    acting = await services.tenancy.acting(caller, request.tenant)
    await _schedules(services).remove(acting, request.agent_id, request.schedule_id)
    return fill(ScheduleRemoved, request)


async def pause_schedule(services: Services, caller: Principal, request: ScheduleRequest) -> ScheduleAnswer:
    return await _pause(services, caller, request, paused=True)


async def resume_schedule(services: Services, caller: Principal, request: ScheduleRequest) -> ScheduleAnswer:
    return await _pause(services, caller, request, paused=False)


async def _pause(services: Services, caller: Principal, request: ScheduleRequest, *, paused: bool) -> ScheduleAnswer:
    acting = await services.tenancy.acting(caller, request.tenant)
    found = await _schedules(services).pause(acting, request.agent_id, request.schedule_id, paused=paused)
    return ScheduleAnswer(tenant=request.tenant, schedule=ScheduleShown.of(found))


async def run_schedule(services: Services, caller: Principal, request: ScheduleRequest) -> ScheduleRun:
    acting = await services.tenancy.acting(caller, request.tenant)
    task_id = await _schedules(services).run_now(acting, request.agent_id, request.schedule_id)
    return fill(ScheduleRun, request, task_id=task_id)


SCHEDULES: Final = "/v1/admin/tenants/{tenant}/schedules"
OF_AGENT: Final = "/v1/admin/tenants/{tenant}/agents/{agent_id}/schedules"
SCHEDULE: Final = f"{OF_AGENT}/{{schedule_id}}"
OPERATIONS: Final[tuple[AnyApiOperation, ...]] = (
    ApiOperation("POST", TENANTS, add_tenant, "Add a tenant and mint its token", status=201),
    ApiOperation("GET", TENANTS, list_tenants, "All tenants, the oldest first"),
    ApiOperation("PATCH", f"{TENANTS}/{{name}}", change_tenant, "Disable or enable a tenant, or change its limits"),
    ApiOperation(
        "POST", f"{TENANTS}/{{name}}/rotate-token", rotate_tenant, "Replace a tenant's token; the old one ends at once"
    ),
    ApiOperation("POST", f"{TENANTS}/{{name}}/removal", remove_tenant, "Erase all of a tenant's data and prove it"),
    ApiOperation("GET", f"{TENANTS}/{{name}}/removal", tenant_removal, "How far the removal of a tenant is"),
    ApiOperation("GET", f"{TENANTS}/{{name}}/traces", tenant_traces, "Search every place for a tenant's traces"),
    ApiOperation("POST", AGENTS, add_agent, "Store an agent for a tenant", status=201),
    ApiOperation(
        "GET",
        AGENTS,
        list_agents,
        "A tenant's agents: index, those of code and files, then the stored ones, the oldest first",
    ),
    ApiOperation("GET", f"{AGENTS}/{{agent_id}}", show_agent, "One agent of a tenant"),
    ApiOperation("DELETE", f"{AGENTS}/{{agent_id}}", remove_agent, "Remove a stored agent; its tasks stay"),
    ApiOperation("GET", SCHEDULES, list_schedules, "The schedules of a tenant's agents, each with its next moment"),
    ApiOperation("GET", SCHEDULE, show_schedule, "One schedule, with its next moments"),
    ApiOperation("POST", OF_AGENT, add_schedule, "Add a schedule to a stored agent", status=201),
    ApiOperation("DELETE", SCHEDULE, remove_schedule, "Remove a schedule from a stored agent; its tasks stay"),
    ApiOperation("POST", f"{SCHEDULE}/pause", pause_schedule, "Pause a schedule: it has no runs until it is resumed"),
    ApiOperation("POST", f"{SCHEDULE}/resume", resume_schedule, "Resume a schedule, with the next moment from now on"),
    ApiOperation("POST", f"{SCHEDULE}/run", run_schedule, "Run a schedule now, paused or not", status=201),
)
