"""The operator's operations on schedules."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from covenant.doors.operator_api.operation import AnyApiOperation, ApiAnswer, ApiOperation, Services, fill, fit
from covenant.exchange.access.principals import Principal
from covenant.exchange.cron import invalid_schedule
from covenant.exchange.schedules import Moment, ScheduleAdmin, ScheduleFound
from covenant.model.agent_definition import Schedule, explain_invalid
from covenant.model.errors import Unavailable
from covenant.model.ids import TaskId
from covenant.model.tenants import DEFAULT
from covenant.wire.mailbox import Request, StrictRequest

OF_TENANT: Final = "/v1/admin/tenants/{tenant}/schedules"
OF_AGENT: Final = "/v1/admin/tenants/{tenant}/agents/{agent_id}/schedules"
ONE: Final = f"{OF_AGENT}/{{schedule_id}}"


class ListSchedulesRequest(Request, frozen=True, kw_only=True):
    """`agent_id`: of this agent alone."""

    tenant: str = DEFAULT
    agent_id: str = ""


class ScheduleRequest(Request, frozen=True, kw_only=True):
    tenant: str = DEFAULT
    agent_id: str = ""
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


async def list_schedules(services: Services, caller: Principal, request: ListSchedulesRequest) -> ScheduleList:
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


OPERATIONS: Final[tuple[AnyApiOperation, ...]] = (
    ApiOperation("GET", OF_TENANT, list_schedules, "The schedules of a tenant's agents, each with its next moment"),
    ApiOperation("GET", ONE, show_schedule, "One schedule, with its next moments"),
    ApiOperation("POST", OF_AGENT, add_schedule, "Add a schedule to a stored agent", status=201),
    ApiOperation("DELETE", ONE, remove_schedule, "Remove a schedule from a stored agent; its tasks stay"),
    ApiOperation("POST", f"{ONE}/pause", pause_schedule, "Pause a schedule: it has no runs until it is resumed"),
    ApiOperation("POST", f"{ONE}/resume", resume_schedule, "Resume a schedule, with the next moment from now on"),
    ApiOperation("POST", f"{ONE}/run", run_schedule, "Run a schedule now, paused or not", status=201),
)
