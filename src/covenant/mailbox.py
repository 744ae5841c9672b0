"""The mailbox as a library: a durable queue between agents in one process, without a daemon.

    async with Mailbox.open("home") as mailbox:        # or Mailbox.memory()
        await mailbox.send_task(mailbox.new_task(alice, bob, "say hello"))
        task = await mailbox.recv_task()
        await mailbox.send_result(Result.ok(task.id, "hello"))
        result = await mailbox.recv_result()

Promises what the ledger promises: what was sent is on disk when `send_task` returns, a received task is an explicit
lease that nothing takes back by itself, a result is delivered once. The process is trusted: nothing is authorised.
A home belongs to one process at a time; a daemon's home belongs to the daemon.
"""

from __future__ import annotations

import hashlib
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from covenant.exchange.mailbox import MailboxLimits, check_repair, check_task
from covenant.ledger.contract import Ledger, QueueEntry, QueueQuery
from covenant.ledger.log.homes import memory_ledger, open_ledger
from covenant.ledger.log.journal import Durability
from covenant.ledger.machine.commands import Accept, Accepted, Drain, LeasedTask, Repair, Settle, Settled, Take
from covenant.model.content import Content
from covenant.model.errors import NotFound
from covenant.model.ids import AgentId, LeaseId, PublicKey, TaskId, base58, check_display
from covenant.model.repair import RepairCommand, RepairOutcome
from covenant.model.result import Result
from covenant.model.task import Task
from covenant.wire.decoding import NESTING_MAX, deeper_than, too_deep

LIMITS: Final = MailboxLimits()
WAIT_MS: Final = 60_000


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _monotonic_ms() -> int:
    return time.monotonic_ns() // 1_000_000


def _check_depth(content: Sequence[Content]) -> None:
    """What is nested too deeply could be written, and then not archived."""
    if content and deeper_than(content, NESTING_MAX):
        raise too_deep()


def local_agent(display: str) -> AgentId:
    """Who, inside one process: a key made of the name stands for one that nobody needs to hold."""
    return AgentId(check_display(display), PublicKey(base58(hashlib.sha256(display.encode()).digest())))


class Mailbox:
    """Ten verbs: `recv_*` wait, `try_recv_*` do not, `recent_*` and `task_queue` take nothing."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    @staticmethod
    @asynccontextmanager
    async def open(home: str | Path, *, durability: Durability = "fsync") -> AsyncIterator[Mailbox]:
        """The mailbox kept in a folder, which is made if it is not there."""
        ledger = await open_ledger(Path(home), clock=_now_ms, monotonic_ms=_monotonic_ms, durability=durability)
        try:
            yield Mailbox(ledger)
        finally:
            await ledger.close()

    @staticmethod
    @asynccontextmanager
    async def memory() -> AsyncIterator[Mailbox]:
        """A mailbox that ends with the process: for tests and try-outs."""
        ledger = await memory_ledger(clock=_now_ms, monotonic_ms=_monotonic_ms)
        try:
            yield Mailbox(ledger)
        finally:
            await ledger.close()

    @staticmethod
    def new_task(sender: AgentId, recipient: AgentId, intent_text: str, *, parent: TaskId | None = None) -> Task:
        """A task with a fresh id. Those with more to say make a `Task` themselves."""
        return Task(
            id=TaskId(str(uuid.uuid4())), sender=sender, recipient=recipient, intent_text=intent_text, parent=parent
        )

    async def send_task(self, task: Task) -> Accepted:
        _check_depth(task.parts)
        digest = check_task(task, LIMITS.task_bytes_max)
        return await self._ledger.commit(Accept(task=task, digest=digest))

    async def recv_task(self) -> Task:
        """Lease the oldest task of all, to its recipient; waits for one."""
        return (await self._lease(None)).task

    async def recv_task_for(self, recipient: AgentId) -> LeasedTask:
        """Lease the recipient's oldest task; waits for one. Says which lease it is: `send_result` may need it."""
        return await self._lease(recipient)

    async def try_recv_task_for(self, recipient: AgentId) -> Task | None:
        leased = await self._ledger.commit(Take(holder=recipient, recipient=recipient.pubkey))
        return leased.tasks[0].task if leased.tasks else None

    async def recent_tasks(self, limit: int) -> Sequence[Task]:
        return await self._ledger.recent_tasks(None, limit)

    async def task_queue(self, limit: int) -> Sequence[QueueEntry]:
        return (await self._ledger.queue(QueueQuery(limit=limit))).tasks

    async def repair_task(self, task_id: TaskId, command: RepairCommand, reason: str) -> RepairOutcome:
        check_repair(command, reason)
        entry = await self._ledger.entry(task_id)
        if entry is None:
            raise NotFound("unknown_task", f"task {task_id} is not known here")
        return await self._ledger.commit(
            Repair(task_id=task_id, by=entry.task.recipient, command=command, reason=reason)
        )

    async def send_result(self, result: Result, lease_id: LeaseId | None = None) -> Settled:
        _check_depth(result.content)
        return await self._ledger.commit(Settle(task_id=result.task_id, holder=None, result=result, lease_id=lease_id))

    async def recv_result(self) -> Result:
        """Take the oldest result of all; waits for one."""
        with self._ledger.result_waiter(None) as waiter:
            while True:
                drained = await self._ledger.commit(Drain(by=_PROCESS, sender=None))
                if drained.results:
                    waiter.served()
                    return drained.results[0]
                await waiter.wait(WAIT_MS)

    async def try_recv_result_for(self, peer: AgentId) -> Result | None:
        drained = await self._ledger.commit(Drain(by=peer, sender=peer.pubkey))
        return drained.results[0] if drained.results else None

    async def recent_results(self, limit: int) -> Sequence[Result]:
        return await self._ledger.recent_results(None, limit)

    async def compact(self) -> int:
        return await self._ledger.compact()

    async def _lease(self, recipient: AgentId | None) -> LeasedTask:
        pubkey = recipient.pubkey if recipient is not None else None
        with self._ledger.task_waiter(pubkey) as waiter:
            while True:
                leased = await self._ledger.commit(Take(holder=recipient, recipient=pubkey))
                if leased.tasks:
                    waiter.served()
                    return leased.tasks[0]
                await waiter.wait(WAIT_MS)


_PROCESS = local_agent("process@local")
