"""Delegations between this instance and its peers, messages that wait for delivery, and received messages.

A delegation is identified by this instance's role, the peer and the offer's id, which the requester chose. Each side
numbers its messages about a delegation from 1. Messages are delivered in that order, and each is applied once however
often it arrives.
"""

from __future__ import annotations

import enum
import hashlib
from typing import Any, Final, Literal, NamedTuple

import msgspec

from covenant.model.content import Content
from covenant.model.errors import Conflict
from covenant.model.ids import AgentId, PublicKey, TaskId, base58
from covenant.model.peers.delegation_messages import (
    DelegationInput,
    DelegationOffer,
    DelegationOutcome,
    DelegationResult,
    DelegationStatus,
    Profile,
    Proof,
    SubDelegation,
    TokenUsage,
)
from covenant.model.peers.instance import FormerKey, InstanceId, KeyBundle, Trust, Versions
from covenant.model.task import DELEGATION, Task
from covenant.model.tenants import DEFAULT

NAME_CHARS_MAX: Final = 64
ID_TAIL: Final = 8
"""A peer without a name is called by this many of the last characters of its id."""

PeerSource = Literal["operator", "setting"]
PEER: Final = "peer"
"""The origin of tasks that a peer has delegated to us."""
TERMS: Final = "covenant.peer"
"""Key in such a task's request metadata: the agreed terms (`budget`, `depth_remaining`) and the peer (`peer`)."""
ARTIFACT: Final = "covenant.artifact"
"""Key in the metadata of a result's part: the provider's artifact that the part belongs to (`id`, `name`)."""
PROOF: Final = "covenant.proof"
"""Key in the metadata of an update of the requester's task: the result's whole proof, which can be checked offline."""
BUDGET_EXCEEDED: Final = "budget_exceeded"
BUDGET: Final = "covenant.budget"
"""Key in the request metadata of a task that was delegated to a local agent: its share of its parent's tokens."""


class PeerLimits(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """The limits of one peer where they differ from the settings. None: the setting."""

    offers_per_min: int | None = None
    concurrent: int | None = None
    budget_max: int | None = None
    offers_per_day: int | None = None
    tokens_per_day: int | None = None


class PeerCapabilities(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A peer's signed answer to our challenge. It is valid until `expires_at_ms`."""

    profiles: tuple[Profile, ...]
    versions: Versions
    active_delegations: int
    free_slots: int
    trust_level: Trust
    """How far the peer trusts us."""
    issued_at_ms: int
    expires_at_ms: int
    token: str | None = None
    """The peer's capability token for us, which we narrow for each offer. It is never shown."""

    def offers(self, profile: str) -> bool:
        return any(each.name == profile for each in self.profiles)


class IssuedToken(msgspec.Struct, frozen=True, gc=False):
    """A token that we gave to a peer: revoking `id` revokes the token and every token that was narrowed from it."""

    id: str
    until_ms: int


class Challenge(msgspec.Struct, frozen=True, gc=False):
    nonce: str
    made_at_ms: int


class Peer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    id: InstanceId
    name: str
    url: str | None = None
    """Where the peer receives envelopes. None: the peer cannot be reached, and polls for its messages."""
    trust: Trust = Trust.PEER
    tenant: str = DEFAULT
    """The tenant whose agents the peer may use, and which may delegate to the peer. No other tenant sees the peer."""
    denied: bool = False
    """The peer is known, but everything that it sends is refused."""
    tokenless: bool = False
    """The peer's tokens were revoked. It gets no new one until the operator sets its trust again."""
    source: PeerSource = "operator"
    added_at_ms: int = 0
    keys: KeyBundle | None = None
    """The newest keys that the peer showed, signed by the peer."""
    challenge: Challenge | None = None
    """Our challenge that the peer has not answered yet."""
    verified_at_ms: int | None = None
    capabilities: PeerCapabilities | None = None
    limits: PeerLimits = PeerLimits()
    issued: tuple[IssuedToken, ...] = ()
    """The tokens that we gave the peer and that are still valid, newest last."""
    heard_at_ms: int = 0
    """When the peer last proved that it is reachable."""
    conflict: str | None = None
    """A mismatch that was found at the peer's address: `identity_changed` or `unverified_keys`."""
    epoch: str | None = None
    """The ledger epoch of the peer's last message. None: its first epoch, or the peer does not know epochs."""
    told_epoch: str | None = None
    """The epoch of our ledger in which the peer has answered."""
    end: tuple[str | None, int] = (None, 0)
    """The ledger epoch in which the peer last reported its number of records, and that number."""
    told_id: str | None = None
    """The identity of ours to which the peer has answered. None: our first one."""
    void_before_ms: int = 0
    """Certificates of the peer's keys that began earlier are void, as the peer itself declared."""
    former: tuple[FormerKey, ...] = ()
    """The peer's earlier identities, newest last."""

    @property
    def ids(self) -> tuple[str, ...]:
        """The peer's present and former ids."""
        return self.id, *(each.id for each in self.former)

    @property
    def agent(self) -> AgentId:
        """The peer as an agent: in the audit, and as the sender of a task."""
        name = self.name or self.id[-ID_TAIL:]
        if self.keys is not None:
            return AgentId(f"{name}@peer", PublicKey(self.keys.identity_key))
        # A peer that has not shown its key has sent nothing yet. This key stands for it, and is nobody's.
        stand_in = base58(hashlib.sha256(f"covenant.peer.v1\n{self.id}".encode()).digest())
        return AgentId(f"{name}@peer", PublicKey(stand_in))

    def signed_as(self, claimed: str) -> InstanceId:
        """Returns `claimed` if it is an id that the peer has or had; otherwise the peer's present id.

        For content of the peer's envelopes: its present key answers for what an old key signed, revoked or not.
        """
        return InstanceId(claimed) if claimed in self.ids else self.id


class DelegationRole(enum.StrEnum):
    REQUESTER = "requester"
    PROVIDER = "provider"


class DelegationState(enum.StrEnum):
    OFFERED = "offered"
    ACCEPTED = "accepted"
    RUNNING = "running"
    CANCELLING = "cancelling"
    """The requester asked the provider to stop; the provider's last message is still to come."""
    LOST = "lost"
    """The provider was silent for longer than the limit. It may send messages again."""
    REJECTED = "rejected"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    TIMEOUT = "timeout"


OFFERED, ACCEPTED, RUNNING, CANCELLING, LOST, REJECTED, COMPLETED, FAILED, CANCELLED, TIMEOUT = DelegationState

ENDED: Final = frozenset({REJECTED, COMPLETED, FAILED, CANCELLED, TIMEOUT})
OUTCOMES: Final[dict[DelegationOutcome, DelegationState]] = {
    "completed": COMPLETED,
    "failed": FAILED,
    "cancelled": CANCELLED,
    "timeout": TIMEOUT,
}


_Moves = dict[str, dict[DelegationState | None, DelegationState]]


def _table(
    results_in: tuple[DelegationState, ...], moves: _Moves
) -> dict[tuple[DelegationState | None, str], DelegationState]:
    """`results_in`: the states in which a result may arrive. A result ends a delegation, even if earlier messages were
    missed.
    """
    results: _Moves = {f"result_{outcome}": dict.fromkeys(results_in, after) for outcome, after in OUTCOMES.items()}
    return {(before, what): after for what, row in (moves | results).items() for before, after in row.items()}


_REQUESTER: Final = _table(
    (OFFERED, ACCEPTED, RUNNING, CANCELLING, LOST),
    {
        "offer": {None: OFFERED, OFFERED: OFFERED, LOST: OFFERED},
        "accept": {
            OFFERED: ACCEPTED,
            ACCEPTED: ACCEPTED,
            RUNNING: RUNNING,
            CANCELLING: CANCELLING,
            LOST: ACCEPTED,
        },
        "reject": {OFFERED: REJECTED, LOST: REJECTED, CANCELLING: CANCELLED},
        "status": {OFFERED: RUNNING, ACCEPTED: RUNNING, RUNNING: RUNNING, CANCELLING: CANCELLING, LOST: RUNNING},
        "cancel": dict.fromkeys((OFFERED, ACCEPTED, RUNNING, CANCELLING, LOST), CANCELLING),
        "withdraw": {OFFERED: CANCELLED, LOST: CANCELLED},
        "silence": dict.fromkeys((OFFERED, ACCEPTED, RUNNING), LOST),
        "force_error": {LOST: FAILED, CANCELLING: CANCELLED},
        "timeout": dict.fromkeys((OFFERED, ACCEPTED, RUNNING, LOST), TIMEOUT),
        # A settled delegation takes the outcome of its task, even if the provider reported another one.
        **{f"task_{what}": dict.fromkeys((REJECTED, *OUTCOMES.values()), after) for what, after in OUTCOMES.items()},
    },
)
_PROVIDER: Final = _table(
    (ACCEPTED, RUNNING, CANCELLING),
    {
        "offer": {
            None: OFFERED,
            OFFERED: OFFERED,
            ACCEPTED: ACCEPTED,
            RUNNING: RUNNING,
            CANCELLING: CANCELLING,
        },
        "accept": {OFFERED: ACCEPTED},
        "reject": {OFFERED: REJECTED},
        "start": {ACCEPTED: RUNNING},
        "status": {ACCEPTED: ACCEPTED, RUNNING: RUNNING, CANCELLING: CANCELLING},
        "cancel": dict.fromkeys((OFFERED, ACCEPTED, RUNNING, CANCELLING), CANCELLING),
    },
)

# Maps role -> (state before, event) -> state after. State None: this side does not know the delegation.
DELEGATION_TRANSITIONS: Final = {DelegationRole.REQUESTER: _REQUESTER, DelegationRole.PROVIDER: _PROVIDER}

STATUS: Final[dict[DelegationState, DelegationStatus]] = {
    OFFERED: "pending",
    ACCEPTED: "pending",
    RUNNING: "running",
    CANCELLING: "running",
    LOST: "running",
    REJECTED: "failed",
    COMPLETED: "completed",
    FAILED: "failed",
    CANCELLED: "cancelled",
    TIMEOUT: "timeout",
}
"""Each state as one of the protocol's six statuses."""


def move(role: DelegationRole, before: DelegationState | None, transition: str) -> DelegationState:
    after = DELEGATION_TRANSITIONS[role].get((before, transition))
    if after is None:
        state = "unknown" if before is None else before.value
        raise Conflict("illegal_move", f"{transition} cannot happen to a delegation that is {state}")
    return after


def budget_of(task: Task) -> int | None:
    """How many tokens a task and everything that it delegates may use. None: no budget was set."""
    noted = task.request_metadata or {}
    if task.origin == PEER:
        budget = (noted.get(TERMS) or {}).get("budget")
    else:
        # The request metadata of such a task is the daemon's: nothing in it comes from a client.
        budget = noted.get(BUDGET) if task.origin == DELEGATION else None
    return budget if isinstance(budget, int) else None


def with_budget(task: Task, tokens: int) -> Task:
    """The delegated task with a token budget, whether a peer or a local agent does it."""
    if task.target is not None and task.target.of_peer:
        return msgspec.structs.replace(task, target=msgspec.structs.replace(task.target, budget=tokens))
    return msgspec.structs.replace(task, request_metadata={**(task.request_metadata or {}), BUDGET: tokens})


class DelegationKey(msgspec.Struct, frozen=True, gc=False):
    role: DelegationRole
    """The role of this instance."""
    peer: InstanceId
    offer_id: str


class DelegationQuestion(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A question of the provider's agent, as the provider sent it."""

    number: int
    text: str = ""
    parts: tuple[Content, ...] = ()


class Delegation(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    role: DelegationRole
    peer: InstanceId
    offer_id: str
    task_id: TaskId
    """The local task. The requester's task waits for the result; the provider's task is the work."""
    profile: str
    state: DelegationState
    budget: int
    timeout_ms: int
    """The agreed time limit; until the provider accepts, the offered one."""
    depth_remaining: int = 0
    delegation_id: str | None = None
    """The provider's id for the delegation."""
    made_at_ms: int = 0
    moved_at_ms: int = 0
    heard_at_ms: int = 0
    """When the other side last sent a message about the delegation."""
    accepted_at_ms: int = 0
    """Requester: when the provider's accept first arrived. The time limit counts from then on."""
    status_interval_ms: int = 0
    sent_seq: int = msgspec.field(default=0, name="said")
    """The number of the last message that we sent about the delegation. (Stored as `said`.)"""
    received_seq: int = msgspec.field(default=0, name="heard")
    """The number of the last message that we received about it. (Stored as `heard`.)"""
    epoch: str | None = None
    """The epochs of our ledger and of the peer's in which `received_seq` counts."""
    peer_epoch: str | None = None
    offered_in: tuple[str | None, str | None] = (None, None)
    """Requester: the epochs of both ledgers in which the last offer was made."""
    status_seq: int = 0
    usage: TokenUsage = TokenUsage()
    progress: float | None = None
    message: str | None = None
    below: tuple[SubDelegation, ...] = ()
    """Requester: the provider's own delegations for this work, as it last reported them."""
    code: str | None = None
    """Why the delegation was rejected, failed or abandoned, for machines; `reason` is for people."""
    reason: str | None = None
    retry_after_ms: int | None = None
    overspent: bool = False
    broken: tuple[str, ...] = ()
    """The parts of the proof that failed verification."""
    redacted: int = 0
    """How many secrets were redacted in our messages."""
    offer: DelegationOffer | None = None
    """The offer, until the delegation has ended and its result was taken: it may be sent again, and is proven."""
    result: DelegationResult | None = None
    """Requester: the result, until the task has taken it."""
    number: int = 1
    """Requester: the number of this offer for its task. The one before was rejected, or its provider was unreachable.
    """
    since_ms: int = 0
    """When the first offer for the task was made."""
    renewed: bool = False
    """Requester: the offer before this one was denied, so this one has a token that was requested since."""
    anyone: bool = False
    """Requester: any peer that offers the profile may do the work."""
    settled: bool = False
    """Requester: the task has ended too, and the state is the task's outcome."""
    proof: Proof | None = None
    question: DelegationQuestion | None = None
    """Requester: the provider's question that has no answer yet."""
    asked: int = 0
    """Requester: the number of the question for which the task is parked. Its answer answers no other question."""
    answered: int = 0
    """Requester: the number of the last answered question, and the turn of the task that answered it."""
    answered_turn: int = 1
    doubted: int = 0
    """Requester: the answered question, if its provider was restored since and has not accepted the offer again yet."""
    answer: DelegationInput | None = None
    """Provider: the answer that arrived, until the task has it."""

    @classmethod
    def offered(
        cls, role: DelegationRole, peer: InstanceId, task_id: TaskId, offer: DelegationOffer, **more: Any
    ) -> Delegation:
        """A new delegation on the terms of the offer."""
        return cls(
            role=role,
            peer=peer,
            offer_id=offer.offer_id,
            task_id=task_id,
            profile=offer.profile,
            state=OFFERED,
            budget=offer.max_token_budget,
            timeout_ms=offer.timeout,
            depth_remaining=offer.depth_remaining,
            offer=offer,
            **more,
        )

    @property
    def key(self) -> DelegationKey:
        return DelegationKey(self.role, self.peer, self.offer_id)

    @property
    def ended(self) -> bool:
        return self.state in ENDED

    @property
    def status(self) -> DelegationStatus:
        return STATUS[self.state]


class OutboxMessage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A message that a peer does not have yet. Each delivery seals it again: an envelope is valid for minutes."""

    role: DelegationRole
    peer: InstanceId
    offer_id: str
    seq: int
    typ: str
    body: msgspec.Raw
    made_at_ms: int
    attempts: int = 0
    next_ms: int = 0
    failure: str | None = None

    @property
    def delegation(self) -> DelegationKey:
        return DelegationKey(self.role, self.peer, self.offer_id)


class OutboxMove(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """The outcome of a delivery. `delivered`: the peer has this message and all messages before it."""

    delegation: DelegationKey
    seq: int
    delivered: bool = False
    attempts: int = 0
    next_ms: int = 0
    failure: str | None = None


class ReceivedEnvelope(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """The record of a received envelope, by which a replay is recognised."""

    sender: InstanceId
    jti: str
    typ: str
    until_ms: int
    """The envelope expires at this time, and from then on would be refused as stale."""
    seq: int | None = None
    sent_at_ms: int = 0
    """The time of sending by the sender's clock."""
    epoch: str | None = None
    """The epoch of the sender's ledger, and that of ours when the envelope arrived."""
    our_epoch: str | None = None


class LoggedMessage(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """One row of the log of messages with a peer, without their content."""

    at_ms: int
    direction: str
    """`sent` (the peer has the message) or `received`."""
    peer: InstanceId
    typ: str
    id: str
    """A received message: the envelope's id. A sent message: its number among our messages about the offer."""
    offer_id: str | None = None


class PendingMessages(msgspec.Struct, frozen=True, gc=False, rename="camel", omit_defaults=True):
    """The messages that a peer has not received yet, and the reason."""

    count: int = 0
    failure: str | None = None
    next_ms: int | None = None


class DelegationBegun(NamedTuple):
    """`peer` is the first peer that is asked; None: a local agent does the work, or no known peer offers it yet."""

    task_id: str
    peer: InstanceId | None
    profile: str
    duplicate: bool
    remote: bool


class DelegationView(NamedTuple):
    """A delegation with the status of its task here, and once the task has ended, its answer or its error."""

    delegation: Delegation
    result: str | None = None
    error: str | None = None


class DelegationEvidence(NamedTuple):
    """The signed offer, transcript and proof of a result, all as they were sent."""

    offer: Any
    result: Any
    transcript: Any
    proof: Proof | None
