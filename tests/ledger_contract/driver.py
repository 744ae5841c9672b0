"""A driver of a ledger: its verbs as short calls, so that a test reads as what happens and not as how it is asked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import msgspec

from covenant.ledger.contract.ledger import Ledger
from covenant.ledger.contract.tasks import QueueEntry, QueueQuery, TaskDetail
from covenant.ledger.machine.commands import (
    Accept,
    Accepted,
    Access,
    Cancel,
    Canceled,
    Continue,
    Drain,
    Interrupt,
    LeasedTask,
    Release,
    Renew,
    Repair,
    Report,
    Reported,
    RetryStale,
    Settle,
    Settled,
    Sweep,
    Swept,
    Take,
)
from covenant.ledger.machine.entry import Entry
from covenant.ledger.machine.identity_commands import WriteAuditRow
from covenant.model.content import Text
from covenant.model.errors import Refusal
from covenant.model.ids import AgentId, LeaseId, TaskId
from covenant.model.retry_policy import ForceError, Posture, RepairOutcome, Requeue, RetryPolicy, RetryReport
from covenant.model.task import Lease, Result, Task, fingerprint
from covenant.model.task_event import MessageUpdate, StatusUpdate, Update
from tests.ledger_contract.fake_clock import FakeClock
from tests.ledger_contract.samples import ALICE, BOB, OPERATOR

UPDATES_MAX: Final = 1_000
WAIT_MS: Final = 20_000
"""The bound of a wait that is expected to end early."""


@contextmanager
def refused(code: str, status: int | None = None) -> Iterator[None]:
    """What is inside must be refused with this machine code."""
    try:
        yield
    except Refusal as refusal:
        if refusal.code != code:
            raise
        assert status is None or refusal.status == status, f"{code} has the status {refusal.status}"
    else:
        raise AssertionError(f"was not refused with {code}")


class LedgerDriver:
    def __init__(self, ledger: Ledger, clock: FakeClock) -> None:
        self.ledger = ledger
        self.clock = clock

    async def send(self, task: Task, *, access: Access | None = None, admission: Access | None = None) -> Accepted:
        digest, _ = fingerprint(task)
        return await self.ledger.commit(Accept(task=task, digest=digest, access=access, admission=admission))

    async def send_all(self, tasks: Sequence[Task]) -> None:
        for task in tasks:
            await self.send(task)

    async def take(
        self,
        holder: AgentId = BOB,
        count: int = 1,
        *,
        everyone: bool = False,
        request_id: str | None = None,
        node: str | None = None,
        boot: str | None = None,
    ) -> tuple[LeasedTask, ...]:
        recipient = None if everyone else holder.pubkey
        leased = await self.ledger.commit(
            Take(holder=holder, recipient=recipient, count=count, request_id=request_id, node=node, boot=boot)
        )
        return leased.tasks

    async def take_one(self, holder: AgentId = BOB, **how: Any) -> LeasedTask:
        (leased,) = await self.take(holder, **how)
        return leased

    async def taken(self, task: Task, **how: Any) -> LeasedTask:
        """Send a task and lease it, to its recipient."""
        await self.send(task)
        leased = await self.take_one(task.recipient, **how)
        assert leased.task == task
        return leased

    async def taken_here(self, task: Task) -> LeasedTask:
        """As an agent inside the daemon takes it: the lease says which run of which node holds it."""
        return await self.taken(task, node=self.ledger.node, boot=self.ledger.boot)

    async def renew(self, leased: LeasedTask, *, holder: AgentId | None = None) -> Lease:
        return await self.ledger.commit(
            Renew(task_id=leased.task.id, holder=holder or leased.lease.leased_to, lease_id=leased.lease.lease_id)
        )

    async def release(self, leased: LeasedTask, reason: str = "no room") -> Lease:
        lease = leased.lease
        return await self.ledger.commit(
            Release(task_id=leased.task.id, holder=lease.leased_to, lease_id=lease.lease_id, reason=reason)
        )

    async def interrupt(self, leased: LeasedTask, reason: str = "stopping", **how: Any) -> Lease:
        lease = leased.lease
        return await self.ledger.commit(
            Interrupt(task_id=leased.task.id, holder=lease.leased_to, lease_id=lease.lease_id, reason=reason, **how)
        )

    async def report(
        self, leased: LeasedTask, update: Update | str, update_no: int = 0, *, holder: AgentId | None = None
    ) -> Reported:
        return await self.ledger.commit(
            Report(
                task_id=leased.task.id,
                holder=holder or leased.lease.leased_to,
                lease_id=leased.lease.lease_id,
                update=StatusUpdate(text=update) if isinstance(update, str) else update,
                update_no=update_no,
            )
        )

    async def park(self, leased: LeasedTask, update_no: int = 0) -> Reported:
        return await self.report(leased, StatusUpdate(text="which one?", state="input-required"), update_no)

    async def say(self, which: TaskId, text: str, *, message_id: str | None = None) -> Reported:
        """The next message to a parked task."""
        message = MessageUpdate(role="user", parts=(Text(text),))
        return await self.ledger.commit(Continue(task_id=which, message=message, message_id=message_id or text))

    async def settle(
        self,
        result: Result,
        *,
        holder: AgentId = BOB,
        lease_id: LeaseId | None = None,
        access: Access | None = None,
        viewer: AgentId | None = None,
    ) -> Settled:
        return await self.ledger.commit(
            Settle(
                task_id=result.task_id,
                viewer=viewer.pubkey if viewer else None,
                holder=holder,
                result=result,
                lease_id=lease_id,
                access=access,
            )
        )

    async def finish(self, leased: LeasedTask, result: Result) -> Settled:
        lease = leased.lease
        return await self.settle(
            msgspec.structs.replace(result, task_id=leased.task.id), holder=lease.leased_to, lease_id=lease.lease_id
        )

    async def cancel(self, which: TaskId, *, by: AgentId = ALICE, reason: str = "not wanted") -> Canceled:
        return await self.ledger.commit(Cancel(task_id=which, viewer=by.pubkey, by=by, reason=reason))

    async def drain(
        self,
        sender: AgentId = ALICE,
        count: int = 1,
        *,
        everyone: bool = False,
        request_id: str | None = None,
        which: TaskId | None = None,
    ) -> tuple[Result, ...]:
        scope = None if everyone else sender.pubkey
        drained = await self.ledger.commit(
            Drain(by=sender, sender=scope, count=count, request_id=request_id, task_id=which)
        )
        return drained.results

    async def requeue(
        self,
        which: TaskId,
        *,
        posture: Posture = Posture.OPERATOR_ACCEPTED,
        lease_id: LeaseId | None = None,
        reason: str = "the holder is gone",
        access: Access | None = None,
    ) -> RepairOutcome:
        command = Requeue(posture, lease_id)
        return await self.ledger.commit(
            Repair(task_id=which, by=OPERATOR, command=command, reason=reason, access=access)
        )

    async def force_error(
        self, which: TaskId, message: str = "given up", *, lease_id: LeaseId | None = None
    ) -> RepairOutcome:
        command = ForceError(message, lease_id)
        return await self.ledger.commit(Repair(task_id=which, by=OPERATOR, command=command, reason="it hangs"))

    async def retry(self, policy: RetryPolicy, *, access: Access | None = None, scheduled: bool = False) -> RetryReport:
        return await self.ledger.commit(RetryStale(by=OPERATOR, policy=policy, access=access, scheduled=scheduled))

    async def sweep(self) -> Swept:
        """Sweep until there is no more to do; what all of it came to."""
        total = Swept()
        while True:
            swept = await self.ledger.commit(Sweep())
            total = Swept(
                total.expired + swept.expired,
                total.timed_out + swept.timed_out,
                total.forgotten + swept.forgotten,
                total.uncached + swept.uncached,
                pushes=total.pushes + swept.pushes,
                interrupted=total.interrupted + swept.interrupted,
                woken=total.woken + swept.woken,
            )
            if not swept.more:
                return total

    async def note(self, text: str) -> None:
        await self.ledger.commit(WriteAuditRow(by=OPERATOR, row={"type": "noted", "text": text}))

    async def entry(self, which: TaskId) -> Entry:
        entry = await self.ledger.entry(which)
        assert entry is not None, f"task {which} is not live"
        return entry

    async def show(self, which: TaskId) -> TaskDetail:
        shown = await self.ledger.show(which, None, UPDATES_MAX)
        assert shown is not None, f"task {which} is not known"
        return shown

    async def queue(self, **query: Any) -> tuple[QueueEntry, ...]:
        return (await self.ledger.queue(QueueQuery(**query))).tasks

    async def queued_ids(self, recipient: AgentId = BOB) -> list[TaskId]:
        """Who is next, in order, as a look at the queue tells."""
        entries = await self.queue(viewer=recipient.pubkey, limit=1_000, state_filter="queued")
        return [entry.task.id for entry in entries]

    async def audit_types(self) -> list[str]:
        """The kinds of all audit rows, oldest first."""
        return [row["kind"]["type"] for row in await self.audit_rows()]

    async def audit_rows(self) -> list[dict[str, Any]]:
        records = sorted(await self.ledger.audit_recent(None, 1_000, None), key=lambda record: record.index)
        return [msgspec.json.decode(record.row) for record in records]

    async def check_audit(self) -> None:
        report = await self.ledger.audit_verify()
        assert report.valid, report.failures


async def check_generations(driver: LedgerDriver, which: TaskId) -> TaskDetail:
    """Generations begin at 1, have no gap and no repeat, and reach as far as the task says."""
    shown = await driver.show(which)
    numbers = [update.generation for update in shown.updates]
    assert numbers == list(range(1, shown.generation + 1)), numbers
    return shown
