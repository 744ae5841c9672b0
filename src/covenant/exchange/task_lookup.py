"""Finds tasks by their id alone, of any agent and any door, and shows the queue.

A tenant sees its own tasks. The operator sees every task, the mailbox's too, if it may (`TaskLookup.operator`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from covenant.exchange.access.principals import Principal
from covenant.exchange.access.tenants import Caller
from covenant.exchange.catalogue import Catalogue
from covenant.exchange.tasks.reader import TaskReader, TaskStream, parse_known_id
from covenant.exchange.tasks.writer import refuse_ended
from covenant.ledger.contract.ledger import Ledger
from covenant.ledger.contract.tasks import ANY, QueueQuery, TaskRow, TaskScope
from covenant.ledger.machine.commands import Cancel
from covenant.ledger.machine.states import LEASED, QUEUED
from covenant.model.agent_definition import CatalogueAgent
from covenant.model.task_view import TaskState, TaskView

COUNTED_MAX: Final = 200
"""A tenant's status covers its newest tasks: counting all would cost more and more with its history."""


class LiveTask(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    task_id: str
    agent: str
    state: str
    since_ms: int | None = None
    holder_lost: bool = False


class QueueStatus(msgspec.Struct, frozen=True, kw_only=True):
    """`counted`: how many tasks the counts cover; None: all."""

    counts: Mapping[str, int]
    waiting: Sequence[LiveTask]
    counted: int | None = None


class TaskLookup:
    """`operator`: the operator's principal, which sees every task and can cancel one. None: the operator is treated
    like the tenant that it calls for."""

    def __init__(self, ledger: Ledger, catalogue: Catalogue, operator: Principal | None = None) -> None:
        self._ledger = ledger
        self._catalogue = catalogue
        self._operator = operator
        self._reader = TaskReader(ledger)

    async def agents(self, caller: Caller) -> Sequence[CatalogueAgent]:
        """The caller's own agents; for the operator, all tenants' agents."""
        if not self._sees_all(caller):
            return await self._catalogue.list(caller.tenant.name)
        return [agent for tenant in await self._ledger.tenants() for agent in self._catalogue.agents(tenant.name)]

    async def list(self, caller: Caller, limit: int) -> Sequence[TaskRow]:
        """The tenant's tasks, newest first."""
        return await self._ledger.of_tenant(caller.tenant.name, limit)

    async def get(self, caller: Caller, task_id: str) -> TaskView:
        return await self._reader.get(parse_known_id(task_id), self._scope(caller))

    async def follow(
        self, caller: Caller, task_id: str, after: int | None = None, *, ends_when_parked: bool = True
    ) -> TaskStream:
        """All steps after a generation; None: from now on. Until the task ends or waits for its sender."""
        return await self._reader.follow(
            parse_known_id(task_id),
            self._scope(caller),
            after,
            ends_when_parked=ends_when_parked,
            invalid="invalid_request",
        )

    async def cancel(self, caller: Caller, task_id: str) -> TaskView:
        """Cancels the task; returns it afterwards. Refused as `not_cancelable` if the task had ended before."""
        task = (await self.get(caller, task_id)).task
        by = self._operator.agent if self._operator and caller.operator else self._catalogue.client(caller.tenant.name)
        command = Cancel(task_id=task.id, recipient=task.recipient.pubkey, by=by, reason=f"by {caller.name}")
        refuse_ended(task.id, await self._ledger.commit(command))
        return await self.get(caller, task.id)

    def _sees_all(self, caller: Caller) -> bool:
        return caller.operator and self._operator is not None

    def _scope(self, caller: Caller) -> TaskScope:
        return ANY if self._sees_all(caller) else TaskScope(tenant=caller.tenant.name)

    async def queue(self, caller: Caller, limit: int) -> QueueStatus:
        return await (self._whole_queue(limit) if self._sees_all(caller) else self._queue_of(caller.tenant.name, limit))

    async def _whole_queue(self, limit: int) -> QueueStatus:
        ledger = self._ledger
        found, counts = await ledger.queue(QueueQuery(limit=limit)), await ledger.counts()
        return QueueStatus(
            counts={
                QUEUED.wire_name: counts.queued,
                LEASED.wire_name: counts.leased,
                "waiting_for_sender": counts.parked,
                "holders_lost": counts.holders_lost,
            },
            waiting=[
                LiveTask(
                    task_id=entry.task.id,
                    agent=entry.task.recipient.display,
                    state=entry.state,
                    since_ms=entry.leased_at_ms,
                    holder_lost=entry.holder_lost,
                )
                for entry in found.tasks
            ],
        )

    async def _queue_of(self, tenant: str, limit: int) -> QueueStatus:
        rows = await self._ledger.of_tenant(tenant, COUNTED_MAX)
        live = [row for row in rows if not TaskState(row.state).terminal]
        return QueueStatus(
            counts=dict(Counter(row.state for row in rows)),
            waiting=[
                LiveTask(task_id=row.task_id, agent=row.agent_id, state=row.state, since_ms=row.updated_at_ms)
                for row in live[:limit]
            ],
            counted=len(rows),
        )
