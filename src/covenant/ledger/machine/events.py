"""Events: a closed union. Their encoding is the journal's content, so fields are only ever added.

Every event of a task names the task first and is one move of the table in `states`. An event that the task's watchers
see carries its `generation`; 0: the event is not an update of the task.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Any, Final

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
    """An event of a peer. Its consequence for a task is an event of its own, in the same record."""


class PeerPut(PeerEvent, frozen=True, gc=False, tag="peer_put"):
    """The peer as it is from here on."""

    peer: Peer


class PeerRemoved(PeerEvent, frozen=True, gc=False, tag="peer_removed"):
    """The peer is removed, with the messages that waited for it."""

    id: InstanceId


class PeerSucceeded(PeerEvent, frozen=True, gc=False, tag="peer_succeeded"):
    """The peer `old` has another id from here on, and so has everything that is stored under it."""

    old: InstanceId
    peer: Peer


class EnvelopeTaken(PeerEvent, frozen=True, gc=False, tag="envelope_taken"):
    envelope: ReceivedEnvelope
    offer_id: str | None = None


class DelegationPut(PeerEvent, frozen=True, gc=False, tag="delegation_put"):
    """The delegation as it is from here on. Without an offer, the one of an earlier record stays, until it ends."""

    delegation: Delegation


class DelegationDropped(PeerEvent, frozen=True, gc=False, tag="delegation_dropped"):
    """Drops an ended delegation: the oldest of too many, or one whose task got another offer. Its task is archived."""

    key: DelegationKey


class OutboxPut(PeerEvent, frozen=True, gc=False, tag="parcel_put"):
    """A message is put into the outbox, or replaces the one with its number."""

    message: OutboxMessage = msgspec.field(name="parcel")


class OutboxMoved(PeerEvent, frozen=True, gc=False, tag="parcel_moved"):
    move: OutboxMove


class OutboxDropped(PeerEvent, frozen=True, gc=False, tag="parcels_dropped"):
    """The peer has all messages about this delegation up to this number, or must not get them any more."""

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
    OutboxPut: lambda event: event.message.peer,
    OutboxMoved: lambda event: event.move.delegation.peer,
    OutboxDropped: lambda event: event.key.peer,
}


def peer_of(event: PeerEvent) -> InstanceId | None:
    """The peer that an event is about; None if it is about none in particular."""
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
    """The caller with that request id, if it is not the holder."""


class LeaseRenewed(TaskEvent, frozen=True, gc=False, tag="lease_renewed"):
    lease_id: LeaseId
    renewed_at_ms: int


class LeaseReleased(TaskEvent, frozen=True, gc=False, tag="lease_released"):
    lease_id: LeaseId
    reason: str
    undelivered: bool = False
    """The caller never got the lease: the task keeps its place in the queue, and the attempt does not count."""
    untouched: bool = False
    """No lease of this turn reached its caller: the task has no holder. Earlier versions did not write it."""


class LeaseInterrupted(TaskEvent, frozen=True, gc=False, tag="lease_interrupted"):
    """The holder is gone, with its work half done; an operator decides about it within `hold_ms`."""

    lease_id: LeaseId
    reason: str
    hold_ms: int = 0
    """0: without limit."""
    held: bool = False
    """The task's watchers saw that an operator decides. Earlier versions had no such update."""
    by_agent: bool | None = None
    """None: written by an earlier version."""


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
    """The task is parked until a time or for a signal: before its first lease, between attempts, or within one."""

    wait: Wait
    lease_id: LeaseId | None = None
    generation: int = 0
    """Set if there is an update, which watchers see."""
    update: StatusUpdate | StepUpdate | None = None


class TaskResumed(TaskEvent, frozen=True, gc=False, tag="task_resumed"):
    """The wait is over. `update`: the result of the step that waited, if one did."""

    generation: int = 0
    update: StepUpdate | None = None
    signal_id: str | None = None


class SignalKept(TaskEvent, frozen=True, gc=False, tag="signal_kept"):
    """A signal that the task does not wait for yet."""

    signal: Signal


class SignalTaken(TaskEvent, frozen=True, gc=False, tag="signal_taken"):
    """A step waits for a kept signal: the signal's value is the result of the step, in the same record."""

    signal_id: str


class TaskContinued(TaskEvent, frozen=True, gc=False, tag="task_continued"):
    generation: int
    message: MessageUpdate
    message_id: str


class MessageKept(TaskEvent, frozen=True, gc=False, tag="message_kept"):
    """A message to a task that is at work: it is kept for the next turn.

    `answers`: a step waits for the message instead, and it is not kept for a turn.
    """

    generation: int
    message: MessageUpdate
    message_id: str
    answers: bool = False


class TurnEnded(TaskEvent, frozen=True, gc=False, tag="turn_ended"):
    """The turn is done and the task is not: messages were kept for the next turn, which begins here."""

    lease_id: LeaseId
    reply: MessageUpdate | None = None
    generation: int = 0
    """Set if there is a reply, the output of the turn."""
    digest: str | None = None
    """The digest of the result that ended the turn; None if a question did."""


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
    """Settled, and no sender drains the result: it is read where it is stored."""


class ResultDrained(TaskEvent, frozen=True, gc=False, tag="result_drained"):
    request_id: str | None = None
    by: PublicKey | None = None
    """The caller that drained it, if it may repeat the drain under a request id."""
    forgotten: bool = False
    """Nobody drained the result within the retention time."""


class ResultReturned(TaskEvent, frozen=True, gc=False, tag="result_returned"):
    """The caller that drained the result never got it: it can be drained again.

    The event carries the task and its ending, because a ledger may have left both to the archive by now.
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
    """The receive or drain with this request id gets nothing any more."""

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
    """Counted only for a grant with `max_uses`."""

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
    """Erases the tenant's stored agents, its identities and their grants, and the remembered requests of `keys`."""

    tenant: str
    keys: tuple[PublicKey, ...] = ()


class TenantRemoved(LedgerEvent, frozen=True, gc=False, tag="tenant_removed"):
    """Removes the record of the tenant itself: its name is free."""

    tenant: str


class AgentPut(LedgerEvent, frozen=True, gc=False, tag="agent_put"):
    """The stored agent as it is from here on."""

    agent: CatalogueAgent


class AgentRemoved(LedgerEvent, frozen=True, gc=False, tag="agent_removed"):
    tenant: str
    agent_id: str


class PushEvent(LedgerEvent, frozen=True, gc=False):
    """An event of a push configuration. It is no event of the task: watchers and the history do not have it."""


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
    """The configuration was deleted, completed or never used."""

    task_id: TaskId
    id: str


class Audited(LedgerEvent, frozen=True, gc=False, tag="audited"):
    """`row` is the row's exact text, because the chain is hashed over its bytes."""

    index: int
    chain_hash: str
    issuer: str
    row: str


class AuditPurged(LedgerEvent, frozen=True, gc=False, tag="audit_purged"):
    """Rows up to `through` are gone; the chain is anchored at `anchor_hash` from here on."""

    through: int
    anchor_hash: str


def kinds_of(base: type[msgspec.Struct]) -> Iterator[type[Any]]:
    """The kinds of events below a class: those that have a tag of their own, and not their name for one."""
    for kind in base.__subclasses__():
        if kind.__struct_config__.tag != kind.__name__:
            yield kind
        yield from kinds_of(kind)


TASK_EVENTS: Final = frozenset(kinds_of(TaskEvent))
"""The classes of task events. A look-up takes a quarter of the time of `isinstance` with a struct's base."""

if TYPE_CHECKING:
    AnyTaskEvent = TaskEvent
    AnyEvent = LedgerEvent
else:  # to decode by
    AnyTaskEvent = reduce(or_, kinds_of(TaskEvent))
    AnyEvent = reduce(or_, kinds_of(LedgerEvent))
