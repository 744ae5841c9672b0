"""The embedded engine: decide in memory, append to the journal, answer when it is durable.

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
from pathlib import Path
from typing import Any, Final, TypeVar

from covenant.ledger.clock import Clock
from covenant.ledger.contract.identities import RegisterChange
from covenant.ledger.contract.ledger import Counts, LedgerNode
from covenant.ledger.contract.retention import Erased, EraseTasks, Scrub, SearchedPlace
from covenant.ledger.embedded.journal.recovery import TornTail
from covenant.ledger.embedded.queues import BodyNeeded, ReadBodies
from covenant.ledger.embedded.reads import CATCH_UP_S, Reads, Storage
from covenant.ledger.embedded.state import LedgerState
from covenant.ledger.machine.commands import (
    Accept,
    Advance,
    Command,
    Drain,
    GiveBack,
    Report,
    TaskCommand,
    Withdraw,
)
from covenant.ledger.machine.decisions import Decision, decide
from covenant.ledger.machine.decisions.context import CommandRefused
from covenant.ledger.machine.event_codec import encode_events
from covenant.ledger.machine.events import TASK_EVENTS, AnyEvent, TaskLeased, TaskUpdated
from covenant.ledger.machine.peer_commands import ReceiveFromPeer
from covenant.ledger.machine.states import FINISHED, QUEUED, SETTLED
from covenant.ledger.machine.view import Archived
from covenant.ledger.watchers import KeyedWakeups, QueueWaiters, TaskWatchers
from covenant.model.errors import OverLimit, Unavailable, storage_failed
from covenant.model.ids import PublicKey, TaskId
from covenant.model.peers.instance import InstanceId
from covenant.model.settings import Limits
from covenant.model.task import CacheKey
from covenant.model.task_event import Step

A = TypeVar("A")

# How far the archive may fall behind the journal. A batch of it takes some 10 µs an event: these are about a second and
# ten seconds of work, and bound what a start must still archive.
LAG_SLOWS_REPORTS: Final = 100_000
LAG_REFUSES_TASKS: Final = 1_000_000

_RUNG: Final = TASK_EVENTS - {TaskUpdated, TaskLeased}
"""Those two neither queue a task nor end it, and are most of what happens."""

log = logging.getLogger(__name__)


class EmbeddedLedger(Reads):
    """Made by `open_ledger` or `memory_ledger`; used on the loop it was made on."""

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
        self._started_at_ms = clock.now_ms()
        super().__init__(state, storage)
        self._new_id = new_id
        self._bell = KeyedWakeups()
        self._task_waiters = QueueWaiters(lambda recipient: bool(self._state.queue.first(recipient, 1)))
        self._result_waiters = QueueWaiters(lambda sender: bool(self._state.results.first(sender, 1)))
        self._watching = TaskWatchers(self._journal.durable_seq)
        self.changes = self._watching.changes
        self.task_waiter = self._task_waiters.waiter
        self.result_waiter = self._result_waiters.waiter
        self.watch = self._watching.watch
        self._watching.on_audit(lambda: self._bell.ring(("audit",)))
        self._compacting = asyncio.Lock()
        state.watch_holders(self.alive)
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
        recalled = await self._recall(command) if self._may_be_forgotten(command) else {}
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

    def _record(self, events: list[AnyEvent], now_ms: int) -> None:
        state = self._state
        encoded, events = encode_events(events)
        seq = self._journal.append(encoded, now_ms)
        state.apply(events, now_ms, seq)
        if self._bell.waiting or self._task_waiters.lines or self._result_waiters.lines:
            self._ring(events)
        self._watching.note(events, now_ms, seq, state.pushes_by_task)

    def _landed(self, durable_seq: int) -> None:
        self._watching.landed(durable_seq)
        self._archive_on_durable(durable_seq)

    def _ring(self, events: Sequence[AnyEvent]) -> None:
        """Wake whoever waits for this. They decide at once, and share the sync that this record waits for."""
        event: Any
        for event in events:
            if type(event) not in _RUNG:
                continue
            entry = self._state.entries[event.task_id]
            if entry.state is QUEUED:
                self._task_waiters.wake(entry.task.recipient.pubkey)
            elif entry.state in FINISHED:
                if self._bell.waiting:
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

    def _may_be_forgotten(self, command: Command[Any]) -> bool:
        """Whether the archive must be asked: most commands are for a task in memory, or make a new one."""
        if type(command) is Accept and command.minted:
            return False
        if isinstance(command, TaskCommand) and command.task_id in self._state.entries:
            return False
        return bool(self._forgotten(command))

    def _forgotten(self, command: Command[Any]) -> Sequence[TaskId]:
        """The tasks this command names that only the archive may still know."""
        entries, seen = self._state.entries, self._storage.seen
        return [
            task_id for task_id in _named_tasks(command, self._state) if task_id not in entries and seen.maybe(task_id)
        ]

    async def _recall(self, command: Command[Any]) -> dict[TaskId, Archived | None]:
        """What the archive knows of the tasks; None of one that was erased."""
        found: dict[TaskId, Archived | None] = {}
        unknown: set[TaskId] = set()
        # Asked anew after each look: while the archive was read, more of what the command names may have left memory.
        while wanted := [task_id for task_id in self._forgotten(command) if task_id not in found]:
            for task_id in wanted:
                found[task_id] = archived = await self._lookup(command, task_id)
                if archived is None and not (_begins_work(command) and await self._history.aged_out(task_id)):
                    unknown.add(task_id)
        return {task_id: archived for task_id, archived in found.items() if task_id not in unknown}

    async def _lookup(self, command: Command[Any], task_id: TaskId) -> Archived | None:
        if isinstance(command, (Withdraw, GiveBack)):
            return await self._history.lookup_whole(task_id)
        viewer, recipient = _asked_by(command)
        return await self._history.lookup(task_id, viewer, recipient)

    def _evict(self, archived_seq: int) -> None:
        """On the loop, after each batch of the archive."""
        seen = self._storage.seen
        for task_id in self._state.evict(archived_seq):
            seen.add(task_id)
        self._state.unload(archived_seq)

    async def _reload(self) -> None:
        """The disk failed, and memory is ahead of it: go back to what is known to be there."""
        state = await asyncio.to_thread(self._storage.state_at, self._journal.durable_seq, self._state.limits)
        state.evict(self._archive.archived_seq)
        state.watch_holders(self.alive)
        state.used_here = self._state.used_here
        self._use(state)
        self._watching.forget()

    async def finished(self, task_id: TaskId, timeout_ms: int) -> bool:
        entry = self._state.entries.get(task_id)
        if entry is None or entry.finished:
            return True
        return await self._bell.wait(("task", task_id), timeout_ms)

    async def audited(self, timeout_ms: int) -> bool:
        return await self._bell.wait(("audit",), timeout_ms)

    async def orphaned(self, timeout_ms: int) -> bool:
        return bool(self._state.orphaned) or await self._bell.wait(("orphans",), timeout_ms)

    def on_lost(
        self, callback: Callable[[TaskId], None], used: Callable[[TaskId], dict[str, Any] | None] | None = None
    ) -> None:
        self._watching.on_lost(callback)
        self._state.used_here = used

    # Methods, as the rarer ones are: an object with more than thirty attributes is slower to ask for any of them.

    def on_push(self, callback: Callable[[TaskId, Step | None], None]) -> None:
        self._watching.on_push(callback)

    def on_peer(self, callback: Callable[[InstanceId], None]) -> None:
        self._watching.on_peer(callback)

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
        """Compact if enough segments are sealed; what it dropped, or None if there was nothing to do."""
        if self._compacting.locked() or not self._storage.wants_compaction():
            return None
        return await self.compact()

    async def copy_to(self, folder: Path) -> int:
        """Put a whole ledger into an empty folder of the home's file system, and return its position.

        Everything acknowledged before is in it. Work goes on meanwhile; compaction waits.
        """
        async with self._compacting:
            return await self._storage.copy_to(folder)

    @property
    def durable_seq(self) -> int:
        """How many records there are that no crash takes away."""
        return self._journal.durable_seq

    async def seal(self) -> None:
        """Have everything written so far in sealed segments."""
        await self._journal.rotate()

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
            holders_lost=state.holders_lost(),
            commits=journal.last_seq,
            failure=journal.failure,
            behind=max(0, self._archive_lag()),
            history_failure=self._archive.failure,
            rejected=self._archive.rejected,
            pushes=state.push_count(),
            pushes_dead=len(state.pushes_dead),
            delegations=state.delegation_count(),
            delegations_lost=state.delegations_lost(),
            parcels=state.parcel_total(),
            clock_steps=self.clock.steps_total,
            clock_paused_ms=self.clock.paused_ms_left,
            gauges={"durable_seq": journal.durable_seq, "archived_seq": archived_seq, "syncs": journal.batches},
        )

    def leads(self, name: str) -> bool:  # noqa: ARG002  there is no other node
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
        # An id that was made just now is nobody's yet.
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


def _asked_by(command: Command[Any]) -> tuple[PublicKey | None, PublicKey | None]:
    """Who must have part in the tasks that a command names, and whose they must be; None: whoever, whosever."""
    if isinstance(command, TaskCommand):
        return command.viewer, command.recipient
    return (command.sender if isinstance(command, Drain) else None), None
