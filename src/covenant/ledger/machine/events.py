"""Events: what happened. A closed union; its encoding is the journal's content, so fields are only ever added.

Every event of a task names it first and is one move of the table in `states`. An event that the task's
watchers see carries the `generation` it became; 0 means it is not an update of the task.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, get_args

import msgspec

from covenant.model.agent_definition import CatalogueAgent
from covenant.model.grant import Grant, Identity
from covenant.model.ids import AgentId, LeaseId, PublicKey, TaskId
from covenant.model.peers.delegation import Delegation, DelegationKey, OutboxMessage, OutboxMove, Peer, ReceivedEnvelope
from covenant.model.peers.instance import InstanceId
from covenant.model.push import Push, PushMove
from covenant.model.retry_policy import Posture
from covenant.model.task import CacheKey, Cause, Ending, Lease, Result, Task
from covenant.model.task_event import (
    Interruption,
    MessageUpdate,
    Signal,
    StatusUpdate,
    StepUpdate,
    TurnUpdate,
    Update,
    Wait,
)
from covenant.model.tenants import Tenant


class LedgerEvent(msgspec.Struct, frozen=True, gc=False, tag_field="type", omit_defaults=True):
    pass


class PeerEvent(LedgerEvent, frozen=True, gc=False):
    """Of a peer. No event of a task: what follows for one is an event of its own, in the same record."""


class PeerPut(PeerEvent, frozen=True, gc=False, tag="peer_put"):
    """The peer as it is from here on."""

    peer: Peer


class PeerRemoved(PeerEvent, frozen=True, gc=False, tag="peer_removed"):
    """With what waited for it."""

    id: InstanceId


class PeerSucceeded(PeerEvent, frozen=True, gc=False, tag="peer_succeeded"):
    """`old` goes by another id from here on, and so does all that is kept under it."""

    old: InstanceId
    peer: Peer


class EnvelopeTaken(PeerEvent, frozen=True, gc=False, tag="envelope_taken"):
    envelope: ReceivedEnvelope
    offer_id: str | None = None


class DelegationPut(PeerEvent, frozen=True, gc=False, tag="delegation_put"):
    """The delegation as it is from here on. Its offer is said once: until it ends, it stays what it was."""

    delegation: Delegation


class DelegationDropped(PeerEvent, frozen=True, gc=False, tag="delegation_dropped"):
    """Ended, and the oldest of too many, or followed by another offer of its task. Its task is in the archive."""

    key: DelegationKey


class ParcelPut(PeerEvent, frozen=True, gc=False, tag="parcel_put"):
    """Put into the outbox; or in the place of the one with its number."""

    parcel: OutboxMessage


class ParcelMoved(PeerEvent, frozen=True, gc=False, tag="parcel_moved"):
    move: OutboxMove


class ParcelsDropped(PeerEvent, frozen=True, gc=False, tag="parcels_dropped"):
    """The peer has all that was said of this delegation through this number; or is not to be sent it any more."""

    key: DelegationKey
    through: int
    sent: bool = True


class TokenRevoked(PeerEvent, frozen=True, gc=False, tag="token_revoked"):
    token_id: str
    by: AgentId
    at_ms: int
    until_ms: int


_PEER_OF: Final[dict[type[PeerEvent], Callable[[Any], InstanceId]]] = {
    PeerPut: lambda event: event.peer.id,
    PeerRemoved: lambda event: event.id,
    PeerSucceeded: lambda event: event.peer.id,
    EnvelopeTaken: lambda event: event.envelope.sender,
    DelegationPut: lambda event: event.delegation.peer,
    DelegationDropped: lambda event: event.key.peer,
    ParcelPut: lambda event: event.parcel.peer,
    ParcelMoved: lambda event: event.move.delegation.peer,
    ParcelsDropped: lambda event: event.key.peer,
}


def peer_of(event: PeerEvent) -> InstanceId | None:
    """Whose it is; None of what is about no peer in particular."""
    found = _PEER_OF.get(type(event))
    return found(event) if found is not None else None


class TaskEvent(LedgerEvent, frozen=True, gc=False):
    task_id: TaskId


class TaskSent(TaskEvent, frozen=True, gc=False, tag="task_sent"):
    task: Task
    digest: str
    generation: int = 1


class TaskFollowed(TaskEvent, frozen=True, gc=False, tag="task_followed"):
    task: Task
    digest: str
    leader: TaskId
    generation: int = 1


class TaskPromoted(TaskEvent, frozen=True, gc=False, tag="task_promoted"):
    """The leader ended without a result to share: the oldest follower takes its place."""


class TaskLeased(TaskEvent, frozen=True, gc=False, tag="task_leased"):
    lease: Lease
    generation: int = 0
    """Set on the first lease of a turn: from then on the task is `working`."""
    request_id: str | None = None
    by: PublicKey | None = None
    """Who asked with that request id, where it is not the holder."""


class LeaseRenewed(TaskEvent, frozen=True, gc=False, tag="lease_renewed"):
    lease_id: LeaseId
    renewed_at_ms: int


class LeaseReleased(TaskEvent, frozen=True, gc=False, tag="lease_released"):
    lease_id: LeaseId
    reason: str
    undelivered: bool = False
    """Nobody was told of the lease: the task keeps its place in the queue, and the attempt does not count."""


class LeaseInterrupted(TaskEvent, frozen=True, gc=False, tag="lease_interrupted"):
    """The holder is gone, with its work half done; an operator decides what becomes of it, within `hold_ms`."""

    lease_id: LeaseId
    reason: str
    hold_ms: int = 0
    """0: without a bound."""
    held: bool = False
    """Those who watch the task were told that an operator decides. Earlier versions told nobody."""


class TaskUpdated(TaskEvent, frozen=True, gc=False, tag="task_updated"):
    lease_id: LeaseId
    generation: int
    update: TurnUpdate
    update_no: int = 0


class TaskParked(TaskEvent, frozen=True, gc=False, tag="task_parked"):
    lease_id: LeaseId
    generation: int
    interruption: Interruption
    update: Update
    update_no: int = 0


class TaskSuspended(TaskEvent, frozen=True, gc=False, tag="task_suspended"):
    """Parked until a moment, or for a signal: before its first lease, between two attempts, or in the middle of one."""

    wait: Wait
    lease_id: LeaseId | None = None
    generation: int = 0
    """Set if there is an update: what its watchers are told."""
    update: StatusUpdate | StepUpdate | None = None


class TaskResumed(TaskEvent, frozen=True, gc=False, tag="task_resumed"):
    """What it waited for has come. `update`: as the result of the step that waited, where one did."""

    generation: int = 0
    update: StepUpdate | None = None
    signal_id: str | None = None


class SignalKept(TaskEvent, frozen=True, gc=False, tag="signal_kept"):
    """A signal that the task does not wait for yet."""

    signal: Signal


class SignalTaken(TaskEvent, frozen=True, gc=False, tag="signal_taken"):
    """A signal that was kept is what a step waits for: its value is the result of the step, in the same record."""

    signal_id: str


class TaskContinued(TaskEvent, frozen=True, gc=False, tag="task_continued"):
    generation: int
    message: MessageUpdate
    message_id: str


class MessageKept(TaskEvent, frozen=True, gc=False, tag="message_kept"):
    """A message to a task that is at work: the next turn will be about it.

    `answers`: it is what a step waits for instead, and is not kept for a turn.
    """

    generation: int
    message: MessageUpdate
    message_id: str
    answers: bool = False


class TurnEnded(TaskEvent, frozen=True, gc=False, tag="turn_ended"):
    """The turn is done and the task is not: messages were kept for the next one, which begins here."""

    lease_id: LeaseId
    reply: MessageUpdate | None = None
    generation: int = 0
    """Set if there is a reply: what the turn came to."""
    digest: str | None = None
    """Of the result that ended it; none if a question did."""


class TaskRequeued(TaskEvent, frozen=True, gc=False, tag="task_requeued"):
    lease_id: LeaseId
    reason: str
    duplicate_risk: Posture
    attempt: int


class TaskSettled(TaskEvent, frozen=True, gc=False, tag="task_settled"):
    result: Result
    ending: Ending
    cause: Cause
    generation: int
    lease_id: LeaseId | None = None
    reason: str | None = None
    cached: bool = False
    """The result answers later tasks with the same cache key."""


class TaskClosed(TaskSettled, frozen=True, gc=False, tag="task_closed"):
    """Settled, and nobody comes for the result: whoever sent it reads it where it is kept."""


class ResultDrained(TaskEvent, frozen=True, gc=False, tag="result_drained"):
    request_id: str | None = None
    by: PublicKey | None = None
    """Who drained it, where a request id says that they may ask again."""
    forgotten: bool = False
    """Nobody came for it within the retention time."""


class ResultReturned(TaskEvent, frozen=True, gc=False, tag="result_returned"):
    """Whoever drained the result was not told of it: it can be drained again.

    It carries the task and how it ended, because a ledger may have left both to the archive by now.
    """

    reason: str
    task: Task
    digest: str
    result: Result
    ending: Ending
    cause: Cause
    generation: int
    accepted_at_ms: int
    lease: Lease | None = None


class RequestWithdrawn(LedgerEvent, frozen=True, gc=False, tag="request_withdrawn"):
    """Nothing is given to a receive or drain under this request id any more."""

    by: PublicKey
    request_id: str


class CacheDropped(LedgerEvent, frozen=True, gc=False, tag="cache_dropped"):
    """Results that are too old, or too many, to be replayed: those under `keys`, or else the `count` oldest."""

    count: int = 0
    keys: tuple[CacheKey, ...] = ()


class IdentityEnrolled(LedgerEvent, frozen=True, gc=False, tag="identity_enrolled"):
    identity: Identity


class IdentityRevoked(LedgerEvent, frozen=True, gc=False, tag="identity_revoked"):
    token_sha256: str
    revoked_at_ms: int


class IdentitiesPurged(LedgerEvent, frozen=True, gc=False, tag="identities_purged"):
    before_ms: int


class GrantMade(LedgerEvent, frozen=True, gc=False, tag="grant_made"):
    grant: Grant


class GrantUsed(LedgerEvent, frozen=True, gc=False, tag="grant_used"):
    """Counted only where a grant has `max_uses`."""

    signature_b58: str


class GrantRevoked(LedgerEvent, frozen=True, gc=False, tag="grant_revoked"):
    signature_b58: str
    revoked_at_ms: int


class GrantsPurged(LedgerEvent, frozen=True, gc=False, tag="grants_purged"):
    before_ms: int


class TenantPut(LedgerEvent, frozen=True, gc=False, tag="tenant_put"):
    """The tenant as it is from here on."""

    tenant: Tenant


class TenantErased(LedgerEvent, frozen=True, gc=False, tag="tenant_erased"):
    """Gone with this: the tenant's stored agents, its identities and their grants, and what was remembered of requests
    by `keys`."""

    tenant: str
    keys: tuple[PublicKey, ...] = ()


class TenantRemoved(LedgerEvent, frozen=True, gc=False, tag="tenant_removed"):
    """The record of the tenant itself: its name is free."""

    tenant: str


class AgentPut(LedgerEvent, frozen=True, gc=False, tag="agent_put"):
    """The stored agent as it is from here on."""

    agent: CatalogueAgent


class AgentRemoved(LedgerEvent, frozen=True, gc=False, tag="agent_removed"):
    tenant: str
    agent_id: str


class PushEvent(LedgerEvent, frozen=True, gc=False):
    """Of a push configuration. No event of its task: nothing that a watcher sees, and nothing that history keeps."""


class PushPut(PushEvent, frozen=True, gc=False, tag="push_put"):
    """The configuration as it is from here on."""

    push: Push

    @property
    def task_id(self) -> TaskId:
        return self.push.task_id


class PushMoved(PushEvent, frozen=True, gc=False, tag="push_moved"):
    move: PushMove

    @property
    def task_id(self) -> TaskId:
        return self.move.task_id


class PushDropped(PushEvent, frozen=True, gc=False, tag="push_dropped"):
    """Deleted, or done, or nobody came for it."""

    task_id: TaskId
    id: str


class Audited(LedgerEvent, frozen=True, gc=False, tag="audited"):
    """`row` is the row's exact text, because the chain is taken over its bytes."""

    index: int
    chain_hash: str
    issuer: str
    row: str


class AuditPurged(LedgerEvent, frozen=True, gc=False, tag="audit_purged"):
    """Rows up to `through` are gone; the chain is anchored at `anchor_hash` from here on."""

    through: int
    anchor_hash: str


AnyTaskEvent = (
    TaskSent
    | TaskFollowed
    | TaskPromoted
    | TaskLeased
    | LeaseRenewed
    | LeaseReleased
    | LeaseInterrupted
    | TaskUpdated
    | TaskParked
    | TaskSuspended
    | TaskResumed
    | SignalKept
    | SignalTaken
    | TaskContinued
    | MessageKept
    | TurnEnded
    | TaskRequeued
    | TaskSettled
    | TaskClosed
    | ResultDrained
    | ResultReturned
)
TASK_EVENTS: Final = frozenset(get_args(AnyTaskEvent))
"""Their classes. To look one up takes a quarter of what `isinstance` takes for the base of a struct."""

AnyEvent = (
    AnyTaskEvent
    | RequestWithdrawn
    | CacheDropped
    | IdentityEnrolled
    | IdentityRevoked
    | IdentitiesPurged
    | GrantMade
    | GrantUsed
    | GrantRevoked
    | GrantsPurged
    | TenantPut
    | TenantErased
    | TenantRemoved
    | AgentPut
    | AgentRemoved
    | PushPut
    | PushMoved
    | PushDropped
    | PeerPut
    | PeerRemoved
    | PeerSucceeded
    | EnvelopeTaken
    | DelegationPut
    | DelegationDropped
    | ParcelPut
    | ParcelMoved
    | ParcelsDropped
    | TokenRevoked
    | Audited
    | AuditPurged
)
