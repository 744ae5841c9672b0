"""Requests: a tenant's tasks by their id alone, whichever of its agents they are for and whichever door brought them.

What is another tenant's is not there. A task of the mailbox has no tenant, and so is nobody's here.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from covenant.exchange.catalogue import Catalogue
from covenant.exchange.streams import Stream
from covenant.exchange.tenancy import Caller
from covenant.exchange.views import Views, known_id
from covenant.ledger.contract import Ledger, TaskRow
from covenant.ledger.machine.commands import Cancel
from covenant.model.errors import Invalid, NotFound
from covenant.model.folding import TaskView


class Requests:
    def __init__(self, ledger: Ledger, catalogue: Catalogue) -> None:
        self._ledger = ledger
        self._catalogue = catalogue
        self._views = Views(ledger)

    async def list(self, caller: Caller, limit: int) -> Sequence[TaskRow]:
        """The newest first."""
        return await self._ledger.of_tenant(caller.tenant.name, limit)

    async def get(self, caller: Caller, request_id: str) -> TaskView:
        return await self._views.of_tenant(known_id(request_id), caller.tenant.name)

    async def follow(self, caller: Caller, request_id: str, after: int, *, ends_when_parked: bool = False) -> Stream:
        """Everything after this generation, until the end. From 0 on, the first view is the first step itself.

        `ends_when_parked`: also until it waits for its sender.
        """
        task_id = known_id(request_id)
        with ExitStack() as stack:
            watch = stack.enter_context(self._ledger.watch(task_id))
            now = await self._views.of_tenant(task_id, caller.tenant.name)
            if not 0 <= after <= now.generation:
                raise Invalid("invalid_request", f"this request has come to {now.generation}, not to {after}")
            first = now
            if max(1, after) < now.generation:
                folded = (await self._views.past(task_id, max(1, after))).view()
                assert folded is not None, "a task that is known has a first step"
                first = folded
            stack.pop_all()
            return Stream(self._ledger, watch, first, ends_when_parked=ends_when_parked)

    async def cancel(self, caller: Caller, request_id: str) -> bool:
        """Whether this ended it. One that is unknown, another's or over is told apart by nobody."""
        try:
            view = await self.get(caller, request_id)
        except NotFound:
            return False
        if view.state.terminal:
            return False
        canceled = await self._ledger.commit(
            Cancel(
                task_id=view.task.id,
                recipient=view.task.recipient.pubkey,
                by=self._catalogue.client(caller.tenant.name),
                reason=f"by {caller.name}",
            )
        )
        return not canceled.before
