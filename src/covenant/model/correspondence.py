"""What is said between this instance and its peers: delegations, what waits to be delivered, and what was taken in.

A delegation is known by its role here, the peer and the offer's id, which the requester chose. What either side says of
one is numbered from 1, delivered in that order and taken in once, however often it arrives.
"""

from __future__ import annotations

from typing import Final

import msgspec

from covenant.model.delegating import ENDED, STATUS, Role, State
from covenant.model.delegation import DelegationResult, Offer, Proof, Status, TokenUsage
from covenant.model.ids import TaskId
from covenant.model.peer import InstanceId
from covenant.model.task import Task

PEER: Final = "peer"
"""The origin of tasks that a peer has delegated to us."""
TERMS: Final = "covenant.peer"
"""In such a task's request metadata: what was agreed (`budget`, `depth_remaining`) and with whom (`peer`)."""
ARTIFACT: Final = "covenant.artifact"
"""In the metadata of a result's part: which artifact of the provider's it is of (`id`, `name`)."""
PROOF: Final = "covenant.proof"
"""In the metadata of an update of the requester's task: all that proves the result, as it can be checked offline."""
BUDGET_EXCEEDED: Final = "budget_exceeded"


def budget_of(task: Task) -> int | None:
    """How many tokens a task may use, with all that it delegates; None where nobody has said."""
    if task.origin != PEER:
        return None
    budget = ((task.request_metadata or {}).get(TERMS) or {}).get("budget")
    return budget if isinstance(budget, int) else None


class DelegationKey(msgspec.Struct, frozen=True, gc=False):
    role: Role
    """Ours."""
    peer: InstanceId
    offer_id: str


class Delegation(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What this side knows of one delegation."""

    role: Role
    peer: InstanceId
    offer_id: str
    task_id: TaskId
    """The task here: the requester's waits for the result, the provider's is the work."""
    profile: str
    state: State
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
    """The number of what we said of it last, and of what we heard."""
    heard: int = 0
    status_seq: int = 0
    usage: TokenUsage = TokenUsage()
    progress: float | None = None
    message: str | None = None
    code: str | None = None
    """Why it was rejected, failed or given up, for machines; `reason` for people."""
    reason: str | None = None
    retry_after_ms: int | None = None
    overspent: bool = False
    """The provider used more than was agreed."""
    broken: tuple[str, ...] = ()
    """What of its proof does not hold."""
    redacted: int = 0
    """How many secrets were found in what we said."""
    offer: Offer | None = None
    """While it has not ended, or its result was not taken: to be offered again, and to be proven."""
    result: DelegationResult | None = None
    """The requester's, until its task has taken it."""
    proof: Proof | None = None

    @property
    def key(self) -> DelegationKey:
        return DelegationKey(self.role, self.peer, self.offer_id)

    @property
    def ended(self) -> bool:
        return self.state in ENDED

    @property
    def status(self) -> Status:
        return STATUS[self.state]


class Parcel(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A message that a peer does not have yet. Sealed anew for each delivery: an envelope lives for minutes."""

    role: Role
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


class ParcelMove(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """What a delivery came to. `delivered`: the peer has this one and all before it."""

    delegation: DelegationKey
    seq: int
    delivered: bool = False
    attempts: int = 0
    next_ms: int = 0
    failure: str | None = None


class Envelope(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """An envelope that was taken in: what is kept of it, so that it is taken once."""

    sender: InstanceId
    jti: str
    typ: str
    until_ms: int
    """From then on it would be stale anyway."""
    seq: int | None = None


class LoggedMessage(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """One line of what went to and fro; never what it said."""

    at_ms: int
    direction: str
    """`sent` (the peer has it) or `received`."""
    peer: InstanceId
    typ: str
    id: str
    """The envelope's, of what was received; of what was sent, its number among what was said of the offer."""
    offer_id: str | None = None
