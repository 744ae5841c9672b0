"""The embedded engine: decides in memory, appends to the journal, answers when the record is durable.

State changes when a command is decided, before its record is on disk, so that the next command is decided on top of it
and both share a sync. Nobody sees the change that early: each answer, refusal and read first waits until everything
decided before it is durable. If the disk fails, memory is ahead of it; then memory is discarded and read back from the
disk, and reads go on from there.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from covenant.ledger.clock import Clock
from covenant.ledger.contract.identities import RegisterChange, Resident
from covenant.ledger.contract.ledger import Counts, LedgerNode, TenantSize
from covenant.ledger.contract.retention import Erased, EraseTasks, Scrub, SearchedPlace
from covenant.ledger.embedded.journal.recovery import TornTail
from covenant.ledger.embedded.queues import BodyNeeded, ReadBodies
from covenant.ledger.embedded.reads import CATCH_UP_S, Reads, Storage
from covenant.ledger.embedded.state import LedgerState
from covenant.ledger.machine.commands import Accept, Advance, Command, Drain, GiveBack, Report, TaskCommand, Withdraw
from covenant.ledger.machine.decisions import DECISIONS, Decision, decide
from covenant.ledger.machine.decisions.context import CommandRefused, DecisionContext
from covenant.ledger.machine.entry import Entry
from covenant.ledger.machine.event_codec import encode_events
from covenant.ledger.machine.events import AnyEvent
from covenant.ledger.machine.peer_commands import ReceiveFromPeer
from covenant.ledger.machine.states import FINISHED, QUEUED, SETTLED
from covenant.ledger.machine.view import Archived
from covenant.ledger.watchers import KeyedWakeups, QueueWaiters, TaskWatchers
from covenant.model.agent_definition import CatalogueAgent
from covenant.model.errors import OverLimit, Refusal, Unavailable, storage_failed
from covenant.model.ids import PublicKey, TaskId
from covenant.model.peers.instance import InstanceId
from covenant.model.settings import Limits
from covenant.model.task import CacheKey
from covenant.model.task_event import Step

A = TypeVar("A")

# How far the archive may fall behind the journal. Archiving takes some 10 µs an event: these are about a second and ten
# seconds of work, and bound what a start must still archive.
LAG_SLOWS_REPORTS: Final = 100_000
LAG_REFUSES_TASKS: Final = 1_000_000

DUE_PAUSE_MS: Final = 10
"""The least pause between two looks at due tasks. Tasks that are due one after the other are settled together."""

log = logging.getLogger(__name__)


class EmbeddedLedger(Reads):
    """Created by `open_ledger` or `memory_ledger`; used on the loop that created it."""

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
        """The tail that opening cut off, if any: it was never acknowledged, is kept aside, and must be reported."""
        self.node = node
        self.boot = boot
        self.clock = clock
        self.now_ms = clock.now_ms
        self._started_at_ms = clock.now_ms()
        super().__init__(state, storage)
        self._new_id = new_id
        self._wakeups = KeyedWakeups()
        self._task_waiters = QueueWaiters(lambda recipient: bool(self._state.queue.first(recipient, 1)))
        self._result_waiters = QueueWaiters(lambda sender: bool(self._state.results.first(sender, 1)))
        self._watching = TaskWatchers(self._journal.durable_seq)
        self.changes = self._watching.changes
        self.task_waiter = self._task_waiters.waiter
        self.result_waiter = self._result_waiters.waiter
        self.watch = self._watching.watch
        self._watching.on_audit(lambda _: self._wakeups.wake(("audit",)))
        self._compacting = asyncio.Lock()
        state.watch_holders(self.alive, self.boot)
        self._evict(self._archive.archived_seq)
        storage.follow(self._evict)
        self._journal.on_durable = self._on_durable
        self._journal.on_failure = self._watching.cut

    living = staticmethod(partial(int, 1))
    """There is no other node. (Not a function of ours, since every request calls it.)"""

    @property
    def limits(self) -> Limits:
        return self._state.limits

    async def commit(self, command: Command[A]) -> A:
        # Most commands need neither: checking first spares each of them two coroutines, a twentieth of its cost.
        journal = self._journal
        if journal.durable_seq - self._archive.archived_seq >= LAG_SLOWS_REPORTS:
            await self._admit(command)
        # Most are for a task in memory, or make a new one: then the archive need not be asked.
        known = (isinstance(command, TaskCommand) and command.task_id in self._state.entries) or (
            type(command) is Accept and command.minted
        )
        recalled = {} if known or not self._evicted_tasks(command) else await self._recall(command)
        state, now_ms = self._state, self.now_ms()
        if journal.failure is not None:
            raise storage_failed(journal.failure)
        state.recalled = recalled
        events: list[AnyEvent] = []
        context = DecisionContext(state, now_ms, self._new_id, self.clock.ages, events, events.append)
        try:
            try:
                answer: A = DECISIONS[type(command)](context, command)  # what `decide` does, without its call
            except Refusal as refusal:
                raise CommandRefused(refusal, events) from None
            except BodyNeeded as needed:
                decision, now_ms = await self._decide_with_bodies(command, needed.task_id)
                events, answer = decision.events, decision.answer
        except CommandRefused as refused:
            if refused.events:
                self._record(refused.events, now_ms)
            await journal.wait()
            raise refused.refusal from None
        if events:
            self._record(events, now_ms)
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
        """Gives back leases or results despite cancellation: they must not stay with nobody."""
        returning = asyncio.create_task(self.commit(undo))
        while not returning.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait((returning,))
        if not returning.cancelled():
            returning.exception()  # the disk failed: the outcome is unknown, and an operator will see the lease

    async def _decide_with_bodies(self, command: Command[Any], needed: TaskId) -> tuple[Decision, int]:
        """Reads one body after the other until the command can be decided. Returns the decision and its time.

        The decision skips tasks that cannot be read. Other commands are decided meanwhile, so each round begins anew.
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

    def _record(self, events: list[AnyEvent], now_ms: int) -> None:
        state = self._state
        encoded, events = encode_events(events)
        seq = self._journal.append(encoded, now_ms)
        moved = state.apply(events, now_ms, seq)
        if moved:
            self._wake_waiters(moved.values())
        self._watching.note(events, now_ms, seq, state.pushes_by_task)

    def _on_durable(self, durable_seq: int) -> None:
        self._watching.deliver(durable_seq)
        # What `notify` does, without its call: this is done after every batch.
        archive = self._archive
        archive.target = durable_seq
        if not archive.wake.is_set():
            archive.wake.set()

    def _wake_waiters(self, moved: Iterable[Entry]) -> None:
        """Wakes waiters for these tasks. They decide at once, and share the sync that this record waits for."""
        for entry in moved:
            state, task = entry.state, entry.task
            if state is QUEUED:
                self._task_waiters.wake(task.recipient.pubkey)
            elif state in FINISHED:
                if (key := ("task", task.id)) in self._wakeups.waiting:
                    self._wakeups.wake(key)
                if self._state.orphaned:
                    self._wakeups.wake(("orphans",))
                if state is SETTLED:
                    self._result_waiters.wake(task.sender.pubkey)

    def _archive_lag(self) -> int:
        return self._journal.durable_seq - self._archive.archived_seq

    async def _admit(self, command: Command[Any]) -> None:
        """Bounds the lag of a slow archive: slows updates, which feed it most, then refuses new tasks."""
        if isinstance(command, (Report, Advance)):
            await self._archive.caught_up(self._journal.durable_seq - LAG_SLOWS_REPORTS, CATCH_UP_S)
        elif _begins_work(command) and self._archive_lag() >= LAG_REFUSES_TASKS:
            raise OverLimit(
                "archive_lagging", "the archive cannot keep up; send again in a few seconds", retry_after_ms=5_000
            )

    def _evicted_tasks(self, command: Command[Any]) -> Sequence[TaskId]:
        """The tasks named by this command that only the archive may still have."""
        entries, seen = self._state.entries, self._storage.seen
        return [
            task_id for task_id in _named_tasks(command, self._state) if task_id not in entries and seen.maybe(task_id)
        ]

    async def _recall(self, command: Command[Any]) -> dict[TaskId, Archived | None]:
        """The archive's record of each task; None for one that was erased."""
        found: dict[TaskId, Archived | None] = {}
        unknown: set[TaskId] = set()
        # Checked anew after each read: meanwhile more of the command's tasks may have left memory.
        while wanted := [task_id for task_id in self._evicted_tasks(command) if task_id not in found]:
            for task_id in wanted:
                found[task_id] = archived = await self._lookup(command, task_id)
                if archived is None and not (_begins_work(command) and await self._history.aged_out(task_id)):
                    unknown.add(task_id)
        return {task_id: archived for task_id, archived in found.items() if task_id not in unknown}

    async def _lookup(self, command: Command[Any], task_id: TaskId) -> Archived | None:
        if isinstance(command, (Withdraw, GiveBack)):
            return await self._history.lookup_whole(task_id)
        viewer, recipient = _visibility_of(command)
        return await self._history.lookup(task_id, viewer, recipient)

    def _evict(self, archived_seq: int) -> None:
        """Runs on the loop, after each batch of the archive."""
        seen = self._storage.seen
        for task_id in self._state.evict(archived_seq):
            seen.add(task_id)
        self._state.unload(archived_seq)

    async def _reload(self) -> None:
        """Goes back to the state on disk, after the disk has failed and memory is ahead of it."""
        state = await asyncio.to_thread(self._storage.state_at, self._journal.durable_seq, self._state.limits)
        state.evict(self._archive.archived_seq)
        state.watch_holders(self.alive, self.boot)
        state.usage_source = self._state.usage_source
        self._use(state)
        self._watching.forget()

    async def finished(self, task_id: TaskId, timeout_ms: int) -> bool:
        entry = self._state.entries.get(task_id)
        if entry is None or entry.finished:
            return True
        return await self._wakeups.wait(("task", task_id), timeout_ms)

    async def audited(self, timeout_ms: int) -> bool:
        return await self._wakeups.wait(("audit",), timeout_ms)

    async def orphaned(self, timeout_ms: int) -> bool:
        return bool(self._state.orphaned) or await self._wakeups.wait(("orphans",), timeout_ms)

    async def overdue(self, timeout_ms: int) -> bool:
        due_in_ms = self._due_in_ms()
        wait_ms = timeout_ms if due_in_ms is None else min(timeout_ms, due_in_ms)
        if wait_ms > 0:
            wake = partial(self._wakeups.wake, ("due",))
            self._state.due_tasks.notify(self.now_ms() + wait_ms, wake)
            await self._wakeups.wait(("due",), max(wait_ms, DUE_PAUSE_MS))
            due_in_ms = self._due_in_ms()
        return due_in_ms is not None and due_in_ms <= 0

    def _due_in_ms(self) -> int | None:
        """The time until the next task is due; None: there is none."""
        now_ms = self.now_ms()
        next_ms = self._state.due_tasks.next_ms(now_ms, self.clock.ages)
        return None if next_ms is None else next_ms - now_ms

    def on_lost(
        self, callback: Callable[[TaskId], None], used: Callable[[TaskId], dict[str, Any] | None] | None = None
    ) -> None:
        self._watching.on_lost(callback)
        self._state.usage_source = used

    # Methods, not attributes: an object with more than thirty attributes is slower to read from.

    def on_push(self, callback: Callable[[TaskId, Step | None], None]) -> None:
        self._watching.on_push(callback)

    def on_peer(self, callback: Callable[[InstanceId], None]) -> None:
        self._watching.on_peer(callback)

    async def announce(self, agents: Sequence[CatalogueAgent]) -> None:
        """Does nothing: there is no other node."""

    def residents(self) -> Sequence[Resident]:
        return ()

    def on_registers(self, callback: Callable[[RegisterChange], None]) -> None:
        self._watching.on_registers(callback)

    async def erase_tasks(self, which: EraseTasks) -> Erased:
        erased = await self._archive.erase(which)
        if erased.tasks:
            for callback in self._archive.erased_callbacks:
                callback()
        return erased

    async def scrub(self, tenant: str, parties: Sequence[str]) -> None:
        await self._archive.erase(Scrub(tenant=tenant, parties=tuple(parties)))
        await self.compact()

    async def search(self, tenant: str, parties: Sequence[str]) -> Sequence[SearchedPlace]:
        await self._archived()
        return await self._storage.search(tenant, parties)

    async def cached_keys(self, parties: Sequence[str]) -> Sequence[CacheKey]:
        await self.durable()
        wanted = frozenset(parties)
        return tuple([key for key, _ in self._state.cache.items() if key.sender in wanted or key.recipient in wanted])

    def on_erased(self, callback: Callable[[], None]) -> None:
        self._archive.erased_callbacks.append(callback)

    async def compact(self) -> int:
        async with self._compacting:
            return await self._storage.compact(self._state)

    async def maintain(self) -> int | None:
        """Compacts if enough segments are sealed. Returns how many events were dropped; None: nothing was to do."""
        if self._compacting.locked() or not self._storage.wants_compaction():
            return None
        return await self.compact()

    async def copy_to(self, folder: Path) -> int:
        """Copies the whole ledger into an empty folder on the home's file system. Returns the copy's position.

        The copy has everything acknowledged before. Work goes on meanwhile; compaction waits.
        """
        async with self._compacting:
            return await self._storage.copy_to(folder)

    @property
    def durable_seq(self) -> int:
        """The number of records that survive any crash."""
        return self._journal.durable_seq

    async def seal(self) -> None:
        """Seals the active segment, so that everything written so far is in sealed segments."""
        await self._journal.rotate()

    async def tenant_sizes(self, tenants: Sequence[str]) -> Sequence[TenantSize]:
        await self._live()
        kept: dict[str, int] | None = None
        with suppress(Unavailable):
            kept = await self._history.kept_bytes()
        accounts = [(self._state.account(name), kept.get(name, 0) if kept is not None else None) for name in tenants]
        return [TenantSize(account.tasks, account.size, kept_bytes) for account, kept_bytes in accounts]

    async def counts(self) -> Counts:
        await self.durable()
        state, journal, archived_seq = self._state, self._journal, self._archive.archived_seq
        return Counts(
            queued=len(state.queue),
            leased=len(state.leased),
            parked=state.parked,
            following=state.following,
            settled=len(state.results),
            cached=len(state.cache),
            oldest_lease_age_ms=state.oldest_lease_age_ms(self.now_ms(), self.clock.ages),
            holders_lost=len(state.lost_leases),
            commits=journal.last_seq,
            failure=journal.failure,
            behind=max(0, self._archive_lag()),
            history_failure=self._archive.failure,
            rejected=self._archive.rejected,
            pushes=state.push_count(),
            pushes_dead=len(state.pushes_dead),
            delegations=state.delegation_count(),
            delegations_lost=state.delegations_lost(),
            peer_outbox=state.outbox_total(),
            clock_steps=self.clock.steps_total,
            clock_paused_ms=self.clock.paused_ms_left,
            gauges={"durable_seq": journal.durable_seq, "archived_seq": archived_seq, "syncs": journal.batches},
        )

    def leads(self, name: str) -> bool:  # noqa: ARG002  there is no other node
        return True

    def shares(self, work: str, part: str) -> bool:  # noqa: ARG002  there is no other node
        return True

    async def nodes(self) -> Sequence[LedgerNode]:
        await self.durable()
        held = [entry.lease for entry in self._state.leases() if entry.lease is not None]
        return (
            LedgerNode(
                node=self.node,
                boot=self.boot,
                alive=True,
                started_at_ms=self._started_at_ms,
                seen_at_ms=self.now_ms(),
                leases=sum((lease.node, lease.boot) == (self.node, self.boot) for lease in held),
            ),
        )

    async def close(self) -> None:
        await self._storage.close()


def _begins_work(command: Command[Any]) -> bool:
    return isinstance(command, Accept) or (isinstance(command, ReceiveFromPeer) and command.accept is not None)


def _named_tasks(command: Command[Any], state: LedgerState) -> Sequence[TaskId]:
    """The tasks that a command names, by id or by the request that was given them."""
    if isinstance(command, TaskCommand):
        return (command.task_id,)
    if isinstance(command, Accept):
        # An id that was just generated is not in use yet.
        return () if command.minted else (command.task.id,)
    if isinstance(command, ReceiveFromPeer):
        return () if command.accept is None else (command.accept.task.id,)
    if isinstance(command, Drain):
        if command.request_id is not None:
            again = state.remembered("drain", command.by.pubkey, command.request_id)
            if again is not None:
                return again.task_ids
        return (command.task_id,) if command.task_id is not None else ()
    if isinstance(command, Withdraw):
        drained = state.remembered("drain", command.by.pubkey, command.request_id)
        return drained.task_ids if drained is not None else ()
    return command.results if isinstance(command, GiveBack) else ()


def _visibility_of(command: Command[Any]) -> tuple[PublicKey | None, PublicKey | None]:
    """The viewer and the recipient that a command's tasks must match; None: any."""
    if isinstance(command, TaskCommand):
        return command.viewer, command.recipient
    return (command.sender if isinstance(command, Drain) else None), None
