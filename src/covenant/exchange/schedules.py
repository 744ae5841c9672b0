"""Schedules: agents' work at given times. A run is an ordinary task, and its id is derived from its moment.

A schedule is part of an agent's definition, stored or declared in code, so nothing else is kept: the id of a run is
derived from the tenant, the agent, the schedule and the moment. A run that is submitted again, after a restart, a step
of the clock, or by another daemon, finds the existing task. A moment never has two runs.

Missed moments (no daemon was up, or the clock was set) are run if they are no older than the schedule's `catch_up_s`. A
paused schedule has no runs, and none later for the moments of its pause. The next moments are in a heap by time, and
the catalogue is read only after a change, so waiting costs nothing.

`ScheduleAdmin` is the operator's view: adding and removing a schedule changes a stored definition; a schedule from code
or a file is changed at its source. A pause belongs to the tenant, whatever the schedule's source.
"""

from __future__ import annotations

import asyncio
import hashlib
import heapq
import logging
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from typing import Final, NamedTuple

import msgspec

from covenant.exchange.access.tenants import Caller
from covenant.exchange.catalogue import Catalogue
from covenant.exchange.cron import NextMoment, check_schedules, read_time_zone, read_times
from covenant.exchange.tasks.builder import build_task
from covenant.exchange.tasks.writer import TaskWriter
from covenant.ledger.contract.identities import IdentityLedger
from covenant.ledger.contract.ledger import Ledger
from covenant.ledger.machine.identity_commands import PauseSchedule, WriteAuditRow
from covenant.model.agent_definition import SCHEDULES_MAX, AgentDefinition, CatalogueAgent, Schedule
from covenant.model.content import Text
from covenant.model.errors import Conflict, NotFound, OverLimit, Refusal
from covenant.model.ids import TaskId, uuid_of
from covenant.model.task import A2A, Task
from covenant.model.tenants import SchedulePause, schedule_key

LOOK_S: Final = 15.0
"""The longest wait until the clock is read again."""
LATE_MS: Final = 300_000
"""A daemon that is up runs a moment even if it is late by this much: the clock may have been paused meanwhile."""
RETRY_MS: Final = 5_000
"""The pause before a refused run is submitted again, while it is not too late."""
FOLLOWER_DELAY_MS: Final = 500
"""How long other daemons leave a moment to the leader: a database logs an error for an id that is inserted twice."""
RUNS_AT_ONCE_MAX: Final = 100

log = logging.getLogger(__name__)

_NEVER: Final = SchedulePause(0, 0)
"""The pause of a schedule that nobody has paused."""

ScheduleKey = tuple[str, str, str]
"""Tenant, agent and schedule."""
UPCOMING: Final = 5
YIELD_EVERY: Final = 50
"""The number of schedules after which other coroutines run: finding the next moment takes a while."""


class _ActiveSchedule(NamedTuple):
    schedule: Schedule
    definition: AgentDefinition
    next_moment: NextMoment
    resumed_ms: int
    """The end of the last pause. Moments up to here are not run."""


class ScheduleRunner:
    """Must be used on one event loop. `run` works until canceled."""

    def __init__(self, ledger: Ledger, catalogue: Catalogue, writer: TaskWriter) -> None:
        self._ledger = ledger
        self._catalogue = catalogue
        self._writer = writer
        self._active: dict[ScheduleKey, _ActiveSchedule] = {}
        self._heap: list[tuple[int, ScheduleKey, int]] = []
        """When to act, on which schedule, for which moment."""
        self._next: dict[ScheduleKey, int] = {}
        """The moment that each schedule waits for. Other entries in the heap belong to an earlier definition."""
        self._clock_steps = self._looked_ms = 0
        self._looked_monotonic_ms = ledger.clock.monotonic_ms()
        """When the last look was, by the clock that nobody can set. There is none in the pause after a step."""
        self._catalogue_changes = -1
        """The catalogue's count of changes at the last refresh."""
        self._changed = asyncio.Event()
        catalogue.on_change(self._changed.set)

    async def run(self) -> None:
        while True:
            self._changed.clear()
            try:
                await self.step()
            except Refusal as refusal:
                log.warning("schedule.refused", extra={"code": refusal.code, "reason": refusal.message})
            left_s = (self._heap[0][0] - self._ledger.now_ms()) / 1000 if self._heap else LOOK_S
            with suppress(TimeoutError):
                async with asyncio.timeout(min(LOOK_S, max(0.01, left_s))):
                    await self._changed.wait()

    async def step(self) -> int:
        """Submits the runs that are due; returns how many."""
        clock = self._ledger.clock
        if clock.is_paused():
            return 0
        runs, now_ms, monotonic_ms = 0, self._ledger.now_ms(), clock.monotonic_ms()
        if clock.steps_total != self._clock_steps:
            self._clock_steps = clock.steps_total
            if now_ms < self._looked_ms:  # the moments that come again are waited for again
                self._active.clear()
                self._heap.clear()
                self._catalogue_changes = -1
        unseen_ms = monotonic_ms - self._looked_monotonic_ms
        while runs < RUNS_AT_ONCE_MAX:
            await self._refresh(unseen_ms)  # each time: a schedule that is due may have been paused
            self._looked_ms, self._looked_monotonic_ms = now_ms, monotonic_ms
            if not self._heap or self._heap[0][0] > now_ms:
                break
            _, key, moment_ms = heapq.heappop(self._heap)
            known = self._active.get(key)
            if known is None or self._next.get(key) != moment_ms:
                continue
            late_ms, late_ms_max = now_ms - moment_ms, max(LATE_MS, known.schedule.catch_up_s * 1000)
            if late_ms < FOLLOWER_DELAY_MS and not self._ledger.leads("schedules"):
                heapq.heappush(self._heap, (moment_ms + FOLLOWER_DELAY_MS, key, moment_ms))
            elif late_ms > late_ms_max:
                self._push_next(key, known, max(moment_ms, now_ms - late_ms_max - 1))
            elif await self._submit(key, known, moment_ms):
                runs += 1
                self._push_next(key, known, moment_ms)
            else:
                heapq.heappush(self._heap, (now_ms + RETRY_MS, key, moment_ms))
        return runs

    def _push_next(self, key: ScheduleKey, known: _ActiveSchedule, begin_ms: int) -> None:
        following_ms = known.next_moment(max(begin_ms, known.resumed_ms))
        self._next.pop(key, None)
        if following_ms is not None:
            self._next[key] = following_ms
            heapq.heappush(self._heap, (following_ms, key, following_ms))

    async def _refresh(self, unseen_ms: int) -> None:
        """Reads the catalogue: new and changed schedules begin now, and removed ones end.

        `unseen_ms`: the time since the last look. If all schedules begin anew, the moments in it are still run.
        """
        changes = self._catalogue.changes
        if changes == self._catalogue_changes:
            return
        found: dict[ScheduleKey, tuple[Schedule, AgentDefinition, int]] = {}
        for tenant in await self._ledger.tenants():
            if tenant.disabled_at_ms is None:
                for agent in self._catalogue.agents(tenant.name):
                    for schedule in agent.definition.schedules:
                        pause = tenant.schedule_pauses.get(schedule_key(agent.id, schedule.id), _NEVER)
                        if pause.until_ms is not None:
                            found[tenant.name, agent.id, schedule.id] = (schedule, agent.definition, pause.until_ms)
        now_ms = self._ledger.now_ms()
        looked_ms = now_ms - unseen_ms if self._catalogue_changes < 0 else now_ms
        for key in [key for key in self._active if key not in found]:
            del self._active[key]
        for number, (key, (schedule, definition, resumed_ms)) in enumerate(found.items()):
            if number % RUNS_AT_ONCE_MAX == 0:
                await asyncio.sleep(0)  # there may be many
            known = self._active.get(key)
            if known is not None and (known.schedule, known.resumed_ms) == (schedule, resumed_ms):
                if known.definition is not definition:
                    self._active[key] = known._replace(definition=definition)
                continue
            try:
                self._active[key] = known = _ActiveSchedule(schedule, definition, read_times(schedule), resumed_ms)
            except Refusal as refusal:
                log.warning("schedule.unreadable", extra={"schedule": "/".join(key), "reason": refusal.message})
                continue
            self._push_next(key, known, min(looked_ms, now_ms - schedule.catch_up_s * 1000 - 1))
        self._catalogue_changes = changes

    async def _submit(self, key: ScheduleKey, known: _ActiveSchedule, moment_ms: int) -> bool:
        """Whether the moment has its run now."""
        tenant, agent_id, schedule_id = key
        try:
            if await self._ledger.parties(run_id(key, moment_ms)) is not None:
                return True  # another daemon has submitted it
            await self._writer.submit(run_task(self._catalogue, tenant, known.definition, known.schedule, moment_ms))
        except Conflict:
            return True  # the moment has a run, made from an earlier definition
        except Refusal as refusal:
            log.warning(
                "schedule.run_refused",
                extra={"tenant": tenant, "agent": agent_id, "schedule": schedule_id, "code": refusal.code},
            )
            return False
        return True


def run_task(
    catalogue: Catalogue, tenant: str, definition: AgentDefinition, schedule: Schedule, moment_ms: int
) -> Task:
    return build_task(
        run_id((tenant, definition.id, schedule.id), moment_ms),
        sender=catalogue.client(tenant),
        recipient=catalogue.identity(tenant, definition.id),
        parts=(Text(schedule.text or schedule.id),),
        tenant=tenant,
        origin=A2A,
        definition=definition,
        metadata={"schedule": {"id": schedule.id, "moment_ms": moment_ms}},
    )


def run_id(key: ScheduleKey, moment_ms: int) -> TaskId:
    """The id of a moment's task."""
    named = "\n".join(("schedule", *key, str(moment_ms)))
    return TaskId(uuid_of(hashlib.sha256(named.encode()).digest()))


class Moment(msgspec.Struct, frozen=True, gc=False):
    """`local` is the time in the schedule's own zone, with its offset to UTC."""

    at_ms: int
    local: str


class ScheduleFound(NamedTuple):
    agent: CatalogueAgent
    schedule: Schedule
    paused_at_ms: int | None
    upcoming: Sequence[Moment]
    """The next moments; none while the schedule is paused or its tenant disabled."""


class ScheduleAdmin:
    def __init__(self, ledger: IdentityLedger, catalogue: Catalogue, writer: TaskWriter) -> None:
        self._ledger = ledger
        self._catalogue = catalogue
        self._writer = writer

    async def list(self, caller: Caller, agent_id: str = "") -> Sequence[ScheduleFound]:
        tenant = caller.tenant.name
        agents = [await self._catalogue.show(tenant, agent_id)] if agent_id else await self._catalogue.list(tenant)
        found: list[ScheduleFound] = []
        for agent in agents:
            for schedule in agent.definition.schedules:
                found.append(self._describe(agent, schedule, 1))
                if len(found) % YIELD_EVERY == 0:
                    await asyncio.sleep(0)
        return found

    async def show(self, caller: Caller, agent_id: str, schedule_id: str) -> ScheduleFound:
        agent = await self._catalogue.show(caller.tenant.name, agent_id)
        return self._describe(agent, _schedule(agent, schedule_id), UPCOMING)

    async def add(self, caller: Caller, agent_id: str, schedule: Schedule) -> ScheduleFound:
        check_schedules((schedule,))
        agent = await self._catalogue.show(caller.tenant.name, agent_id)
        old = agent.definition
        if any(each.id == schedule.id for each in old.schedules):
            raise Conflict("schedule_exists", f"{agent_id} has a schedule {schedule.id!r} already; remove it first")
        if len(old.schedules) >= SCHEDULES_MAX:
            raise OverLimit("too_many_schedules", f"an agent may have at most {SCHEDULES_MAX} schedules")
        return self._describe(await self._put(caller, old, (*old.schedules, schedule)), schedule, 1)

    async def remove(self, caller: Caller, agent_id: str, schedule_id: str) -> None:
        agent = await self._catalogue.show(caller.tenant.name, agent_id)
        gone, old = _schedule(agent, schedule_id), agent.definition
        await self._put(caller, old, tuple(each for each in old.schedules if each != gone))

    async def pause(self, caller: Caller, agent_id: str, schedule_id: str, *, paused: bool) -> ScheduleFound:
        """Begins or ends a pause. Moments that pass in a pause are never run."""
        agent = await self._catalogue.show(caller.tenant.name, agent_id)
        schedule = _schedule(agent, schedule_id)
        await self._ledger.commit(
            PauseSchedule(
                by=self._catalogue.author(caller),
                name=caller.tenant.name,
                agent_id=agent_id,
                schedule_id=schedule_id,
                paused=paused,
            )
        )
        return self._describe(agent, schedule, 1)

    async def run_now(self, caller: Caller, agent_id: str, schedule_id: str) -> TaskId:
        """Runs the schedule for the present moment, even if it is paused; returns the task's id."""
        tenant = caller.tenant
        agent = await self._catalogue.show(tenant.name, agent_id)
        schedule = _schedule(agent, schedule_id)
        if tenant.disabled_at_ms is not None:
            raise Conflict("tenant_disabled", f"the tenant {tenant.name} is disabled; its schedules have no runs")
        task = run_task(self._catalogue, tenant.name, agent.definition, schedule, self._ledger.now_ms())
        row: dict[str, object] = {
            "type": "schedule_run",
            "tenant": tenant.name,
            "agent": agent_id,
            "schedule": schedule_id,
            "task_id": task.id,
        }
        # The audit row follows the submission, so that a refused run leaves none.
        await self._writer.submit(task)
        await self._ledger.commit(WriteAuditRow(by=self._catalogue.author(caller), row=row))
        return task.id

    async def _put(self, caller: Caller, old: AgentDefinition, schedules: tuple[Schedule, ...]) -> CatalogueAgent:
        self._catalogue.check_stored(caller.tenant.name, old.id)
        return await self._catalogue.replace(caller, msgspec.structs.replace(old, schedules=schedules), expected=old)

    def _describe(self, agent: CatalogueAgent, schedule: Schedule, count: int) -> ScheduleFound:
        tenant = self._ledger.tenant(agent.tenant)
        pause = tenant.schedule_pauses.get(schedule_key(agent.id, schedule.id)) if tenant is not None else None
        paused_at_ms = pause.since_ms if pause is not None and pause.until_ms is None else None
        idle = paused_at_ms is not None or tenant is None or tenant.disabled_at_ms is not None
        upcoming = () if idle else _upcoming(schedule, self._ledger.now_ms(), count)
        return ScheduleFound(agent, schedule, paused_at_ms, upcoming)


def _upcoming(schedule: Schedule, now_ms: int, count: int) -> Sequence[Moment]:
    try:
        next_moment, zone = read_times(schedule), read_time_zone(schedule.time_zone)
    except Refusal:
        return ()  # this machine does not have the schedule's time zone
    found: list[Moment] = []
    next_ms = next_moment(now_ms)
    while len(found) < count and next_ms is not None:
        found.append(Moment(next_ms, datetime.fromtimestamp(next_ms / 1000, zone).isoformat(timespec="seconds")))
        next_ms = next_moment(next_ms)
    return found


def _schedule(agent: CatalogueAgent, schedule_id: str) -> Schedule:
    for schedule in agent.definition.schedules:
        if schedule.id == schedule_id:
            return schedule
    known = ", ".join(each.id for each in agent.definition.schedules[:10]) or "none"
    raise NotFound("unknown_schedule", f"{agent.id} has no schedule {schedule_id[:80]!r}; its schedules: {known}")
