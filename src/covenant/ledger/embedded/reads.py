"""Look-ups that memory answers at once: who is known, what a peer is owed, which webhooks are told.

They wait for nothing, so they may see a record that is not on disk yet. What rests on one is a command of its own, and
that is durable only together with what it was decided on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from heapq import nsmallest
from itertools import chain, islice
from typing import Any

import msgspec

from covenant.ledger.contract.tasks import LeaseRecord, Queue, QueueEntry, QueueQuery, TaskDetail
from covenant.ledger.embedded.state import LedgerState
from covenant.ledger.machine.commands import Accept, Command, Drain, GiveBack, TaskCommand, Withdraw
from covenant.ledger.machine.entry import Entry
from covenant.ledger.machine.peer_commands import ReceiveFromPeer
from covenant.ledger.machine.states import FOLLOWING, LEASED, PARKED
from covenant.model.agent_definition import CatalogueAgent
from covenant.model.grant import Identity
from covenant.model.ids import AgentId, PublicKey, TaskId
from covenant.model.peers.delegation import Delegation, DelegationKey, DelegationRole, LoggedMessage, OutboxMessage
from covenant.model.peers.instance import InstanceId
from covenant.model.peers.peer_record import Peer
from covenant.model.push import Push
from covenant.model.result import Result
from covenant.model.task import Task
from covenant.model.tenants import Tenant


class MemoryReads:
    _state: LedgerState

    def pushes(self, task_id: TaskId) -> Sequence[Push]:
        return self._state.pushes(task_id)

    def peer(self, peer_id: InstanceId) -> Peer | None:
        return self._state.peer(peer_id)

    def peer_named(self, name: str) -> Peer | None:
        return self._state.peer_named(name)

    def peers(self) -> Sequence[Peer]:
        return tuple(self._state.peers_by_id.values())

    def delegation(self, key: DelegationKey) -> Delegation | None:
        return self._state.delegation(key)

    def delegation_of(self, task_id: TaskId) -> Delegation | None:
        return self._state.delegation_of(task_id)

    def delegations(self) -> Sequence[Delegation]:
        return tuple(self._state.delegations())

    def delegations_live(self, role: DelegationRole, peer: InstanceId | None = None) -> Sequence[Delegation]:
        return self._state.delegations_live(role, peer)

    def parcels(self, peer: InstanceId) -> Sequence[OutboxMessage]:
        return tuple(self._state.parcels_of(peer))

    def addressees(self) -> Sequence[InstanceId]:
        return self._state.addressees()

    def envelope_taken(self, sender: InstanceId, jti: str) -> bool:
        return self._state.envelope_taken(sender, jti)

    def token_revoked(self, token_id: str) -> bool:
        return self._state.token_revoked(token_id)

    def message_log(self) -> Sequence[LoggedMessage]:
        return tuple(reversed(self._state.messages))

    def identity(self, token_sha256: str) -> Identity | None:
        return self._state.identities_by_token.get(token_sha256)

    def enrolled(self, agent: AgentId) -> AgentId | None:
        return self._state.enrolled(agent)

    def tenant(self, name: str) -> Tenant | None:
        return self._state.tenants.get(name)

    def tenant_of(self, token_sha256: str) -> Tenant | None:
        return self._state.tenants_by_token.get(token_sha256)

    def agent(self, tenant: str, agent_id: str) -> CatalogueAgent | None:
        return self._state.agent(tenant, agent_id)

    def agents(self, tenant: str) -> Sequence[CatalogueAgent]:
        return tuple(self._state.stored_agents.get(tenant, {}).values())


def named_tasks(command: Command[Any], state: LedgerState) -> Sequence[TaskId]:
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


def asked_by(command: Command[Any]) -> tuple[PublicKey | None, PublicKey | None]:
    """Who must have part in the tasks that a command names, and whose they must be; None: whoever, whosever."""
    if isinstance(command, TaskCommand):
        return command.viewer, command.recipient
    return (command.sender if isinstance(command, Drain) else None), None


def queue(state: LedgerState, query: QueueQuery, now_ms: int, node: str, boot: str) -> Queue:
    """Lost holders first, then the longest held leases, then what is queued, then what waits for something else."""

    def rank(entry: Entry) -> tuple[bool, int]:
        return not entry.holder_lost(node, boot), -entry.lease.age_ms(now_ms) if entry.lease is not None else 0

    leased = (entry for entry in state.leases() if _passes(entry, query, now_ms))
    queued = (entry for entry in _entries(state, state.queue) if _passes(entry, query, now_ms))
    waiting = (entry for entry in _waiting(state) if _passes(entry, query, now_ms))
    chosen = islice(chain(nsmallest(query.limit, leased, rank), queued, waiting), query.limit)
    results = recent_results(state, query.viewer, query.limit, newest_first=False)
    return Queue(tuple(_line(entry, node, boot) for entry in chosen), tuple(results))


def recent_tasks(state: LedgerState, viewer: PublicKey | None, limit: int) -> Sequence[Task]:
    """Queued tasks, the newest first."""
    found = (entry.task for entry in _entries(state, reversed(state.queue)) if _has_part(entry, viewer))
    return tuple(islice(found, limit))


def recent_results(
    state: LedgerState, viewer: PublicKey | None, limit: int, *, newest_first: bool = True
) -> Sequence[Result]:
    """Undrained results. Results are the sender's alone."""
    order = reversed(state.results) if newest_first else iter(state.results)
    found = (
        entry.result
        for entry in _entries(state, order)
        if entry.result is not None and viewer in (None, entry.task.sender.pubkey)
    )
    return tuple(islice(found, limit))


def show(
    entry: Entry, viewer: PublicKey | None, archived: TaskDetail | None, node: str, boot: str
) -> TaskDetail | None:
    """One task that is in memory. Its leases and updates are told as far as the archive has them."""
    if not _has_part(entry, viewer):
        return None
    leases = archived.leases if archived is not None else ()
    live = _lease_record(entry)
    if live is not None and all(lease.lease_id != live.lease_id for lease in leases):
        leases = (*leases, live)
    return TaskDetail(
        task=entry.task,
        state=entry.state.value,
        a2a_state=in_words_of_a2a(entry),
        attempt=entry.attempt,
        turn=entry.turn,
        generation=entry.generation,
        created_at_ms=entry.accepted_at_ms,
        updated_at_ms=entry.updated_at_ms,
        leases=leases,
        updates=archived.updates if archived is not None else (),
        result=entry.result,
        cause=entry.cause,
        holder_lost=entry.holder_lost(node, boot),
    )


def in_words_of_a2a(entry: Entry) -> str:
    """The state as an A2A client is told it."""
    if entry.ending is not None:
        return entry.ending
    if entry.state is PARKED:
        return entry.interruption or ""
    return "working" if entry.attempt > 0 or entry.turn > 1 else "submitted"


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


def _passes(entry: Entry, query: QueueQuery, now_ms: int) -> bool:
    if query.state_filter is not None and entry.state.value != query.state_filter:
        return False
    age_ms, within_ms = query.min_lease_age_ms, query.deadline_within_ms
    held = entry.lease if entry.state is LEASED else None
    if age_ms is not None and held is not None and held.age_ms(now_ms) < age_ms:
        return False
    if within_ms is not None and (entry.deadline_ms is None or entry.deadline_ms > now_ms + within_ms):
        return False
    return _has_part(entry, query.viewer)


def _line(entry: Entry, node: str, boot: str) -> QueueEntry:
    line = QueueEntry(state=entry.state.value, task=entry.task, attempt=entry.attempt)
    lease = entry.lease
    if entry.state is not LEASED or lease is None:
        return line
    return msgspec.structs.replace(
        line,
        lease_id=lease.lease_id,
        leased_to=lease.leased_to,
        leased_at_ms=lease.leased_at_ms,
        renewed_at_ms=lease.renewed_at_ms or None,
        holder_lost=entry.holder_lost(node, boot),
    )


def _lease_record(entry: Entry) -> LeaseRecord | None:
    lease = entry.lease
    if entry.state is not LEASED or lease is None:
        return None
    return LeaseRecord(
        lease_id=lease.lease_id,
        leased_to=lease.leased_to,
        leased_at_ms=lease.leased_at_ms,
        turn=entry.turn,
        attempt=lease.attempt,
    )
