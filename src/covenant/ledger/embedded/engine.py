"""The log engine: decide in memory, append to the journal, answer when it is durable.

State changes when a command is decided, before its record is on disk, so that the next command is decided on top of
it and both share a sync. Nobody sees that early: each answer, refusal and read first waits until everything decided
before it is durable. If the disk fails, memory is ahead of it; then it is thrown away and read back from the disk, and
reads go on from there.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final, TypeVar

import msgspec

from covenant.ledger.clock import Clock
from covenant.ledger.contract.ledger import AuditRecord, Counts
from covenant.ledger.contract.tasks import (
    ANY,
    Listing,
    ListQuery,
    Parties,
    Queue,
    QueueQuery,
    TaskDetail,
    TaskRow,
    TaskScope,
    TreeNode,
)
from covenant.ledger.embedded import reads
from covenant.ledger.embedded.archive.history import History
from covenant.ledger.embedded.journal.record import encode_events
from covenant.ledger.embedded.journal.recovery import TornTail
from covenant.ledger.embedded.queues import BodyNeeded, ReadBodies
from covenant.ledger.embedded.reads import MemoryReads, asked_by, named_tasks
from covenant.ledger.embedded.state import LedgerState
from covenant.ledger.embedded.storage import Storage
from covenant.ledger.embedded.watchers import KeyedWakeups, QueueWaiter, QueueWaiters, TaskWatch, TaskWatchers
from covenant.ledger.machine.commands import (
    Accept,
    Advance,
    Command,
    GiveBack,
    Report,
    Withdraw,
)
from covenant.ledger.machine.decide import Decision, decide
from covenant.ledger.machine.decisions.context import CommandRefused
from covenant.ledger.machine.decisions.leases import body_unreadable
from covenant.ledger.machine.entry import Entry
from covenant.ledger.machine.events import AnyEvent, TaskEvent, TaskLeased, TaskUpdated
from covenant.ledger.machine.peer_commands import ReceiveFromPeer
from covenant.ledger.machine.states import QUEUED, SETTLED
from covenant.ledger.machine.view import Archived, Limits
from covenant.model.audit_chain import AuditHead, AuditReport
from covenant.model.errors import OverLimit, Unavailable, storage_failed
from covenant.model.grant import Grant, Identity
from covenant.model.ids import PublicKey, TaskId
from covenant.model.peers.instance import InstanceId
from covenant.model.push import Push
from covenant.model.result import Result
from covenant.model.task import Task
from covenant.model.task_event import Step
from covenant.model.tenants import Tenant

A = TypeVar("A")

# How far the archive may fall behind the journal. A batch of it takes some 10 µs an event: these are about a second and
# ten seconds of work, and bound what a start must still archive.
LAG_SLOWS_REPORTS: Final = 100_000
LAG_REFUSES_TASKS: Final = 1_000_000
CATCH_UP_S: Final = 10.0
LIVE_S: Final = 2.0
"""How long a question about what is live waits for the archive, before memory answers it."""

log = logging.getLogger(__name__)


class EmbeddedLedger(MemoryReads):
    """Made by `homes.open_ledger` or `homes.memory_ledger`; used on the loop it was made on."""

    def __init__(
        self,
        state: LedgerState,
        storage: Storage,
        *,
        node: str,
        boot: str,
        clock: Clock,
        new_id: Callable[[], str],
        torn: TornTail | None = None,
    ) -> None:
        self.torn: Final = torn
        """The tail that opening cut off, if there was one: never acknowledged, kept aside, to be reported."""
        self.node = node
        self.boot = boot
        self.clock = clock
        self.now_ms = clock.now_ms
        self._state = state
        self._storage = storage
        self._journal = storage.journal
        self._archive = storage.archive
        self._history: History = storage.history
        self._new_id = new_id
        self._bell = KeyedWakeups()
        self._task_waiters = QueueWaiters(lambda recipient: bool(self._state.queue.first(recipient, 1)))
        self._result_waiters = QueueWaiters(lambda sender: bool(self._state.results.first(sender, 1)))
        self._watching = TaskWatchers(lambda task_id: task_id in self._state.pushes_by_task)
        self._reloading: asyncio.Task[None] | None = None
        self._compacting = asyncio.Lock()
        state.watch_holders(node, boot)
        self._evict(self._archive.archived_seq)
        storage.follow(self._evict)
        self._archive_on_durable = self._journal.on_durable
        self._journal.on_durable = self._landed
        self._journal.on_failure = self._watching.cut

    @property
    def limits(self) -> Limits:
        return self._state.limits

    async def commit(self, command: Command[A]) -> A:
        # Most commands need neither: asking first spares each of them two coroutines, a twentieth of its cost.
        journal = self._journal
        if journal.durable_seq - self._archive.archived_seq >= LAG_SLOWS_REPORTS:
            await self._admit(command)
        recalled = await self._recall(command) if self._forgotten(command) else {}
        state, now_ms = self._state, self.now_ms()
        if journal.failure is not None:
            raise storage_failed(journal.failure)
        state.recalled = recalled
        try:
            try:
                decision = decide(state, command, now_ms, self._new_id, self.clock.ages)
            except BodyNeeded as needed:
                decision, now_ms = await self._decide_with_bodies(command, needed.task_id)
        except CommandRefused as refused:
            if refused.events:
                self._record(refused.events, now_ms)
            await journal.wait()
            raise refused.refusal from None
        if decision.events:
            self._record(decision.events, now_ms)
        answer: A = decision.answer
        waiter = journal.waiter()
        if waiter is not None:
            try:
                await waiter
            except asyncio.CancelledError:
                undo = command.undo(answer)
                if undo is not None:
                    await self._give_back(undo)
                raise
        return answer

    async def _give_back(self, undo: GiveBack) -> None:
        """To its end, however often somebody cancels: what was taken must not stay with nobody."""
        doing = asyncio.create_task(self.commit(undo))
        while not doing.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait((doing,))
        if not doing.cancelled():
            doing.exception()  # the disk failed: then nobody knows whether it was taken, and an operator will see

    async def _decide_with_bodies(self, command: Command[Any], needed: TaskId) -> tuple[Decision, int]:
        """Read one body after the other, until the command can be decided; and when that was.

        What cannot be read is passed over by the decision. Meanwhile others decide: each round begins anew.
        """
        read = ReadBodies()
        while True:
            try:
                read.found[needed] = await self._read_task(needed)
            except Unavailable as unavailable:
                read.unreadable.add(needed)
                log.warning("ledger.body_unreadable", extra={"task_id": needed, "reason": unavailable.message})
            state, now_ms = self._state, self.now_ms()
            if self._journal.failure is not None:
                raise storage_failed(self._journal.failure)
            state.recalled, state.bodies_read = {}, read
            try:
                return decide(state, command, now_ms, self._new_id, self.clock.ages), now_ms
            except BodyNeeded as more:
                needed = more.task_id
            finally:
                state.bodies_read = ReadBodies()

    async def _read_task(self, task_id: TaskId) -> Task:
        """A task whose body is on disk."""
        await self._archive.caught_up(self._state.large.unloaded_seq, CATCH_UP_S)
        try:
            task = await self._history.task(task_id)
        except msgspec.MsgspecError as error:
            raise body_unreadable(f"task {task_id} ({error})") from error
        if task is None:
            raise body_unreadable(f"task {task_id}, which the archive does not have,")
        return task

    def _record(self, events: list[AnyEvent], now_ms: int) -> None:
        encoded, events = encode_events(events)
        seq = self._journal.append(encoded, now_ms)
        self._state.apply(events, now_ms, seq)
        if self._bell.waiting or self._task_waiters.lines or self._result_waiters.lines:
            self._ring(events)
        if self._watching:
            self._watching.note(events, now_ms, seq)

    def _landed(self, durable_seq: int) -> None:
        self._watching.landed(durable_seq)
        self._archive_on_durable(durable_seq)

    def _ring(self, events: Sequence[AnyEvent]) -> None:
        """Wake whoever waits for this. They decide at once, and share the sync that this record waits for."""
        for event in events:
            # Those that neither queue a task nor end it are most of what happens.
            if isinstance(event, (TaskUpdated, TaskLeased)) or not isinstance(event, TaskEvent):
                continue
            entry = self._state.entries[event.task_id]
            if entry.state is QUEUED:
                self._task_waiters.wake(entry.task.recipient.pubkey)
            elif entry.finished:
                self._bell.ring(("task", event.task_id))
                if self._state.orphaned:
                    self._bell.ring(("orphans",))
                if entry.state is SETTLED:
                    self._result_waiters.wake(entry.task.sender.pubkey)

    def _archive_lag(self) -> int:
        return self._journal.durable_seq - self._archive.archived_seq

    async def _admit(self, command: Command[Any]) -> None:
        """An archive that cannot keep up slows what feeds it most, then refuses new work: the lag is bounded."""
        if isinstance(command, (Report, Advance)):
            await self._archive.caught_up(self._journal.durable_seq - LAG_SLOWS_REPORTS, CATCH_UP_S)
        elif _begins_work(command) and self._archive_lag() >= LAG_REFUSES_TASKS:
            raise OverLimit(
                "archive_lagging", "the archive cannot keep up; send again in a few seconds", retry_after_ms=5_000
            )

    def _forgotten(self, command: Command[Any]) -> Sequence[TaskId]:
        """The tasks this command names that only the archive may still know."""
        entries, seen = self._state.entries, self._storage.seen
        return [
            task_id for task_id in named_tasks(command, self._state) if task_id not in entries and seen.maybe(task_id)
        ]

    async def _recall(self, command: Command[Any]) -> dict[TaskId, Archived]:
        found: dict[TaskId, Archived | None] = {}
        # Asked anew after each look: while the archive was read, more of what the command names may have left memory.
        while wanted := [task_id for task_id in self._forgotten(command) if task_id not in found]:
            for task_id in wanted:
                found[task_id] = await self._lookup(command, task_id)
        return {task_id: archived for task_id, archived in found.items() if archived is not None}

    async def _lookup(self, command: Command[Any], task_id: TaskId) -> Archived | None:
        if isinstance(command, (Withdraw, GiveBack)):
            return await self._history.lookup_whole(task_id)
        viewer, recipient = asked_by(command)
        return await self._history.lookup(task_id, viewer, recipient)

    def _evict(self, archived_seq: int) -> None:
        """On the loop, after each batch of the archive."""
        seen = self._storage.seen
        for task_id in self._state.evict(archived_seq):
            seen.add(task_id)
        self._state.unload(archived_seq)

    async def durable(self) -> None:
        """Reads begin here: nothing that is not on disk is visible after it."""
        if self._journal.failure is None:
            await self._journal.wait()
        if self._journal.failure is not None:
            if self._reloading is None:
                self._reloading = asyncio.create_task(self._reload())
            await asyncio.shield(self._reloading)

    async def _reload(self) -> None:
        """The disk failed, and memory is ahead of it: go back to what is known to be there."""
        state = await asyncio.to_thread(self._storage.state_at, self._journal.durable_seq, self._state.limits)
        state.evict(self._archive.archived_seq)
        state.watch_holders(self.node, self.boot)
        state.used_here = self._state.used_here
        self._state = state
        self._watching.forget()

    async def _archived(self) -> None:
        """For reads of history: durable, and in the archive."""
        await self.durable()
        await self._archive.caught_up(self._journal.durable_seq, CATCH_UP_S)

    def task_waiter(self, recipient: PublicKey | None) -> QueueWaiter:
        return self._task_waiters.waiter(recipient)

    def result_waiter(self, sender: PublicKey | None) -> QueueWaiter:
        return self._result_waiters.waiter(sender)

    async def finished(self, task_id: TaskId, timeout_ms: int) -> bool:
        entry = self._state.entries.get(task_id)
        if entry is None or entry.finished:
            return True
        return await self._bell.wait(("task", task_id), timeout_ms)

    async def orphaned(self, timeout_ms: int) -> bool:
        return bool(self._state.orphaned) or await self._bell.wait(("orphans",), timeout_ms)

    async def entry(self, task_id: TaskId) -> Entry | None:
        await self.durable()
        entry = self._state.entries.get(task_id)
        if entry is None or not entry.body_on_disk:
            return entry
        task = await self._read_task(task_id)
        entry = self._state.entries.get(task_id)
        return None if entry is None else entry.with_body(task)

    def may_know(self, task_id: TaskId) -> bool:
        return task_id in self._state.entries or self._storage.seen.maybe(task_id)

    async def parties(self, task_id: TaskId) -> Parties | None:
        await self.durable()
        entry = self._state.entries.get(task_id)
        if entry is not None:
            task = entry.task
            return Parties(sender=task.sender, recipient=task.recipient, tenant=task.tenant)
        return await self._history.parties(task_id) if self._storage.seen.maybe(task_id) else None

    def watch(self, task_id: TaskId) -> TaskWatch:
        return self._watching.watch(task_id)

    def on_lost(
        self, callback: Callable[[TaskId], None], used: Callable[[TaskId], dict[str, Any] | None] | None = None
    ) -> None:
        self._watching.on_lost(callback)
        self._state.used_here = used

    def on_push(self, callback: Callable[[TaskId], None]) -> None:
        self._watching.on_push(callback)

    async def outbox(self) -> Sequence[Push]:
        await self.durable()
        return tuple(self._state.all_pushes())

    def on_peer(self, callback: Callable[[InstanceId], None]) -> None:
        self._watching.on_peer(callback)

    async def steps(self, task_id: TaskId, after: int, limit: int, scope: TaskScope = ANY) -> Sequence[Step]:
        await self.durable()
        reachable = await self._archive.reachable(self._journal.durable_seq, CATCH_UP_S)
        found = await self._history.steps(task_id, after, limit, scope)
        if not reachable:
            self._check_steps(task_id, found[-1].generation if found else after, whole=len(found) < limit)
        return found

    def _check_steps(self, task_id: TaskId, through: int, *, whole: bool) -> None:
        """While the archive cannot be written, the steps that it has are enough for tasks that have not moved since."""
        entry = self._state.entries.get(task_id)
        if whole and entry is not None and through < entry.generation:
            why = f": {self._archive.failure}" if self._archive.failure else ""
            raise Unavailable("archive_lagging", f"the newest steps are not in the archive yet{why}; ask again")

    async def listing(self, query: ListQuery) -> Listing:
        await self._archived()
        return await self._history.listing(query)

    async def of_tenant(self, tenant: str, limit: int, *, simple: bool = False) -> Sequence[TaskRow]:
        await self._archived()
        return await self._history.of_tenant(tenant, limit, simple=simple)

    # What is live is told from memory when the archive cannot be read or written.

    async def _live(self) -> bool:
        """Whether the archive can tell of what is live, too."""
        await self.durable()
        return await self._archive.reachable(self._journal.durable_seq, LIVE_S)

    async def queue(self, query: QueueQuery) -> Queue:
        if await self._live():
            with suppress(Unavailable):
                return await self._history.queue(query, self.now_ms())
        return reads.queue(self._state, query, self.now_ms(), self.node, self.boot)

    async def recent_tasks(self, viewer: PublicKey | None, limit: int) -> Sequence[Task]:
        if await self._live():
            with suppress(Unavailable):
                return await self._history.recent_tasks(viewer, limit)
        return reads.recent_tasks(self._state, viewer, limit)

    async def recent_results(self, viewer: PublicKey | None, limit: int) -> Sequence[Result]:
        if await self._live():
            with suppress(Unavailable):
                return await self._history.recent_results(viewer, limit)
        return reads.recent_results(self._state, viewer, limit)

    async def show(self, task_id: TaskId, viewer: PublicKey | None, updates_max: int) -> TaskDetail | None:
        reachable, shown = await self._live(), None
        try:
            shown = await self._history.show(task_id, viewer, updates_max)
        except Unavailable:
            if task_id not in self._state.entries:
                raise
            reachable = False
        entry = self._state.entries.get(task_id)
        if reachable or entry is None:
            return shown
        return reads.show(entry, viewer, shown, self.node, self.boot)

    async def tree(self, root: TaskId, viewer: PublicKey | None) -> TreeNode:
        await self._archived()
        return await self._history.tree(root, viewer)

    async def tenants(self) -> Sequence[Tenant]:
        await self.durable()
        return tuple(self._state.tenants.values())

    async def identities(self) -> Sequence[Identity]:
        await self.durable()
        return tuple(self._state.identities_by_token.values())

    async def grants(self) -> Sequence[Grant]:
        await self.durable()
        return tuple(self._state.grants_by_signature.values())

    async def audit_recent(self, issuer: PublicKey | None, limit: int, since_ms: int | None) -> Sequence[AuditRecord]:
        await self._archived()
        return await self._history.audit_recent(issuer, limit, since_ms)

    async def audit_before(self, before_ms: int) -> tuple[int, int, str] | None:
        await self._archived()
        return await self._history.audit_before(before_ms)

    async def audit_verify(self) -> AuditReport:
        return await self._history.audit_verify(await self._audit_head())

    async def audit_verify_new(self) -> AuditReport:
        return await self._history.audit_verify_new(await self._audit_head())

    async def _audit_head(self) -> AuditHead:
        """The newest audit row that is durable, once the archive has it too."""
        while True:
            await self.durable()
            head, seq = self._state.audit_head, self._journal.last_seq
            if seq == self._journal.durable_seq or self._journal.failure is not None:
                await self._archive.caught_up(min(seq, self._journal.durable_seq), CATCH_UP_S)
                return head

    async def compact(self) -> int:
        async with self._compacting:
            return await self._storage.compact(self._state)

    async def maintain(self) -> int | None:
        """Compact if enough segments are sealed; what it dropped, or None if there was nothing to do."""
        if self._compacting.locked() or not self._storage.wants_compaction():
            return None
        return await self.compact()

    async def counts(self) -> Counts:
        await self.durable()
        state, journal = self._state, self._journal
        return Counts(
            queued=len(state.queue),
            leased=len(state.in_flight),
            parked=state.parked,
            following=state.following,
            settled=len(state.results),
            cached=len(state.cache),
            oldest_lease_age_ms=state.oldest_lease_age_ms(self.now_ms(), self.clock.ages),
            holders_lost=state.holders_lost(),
            last_seq=journal.last_seq,
            durable_seq=journal.durable_seq,
            archived_seq=self._archive.archived_seq,
            syncs=journal.batches,
            failure=journal.failure,
            archive_failure=self._archive.failure,
            archive_rejected=self._archive.rejected,
            pushes=state.push_count(),
            pushes_dead=len(state.pushes_dead),
            delegations=state.delegation_count(),
            delegations_lost=state.delegations_lost(),
            parcels=state.parcel_total(),
            clock_steps=self.clock.steps_total,
            clock_paused_ms=self.clock.paused_ms_left,
        )

    async def close(self) -> None:
        await self._storage.close()


def _begins_work(command: Command[Any]) -> bool:
    return isinstance(command, Accept) or (isinstance(command, ReceiveFromPeer) and command.accept is not None)
