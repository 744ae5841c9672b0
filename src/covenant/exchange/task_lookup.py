"""Any task by its id alone, for whoever may see it: a tenant its own, the operator every one, the mailbox's too.

What a caller may not see is unknown to it, and so is what does not exist.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Final

import msgspec

from covenant.exchange.access.principals import Principal
from covenant.exchange.access.tenants import Caller
from covenant.exchange.catalogue import Catalogue
from covenant.exchange.tasks.reader import TaskReader, parse_known_id, unknown
from covenant.exchange.tasks.task_stream import TaskStream
from covenant.ledger.contract.ledger import Ledger
from covenant.ledger.contract.tasks import QueueQuery, TaskRow
from covenant.ledger.machine.commands import Cancel
from covenant.model.agent_definition import CatalogueAgent
from covenant.model.errors import Conflict
from covenant.model.ids import AgentId
from covenant.model.task_view import TaskState, TaskView

COUNTED_MAX: Final = 200
"""A tenant's status is that of its newest tasks: counting all of them would cost more the longer it is here."""


class LiveTask(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """A task that is not over."""

    task_id: str
    agent: str
    state: str
    since_ms: int | None = None
    holder_lost: bool = False


class QueueStatus(msgspec.Struct, frozen=True, kw_only=True):
    """`counted`: how many tasks the counts are of; None if they are of all."""

    counts: Mapping[str, int]
    waiting: Sequence[LiveTask]
    counted: int | None = None


class TaskLookup:
    def __init__(self, ledger: Ledger, catalogue: Catalogue, operator: Principal) -> None:
        self._ledger = ledger
        self._catalogue = catalogue
        self._operator = operator
        self._views = TaskReader(ledger)

    async def agents(self, caller: Caller) -> Sequence[CatalogueAgent]:
        """The caller's own; all tenants', for the operator."""
        if not caller.operator:
            return await self._catalogue.list(caller.tenant.name)
        return [agent for tenant in await self._ledger.tenants() for agent in self._catalogue.agents(tenant.name)]

    async def get(self, caller: Caller, given: str) -> TaskView:
        task_id = parse_known_id(given)
        if not caller.operator:
            return await self._views.of_tenant(task_id, caller.tenant.name)
        view = (await self._views.past(task_id)).view()
        if view is None:
            raise unknown(task_id)
        return await self._views.get(task_id, view.task.recipient.pubkey)

    async def follow(self, caller: Caller, given: str) -> TaskStream:
        """From where it is now, until it has ended or waits for its sender."""
        task_id = parse_known_id(given)
        with ExitStack() as stack:
            watch = stack.enter_context(self._ledger.watch(task_id))
            view = await self.get(caller, task_id)
            stack.pop_all()
            return TaskStream(self._ledger, watch, view, ends_when_parked=True)

    async def cancel(self, caller: Caller, given: str) -> TaskView:
        """The task afterwards. One that was over before is refused as `not_cancelable`."""
        view = await self.get(caller, given)
        task = view.task
        canceled = await self._ledger.commit(
            Cancel(task_id=task.id, recipient=task.recipient.pubkey, by=self._by(caller), reason=f"by {caller.name}")
        )
        if canceled.before:
            raise Conflict("not_cancelable", f"task {task.id} has ended already: it is {canceled.ending}")
        return await self.get(caller, task.id)

    async def queue(self, caller: Caller, limit: int) -> QueueStatus:
        return await (self._whole_queue(limit) if caller.operator else self._queue_of(caller.tenant.name, limit))

    async def _whole_queue(self, limit: int) -> QueueStatus:
        ledger = self._ledger
        found, counts = await ledger.queue(QueueQuery(limit=limit)), await ledger.counts()
        return QueueStatus(
            counts={
                "queued": counts.queued,
                "in_flight": counts.leased,
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
            waiting=[_waiting(row) for row in live[:limit]],
            counted=len(rows),
        )

    def _by(self, caller: Caller) -> AgentId:
        return self._operator.agent if caller.operator else self._catalogue.client(caller.tenant.name)


def _waiting(row: TaskRow) -> LiveTask:
    return LiveTask(task_id=row.task_id, agent=row.agent_id, state=row.state, since_ms=row.updated_at_ms)
