"""What is said between this instance and its peers: delegations, what waits to be delivered, and what was taken in.

A delegation is known by its role here, the peer and the offer's id, which the requester chose. What either side says of
one is numbered from 1, delivered in that order and taken in once, however often it arrives.
"""

from __future__ import annotations

import enum
from typing import Any, Final, Literal, NamedTuple

import msgspec

from covenant.model.content import Content
from covenant.model.errors import Conflict
from covenant.model.ids import TaskId
from covenant.model.peers.delegation_messages import (
    DelegationInput,
    DelegationOffer,
    DelegationOutcome,
    DelegationResult,
    DelegationStatus,
    Profile,
    Proof,
    TokenUsage,
)
from covenant.model.peers.instance import FormerKey, InstanceId, KeyBundle, Trust, Versions
from covenant.model.task import DELEGATION, Task
from covenant.model.tenants import DEFAULT

NAME_CHARS_MAX: Final = 64

PeerSource = Literal["operator", "setting"]


class PeerLimits(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """What one peer may have of us, where it is not what the settings say. None: as there."""

    offers_per_min: int | None = None
    concurrent: int | None = None
    budget_max: int | None = None
    offers_per_day: int | None = None
    tokens_per_day: int | None = None


class PeerCapabilities(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a peer said under its signature, in answer to our challenge. Believed until `expires_at_ms`."""

    profiles: tuple[Profile, ...]
    versions: Versions
    active_delegations: int
    free_slots: int
    trust_level: Trust
    """What we are to it."""
    issued_at_ms: int
    expires_at_ms: int
    token: str | None = None
    """What it allows us, as a token that we narrow for each offer. Never shown."""


class IssuedToken(msgspec.Struct, frozen=True, gc=False):
    """Of a token that we gave: the id by which it, and all that was narrowed from it, can be revoked."""

    id: str
    until_ms: int


class Challenge(msgspec.Struct, frozen=True, gc=False):
    nonce: str
    made_at_ms: int


class Peer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    id: InstanceId
    name: str
    url: str | None = None
    """Where its envelopes are taken. None: it cannot be reached, and fetches what there is for it."""
    trust: Trust = Trust.PEER
    tenant: str = DEFAULT
    """Whose agents it may have, and whose work it may be given. No other tenant sees it."""
    denied: bool = False
    """Known, and nothing is taken from it."""
    tokenless: bool = False
    """Its tokens were revoked: it is given none, until the operator says again how far it is trusted."""
    source: PeerSource = "operator"
    added_at_ms: int = 0
    keys: KeyBundle | None = None
    """As it last showed them. Its own signature is on them."""
    challenge: Challenge | None = None
    """What we asked of it, while it has not answered."""
    verified_at_ms: int | None = None
    capabilities: PeerCapabilities | None = None
    limits: PeerLimits = PeerLimits()
    issued: tuple[IssuedToken, ...] = ()
    """The tokens that we gave it and that are still good, the newest last."""
    heard_at_ms: int = 0
    """When it last proved to be there."""
    conflict: str | None = None
    """What was found at its address that is not it: `identity_changed`, `unverified_keys`."""
    epoch: str | None = None
    """Which life of its ledger it was last heard in; None: the first one, or it does not speak of epochs."""
    told_epoch: str | None = None
    """Which life of our ledger it has answered in."""
    end: tuple[str | None, int] = (None, 0)
    """In which life of its ledger it last said how many records that has, and how many."""
    told_id: str | None = None
    """By which identity of ours it has answered; None: the first one."""
    former: tuple[FormerKey, ...] = ()
    """The identities that it had before, the newest last."""

    @property
    def ids(self) -> tuple[str, ...]:
        """Those that it has and had."""
        return self.id, *(each.id for each in self.former)

    def signed_as(self, claimed: str) -> InstanceId:
        """This identity, if the peer had it; otherwise the one that it has now.

        For what comes in an envelope of the peer's: its present key answers for what an old one signed, dead or not.
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
    """Asked to stop; the provider's last word is still to come."""
    LOST = "lost"
    """The provider has been silent beyond the bound. It may be heard of again."""
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
    """`results_in`: where a result may come. The other side's word is the end, whatever was missed before it."""
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
        # Its task has ended otherwise than its provider said: a delegation is what its task is.
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

# role -> (state before, what happens) -> state after. None is a delegation that this side has never heard of.
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
"""How each state is told in the protocol's six words."""


def move(role: DelegationRole, before: DelegationState | None, happening: str) -> DelegationState:
    after = DELEGATION_TRANSITIONS[role].get((before, happening))
    if after is None:
        said = "unknown" if before is None else before.value
        raise Conflict("illegal_move", f"{happening} cannot happen to a delegation that is {said}")
    return after


PEER: Final = "peer"
"""The origin of tasks that a peer has delegated to us."""
TERMS: Final = "covenant.peer"
"""In such a task's request metadata: what was agreed (`budget`, `depth_remaining`) and with whom (`peer`)."""
ARTIFACT: Final = "covenant.artifact"
"""In the metadata of a result's part: which artifact of the provider's it is of (`id`, `name`)."""
PROOF: Final = "covenant.proof"
"""In the metadata of an update of the requester's task: all that proves the result, as it can be checked offline."""
BUDGET_EXCEEDED: Final = "budget_exceeded"


BUDGET: Final = "covenant.budget"
"""In the request metadata of a task that was delegated here: its share of its parent's tokens."""


def budget_of(task: Task) -> int | None:
    """How many tokens a task may use, with all that it delegates; None where nobody has said."""
    noted = task.request_metadata or {}
    if task.origin == PEER:
        budget = (noted.get(TERMS) or {}).get("budget")
    else:
        # Nothing of a client's is in the metadata of such a task.
        budget = noted.get(BUDGET) if task.origin == DELEGATION else None
    return budget if isinstance(budget, int) else None


def with_budget(task: Task, tokens: int) -> Task:
    """A task that is delegated, bounded to so many tokens wherever it is done."""
    if task.target is not None and task.target.of_peer:
        return msgspec.structs.replace(task, target=msgspec.structs.replace(task.target, budget=tokens))
    return msgspec.structs.replace(task, request_metadata={**(task.request_metadata or {}), BUDGET: tokens})


class DelegationKey(msgspec.Struct, frozen=True, gc=False):
    role: DelegationRole
    """Ours."""
    peer: InstanceId
    offer_id: str


class DelegationQuestion(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a provider's agent asks, as it told us."""

    number: int
    text: str = ""
    parts: tuple[Content, ...] = ()


class Delegation(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    role: DelegationRole
    peer: InstanceId
    offer_id: str
    task_id: TaskId
    """The task here: the requester's waits for the result, the provider's is the work."""
    profile: str
    state: DelegationState
    budget: int
    timeout_ms: int
    """As agreed; until then, as offered."""
    depth_remaining: int = 0
    delegation_id: str | None = None
    """What the provider calls it."""
    made_at_ms: int = 0
    moved_at_ms: int = 0
    heard_at_ms: int = 0
    """When the other side last said something of it."""
    accepted_at_ms: int = 0
    """The requester's: when it was told so first. From then on its time runs."""
    status_interval_ms: int = 0
    said: int = 0
    """The number of the last message that we sent about it; `heard`: of the last that we received."""
    heard: int = 0
    epoch: str | None = None
    """The lives of our ledger and of the peer's in which `heard` counts."""
    peer_epoch: str | None = None
    offered_in: tuple[str | None, str | None] = (None, None)
    """The requester's: the lives of both ledgers in which it was offered last."""
    status_seq: int = 0
    usage: TokenUsage = TokenUsage()
    progress: float | None = None
    message: str | None = None
    code: str | None = None
    """Why it was rejected, failed or given up, for machines; `reason` for people."""
    reason: str | None = None
    retry_after_ms: int | None = None
    overspent: bool = False
    broken: tuple[str, ...] = ()
    """What of its proof does not hold."""
    redacted: int = 0
    """How many secrets were found in what we said."""
    offer: DelegationOffer | None = None
    """While it has not ended, or its result was not taken: to be offered again, and to be proven."""
    result: DelegationResult | None = None
    """The requester's, until its task has taken it."""
    number: int = 1
    """The requester's: which offer of its task this is. The one before was rejected, or its provider was away."""
    since_ms: int = 0
    """When the first offer of its task was made."""
    anyone: bool = False
    """The requester's: any peer that offers the profile may do it."""
    settled: bool = False
    """The requester's: its task has ended too, and the state is what became of that."""
    proof: Proof | None = None
    question: DelegationQuestion | None = None
    """The requester's: what was asked and not answered yet."""
    answered: int = 0
    """The requester's: the number of the last question that was answered, and the turn of its task that did."""
    answered_turn: int = 1
    answer: DelegationInput | None = None
    """The provider's: what was answered, until its task has it."""

    @classmethod
    def offered(
        cls, role: DelegationRole, peer: InstanceId, task_id: TaskId, offer: DelegationOffer, **more: Any
    ) -> Delegation:
        """As it begins: on the terms of the offer."""
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
    """A message that a peer does not have yet. Sealed anew for each delivery: an envelope lives for minutes."""

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
    """The outcome of a delivery. `delivered`: the peer has this message and all before it."""

    delegation: DelegationKey
    seq: int
    delivered: bool = False
    attempts: int = 0
    next_ms: int = 0
    failure: str | None = None


class ReceivedEnvelope(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """An envelope that was received: what is kept of it, so that a replay is recognised."""

    sender: InstanceId
    jti: str
    typ: str
    until_ms: int
    """From then on the envelope would be refused as stale."""
    seq: int | None = None
    sent_at_ms: int = 0
    """By the sender's clock."""
    epoch: str | None = None
    """The life of the sender's ledger, and ours when it came."""
    our_epoch: str | None = None


class LoggedMessage(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """One row of the log of messages with a peer, without their content."""

    at_ms: int
    direction: str
    """`sent` (the peer has it) or `received`."""
    peer: InstanceId
    typ: str
    id: str
    """The envelope's, of what was received; of what was sent, its number among what was said of the offer."""
    offer_id: str | None = None


class PendingMessages(msgspec.Struct, frozen=True, gc=False, rename="camel", omit_defaults=True):
    """What a peer does not have yet, and why."""

    count: int = 0
    failure: str | None = None
    next_ms: int | None = None


class DelegationBegun(NamedTuple):
    """`peer` is the one that is asked first; None where an agent here does it, or no peer is known to yet."""

    task_id: str
    peer: InstanceId | None
    profile: str
    duplicate: bool
    remote: bool


class DelegationEvidence(NamedTuple):
    """What proves a result: all of it as it was sent."""

    offer: Any
    result: Any
    transcript: Any
    proof: Proof | None
