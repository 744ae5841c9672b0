"""Schedules: what agents do at given times. A run is an ordinary task, and its id follows from its moment.

A schedule is part of an agent's definition, whether it is stored or declared by code. So there is nothing else to
keep: the id of a run is derived from the tenant, the agent, the schedule and the moment. Whoever submits a run again,
after a restart, a step of the clock, or beside another daemon, finds the task that is there. A moment never has two.

Moments that were missed (nobody was up, or the clock was set) are run if they are no longer ago than the schedule's
`catch_up_s`. The next moments are in a heap by time, so that waiting costs nothing.
"""

from __future__ import annotations

import asyncio
import hashlib
import heapq
import logging
from typing import Final, NamedTuple

from covenant.exchange.catalogue import Catalogue
from covenant.exchange.cron import After, read_times
from covenant.exchange.tasks.builder import build_task
from covenant.exchange.tasks.writer import TaskWriter
from covenant.ledger.contract.ledger import Ledger
from covenant.model.agent_definition import AgentDefinition, Schedule
from covenant.model.content import Text
from covenant.model.errors import Conflict, Refusal
from covenant.model.ids import TaskId, uuid_of
from covenant.model.task import A2A, Task

LOOK_S: Final = 15.0
"""How often the catalogue and the clock are looked at."""
LATE_MS: Final = 300_000
"""A moment that was waited for is run although it comes late by so much: the clock may have been paused meanwhile."""
AGAIN_MS: Final = 5_000
"""After so long a run that was refused is submitted again, while it is not too late."""
RUNS_AT_ONCE_MAX: Final = 100

log = logging.getLogger(__name__)

ScheduleKey = tuple[str, str, str]
"""Tenant, agent and schedule."""


class _Known(NamedTuple):
    schedule: Schedule
    definition: AgentDefinition
    after: After


class ScheduleRunner:
    """`run` until canceled. Used on one loop."""

    def __init__(self, ledger: Ledger, catalogue: Catalogue, writer: TaskWriter) -> None:
        self._ledger = ledger
        self._catalogue = catalogue
        self._writer = writer
        self._known: dict[ScheduleKey, _Known] = {}
        self._heap: list[tuple[int, ScheduleKey, int]] = []
        """When to act, on which schedule, for which moment."""
        self._next: dict[ScheduleKey, int] = {}
        """The moment that each waits for: whatever else is in the heap is of an earlier definition."""
        self._steps = 0

    async def run(self) -> None:
        while True:
            try:
                await self.step()
            except Refusal as refusal:
                log.warning("schedule.refused", extra={"code": refusal.code, "reason": refusal.message})
            left_s = (self._heap[0][0] - self._ledger.now_ms()) / 1000 if self._heap else LOOK_S
            await asyncio.sleep(min(LOOK_S, max(0.01, left_s)))

    async def step(self) -> int:
        """Submit what is due; how many runs."""
        clock = self._ledger.clock
        if clock.is_paused():
            return 0
        if clock.steps_total != self._steps:
            self._steps = clock.steps_total
            self._known.clear()
            self._heap.clear()
        await self._refresh()
        runs, now_ms = 0, self._ledger.now_ms()
        while self._heap and self._heap[0][0] <= now_ms and runs < RUNS_AT_ONCE_MAX:
            _, key, moment_ms = heapq.heappop(self._heap)
            known = self._known.get(key)
            if known is None or self._next.get(key) != moment_ms:
                continue
            late_ms = now_ms - moment_ms
            if late_ms > max(LATE_MS, known.schedule.catch_up_s * 1000):
                self._push_next(key, known, moment_ms, now_ms)
            elif await self._submit(key, known, moment_ms):
                runs += 1
                self._push_next(key, known, moment_ms, now_ms)
            else:
                heapq.heappush(self._heap, (now_ms + AGAIN_MS, key, moment_ms))
        return runs

    def _push_next(self, key: ScheduleKey, known: _Known, moment_ms: int, now_ms: int) -> None:
        begin_ms = max(moment_ms, now_ms - known.schedule.catch_up_s * 1000 - 1)
        following_ms = known.after(begin_ms)
        self._next.pop(key, None)
        if following_ms is not None:
            self._next[key] = following_ms
            heapq.heappush(self._heap, (following_ms, key, following_ms))

    async def _refresh(self) -> None:
        """The catalogue as it is: schedules that are new or were changed begin now, and those that are gone end."""
        found: dict[ScheduleKey, tuple[Schedule, AgentDefinition]] = {}
        for tenant in await self._ledger.tenants():
            if tenant.disabled_at_ms is None:
                for agent in self._catalogue.agents(tenant.name):
                    for schedule in agent.definition.schedules:
                        found[tenant.name, agent.id, schedule.id] = (schedule, agent.definition)
        now_ms = self._ledger.now_ms()
        for key in [key for key in self._known if key not in found]:
            del self._known[key]
        for number, (key, (schedule, definition)) in enumerate(found.items()):
            if number % RUNS_AT_ONCE_MAX == 0:
                await asyncio.sleep(0)  # there may be many
            known = self._known.get(key)
            if known is not None and known.schedule == schedule:
                if known.definition is not definition:
                    self._known[key] = known._replace(definition=definition)
                continue
            try:
                self._known[key] = known = _Known(schedule, definition, read_times(schedule))
            except Refusal as refusal:
                log.warning("schedule.unreadable", extra={"schedule": "/".join(key), "reason": refusal.message})
                continue
            self._push_next(key, known, 0, now_ms)

    async def _submit(self, key: ScheduleKey, known: _Known, moment_ms: int) -> bool:
        """Whether the moment has its run now."""
        tenant, agent_id, schedule_id = key
        try:
            await self._writer.submit(self._task(key, known, moment_ms))
        except Conflict:
            return True  # it had one, with the words of that time
        except Refusal as refusal:
            log.warning(
                "schedule.run_refused",
                extra={"tenant": tenant, "agent": agent_id, "schedule": schedule_id, "code": refusal.code},
            )
            return False
        return True

    def _task(self, key: ScheduleKey, known: _Known, moment_ms: int) -> Task:
        tenant, agent_id, schedule_id = key
        return build_task(
            run_id(key, moment_ms),
            sender=self._catalogue.client(tenant),
            recipient=self._catalogue.identity(tenant, agent_id),
            parts=(Text(known.schedule.text or schedule_id),),
            tenant=tenant,
            origin=A2A,
            definition=known.definition,
            metadata={"schedule": {"id": schedule_id, "moment_ms": moment_ms}},
        )


def run_id(key: ScheduleKey, moment_ms: int) -> TaskId:
    """The task of a moment."""
    named = "\n".join(("schedule", *key, str(moment_ms)))
    return TaskId(uuid_of(hashlib.sha256(named.encode()).digest()))
