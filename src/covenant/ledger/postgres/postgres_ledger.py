"""The ledger on PostgreSQL: the contract, assembled from its parts.

Nothing here is ahead of the database: every answer, wake and read is of committed data. Registers and counts are in
memory, as new as the news from other nodes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, TypeVar

import asyncpg
import msgspec

from covenant.ledger.clock import Clock
from covenant.ledger.contract.identities import RegisterChange
from covenant.ledger.contract.ledger import Counts, LedgerNode, TenantSize
from covenant.ledger.contract.retention import Erased, EraseTasks
from covenant.ledger.contract.task_query import FoundPage, QueueDepth, TaskCounts, TaskQuery, may_see
from covenant.ledger.contract.tasks import (
    ANY,
    TaskScope,
)
from covenant.ledger.machine.commands import Command, GiveBack
from covenant.ledger.postgres.audit_log import AuditReads
from covenant.ledger.postgres.batch_items import DecidedBatch
from covenant.ledger.postgres.batch_writer import BatchWriter
from covenant.ledger.postgres.connections import Connections, fetch_rows, fetch_value
from covenant.ledger.postgres.counters import Counters
from covenant.ledger.postgres.engine_metrics import EngineMetrics
from covenant.ledger.postgres.found_rows import count_lanes, find_tasks
from covenant.ledger.postgres.hot_tables import HotTables
from covenant.ledger.postgres.migrations import AlteredTables, names_altered_columns
from covenant.ledger.postgres.news import FirstDue, Topics
from covenant.ledger.postgres.node_agents import NodeAgents
from covenant.ledger.postgres.node_runs import Joined
from covenant.ledger.postgres.nodes import Membership
from covenant.ledger.postgres.registers import Registers
from covenant.ledger.postgres.step_follower import StepFollower
from covenant.ledger.postgres.stored_task import (
    column,
    decode_delegation,
    decode_head,
    decode_message,
    decode_push,
    is_task_event,
)
from covenant.ledger.postgres.task_history import TaskReads
from covenant.ledger.postgres.tenant_rows import TenantRows
from covenant.ledger.watchers import KeyedWakeups, QueueWaiter, QueueWaiters, TaskWatchers, step_of
from covenant.model.agent_definition import CatalogueAgent
from covenant.model.grant import Grant, Identity
from covenant.model.ids import PublicKey, TaskId
from covenant.model.peers.delegation import (
    Delegation,
    DelegationKey,
    DelegationRole,
    LoggedMessage,
    OutboxMessage,
    Peer,
)
from covenant.model.peers.instance import InstanceId
from covenant.model.peers.usage_by_day import PeerUsage
from covenant.model.push import Push
from covenant.model.settings import Limits
from covenant.model.task_event import Step
from covenant.model.tenants import Tenant

A = TypeVar("A")

MESSAGES_MAX: Final = 1_000
LEAD_LOOK_MS: Final = 250

_grant: Final = msgspec.json.Decoder(Grant).decode
_identity: Final = msgspec.json.Decoder(Identity).decode
_tenant: Final = msgspec.json.Decoder(Tenant).decode
_logged: Final = msgspec.json.Decoder(LoggedMessage).decode


@names_altered_columns
class PostgresLedger(TaskReads, AuditReads, TenantRows):
    """Created by `open_postgres_ledger`; used on the loop that created it."""

    def __init__(
        self,
        connections: Connections,
        *,
        joined: Joined,
        lease_ms: int,
        lost_path: Path | None,
        node: str,
        clock: Clock,
        new_id: Callable[[], str],
        limits: Limits,
    ) -> None:
        self.node, self.boot, self._new_id, self._resolved = node, joined.boot, new_id, 0
        self.clock, self.now_ms, self.limits, self._connections = clock, clock.now_ms, limits, connections
        self._registers = registers = Registers()
        self._counters, self._hot_tables = Counters(), HotTables(connections)
        self._metrics = EngineMetrics(connections, self._counters)
        self._erased_callbacks: list[Callable[[], None]] = []
        self._erased_count: int | None = None
        """The change of the counts by erasures, as last seen."""
        self._wakeups, self.altered_tables = KeyedWakeups(), AlteredTables(connections)
        self._due = FirstDue(lambda: self._value("next_due"), self.now_ms)
        self._task_waiters = QueueWaiters(lambda recipient: self._is_pending("queued", recipient))
        self._result_waiters = QueueWaiters(lambda sender: self._is_pending("settled", sender))
        self._watchers = watchers = TaskWatchers(0)
        self.changes, self._steps = watchers.changes, StepFollower(self._read_steps, self._generation)
        self.on_push, self.on_peer, self.on_registers = watchers.on_push, watchers.on_peer, watchers.on_registers
        self.task_waiter: Callable[[PublicKey | None], QueueWaiter] = self._task_waiters.waiter
        self.result_waiter: Callable[[PublicKey | None], QueueWaiter] = self._result_waiters.waiter
        self.watch = self._steps.watch
        self.identity, self.enrolled, self.grants_of = registers.identity, registers.enrolled, registers.grants
        self.tenant, self.tenant_of, self.token_revoked = registers.tenant, registers.tenant_of, registers.token_revoked
        self.agent, self.peer, self.peer_named = registers.agent, registers.peer, registers.peer_named
        self._membership = membership = Membership(
            connections,
            node=node,
            joined=joined,
            lease_ms=lease_ms,
            lost_path=lost_path,
            registers=registers,
            counters=self._counters,
            on_news=self._apply_news,
            on_registers=self._registers_changed,
            on_nodes=self.changes.note_nodes,
            on_cut=self._steps.cut,
            on_beat=self._on_beat,
            on_fenced=self._begin_anew,
            on_begun=self._on_new_run,
        )
        self._node_agents = NodeAgents(connections, registers, membership, node)
        self.replaced_secret = registers.secrets.get
        self.residents, self.announce = self._node_agents.residents, self._node_agents.announce
        self.leads, self.shares = membership.singletons.leads, membership.singletons.shares
        self.alive, self.living = membership.alive, membership.living
        self.ledger_epoch, self.committed_batches = membership.ledger_epoch, membership.committed_batches
        self._writer = BatchWriter(
            connections,
            joined=joined,
            membership=membership,
            node=node,
            clock=clock,
            limits=limits,
            registers=registers,
            counters=self._counters,
            new_id=new_id,
            on_committed=self._on_committed,
            on_registers=self._registers_changed,
        )

    async def begin(self) -> None:
        await self._membership.begin()
        self._resolved = self._counters.get("resolved")

    async def _on_beat(self, connection: asyncpg.Connection[Any]) -> None:
        self._writer.look_again()
        await self._look_for_erasure(connection)

    async def _look_for_erasure(self, connection: asyncpg.Connection[Any]) -> None:
        """Notices erasures by other daemons: they are no batches of a writer, so no news report them."""
        known, self._erased_count = self._erased_count, await fetch_value("history", connection, "erased")
        if known != self._erased_count:
            self._notify_erased()

    def _notify_erased(self) -> None:
        for callback in self._erased_callbacks:
            callback()

    async def _begin_anew(self) -> None:
        """Begins another run, after this one was declared lost."""
        self._writer.look_again()  # it may pause until its next try, and is not at rest meanwhile
        async with self._writer.at_rest:
            joined = await self._membership.rejoin(self._new_id())
            self.boot = joined.boot
            self._writer.begin_anew(joined)

    async def _on_new_run(self, connection: asyncpg.Connection[Any]) -> None:
        """Stops the workers of the lost run, and ends watches, whose readers begin again."""
        rows = await fetch_rows("history", connection, "held_before", node=self.node, boot=self.boot)
        self._watchers.notify(lost=[TaskId(row["task_id"]) for row in rows])
        self._steps.cut()
        self._node_agents.announce_again()

    # Deciding

    async def commit(self, command: Command[A]) -> A:
        item = self._writer.submit(command)
        try:
            answer: A = await item.done
        except asyncio.CancelledError:
            if item.begun:
                await self._give_back(command, item.outcome())
            raise
        if item.registers_version:
            await self._membership.wait_acknowledged(item.registers_version)
        return answer

    async def _give_back(self, command: Command[A], done: asyncio.Future[A]) -> None:
        """Gives back the leases or results of a departed caller, despite cancellation."""
        undoing = asyncio.create_task(self._undo(command, done))
        while not undoing.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait((undoing,))
        if not undoing.cancelled():
            undoing.exception()  # the outcome is unknown, and an operator will see the lease

    async def _undo(self, command: Command[A], done: asyncio.Future[A]) -> None:
        undo: GiveBack | None = command.undo(await done)
        if undo is not None:
            await self.commit(undo)

    async def durable(self) -> None:
        """Reads the database if other nodes write: registers are as old as the last look."""
        if self._membership.living() > 1:
            await self._membership.look()

    def _on_committed(self, committed: DecidedBatch) -> None:
        work = committed.work
        version = committed.items[0].registers_version
        if version > self._registers.version:  # otherwise a look has already found it
            self._registers.put(committed.registers)
            self._registers.version = version
        for peer, at_ms in work.heard.items():
            self._registers.note_heard(peer, at_ms)
        self._membership.wrote(committed.seq)
        self._hot_tables.count(len(work.moved))
        pushed = {task_id for task_id, slot in work.slots.items() if slot.pushed}
        for events, ts_ms in committed.records:
            self._watchers.note(events, ts_ms, 0, pushed)
            steps: dict[TaskId, list[Step]] = {}
            for event in events:
                if not is_task_event(event) or not self._steps.follows(event.task_id):
                    continue
                if (step := step_of(event, ts_ms)) is not None:
                    steps.setdefault(event.task_id, []).append(step)
            for task_id, new_steps in steps.items():
                self._steps.wrote(task_id, new_steps)
        self._watchers.deliver(0)
        self._wake_waiters(committed.topics)

    def _apply_news(self, topics: Topics) -> None:
        """Applies the news of another node's batch."""
        for each in topics.steps:
            self._steps.heard(each.task_id, each.first, each.last)
        self._watchers.notify(
            lost=[each.task_id for each in topics.lost if (each.node, each.boot) == (self.node, self.boot)],
            peers=[InstanceId(peer) for peer in topics.peers],
            pushed=topics.pushed,
        )
        tasks = [*(each.task_id for each in topics.steps), *topics.moved]
        self.changes.note_remote(tasks, topics.peers, topics.pushed, self.now_ms(), audited=topics.audited)
        self._wake_waiters(topics)

    def _wake_waiters(self, topics: Topics) -> None:
        for recipient in topics.queued:
            self._task_waiters.wake(PublicKey(recipient))
        for sender in topics.settled:
            self._result_waiters.wake(PublicKey(sender))
        for task_id in topics.ended:
            self._wakeups.wake(("task", task_id))
        if topics.ended and self._counters.get("delegated"):
            self._wakeups.wake(("orphans",))
        if topics.audited:
            self._wakeups.wake(("audit",))
        self._due.note(topics)

    def _registers_changed(self, changes: Iterable[RegisterChange]) -> None:
        self._watchers.notify(registers=changes)

    def _is_pending(self, kind: str, identity: PublicKey | None) -> bool:
        return (self._counters.get("state", kind) if identity is None else self._counters.get(kind, identity)) > 0

    # Waiting

    async def finished(self, task_id: TaskId, timeout_ms: int) -> bool:
        return await self._wait(("task", task_id), timeout_ms, "finished", task_id=task_id)

    async def orphaned(self, timeout_ms: int) -> bool:
        return await self._wait(("orphans",), timeout_ms, "orphaned")

    async def _wait(self, key: tuple[str, ...], timeout_ms: int, query: str, **values: Any) -> bool:
        """Whether the query is true now, or the key is woken within the time limit."""
        waiting = asyncio.ensure_future(self._wakeups.wait(key, timeout_ms))
        try:
            await asyncio.sleep(0)  # wait before the look, so that a change between the two is not missed
            return bool(await self._value(query, **values)) or await waiting
        finally:
            waiting.cancel()

    async def overdue(self, timeout_ms: int) -> bool:
        """Waits for the next due task at one node; at the others this is a pause."""
        if self.leads("wakes"):
            return await self._due.wait(timeout_ms)
        await asyncio.sleep(min(timeout_ms, LEAD_LOOK_MS) / 1000)
        return False

    def on_lost(
        self, callback: Callable[[TaskId], None], used: Callable[[TaskId], dict[str, Any] | None] | None = None
    ) -> None:
        self._watchers.on_lost(callback)
        self._writer.inputs.used = used

    # Reading

    async def _generation(self, task_id: TaskId) -> int:
        return await self._value("generation", task_id=task_id) or 0

    def may_know(self, task_id: TaskId) -> bool:  # noqa: ARG002  any node may have taken it just now
        return True

    async def steps(self, task_id: TaskId, after: int, limit: int, scope: TaskScope = ANY) -> Sequence[Step]:
        await self._steps.wait_for_start(task_id)
        return await self._read_steps(task_id, after, limit, scope)

    async def count_lanes(self, scope: TaskQuery) -> TaskCounts:
        counts = count_lanes(await self._lanes(), scope)
        lost = await self._rows("lost_heads")
        seen = sum(may_see(scope, decode_head(row["head"])) for row in lost)
        return msgspec.structs.replace(counts, holders_lost=seen)

    async def queue_depths(self, count: int) -> Sequence[QueueDepth]:
        rows = await self._rows("queue_depths", count=count)
        return tuple(
            QueueDepth(
                agent=decode_head(row["head"]).recipient.display, depth=row["depth"], oldest_at_ms=row["oldest_at_ms"]
            )
            for row in rows
        )

    async def find(self, query: TaskQuery) -> FoundPage:
        return await find_tasks(self._connections, query, self._lanes)

    async def _lanes(self) -> Sequence[tuple[str, int]]:
        return [(row["lane"], row["n"]) for row in await self._rows("lanes")]

    async def tenants(self) -> Sequence[Tenant]:
        return await self._bodies(_tenant, "registered", kind="tenant")

    async def identities(self) -> Sequence[Identity]:
        return await self._bodies(_identity, "registered", kind="identity")

    async def grants(self) -> Sequence[Grant]:
        rows = await self._rows("grants")
        return tuple([msgspec.structs.replace(_grant(row["body"]), used=row["used"]) for row in rows])

    def agents(self, tenant: str) -> Sequence[CatalogueAgent]:
        return tuple(self._registers.stored_agents.get(tenant, {}).values())

    async def audited(self, timeout_ms: int) -> bool:
        return await self._wakeups.wait(("audit",), timeout_ms)

    async def pushes(self, task_id: TaskId) -> Sequence[Push]:
        return await self._bodies(decode_push, "pushes", task_id=task_id)

    async def outbox(self) -> Sequence[Push]:
        return await self._bodies(decode_push, "outbox")

    def peers(self) -> Sequence[Peer]:
        return tuple(self._registers.peers.values())

    async def delegation(self, key: DelegationKey) -> Delegation | None:
        values = {"role": key.role.value, "peer": key.peer, "offer_id": column(key.offer_id)}
        return next(iter(await self._bodies(decode_delegation, "delegation", **values)), None)

    async def delegation_of(self, task_id: TaskId) -> Delegation | None:
        return next(iter(await self._bodies(decode_delegation, "delegation_of", task_id=task_id)), None)

    async def delegations(self) -> Sequence[Delegation]:
        return await self._bodies(decode_delegation, "delegations")

    async def delegations_live(self, role: DelegationRole, peer: InstanceId | None = None) -> Sequence[Delegation]:
        return await self._bodies(decode_delegation, "delegations_live", role=role.value, peer=peer)

    async def peer_outbox(self, peer: InstanceId) -> Sequence[OutboxMessage]:
        return await self._bodies(decode_message, "parcels", peer=peer)

    async def addressees(self) -> Sequence[InstanceId]:
        return tuple([InstanceId(row["peer"]) for row in await self._rows("addressees")])

    async def envelope_taken(self, sender: InstanceId, jti: str) -> bool:
        return bool(await self._value("envelope", sender=sender, jti=column(jti), now_ms=self.now_ms()))

    async def peer_usage(self, since: int, peer: InstanceId | None = None) -> Sequence[PeerUsage]:
        rows = await self._rows("peer_usage", since=since, peer=peer)
        return tuple([msgspec.convert(dict(row), PeerUsage) for row in rows])

    async def message_log(self) -> Sequence[LoggedMessage]:
        return await self._bodies(_logged, "messages", count=MESSAGES_MAX)

    # Notes and secrets

    async def notes(self, tenant: str, agent_id: str) -> tuple[int, str | None]:
        for row in await self._rows("notes", tenant=tenant, agent_id=agent_id):
            return row["version"], row["body"]
        return 0, None

    async def keep_notes(self, tenant: str, agent_id: str, version: int, body: str) -> bool:
        """Replaces notes, if their version is the one that was read."""
        return bool(await self._rows("keep_notes", tenant=tenant, agent_id=agent_id, version=version, body=body))

    async def secret(self, name: str) -> str | None:
        body: str | None = await self._connections.value("nodes", "secret", name=name)
        return body

    async def keep_secret(self, name: str, body: str) -> None:
        await self._connections.rows("nodes", "keep_secret", name=name, body=body)

    async def replace_secret(self, name: str, before: str, body: str) -> bool:
        version = await self._connections.value("nodes", "replace_secret", name=name, before=before, body=body)
        if version is not None:
            await self._membership.spread(version)
        return version is not None

    # Operating

    async def compact(self) -> int:
        """Vacuums the hot tables. Returns how many events the tasks had that have left them since the last call."""
        await self._hot_tables.vacuum()
        known, self._resolved = self._resolved, self._counters.get("resolved")
        return self._resolved - known

    async def maintain(self) -> int | None:
        return None

    async def erase_tasks(self, which: EraseTasks) -> Erased:
        if which.wholly:
            await self._erase_ids(which)  # the ids go first: the tasks are found again after a crash
        erased = await self._erase(which)
        if erased.tasks:
            self._notify_erased()
        return erased

    def on_erased(self, callback: Callable[[], None]) -> None:
        self._erased_callbacks.append(callback)

    async def counts(self) -> Counts:
        return await self._metrics.counts(self._writer, self._membership, self.clock)

    async def tenant_sizes(self, tenants: Sequence[str]) -> Sequence[TenantSize]:
        count, kept = self._counters.get, {row["tenant"]: row["n"] for row in await self._rows("kept_bytes")}
        return [TenantSize(count("tasks", name), count("size", name), kept.get(name, 0)) for name in tenants]

    async def nodes(self) -> Sequence[LedgerNode]:
        return tuple([LedgerNode(**row) for row in await self._rows("nodes")])

    async def close(self) -> None:
        await self._node_agents.close()
        await self._writer.close()
        await self._hot_tables.close()
        await self._membership.close()
        await self._connections.close()

    async def abort(self) -> None:
        """Ends as a killed process does: writes and sends nothing more."""
        await self._node_agents.close()
        await self._writer.abort()
        await self._hot_tables.close()
        await self._membership.abort()
        self._connections.terminate()
