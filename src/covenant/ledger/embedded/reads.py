"""Reads: look-ups in memory, history from the archive, and live tasks from both.

Each read first waits until everything decided so far is durable. Live tasks are read from memory when the archive
cannot be read or written: the same answers in the same order, at a cost that grows with the live work.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from heapq import nsmallest
from itertools import chain, islice
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec

from covenant.ledger.contract.identities import LAST, AuditMark, AuditRecord
from covenant.ledger.contract.retention import SearchedPlace
from covenant.ledger.contract.task_query import (
    FoundPage,
    Place,
    QueueDepth,
    TaskCounts,
    TaskQuery,
    found_task,
    may_see,
    passes,
    place_after,
)
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
    lease_record,
    queue_entry,
)
from covenant.ledger.embedded.archive.archive import Archive
from covenant.ledger.embedded.archive.history import History
from covenant.ledger.embedded.archive.seen_filter import SeenIds
from covenant.ledger.embedded.journal.journal import Journal, MemoryJournal
from covenant.ledger.embedded.peer_index import PeerReads
from covenant.ledger.embedded.state import LedgerState
from covenant.ledger.machine.decisions.leases import body_unreadable
from covenant.ledger.machine.entry import Alive, Entry
from covenant.ledger.machine.states import FINISHED, FOLLOWING, LEASED, PARKED
from covenant.model.agent_definition import CatalogueAgent
from covenant.model.errors import Unavailable
from covenant.model.grant import AuditHead, AuditReport, Grant, Identity
from covenant.model.ids import PublicKey, TaskId
from covenant.model.push import Push
from covenant.model.settings import Limits
from covenant.model.task import Result, Task
from covenant.model.task_event import Step
from covenant.model.tenants import Tenant

CATCH_UP_S: Final = 10.0
LIVE_S: Final = 2.0
"""How long a query of live tasks waits for the archive before memory answers it."""


class Reads(PeerReads):
    node: str
    boot: str
    _state: LedgerState
    now_ms: Callable[[], int]
    _reload: Callable[[], Coroutine[Any, Any, None]]

    def __init__(self, state: LedgerState, storage: Storage) -> None:
        self._storage = storage
        self._journal = storage.journal
        self._archive = storage.archive
        self._history: History = storage.history
        self._reloading: asyncio.Task[None] | None = None
        self._use(state)

    def alive(self, node: str | None, boot: str) -> bool:  # noqa: ARG002  as the contract has it
        """One process at a time has a home: every other run has ended, also one under another name."""
        return boot == self.boot

    async def durable(self) -> None:
        """Waits until everything decided so far is durable, so that reads after it see nothing else."""
        if self._journal.failure is None:
            await self._journal.wait()
        if self._journal.failure is not None:
            if self._reloading is None:
                self._reloading = asyncio.create_task(self._reload())
            await asyncio.shield(self._reloading)

    async def _archived(self) -> None:
        """For reads of history: waits until everything is durable, and in the archive."""
        await self.durable()
        await self._archive.caught_up(self._journal.durable_seq, CATCH_UP_S)

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

    async def tenants_of(self, task_ids: Collection[TaskId]) -> Mapping[TaskId, str | None]:
        found = {task_id: await self.parties(task_id) for task_id in task_ids}
        return {task_id: parties.tenant for task_id, parties in found.items() if parties is not None}

    async def outbox(self) -> Sequence[Push]:
        await self.durable()
        return tuple(self._state.all_pushes())

    async def steps(self, task_id: TaskId, after: int, limit: int, scope: TaskScope = ANY) -> Sequence[Step]:
        await self.durable()
        reachable = await self._archive.reachable(self._journal.durable_seq, CATCH_UP_S)
        found = await self._history.steps(task_id, after, limit, scope)
        if not reachable:
            self._check_steps(task_id, found[-1].generation if found else after, whole=len(found) < limit)
        return found

    def _check_steps(self, task_id: TaskId, through: int, *, whole: bool) -> None:
        """Refuses steps that the archive lacks. While it cannot be written, it has those of unchanged tasks."""
        entry = self._state.entries.get(task_id)
        if whole and entry is not None and through < entry.generation:
            why = f": {self._archive.failure}" if self._archive.failure else ""
            raise Unavailable("history_lagging", f"the newest steps are not in the archive yet{why}; ask again")

    async def listing(self, query: ListQuery) -> Listing:
        await self._archived()
        return await self._history.listing(query)

    async def of_tenant(self, tenant: str, limit: int, *, simple: bool = False) -> Sequence[TaskRow]:
        await self._archived()
        return await self._history.of_tenant(tenant, limit, simple=simple)

    async def find(self, query: TaskQuery) -> FoundPage:
        """Queries of live tasks are answered from memory while the archive cannot answer."""
        if query.states and FINISHED.isdisjoint(query.states):
            if await self._live():
                with suppress(Unavailable):
                    return await self._history.find(query)
            return live_page(self._state, query, self.alive)
        await self._archived()
        return await self._history.find(query)

    async def count_lanes(self, scope: TaskQuery) -> TaskCounts:
        await self._archived()
        counts = await self._history.count_lanes(scope)
        lost = sum(may_see(scope, self._state.entries[task_id].task) for task_id in self._state.lost_leases)
        return msgspec.structs.replace(counts, holders_lost=lost)

    async def queue_depths(self, count: int) -> Sequence[QueueDepth]:
        await self.durable()
        state = self._state
        found = [(depth, state.entries[first]) for depth, first in state.queue.deepest(count)]
        return tuple(
            QueueDepth(agent=entry.task.recipient.display, depth=depth, oldest_at_ms=entry.accepted_at_ms)
            for depth, entry in found
        )

    async def _live(self) -> bool:
        """Whether the archive can answer a query of live tasks."""
        await self.durable()
        return await self._archive.reachable(self._journal.durable_seq, LIVE_S)

    async def queue(self, query: QueueQuery) -> Queue:
        if await self._live():
            with suppress(Unavailable):
                return await self._history.queue(query, self.now_ms())
        return live_queue(self._state, query, self.now_ms(), self.alive)

    async def recent_tasks(self, viewer: PublicKey | None, limit: int) -> Sequence[Task]:
        if await self._live():
            with suppress(Unavailable):
                return await self._history.recent_tasks(viewer, limit)
        return live_tasks(self._state, viewer, limit)

    async def recent_results(self, viewer: PublicKey | None, limit: int) -> Sequence[Result]:
        if await self._live():
            with suppress(Unavailable):
                return await self._history.recent_results(viewer, limit)
        return live_results(self._state, viewer, limit)

    async def show(
        self, task_id: TaskId, viewer: PublicKey | None, updates_max: int, after: int | None = None
    ) -> TaskDetail | None:
        reachable, shown = await self._live(), None
        try:
            shown = await self._history.show(task_id, viewer, updates_max, after)
        except Unavailable:
            if task_id not in self._state.entries:
                raise
            reachable = False
        entry = self._state.entries.get(task_id)
        if reachable or entry is None:
            return shown
        return live_detail(entry, viewer, shown, self.alive)

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

    async def audit_recent(
        self, issuer: PublicKey | None, limit: int, since_ms: int | None, before_ms: int = LAST, below: int = LAST
    ) -> Sequence[AuditRecord]:
        await self._archived()
        return await self._history.audit_recent(issuer, limit, since_ms, before_ms, below)

    async def audit_before(self, before_ms: int) -> Sequence[AuditMark]:
        await self._archived()
        found = await self._history.audit_before(before_ms)
        return () if found is None else (AuditMark(*found),)

    async def audit_verify(self) -> AuditReport:
        return await self._history.audit_verify(await self._audit_head())

    async def audit_heads(self) -> Sequence[AuditMark]:
        return ()  # there is one chain

    async def audit_verify_new(self) -> AuditReport:
        return await self._history.audit_verify_new(await self._audit_head())

    async def _audit_head(self) -> AuditHead:
        """The newest durable audit row, once the archive has it too."""
        while True:
            await self.durable()
            head, seq = self._state.audit_head, self._journal.last_seq
            if seq == self._journal.durable_seq or self._journal.failure is not None:
                await self._archive.caught_up(min(seq, self._journal.durable_seq), CATCH_UP_S)
                return head

    # Registers and peers are read from memory at once. A look-up may see a record that is not on disk yet: a command
    # that depends on it becomes durable only together with that record.

    def _use(self, state: LedgerState) -> None:
        self._state = state
        self.identity = state.identity
        self.grants_of = state.grants
        self.enrolled = state.enrolled
        self.tenant = state.tenant
        self.tenant_of = state.tenant_of
        self.agent = state.agent
        self.peer = state.peer
        self.peer_named = state.peer_named
        self.token_revoked = state.token_revoked

    def agents(self, tenant: str) -> Sequence[CatalogueAgent]:
        return tuple(self._state.stored_agents.get(tenant, {}).values())

    async def pushes(self, task_id: TaskId) -> Sequence[Push]:
        return self._state.pushes(task_id)


def live_queue(state: LedgerState, query: QueueQuery, now_ms: int, alive: Alive) -> Queue:
    """Lost holders first, then the longest held leases, then queued tasks, then other waiting tasks."""

    def rank(entry: Entry) -> tuple[bool, int]:
        return not entry.holder_lost(alive), -entry.lease.age_ms(now_ms) if entry.lease is not None else 0

    leased = (entry for entry in state.leases() if _matches(entry, query, now_ms))
    queued = (entry for entry in _entries(state, state.queue) if _matches(entry, query, now_ms))
    waiting = (entry for entry in _waiting(state) if _matches(entry, query, now_ms))
    chosen = islice(chain(nsmallest(query.limit, leased, rank), queued, waiting), query.limit)
    results = live_results(state, query.viewer, query.limit, newest_first=False)
    lines = tuple(queue_entry(entry, holder_lost=entry.holder_lost(alive)) for entry in chosen)
    return Queue(lines, tuple(results))


def live_page(state: LedgerState, query: TaskQuery, alive: Alive) -> FoundPage:
    """A page in the same order as the archive's. Tasks of the same millisecond are on one page.

    Cursors of the archive are valid here, and these in the archive.
    """
    by_creation, after = query.order == "created", place_after(query)

    def moment(entry: Entry) -> int:
        return entry.accepted_at_ms if by_creation else entry.updated_at_ms

    in_order = state.entries.values() if query.ascending else reversed(state.entries.values())
    found = [entry for entry in in_order if passes(query, entry)]
    total = len(found) if query.count else None
    if after is not None:
        # A cursor of the archive may be between tasks of the same millisecond: those are listed again.
        sign, least = 1 if query.ascending else -1, 1 if after.no in (0, LAST) else 0
        found = [entry for entry in found if sign * (moment(entry) - after.ms) >= least]
    found.sort(key=moment, reverse=not query.ascending)
    end = min(len(found), query.limit)
    while 0 < end < len(found) and moment(found[end]) == moment(found[end - 1]):
        end += 1
    edge = Place(moment(found[end - 1]), LAST if query.ascending else 0) if end < len(found) else None
    return FoundPage(
        tasks=tuple(found_task(entry, alive) for entry in found[:end]),
        next=edge.cursor(query.order) if edge is not None else None,
        total=total,
    )


def live_tasks(state: LedgerState, viewer: PublicKey | None, limit: int) -> Sequence[Task]:
    """Queued tasks, newest first."""
    found = (entry.task for entry in _entries(state, reversed(state.queue)) if _has_part(entry, viewer))
    return tuple(islice(found, limit))


def live_results(
    state: LedgerState, viewer: PublicKey | None, limit: int, *, newest_first: bool = True
) -> Sequence[Result]:
    """Undrained results, which only their sender sees."""
    order = reversed(state.results) if newest_first else iter(state.results)
    found = (
        entry.result
        for entry in _entries(state, order)
        if entry.result is not None and viewer in (None, entry.task.sender.pubkey)
    )
    return tuple(islice(found, limit))


def live_detail(entry: Entry, viewer: PublicKey | None, archived: TaskDetail | None, alive: Alive) -> TaskDetail | None:
    """One task in memory, with those of its leases and updates that the archive has."""
    if not _has_part(entry, viewer):
        return None
    leases = archived.leases if archived is not None else ()
    live = entry.lease if entry.state is LEASED else None
    if live is not None and all(lease.lease_id != live.lease_id for lease in leases):
        leases = (*leases, lease_record(live, entry.turn))
    return TaskDetail(
        task=entry.task,
        state=entry.state.wire_name,
        a2a_state=entry.a2a_state,
        attempt=entry.attempt,
        turn=entry.turn,
        generation=entry.generation,
        created_at_ms=entry.accepted_at_ms,
        updated_at_ms=entry.updated_at_ms,
        leases=leases,
        updates=archived.updates if archived is not None else (),
        result=entry.result,
        cause=entry.cause,
        holder_lost=entry.holder_lost(alive),
    )


def _entries(state: LedgerState, task_ids: Iterable[TaskId]) -> Iterator[Entry]:
    return (state.entries[task_id] for task_id in task_ids)


def _waiting(state: LedgerState) -> Iterator[Entry]:
    if not state.parked and not state.following:
        return iter(())
    return (entry for entry in state.entries.values() if entry.state in (PARKED, FOLLOWING))


def _has_part(entry: Entry, viewer: PublicKey | None) -> bool:
    task, lease = entry.task, entry.lease
    if viewer is None or viewer in (task.sender.pubkey, task.recipient.pubkey):
        return True
    return lease is not None and lease.leased_to.pubkey == viewer


def _matches(entry: Entry, query: QueueQuery, now_ms: int) -> bool:
    if query.state_filter is not None and entry.state.wire_name != query.state_filter:
        return False
    age_ms, within_ms, deadline_ms = query.min_lease_age_ms, query.deadline_within_ms, entry.task.deadline_ms
    held = entry.lease if entry.state is LEASED else None
    if age_ms is not None and held is not None and held.age_ms(now_ms) < age_ms:
        return False
    if within_ms is not None and (deadline_ms is None or deadline_ms > now_ms + within_ms):
        return False
    return _has_part(entry, query.viewer)


class Storage(Protocol):
    @property
    def journal(self) -> Journal | MemoryJournal: ...
    @property
    def archive(self) -> Archive: ...
    @property
    def history(self) -> History: ...
    @property
    def seen(self) -> SeenIds: ...

    def follow(self, on_archived: Callable[[int], None]) -> None:
        """Begins to archive durable records; `on_archived(seq)` is called on the loop after each batch."""

    def state_at(self, seq: int, limits: Limits, /) -> LedgerState:
        """Reads the state back from the disk. Blocks."""

    def wants_compaction(self) -> bool: ...
    async def compact(self, state: LedgerState) -> int: ...
    async def copy_to(self, folder: Path, /) -> int:
        """Copies the whole ledger into an empty folder, and returns its position. The caller prevents compaction."""

    async def search(self, tenant: str, parties: Sequence[str], /) -> Sequence[SearchedPlace]: ...
    async def close(self) -> None: ...
