"""What a decision asks for that was not loaded yet. Each kind is loaded by one statement, many of a kind at once."""

from __future__ import annotations

from typing import NamedTuple

from covenant.model.ids import PublicKey, TaskId
from covenant.model.peers.delegation import DelegationKey
from covenant.model.peers.instance import InstanceId
from covenant.model.task import CacheKey


class WantTask(NamedTuple):
    """Live or ended, or known to be neither."""

    task_id: TaskId


class WantBody(NamedTuple):
    task_id: TaskId


class WantQueue(NamedTuple):
    recipient: PublicKey
    limit: int


class WantRecipients(NamedTuple):
    """Everybody for whom something is queued."""


class WantResults(NamedTuple):
    """Of one sender, or of all."""

    sender: PublicKey | None
    limit: int


class WantLeases(NamedTuple):
    limit: int


class WantDue(NamedTuple):
    by_ms: int
    limit: int


class WantOrphans(NamedTuple):
    limit: int


class WantShared(NamedTuple):
    """Who leads and who follows, and what is cached."""

    key: CacheKey


class WantCached(NamedTuple):
    """The oldest cached results."""

    limit: int


class WantRequest(NamedTuple):
    verb: str
    holder: PublicKey
    request_id: str


class WantUses(NamedTuple):
    signature: str


class WantPushes(NamedTuple):
    task_id: TaskId


class WantIdlePushes(NamedTuple):
    by_ms: int
    limit: int


class WantDelegation(NamedTuple):
    key: DelegationKey


class WantPeer(NamedTuple):
    """Every delegation with a peer, and what waits for it: for a peer that goes, or goes by another id."""

    peer: InstanceId


class WantLiveDelegations(NamedTuple):
    """How many."""

    peer: InstanceId


class WantEndedFirst(NamedTuple):
    """The delegation that ended first."""


class WantParcels(NamedTuple):
    key: DelegationKey


class WantEnvelope(NamedTuple):
    sender: InstanceId
    jti: str


class WantEnvelopeCount(NamedTuple):
    sender: InstanceId


Want = (
    WantTask
    | WantBody
    | WantQueue
    | WantRecipients
    | WantResults
    | WantLeases
    | WantDue
    | WantOrphans
    | WantShared
    | WantCached
    | WantRequest
    | WantUses
    | WantPushes
    | WantIdlePushes
    | WantDelegation
    | WantPeer
    | WantLiveDelegations
    | WantEndedFirst
    | WantParcels
    | WantEnvelope
    | WantEnvelopeCount
)


class Missing(Exception):
    """The engine loads what is wanted, and decides anew."""

    def __init__(self, *wants: Want) -> None:
        super().__init__(f"{wants} was not loaded")
        self.wants = wants
