"""The mailbox as a library: a durable queue between agents in one process, without a daemon.

    async with Mailbox.open("home") as mailbox:        # or Mailbox.memory()
        await mailbox.send_task(mailbox.new_task(alice, bob, "say hello"))
        task = await mailbox.recv_task()
        await mailbox.send_result(Result.ok(task.id, "hello"))
        result = await mailbox.recv_result()

The promises are the ledger's: a sent task is on disk when `send_task` returns, a received task has an explicit lease
that never ends by itself, a result is delivered once. The process is trusted: no call is authorised. A home belongs to
one process at a time; a daemon's home belongs to the daemon.

Every verb can be cancelled. A cancelled receive gives back the task or result that it was about to return, and the next
receiver gets it. With a `request_id` it keeps it instead: the same receive under the same id returns it again.
"""

from __future__ import annotations

import asyncio
import hashlib
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, Unpack

import msgspec

from covenant.daemon.environment import monotonic_ms, now_ms
from covenant.exchange.argument_checks import checks_arguments, checks_methods
from covenant.exchange.id_prefixes import UUID_LENGTH, find_lease_id, find_task_id
from covenant.exchange.request_checks import (
    check_limit,
    check_reason,
    check_repair,
    check_request_id,
    check_size,
    check_task,
)
from covenant.exchange.task_search import find_request, query_of
from covenant.exchange.tasks.builder import check_blocks
from covenant.exchange.tasks.reader import read_tree
from covenant.ledger.contract.ledger import Ledger
from covenant.ledger.contract.task_query import FoundPage
from covenant.ledger.contract.tasks import QueueEntry, QueueQuery, TaskDetail, TreeNode
from covenant.ledger.embedded.journal.journal import Durability
from covenant.ledger.embedded.open import memory_ledger, open_ledger
from covenant.ledger.machine.commands import (
    Accept,
    Accepted,
    Cancel,
    Canceled,
    Drain,
    LeasedTask,
    Release,
    Renew,
    Repair,
    Settle,
    Settled,
    Take,
)
from covenant.ledger.machine.decisions.context import unknown_task
from covenant.model.errors import Conflict, Invalid
from covenant.model.ids import AgentId, LeaseId, PublicKey, TaskId, base58, check_display
from covenant.model.retry_policy import RepairCommand, RepairOutcome, RepairRequest
from covenant.model.task import Lease, ReceivedTask, Result, Task
from covenant.wire.mailbox import FindFilters
from covenant.wire.validation import encode

WAIT_MS: Final = 60_000


@checks_arguments
def local_agent(display: str) -> AgentId:
    """An agent of this process. Its public key is derived from its name: there is no private key."""
    return AgentId(check_display(display), PublicKey(base58(hashlib.sha256(display.encode()).digest())))


@checks_methods
class Mailbox:
    """`recv_*` wait and `try_recv_*` do not; `recent_*`, `task_queue`, `show` and `tree` only read.

    A received task has its lease: `task.lease`, or `leased.lease` of `recv_task_for`.

    `timeout_s` is how long a `recv_*` waits before it raises `TimeoutError`; None: without limit. Arguments are checked
    against their declared types: `WrongType` names the field that has another type.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    @staticmethod
    @checks_arguments
    @asynccontextmanager
    async def open(home: str | Path, *, durability: Durability = "fsync") -> AsyncIterator[Mailbox]:
        """Opens the mailbox in a folder, which is created if it does not exist."""
        ledger = await open_ledger(Path(home), clock=now_ms, monotonic_ms=monotonic_ms, durability=durability)
        try:
            yield Mailbox(ledger)
        finally:
            await ledger.close()

    @staticmethod
    @asynccontextmanager
    async def memory() -> AsyncIterator[Mailbox]:
        """A mailbox that ends with the process: for tests and experiments."""
        ledger = await memory_ledger(clock=now_ms, monotonic_ms=monotonic_ms)
        try:
            yield Mailbox(ledger)
        finally:
            await ledger.close()

    @staticmethod
    @checks_arguments
    def new_task(sender: AgentId, recipient: AgentId, intent_text: str, *, parent: TaskId | None = None) -> Task:
        """A task with a new id. For the other fields, build a `Task` yourself."""
        return Task(
            id=TaskId(str(uuid.uuid4())), sender=sender, recipient=recipient, intent_text=intent_text, parent=parent
        )

    async def send_task(self, task: Task) -> Accepted:
        digest = check_task(task, self._ledger.limits.task_bytes_max)
        return await self._ledger.commit(Accept(task=task, digest=digest))

    async def recv_task(self, *, timeout_s: float | None = None, request_id: str | None = None) -> ReceivedTask:
        """Leases the next task, of all recipients in turn; waits for one."""
        leased = await self._lease(None, timeout_s, request_id)
        return ReceivedTask.under(leased.task, leased.lease)

    async def recv_task_for(
        self, recipient: AgentId, *, timeout_s: float | None = None, request_id: str | None = None
    ) -> LeasedTask:
        """Leases the recipient's oldest task; waits for one. Also returns the lease, which `send_result` may need."""
        return await self._lease(recipient, timeout_s, request_id)

    async def try_recv_task_for(self, recipient: AgentId, *, request_id: str | None = None) -> ReceivedTask | None:
        check_request_id(request_id)
        leased = await self._ledger.commit(_take(recipient, request_id))
        return ReceivedTask.under(leased.tasks[0].task, leased.tasks[0].lease) if leased.tasks else None

    async def recent_tasks(self, limit: int) -> Sequence[Task]:
        return await self._ledger.recent_tasks(None, check_limit(limit, self._ledger.limits.page_max))

    async def task_queue(self, limit: int) -> Sequence[QueueEntry]:
        return (await self._ledger.queue(QueueQuery(limit=check_limit(limit, self._ledger.limits.page_max)))).tasks

    async def find(self, **filters: Unpack[FindFilters]) -> FoundPage:
        """A page of the live and finished tasks that match the filters. Only reads."""
        if filters.get("parent"):
            filters = {**filters, "parent": await self._id(TaskId(filters["parent"] or ""))}
        return await self._ledger.find(query_of(find_request(filters)))

    async def show(self, task_id: TaskId) -> TaskDetail:
        """A task with its leases, updates and result."""
        task_id = await self._id(task_id)
        shown = await self._ledger.show(task_id, None, self._ledger.limits.page_max)
        if shown is None:
            raise unknown_task(task_id)
        return shown

    async def tree(self, root: TaskId) -> TreeNode:
        """A task with its children, their children, and so on."""
        return await read_tree(self._ledger, await self._id(root), None)

    async def renew(self, task_id: TaskId, lease_id: LeaseId) -> Lease:
        """Renews a lease while the holder is at work: the lease's age starts again at 0."""
        task_id, lease_id, holder = await self._held(task_id, lease_id)
        return await self._ledger.commit(Renew(task_id=task_id, holder=holder, lease_id=lease_id))

    async def release(self, task_id: TaskId, lease_id: LeaseId, reason: str) -> Lease:
        """Gives back a task on which no work was done."""
        check_reason(reason, "release")
        task_id, lease_id, holder = await self._held(task_id, lease_id)
        return await self._ledger.commit(Release(task_id=task_id, holder=holder, lease_id=lease_id, reason=reason))

    async def cancel(self, task_id: TaskId, reason: str) -> Canceled:
        """Ends a task. `canceled` is False if the task had already ended otherwise."""
        check_reason(reason, "cancel")
        return await self._ledger.commit(Cancel(task_id=await self._id(task_id), by=_PROCESS, reason=reason))

    async def _id(self, id_or_prefix: TaskId) -> TaskId:
        """The whole id of a task, of which the beginning may be passed."""
        return id_or_prefix if len(id_or_prefix) >= UUID_LENGTH else await find_task_id(self._ledger, id_or_prefix)

    async def _held(self, task_id: TaskId, lease_id: LeaseId) -> tuple[TaskId, LeaseId, AgentId]:
        """The whole ids, and the holder of the lease: this process acts for every holder."""
        task_id = await self._id(task_id)
        entry = await self._ledger.entry(task_id)
        if entry is None:
            raise unknown_task(task_id)
        if len(lease_id) < UUID_LENGTH:
            lease_id = await find_lease_id(self._ledger, None, task_id, lease_id)
        return task_id, lease_id, entry.lease.leased_to if entry.lease is not None else entry.task.recipient

    async def repair_task(
        self, request: RepairRequest | TaskId, command: RepairCommand | None = None, reason: str | None = None
    ) -> RepairOutcome:
        """Requeue a task whose holder does not come back, or end it with an error.

        The fields of the request may also be passed one by one.
        """
        if not isinstance(request, RepairRequest):
            if command is None or reason is None:
                raise Invalid("invalid_repair", "invalid repair request: it needs a command and a reason")
            request = RepairRequest(task_id=request, command=command, reason=reason)
        check_repair(request.command, request.reason)
        task_id, command = await self._id(request.task_id), request.command
        if command.lease_id is not None:
            lease_id = await find_lease_id(self._ledger, None, task_id, command.lease_id)
            command = msgspec.structs.replace(command, lease_id=lease_id)
        entry = await self._ledger.entry(task_id)
        if entry is None:
            raise unknown_task(task_id)
        repair = Repair(task_id=task_id, by=entry.task.recipient, command=command, reason=request.reason)
        return await self._ledger.commit(repair)

    async def send_result(self, result: Result, lease_id: LeaseId | None = None) -> Settled:
        check_size(encode(result), self._ledger.limits.result_bytes_max, "result")
        check_blocks(result.content, "content")
        if len(result.task_id) < UUID_LENGTH:
            result = msgspec.structs.replace(result, task_id=await self._id(result.task_id))
        if lease_id is not None and len(lease_id) < UUID_LENGTH:
            lease_id = await find_lease_id(self._ledger, None, result.task_id, lease_id)
        return await self._ledger.commit(Settle(task_id=result.task_id, holder=None, result=result, lease_id=lease_id))

    async def recv_result(self, *, timeout_s: float | None = None, request_id: str | None = None) -> Result:
        """Drains the oldest result of any sender; waits for one."""
        check_request_id(request_id)
        async with asyncio.timeout(timeout_s):
            with self._ledger.result_waiter(None) as waiter:
                while True:
                    drained = await self._ledger.commit(Drain(by=_PROCESS, sender=None, request_id=request_id))
                    if drained.results:
                        waiter.served()
                        return drained.results[0]
                    await waiter.wait(WAIT_MS)

    async def try_recv_result_for(self, peer: AgentId, *, request_id: str | None = None) -> Result | None:
        check_request_id(request_id)
        drained = await self._ledger.commit(Drain(by=peer, sender=peer.pubkey, request_id=request_id))
        return drained.results[0] if drained.results else None

    async def recent_results(self, limit: int) -> Sequence[Result]:
        return await self._ledger.recent_results(None, check_limit(limit, self._ledger.limits.page_max))

    async def compact(self) -> int:
        return await self._ledger.compact()

    async def _lease(self, recipient: AgentId | None, timeout_s: float | None, request_id: str | None) -> LeasedTask:
        check_request_id(request_id)
        take = _take(recipient, request_id)
        async with asyncio.timeout(timeout_s):
            with self._ledger.task_waiter(take.recipient) as waiter:
                while True:
                    leased = await self._ledger.commit(take)
                    if leased.tasks:
                        waiter.served()
                        return leased.tasks[0]
                    if leased.again:
                        raise Conflict(
                            "request_over",
                            f"the task of request {request_id!r} is settled or requeued; use a new request_id",
                        )
                    await waiter.wait(WAIT_MS)


def _take(recipient: AgentId | None, request_id: str | None) -> Take:
    by = _PROCESS if recipient is None and request_id is not None else None
    return Take(holder=recipient, recipient=recipient.pubkey if recipient else None, request_id=request_id, by=by)


_PROCESS = local_agent("process@local")
